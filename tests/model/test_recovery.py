"""Recoveries against a queue that does the worst: loses connections, loses answers, and has twins in it.

The queue is a few lines of Python, so that hypothesis can choose every mishap and find the shortest story that loses a
letter; real brokers are in `tests/recover`. A kill is an exception that nothing of the run survives: the next run
begins with the queue, the target and the journal's file as they are.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.core.message import Address, Message
from holdfast.core.recovery import Limits, Summary
from holdfast.core.routes import Route, RouteTable
from holdfast.engines.folder.journal import FileJournal
from holdfast.errors import BrokerLost
from holdfast.ports.recovery import Depth, Exported, Findings, OnOutcome, Taken, Verdict
from holdfast.services.recover.run import Recovery
from holdfast.testing import FrozenClock
from tests.support.quick_time import run_quickly

TARGET = Address(routing_key="target")
QUICK = Limits(
    window_count_max=7,
    total_timeout_s=20.0,
    idle_timeout_s=0.06,
    empty_timeout_s=0.03,
    stall_timeout_s=0.3,
    stop_timeout_s=0.02,
)
MISHAPS = ("none", "none", "none", "lost", "cut_after_send", "unknown_stored", "unknown_gone", "nacked", "killed")


class Killed(BaseException):
    """SIGKILL: nothing is unwound that could matter."""


class Held:
    """One message in the queue."""

    def __init__(self, name: int, *, has_route: bool) -> None:
        self.name = name
        self.has_route = has_route
        self.redelivered = False


class WorstQueue:
    """A dead-letter queue in memory; `mishaps` are taken one by one, then all is well."""

    warnings: Sequence[str] = ()
    trouble = ""
    sent_again_count = 0
    capacity_count = 7
    wanted: int | None = None

    def __init__(self, letters: list[Held], mishaps: list[str], journal: Path) -> None:
        self.ready = letters
        self._journal = journal
        self._left_behind: bytes | None = None  # the journal's file at the moment of the kill
        self.arrived: Counter[int] = Counter()
        self.unacked: dict[Held, int] = {}
        self.generation = 0
        self.unsaid_count = 0  # copies beside others that runs sent which did not live to say so
        self._repeated_count = 0
        self._mishaps = mishaps
        self._down = False
        self._stopped = False

    # What a test does.

    def restart(self) -> None:
        """The process that had connections here is gone, and nothing that it did after its end has happened."""
        if self._left_behind is not None:
            self._journal.write_bytes(self._left_behind)
            self._left_behind = None
            self.unsaid_count += self._repeated_count
        self._repeated_count = 0
        self._requeue()
        self._down = self._stopped = False

    def counted(self) -> Counter[int]:
        """Every message, wherever it is."""
        places = [held.name for held in (*self.ready, *self.unacked)]
        return Counter(places) + self.arrived

    @property
    def is_killed(self) -> bool:
        """Whether the process that has connections here is dead: nothing that it says is heard."""
        return self._left_behind is not None

    # The port.

    @property
    def untaken_count(self) -> int:
        return 0

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Findings:
        return Findings(broker="worst", depth=Depth(ready=len(self.ready)))

    def receivers(self, address: Address) -> Sequence[str]:
        return ()

    async def open(self, *, capacity_count: int) -> str:
        self.generation += 1
        return "tag"

    async def reopen(self, *, capacity_count: int) -> None:
        self._down = False
        self.generation += 1

    async def want(self, count: int | None) -> None:
        self.wanted = count

    async def widen(self, capacity_count: int) -> None:
        pass

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Taken]:
        await asyncio.sleep(0 if self.ready else 0.005)
        mishap = "none" if self._down else self._mishap()
        if mishap == "lost":
            self._lose()
        if mishap == "killed":
            self._kill()
        if self._down:
            raise BrokerLost("cut")
        taken = []
        count_max = min(count_max, len(self.ready) if self.wanted is None else self.wanted)
        for held in self.ready[:count_max]:
            self.unacked[held] = self.generation
            address = TARGET if held.has_route else None
            digest = held.name.to_bytes(16, "big")
            route = Route(address=address, why="" if address else "unknown")
            taken.append(
                Taken((held, self.generation), digest, route, redelivered=held.redelivered, returns=None, size_bytes=10)
            )
        del self.ready[:count_max]
        return taken

    def read(self, letter: Taken) -> Message:
        return Message(body=b"")

    def export(self, letter: Taken) -> Exported:
        raise NotImplementedError

    def restored(self, letter: Exported) -> Taken:
        raise NotImplementedError

    def send(self, letters: Sequence[Taken], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        for letter in letters:
            if self._left_behind is not None:
                return
            mishap = self._mishap()
            held, _ = _raw(letter)
            if mishap in ("unknown_gone", "nacked"):
                verdict = Verdict.NACKED if mishap == "nacked" else Verdict.UNKNOWN
            else:
                self.arrived[held.name] += 1
                self._repeated_count += held.redelivered
                verdict = Verdict.UNKNOWN if mishap == "unknown_stored" else Verdict.CONFIRMED
            if mishap == "killed":
                loop.call_soon(self._kill)
            if mishap == "cut_after_send":
                self._lose()
            loop.call_soon(on_outcome, [letter], verdict, 0, "")

    def put_back(self, letters: Sequence[Taken], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        raise NotImplementedError

    def ack(self, letters: Sequence[Taken]) -> Sequence[Taken]:
        missed: list[Taken] = []
        for letter in letters if self._left_behind is None else ():
            held, generation = _raw(letter)
            if self._down or self.unacked.get(held) != generation:
                missed.append(letter)
            else:
                del self.unacked[held]
        return missed

    def forget(self, letter: Taken) -> None:
        pass

    async def stop(self) -> None:
        self._stopped = True

    def leftovers(self) -> Sequence[Taken]:
        return ()

    async def give_back(self) -> int:
        count = len(self.unacked)
        self._requeue()
        return count

    async def let_go(self) -> None:
        self._requeue()

    async def depth(self) -> Depth:
        return Depth(ready=len(self.ready))

    async def close(self) -> None:
        self._requeue()

    # Inside.

    def _mishap(self) -> str:
        return self._mishaps.pop() if self._mishaps and not self._stopped else "none"

    def _lose(self) -> None:
        self._down = True
        self._requeue()

    def _requeue(self) -> None:
        if self._left_behind is not None:
            return
        for held in self.unacked:
            held.redelivered = True
        self.ready[:0] = sorted(self.unacked, key=lambda held: held.name)
        self.unacked.clear()

    def _kill(self) -> None:
        if self._left_behind is None:
            self._left_behind = self._journal.read_bytes()
        raise Killed


def _raw(letter: Taken) -> tuple[Held, int]:
    assert isinstance(letter.raw, tuple)
    return letter.raw


async def once(queue: WorstQueue, path: Path) -> Summary | None:
    """One run; None when it was killed."""
    journal = FileJournal.open(path, source="worst", run="r")
    recovery = Recovery(
        queue, dead_queue="dlq", run="r", table=RouteTable(), clock=FrozenClock(), limits=QUICK, journal=journal
    )
    return await recovery.run(await queue.inspect(RouteTable()))


def run_once(queue: WorstQueue, path: Path) -> Summary | None:
    try:
        summary = run_quickly(once(queue, path))
        return None if queue.is_killed else summary
    except Killed:
        return None
    finally:
        _unlock(path)
        queue.restart()


def _unlock(path: Path) -> None:
    """A process that is killed has no open files."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(path)):
                os.close(int(name))
        except OSError:
            continue


# Twins of which one was published and not acked when the run was killed: the other may not be taken for it.
@example(
    names=[6, 1, 1, 2, 0, 0, 4, 6],
    routed=[True, False, True, False, False, False, True],
    mishaps=["killed", "cut_after_send", "killed", "nacked", "lost", "cut_after_send", "nacked", "none"],
)
@settings(max_examples=400, deadline=None)
@given(
    names=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    routed=st.lists(st.booleans(), min_size=7, max_size=7),
    mishaps=st.lists(st.sampled_from(MISHAPS), max_size=25),
)
def test_nothing_is_lost_and_every_duplicate_is_counted(
    names: list[int], routed: list[bool], mishaps: list[str]
) -> None:
    """Names that repeat are twins: equal in every byte."""
    put = Counter(names)
    possible = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        letters = [Held(name, has_route=routed[name] or name == 0) for name in names]
        queue = WorstQueue(letters, list(mishaps), path)
        for _ in range(40):
            summary = run_once(queue, path)
            found = queue.counted()
            lost = put - found
            assert not lost, f"lost {dict(lost)}"
            possible += summary.possible_duplicates if summary else 0
            if summary is not None and not (queue._mishaps or any(held.has_route for held in queue.ready)):
                break
    extra = queue.counted() - put
    possible += queue.unsaid_count
    assert sum(extra.values()) <= possible, f"{dict(extra)} more than put, {possible} were counted"
    assert all(not held.has_route for held in queue.ready)


class GhostQueue(WorstQueue):
    """When a node dies, RabbitMQ 3.10 may go on counting letters to a connection that is gone."""

    ghosts: list[Held]

    def _lose(self) -> None:
        self.ghosts = self.ready[:5]
        del self.ready[:5]
        super()._lose()


def test_letters_that_never_come_again_are_not_said_to_be_recovered(tmp_path: Path) -> None:
    mishaps = ["lost", *["none"] * 8]  # the last is the first: when seven letters are done
    queue = GhostQueue([Held(n, has_route=True) for n in range(20)], mishaps, tmp_path / "journal")
    summary = run_once(queue, tmp_path / "journal")
    assert summary is not None
    assert (summary.recovered, len(queue.ghosts), summary.unseen, summary.remaining) == (15, 5, 5, 0)
    assert not summary.is_complete
