"""Recoveries against a queue that does the worst: loses connections, loses answers, and has twins in it.

The queue is a few lines of Python, so that hypothesis can choose every mishap and find the shortest story that loses a
letter; real brokers are in `tests/recover`. A kill is an exception that nothing of the run survives: the next run
begins with the queue, the target and the journals' files as they are.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core.message import Address, Delivery, Message, Outcome, OutcomeKind, Outgoing
from holdfast.core.recovery import Depth, Preflight, RecoveryOrder, RunLetter, RunLimits, StoppedBy, Summary
from holdfast.core.routes import Route, RouteTable
from holdfast.errors import BrokerLost
from holdfast.ports.broker import OnOutcome, RecoveryBroker
from holdfast.services.recover.run import RecoveryRun
from holdfast.services.recover.service import how_it_ended
from holdfast.stores.journal import FileJournal, JournalPaths
from holdfast.testing import FrozenClock
from tests.support.quick_time import run_quickly

pytestmark = pytest.mark.slow

TARGET = Address(routing_key="target")
QUICK = RunLimits(
    window_count_max=7,
    total_timeout_s=20.0,
    idle_timeout_s=0.06,
    empty_timeout_s=0.03,
    stall_timeout_s=0.3,
    stop_timeout_s=0.02,
)
MISHAPS = (
    "none",
    "none",
    "none",
    "lost",
    "lost_with_acks",
    "cut_after_send",
    "unknown_stored",
    "unknown_gone",
    "nacked",
    "killed",
    "killed_noted",
)

#: The last is the first: two letters are taken and published, and the process is killed before their acks.
NOTED_AND_KILLED = ["killed_noted", "none", "none"]


class Killed(BaseException):
    """SIGKILL: nothing is unwound that could matter."""


class Held:
    """One message in the queue."""

    def __init__(self, name: int, *, has_route: bool, redelivered: bool = False, came_at: int = 0) -> None:
        self.name = name
        self.has_route = has_route
        self.redelivered = redelivered
        self.came_at = came_at  # before which run


@dataclass(frozen=True)
class Way:
    """How a run is started."""

    limit: int | None = None
    journal: str | None = "usual"  # None: it keeps none
    newcomers: tuple[tuple[int, bool], ...] = ()  # names of letters that came before it, and whether redelivered


class WorstQueue:
    """A dead-letter queue in memory; `mishaps` are taken one by one, then all is well."""

    queue = "dlq"
    is_lost = False
    trouble = ""
    sent_again = 0
    wanted: int | None = None

    def __init__(self, letters: list[Held], mishaps: list[str], folder: Path) -> None:
        self.warnings: list[str] = []
        self.ready = letters
        self._folder = folder  # of the journals
        self._left_behind: dict[str, bytes | Path] | None = None  # what was in it at the moment of the kill
        self.arrived: Counter[int] = Counter()
        self.run_count = 0
        self.sent: list[tuple[int, int]] = []  # name and run of every copy
        self.acked: list[Held] = []
        self._acked_last: list[Held] = []  # on this connection: the broker may not have got these acks
        self.unacked: dict[Held, int] = {}
        self.generation = 0
        self._mishaps = mishaps
        self._down = False
        self._stopped = False
        self._is_killed_when_noted = False

    # What a test does.

    def restart(self) -> None:
        """The process that had connections here is gone, and nothing that it did after its end has happened."""
        if self._left_behind is not None:
            _restore(self._folder, self._left_behind)
            self._left_behind = None
        self.run_count += 1
        self._requeue()
        self._down = self._stopped = self._is_killed_when_noted = False

    def counted(self) -> Counter[int]:
        """Every message, wherever it is."""
        places = [held.name for held in (*self.ready, *self.unacked)]
        return Counter(places) + self.arrived

    def noted(self) -> None:
        """The journal has been told of letters that are published."""
        if self._is_killed_when_noted:
            self._kill()

    @property
    def is_killed(self) -> bool:
        """Whether the process that has connections here is dead: nothing that it says is heard."""
        return self._left_behind is not None

    # The broker: its inspector, its drain, its redriver and its publisher.

    async def preflight(self, table: RouteTable) -> Preflight:
        return Preflight(broker="worst", depth=await self.depth(), receivers=lambda to: [to.routing_key])

    async def alarm(self) -> str:
        return ""

    async def refusal(self, exchange: str) -> str:
        return ""

    @property
    def is_connected(self) -> bool:
        return not self._down

    async def open(self) -> str:
        self._down = False
        self.generation += 1
        self._acked_last.clear()
        return "tag"

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        self.wanted = wanted

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        await asyncio.sleep(0 if self.ready else 0.005)
        mishap = "none" if self._down else self._mishap()
        if mishap in ("lost", "lost_with_acks"):
            self._lose()
        if mishap == "lost_with_acks":
            self._forget_acks()
        if mishap == "killed":
            self._kill()
        if self._down:
            raise BrokerLost("cut")
        taken = []
        count_max = min(count_max, len(self.ready) if self.wanted is None else self.wanted)
        for held in self.ready[:count_max]:
            self.unacked[held] = self.generation
            taken.append(Delivery(1, 1, held.redelivered, "", "", "", b"", b"", own=(held, self.generation)))
        del self.ready[:count_max]
        return taken

    def tick(self) -> None:
        pass

    def letter(self, delivery: Delivery) -> RunLetter:
        held, _ = _raw(delivery)
        address = TARGET if held.has_route else None
        digest = held.name.to_bytes(16, "big")
        route = Route(address=address, why="" if address else "unknown")
        return RunLetter(delivery, b"", digest, route, held.redelivered, returns=None, size_bytes=10)

    def read(self, delivery: Delivery) -> Message:
        return Message(body=b"")

    async def publish(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        raise NotImplementedError

    def send(self, messages: Sequence[Outgoing], told: OnOutcome, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        for message in messages:
            if self._left_behind is not None:
                return
            mishap = self._mishap()
            held, _ = _raw(message.made_from.delivery)
            if mishap in ("unknown_gone", "nacked"):
                kind = OutcomeKind.NACKED if mishap == "nacked" else OutcomeKind.UNKNOWN
            else:
                self.arrived[held.name] += 1
                self.sent.append((held.name, self.run_count))
                kind = OutcomeKind.UNKNOWN if mishap == "unknown_stored" else OutcomeKind.CONFIRMED
            if mishap == "killed":
                loop.call_soon(self._kill)
            if mishap == "killed_noted":
                self._is_killed_when_noted = True
            if mishap == "cut_after_send":
                self._lose()
            loop.call_soon(told, [message], Outcome(kind))

    def put_back(self, letter: RunLetter) -> Outgoing:
        raise NotImplementedError

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        missed: list[Delivery] = []
        for delivery in deliveries if self._left_behind is None else ():
            held, generation = _raw(delivery)
            if self._down or self.unacked.get(held) != generation:
                missed.append(delivery)
            else:
                del self.unacked[held]
                self.acked.append(held)
                self._acked_last.append(held)
        return missed

    def forget_body(self, delivery: Delivery) -> None:
        pass

    async def stop(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        self._stopped = True
        return ()

    async def give_back_all(self, *, others_count: int) -> int:
        count = len(self.unacked)
        self._requeue()
        return count

    async def abandon(self) -> None:
        self._requeue()

    async def depth(self) -> Depth:
        return Depth(ready=len(self.ready))

    # Inside.

    def _mishap(self) -> str:
        return self._mishaps.pop() if self._mishaps and not self._stopped else "none"

    def _lose(self) -> None:
        self._down = True
        self._requeue()

    def _forget_acks(self) -> None:
        """Acks that were sent and never arrived: their letters come again, here after all others."""
        for held in self._acked_last:
            self.acked.remove(held)
            held.redelivered = True
        self.ready += self._acked_last
        self._acked_last = []

    def _requeue(self) -> None:
        if self._left_behind is not None:
            return
        for held in self.unacked:
            held.redelivered = True
        self.ready[:0] = sorted(self.unacked, key=lambda held: held.name)
        self.unacked.clear()

    def _kill(self) -> None:
        if self._left_behind is None:
            self._left_behind = _snapshot(self._folder)
        raise Killed


def _raw(delivery: Delivery) -> tuple[Held, int]:
    assert isinstance(delivery.own, tuple)
    return delivery.own


def _snapshot(folder: Path) -> dict[str, bytes | Path]:
    return {path.name: path.readlink() if path.is_symlink() else path.read_bytes() for path in folder.iterdir()}


def _restore(folder: Path, before: dict[str, bytes | Path]) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, what in before.items():
        if isinstance(what, Path):
            (folder / name).symlink_to(what)
        else:
            (folder / name).write_bytes(what)


def run_of(
    queue: WorstQueue, limits: RunLimits, journal: FileJournal | None = None, preflight: Preflight | None = None
) -> RecoveryRun:
    order = RecoveryOrder(dead_queue="dlq", run="r", table=RouteTable(), limits=limits)
    if preflight is None:
        depth = Depth(ready=len(queue.ready))
        preflight = Preflight(broker="worst", depth=depth, receivers=lambda to: [to.routing_key])
    broker = RecoveryBroker(drain=queue, publisher=queue, redriver=queue, inspector=queue)
    return RecoveryRun(broker, order, preflight, clock=FrozenClock(), journal=journal)


async def once(queue: WorstQueue, folder: Path, way: Way) -> Summary | None:
    """One run; None when it was killed."""
    own = folder / way.journal if way.journal else None
    journal = FileJournal(JournalPaths(origin="worst", own=own, usual=folder / "usual"), "r")
    note = journal.confirmed

    def confirmed(digests: Sequence[bytes]) -> None:
        note(digests)
        queue.noted()

    journal.confirmed = confirmed  # type: ignore[method-assign]
    summary = await run_of(queue, replace(QUICK, limit=way.limit), journal).run()
    if not queue.is_killed:
        journal.close(how_it_ended(summary, has_broker=not queue.trouble, is_lost=queue.is_lost))
    return summary


def run_once(queue: WorstQueue, folder: Path, way: Way = Way()) -> Summary | None:  # noqa: B008
    try:
        summary = run_quickly(once(queue, folder, way))
        return None if queue.is_killed else summary
    except Killed:
        return None
    finally:
        _unlock(folder)
        queue.restart()


def _unlock(folder: Path) -> None:
    """A process that is killed has no open files."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(folder)):
                os.close(int(name))
        except OSError:
            continue


# Twins of which one was published and not acked when the run was killed: the other may not be taken for it.
@example(
    names=[6, 1, 1, 2, 0, 0, 4, 6],
    routed=[True, False, True, False, False, False, True],
    mishaps=["killed", "cut_after_send", "killed", "nacked", "lost", "cut_after_send", "nacked", "none"],
)
# Acks of seven letters are lost, and the run has all that it wanted before these come again.
@example(names=[0, 1, 2, 3, 4, 5, 6, 0], routed=[True] * 7, mishaps=["lost_with_acks", *["none"] * 8])
@settings(max_examples=400)
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
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        letters = [Held(name, has_route=routed[name] or name == 0) for name in names]
        queue = WorstQueue(letters, list(mishaps), folder)
        for _ in range(40):
            summary = run_once(queue, folder)
            found = queue.counted()
            lost = put - found
            assert not lost, f"lost {dict(lost)}"
            possible += summary.possible_duplicates if summary else 0
            if summary is not None and not (queue._mishaps or any(held.has_route for held in queue.ready)):
                break
    extra = queue.counted() - put
    assert sum(extra.values()) <= possible, f"{dict(extra)} more than put, {possible} were counted"
    assert all(not held.has_route for held in queue.ready)


# Both are noted by a killed run. One is published again by a short run without a journal, and comes anew.
@example(
    names=[1, 2],
    mishaps=NOTED_AND_KILLED,
    ways=[Way(), Way(limit=1, journal=None), Way(newcomers=((1, True),))],
)
# The same by a run that finishes.
@example(
    names=[1, 2],
    mishaps=NOTED_AND_KILLED,
    ways=[Way(), Way(journal=None), Way(newcomers=((1, True),))],
)
# Noted elsewhere.
@example(
    names=[1, 2],
    mishaps=NOTED_AND_KILLED,
    ways=[Way(journal="another"), Way(), Way(newcomers=((1, True),), journal="another")],
)
@settings(max_examples=200)
@given(
    names=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    mishaps=st.lists(st.sampled_from((*MISHAPS, "killed")), max_size=15),
    ways=st.lists(
        st.builds(
            Way,
            limit=st.none() | st.integers(1, 4),
            journal=st.sampled_from(("usual", "usual", "another", None)),
            newcomers=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=2).map(tuple),
        ),
        max_size=6,
    ),
)
def test_no_letter_is_taken_for_one_that_came_before_it(names: list[int], mishaps: list[str], ways: list[Way]) -> None:
    """Runs with different journals, or none, some of which do not come to the end; and letters that come later."""
    put = Counter(names)
    possible = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        queue = WorstQueue([Held(name, has_route=True) for name in names], list(mishaps), folder)
        for number in range(40):
            way = ways[number] if number < len(ways) else Way()
            for name, redelivered in way.newcomers:
                queue.ready.append(Held(name, has_route=True, redelivered=redelivered, came_at=number))
                put[name] += 1
            summary = run_once(queue, folder, way)
            assert not put - queue.counted()
            possible += summary.possible_duplicates if summary else 0
            for came_at in range(number + 1):
                gone = Counter(held.name for held in queue.acked if held.came_at >= came_at)
                sent = Counter(name for name, run in queue.sent if run >= came_at)
                assert not gone - sent, f"acked without a copy: {dict(gone - sent)} of those that came before {came_at}"
            if summary is not None and number >= len(ways) and not (queue._mishaps or queue.ready):
                break
        run_once(queue, folder)  # the last one may have kept letters that were gone at its end
        assert not list(folder.iterdir()), "journals end with the queue"
    if all(way.journal for way in ways):  # a run without one that is killed is known to nobody
        extra = queue.counted() - put
        assert sum(extra.values()) <= possible


class GhostQueue(WorstQueue):
    """When a node dies, RabbitMQ 3.10 may go on counting letters to a connection that is gone."""

    ghosts: list[Held]

    def _lose(self) -> None:
        self.ghosts = self.ready[:5]
        del self.ready[:5]
        super()._lose()


def test_letters_that_never_come_again_are_not_said_to_be_recovered(tmp_path: Path) -> None:
    mishaps = ["lost", *["none"] * 8]  # the last is the first: when seven letters are done
    queue = GhostQueue([Held(n, has_route=True) for n in range(20)], mishaps, tmp_path)
    summary = run_once(queue, tmp_path)
    assert summary is not None
    assert (summary.recovered, len(queue.ghosts), summary.unseen, summary.remaining) == (15, 5, 5, 0)
    assert not summary.is_complete


class SlowQueue(WorstQueue):
    """It does not answer at the end."""

    def __init__(self, letters: list[Held], folder: Path, *, silent_at: str) -> None:
        super().__init__(letters, [], folder)
        self.silent = asyncio.Event()
        self._silent_at = silent_at
        self.abandoned_count = 0

    async def give_back_all(self, *, others_count: int) -> int:
        await self._may_be_silent("release")
        return await super().give_back_all(others_count=others_count)

    async def abandon(self) -> None:
        self.abandoned_count += 1
        await super().abandon()

    async def depth(self) -> Depth:
        if self._stopped and not self.silent.is_set():
            await self._may_be_silent("depth")
        return await super().depth()

    async def _may_be_silent(self, at: str) -> None:
        if at == self._silent_at:
            self.silent.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("silent_at", ["release", "depth"])
async def test_a_second_signal_does_not_wait_for_what_the_end_waits_for(silent_at: str, tmp_path: Path) -> None:
    queue = SlowQueue([Held(n, has_route=False) for n in range(3)], tmp_path, silent_at=silent_at)
    recovery = run_of(queue, RunLimits())
    running = asyncio.create_task(recovery.run())
    await asyncio.wait_for(queue.silent.wait(), 60.0)
    recovery.abandon()
    summary = await asyncio.wait_for(running, 60.0)
    assert (summary.skipped, summary.remaining, len(queue.ready)) == (3, 3, 3)
    assert queue.abandoned_count == (silent_at == "release")


class LateConfirms(WorstQueue):
    """What is put back is delivered from its new place before its confirm is heard: these are two connections."""

    def __init__(self, letters: list[Held], folder: Path, *, kinds: Sequence[OutcomeKind] = ()) -> None:
        super().__init__(letters, [], folder)
        self._kinds = list(kinds)  # of the first put-backs; all others are confirmed
        self._unheard: list[tuple[Held, Outgoing, OnOutcome, Outcome]] = []

    def put_back(self, letter: RunLetter) -> Outgoing:
        return Outgoing("", "dlq", b"", b"", letter)

    async def publish(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        return [self._published(message)[1] for message in messages]

    def send(self, messages: Sequence[Outgoing], told: OnOutcome, *, timeout_s: float) -> None:
        for message in messages:
            copy, outcome = self._published(message)
            self._unheard.append((copy, message, told, outcome))

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        heard = [one for one in self._unheard if one[0] not in self.ready]
        self._unheard = [one for one in self._unheard if one not in heard]
        for _, message, told, outcome in heard:
            told([message], outcome)
        return await super().take(count_max=count_max, timeout_s=timeout_s)

    def _published(self, message: Outgoing) -> tuple[Held, Outcome]:
        copy = Held(_raw(message.made_from.delivery)[0].name, has_route=False)
        kind = self._kinds.pop(0) if self._kinds else OutcomeKind.CONFIRMED
        if kind is OutcomeKind.CONFIRMED:
            self.ready.append(copy)
        return copy, Outcome(kind)


@pytest.mark.parametrize("failures", [0, 3])
async def test_a_letter_that_is_put_back_is_known_before_its_confirm_is_heard(failures: int, tmp_path: Path) -> None:
    """One more is found than there is, so that all others come twice; those that are not put back come once."""
    kinds = [OutcomeKind.NACKED] * failures
    queue = LateConfirms([Held(n, has_route=False) for n in range(10)], tmp_path, kinds=kinds)
    preflight = Preflight(broker="worst", depth=Depth(ready=11), delivery_limit=5)
    summary = await run_of(queue, replace(QUICK, window_count_max=100), preflight=preflight).run()
    assert (summary.stopped_by, summary.skipped, summary.put_back) == (StoppedBy.EMPTY, 10, 20 - failures)
    assert (summary.remaining, queue.counted()) == (10, Counter(range(10)))
