"""What of an installation has changed, for whoever shows it: by topic, without any name.

One watcher looks for everybody, once a second, and only while somebody listens. What others did to the vault is found
in its ledger; what only this process knows is compared with how it was.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator

from holdfast.core.states import LetterState
from holdfast.errors import HoldfastError
from holdfast.services.queue.manager import QueueManager
from holdfast.services.vault.admin import VaultApp
from holdfast.telemetry.events import counts, emit

TOPICS = ("letters", "groups", "redrives", "captures", "queues", "results", "recoveries", "time")
STEP_S = 1.0
#: Each who is told reads a page anew: so many a second are told, those first who have waited longest.
TOLD_A_SECOND_MAX = 5
#: What nobody tells of (how deep a broker's queues are, how old a letter is) is looked at again after so long.
TIME_S = 10.0
#: Who was told nothing for so long is told that all is well: so it is seen that he has gone.
QUIET_S = 25.0
#: So long it is watched on after the last page: its browser is about to listen.
STAY_S = 30.0
#: Topics of what is counted in this process, by the word that their events begin with.
EVENT_TOPICS = {"collect": "results", "recovery": "recoveries"}
#: Topics of acts that are not moves of letters, by the word that they begin with.
ACT_TOPICS = {
    "letters": "letters",
    "groups": "groups",
    "redrives": "redrives",
    "recovery": "recoveries",
    "recoveries": "recoveries",
}
REDRIVE_STATES = {LetterState.REDRIVING.value, LetterState.REDRIVEN.value, LetterState.CAME_BACK.value}


class _Listener:
    """Somebody who is told."""

    def __init__(self, topics: set[str]) -> None:
        self.topics = topics
        self.woken = asyncio.Event()


class Changes:
    """What has changed, from one look to the next. The looks have numbers: who says up to which look he has seen
    everything is told what has changed since."""

    def __init__(self, vault_app: VaultApp, manager: QueueManager) -> None:
        self._vault_app = vault_app
        self._manager = manager
        self._process = secrets.token_hex(4)  # another one's looks have other numbers
        self._listeners: dict[_Listener, None] = {}  # who has waited longest comes first
        self._watcher: asyncio.Task[None] | None = None
        self._until_s = 0.0
        self._ready = asyncio.Event()  # there is a look to compare with
        self._look_number = self._first_number = 0  # of the newest look, and of the first since the watcher began
        self._changed_at: dict[str, int] = {}  # by topic: in which look
        self._newest = -1  # row of the ledger that was seen; -1 before the first look
        self._seen: dict[str, object] = {}
        self._time_at_s = 0.0
        self._is_troubled = False
        vault_app.at_end.append(self.close)

    @property
    def mark(self) -> str:
        """Of the newest look."""
        return f"{self._process}-{self._look_number}"

    async def begin(self) -> str:
        """Watch from now on, if only for a while; returns the mark of a look that was before now."""
        self._until_s = asyncio.get_running_loop().time() + STAY_S
        if self._watcher is None:
            self._ready.clear()
            self._watcher = asyncio.create_task(self._watch(), name="changes")
        await self._ready.wait()
        return self.mark

    async def listen(self, mark: str = "") -> AsyncGenerator[tuple[str, ...]]:
        """The topics that have changed since the look of this mark, about once a second at the most; none at all now
        and then."""
        await self.begin()
        one = _Listener(self._since(mark))
        self._listeners[one] = None
        try:
            while True:
                try:
                    async with asyncio.timeout(QUIET_S):
                        await one.woken.wait()
                except TimeoutError:
                    yield ()
                    continue
                told = tuple(topic for topic in TOPICS if topic in one.topics)
                one.topics.clear()
                one.woken.clear()
                yield told
        finally:
            del self._listeners[one]
            self._until_s = asyncio.get_running_loop().time() + STAY_S

    def close(self) -> None:
        """Look no more."""
        if self._watcher is not None:
            self._watcher.cancel()

    def _since(self, mark: str) -> set[str]:
        process, _, number = mark.partition("-")
        if not mark:
            return set()
        if process != self._process or not number.isdecimal() or int(number[:18]) < self._first_number:
            return set(TOPICS)  # nobody watched since then
        return {topic for topic, changed_at in self._changed_at.items() if changed_at > int(number[:18])}

    async def _watch(self) -> None:
        """While somebody listens, or may be about to."""
        loop = asyncio.get_running_loop()
        self._newest, self._seen, self._time_at_s = -1, {}, loop.time() + TIME_S
        self._first_number = self._look_number + 1
        try:
            while self._listeners or loop.time() < self._until_s:
                began_s = loop.time()
                topics = await self._look()
                self._look_number += 1
                self._changed_at |= dict.fromkeys(topics, self._look_number)
                self._ready.set()
                if began_s >= self._time_at_s:
                    topics.add("time")
                    self._time_at_s = began_s + TIME_S
                for one in self._listeners:
                    one.topics |= topics
                await self._tell()
                await asyncio.sleep(max(0.0, began_s + STEP_S - loop.time()))
        finally:
            self._watcher = None
            self._ready.set()

    async def _tell(self) -> None:
        """One after the other: they do not all come for their pages at the same moment."""
        for one in [one for one in self._listeners if one.topics][:TOLD_A_SECOND_MAX]:
            if one in self._listeners:
                self._listeners[one] = self._listeners.pop(one)
                one.woken.set()
                await asyncio.sleep(STEP_S / TOLD_A_SECOND_MAX)

    async def _look(self) -> set[str]:
        """Never fails: who is told nothing for a while is told when it can be seen again."""
        try:
            topics = {*await self._in_vault(), *self._here()}
        except HoldfastError as error:
            if not self._is_troubled:
                emit("vault.failed", error=error)
            self._is_troubled = True
            return set()
        except Exception as bug:  # noqa: BLE001 - pages are as good without it
            if not self._is_troubled:
                emit("server.bug", method="changes", error=repr(bug), traceback=bug)
            self._is_troubled = True
            return set()
        if self._is_troubled:
            self._is_troubled = False
            return set(TOPICS)
        return topics

    async def _in_vault(self) -> set[str]:
        """By the rows of the ledger that are new."""
        is_first = self._newest < 0
        self._newest, acts = await self._vault_app.vault.ledger.acts_since(self._newest)
        return set() if is_first else {topic for act in acts for topic in _topics_of(*act)}

    def _here(self) -> Iterator[str]:
        """By what this process alone knows."""
        custody, counted = self._vault_app.custody, dict.fromkeys(EVENT_TOPICS.values(), 0)
        reports = custody.captures()
        for (event, _), count in counts.items():
            if (topic := EVENT_TOPICS.get(event.partition(".")[0])) is not None:
                counted[topic] += count
        now: dict[str, object] = {
            **counted,
            "recoveries": (counted["recoveries"], self._vault_app.recovery_changes),
            "captures": [(one.queue, one.state, one.why, one.captured, one.failed_imports) for one in reports],
            "redrives": [broker.publisher.trouble for broker in custody.brokers],
            "queues": list(self._queues()),
        }
        seen, self._seen = self._seen, now
        return (topic for topic, value in now.items() if topic in seen and seen[topic] != value)

    def _queues(self) -> Iterator[object]:
        """How each stands. A state that is the same object is not looked into."""
        for record in self._manager.records():
            yield record
            if (queue := self._manager.find(record.name)) is not None:
                for share in queue.shares:
                    yield share.healthy
                    yield from share.states.values()


def _topics_of(action: str, source: str, target: str) -> Iterator[str]:
    """What an act of the ledger changes to whoever looks; moves of letters have a state to which they went."""
    if target:
        yield from ("letters", "groups")
        if {source, target} & REDRIVE_STATES:
            yield "redrives"
    elif (topic := ACT_TOPICS.get(action.partition(".")[0])) is not None:
        yield topic
