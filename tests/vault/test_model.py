"""The vault against its model, on every store: any order of captures, kills, edits, redrives, leases that run out, and
restarts. Nothing is lost, states are as the table says, balance and chain hold.

The model says what must be true of a vault, in plain Python: a dead-letter queue, letters and their states, tasks and
their leases. The broker is modelled too, so that nothing can be lost unseen: a message that was sent is still in its
queue, or a letter of its bytes was stored for it. What the vault alone decides (which of two equal un-acked rows is
used up) is taken from what it says, after it was checked.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from holdfast.core.letter import NewLetter
from holdfast.core.moments import moment
from holdfast.core.plan import Plan, PlanOptions, RedriveState
from holdfast.core.selection import ID_MAX, Selection
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import Conflict
from holdfast.stores.redrives import Settled
from holdfast.testing import FrozenClock
from tests.model.installation import settings_for
from tests.support.postgres import emptied
from tests.support.servers import memory_place
from tests.vault.conftest import vault_on
from tests.vault.letters import ACT, act, letter

T = TypeVar("T")
S = LetterState
QUEUES = ("a.dlq", "b.dlq")
BODIES = (b"", b"twin", b"\xff")
LEASE_S = 120
ALL = 10_000
FATES = ("before put", "after put", "after note", "unsent", "acked")
ACTIONS = {
    "archive": (S.CAPTURED, S.ARCHIVED),
    "restore": (S.ARCHIVED, S.CAPTURED),
    "discard": (S.CAPTURED, S.DISCARDED),
    "resolve": (S.REDRIVEN, S.RESOLVED),
}
#: What the broker did with a publish, and what the worker heard of it.
OUTCOMES = ((True, "redriven"), (True, "unknown"), (False, "unknown"), (False, "failed"))
RETURNING = (S.REDRIVING, S.REDRIVEN, S.RESOLVED)
FINAL = ("redriven", "failed", "skipped", "released")


@dataclass(frozen=True)
class Message:
    """A message in a dead-letter queue."""

    queue: str
    body: bytes
    redrive_id: str = ""
    redelivered: bool = False

    @property
    def key(self) -> tuple[str, bytes, str]:
        """What it is told by: equal twins have the same."""
        return self.queue, self.body, self.redrive_id


@dataclass
class Known:
    """A letter as it must be in the vault."""

    queue: str
    body: bytes
    redrive_id: str
    changed_us: int
    state: LetterState = S.CAPTURED
    acked: bool = False
    edits: list[bytes] = field(default_factory=list)
    came_from: int = 0
    #: Copies of it that a broker has stored, whatever we were told of them.
    published: int = 0

    def move(self, target: LetterState, now_us: int) -> None:
        assert (self.state, target) in LETTER_MOVES, f"{self.state} to {target} is not in the table"
        self.state, self.changed_us = target, now_us


@dataclass
class Place:
    """A letter in a task."""

    redrive_id: str = ""
    status: str = "waiting"
    until_us: int = 0


@dataclass
class Task:
    """A redrive."""

    id: int
    places: dict[int, Place]
    state: str = "running"


@dataclass
class Holding:
    """Letters that a worker has leased and not settled yet. `stored` is what the broker did, known to nobody else."""

    task: Task
    letters: dict[int, str]
    until_us: int


class VaultModel:
    """Everything around one vault."""

    def __init__(self) -> None:
        self.waiting: list[Message] = []  #: in the dead-letter queues
        self.out: list[tuple[int, Message]] = []  #: on the targets, with the letter that each is a copy of
        self.letters: dict[int, Known] = {}
        self.tasks: list[Task] = []
        self.holdings: list[Holding] = []
        self.sent: Counter[tuple[str, bytes, str]] = Counter()
        self.stored: Counter[tuple[str, bytes, str]] = Counter()
        self.copies: Counter[tuple[str, bytes, str]] = Counter()  #: how often a stored one was given back unnoticed
        self.by_redrive_id: dict[str, int] = {}

    def arrive(self, message: Message) -> None:
        self.sent[message.key] += 1
        self.waiting.append(message)

    def may_match(self, message: Message, used: set[int]) -> set[int]:
        """The rows that this delivery may be taken for."""
        if not message.redelivered:
            return set()
        return {
            number
            for number, one in self.letters.items()
            if (one.queue, one.body, one.redrive_id) == message.key
            and not one.acked
            and number not in used
            and one.state is not S.DELETED
        }

    def take(self, number: int, message: Message, now_us: int) -> None:
        """A new letter."""
        assert number not in self.letters, f"id {number} was given out twice"
        old = self.by_redrive_id.get(message.redrive_id, 0)
        if old and self.letters[old].state in RETURNING:
            self.letters[old].move(S.CAME_BACK, now_us)
        gone = old and self.letters[old].state is S.DELETED
        self.letters[number] = Known(*message.key, now_us, came_from=0 if gone else old)
        self.stored[message.key] += 1

    def of_state(self, state: LetterState) -> list[int]:
        return sorted(number for number, one in self.letters.items() if one.state is state)

    def leasable(self, task: Task, count: int, now_us: int) -> dict[int, Place]:
        """Of the next places, the ones that are to be published; the others are passed over."""
        if task.state != "running":
            return {}
        due = {
            number: place
            for number, place in sorted(task.places.items())
            if place.status == "waiting" or (place.status in ("leased", "unknown") and place.until_us <= now_us)
        }
        ours: dict[int, Place] = {}
        for number, place in list(due.items())[:count]:
            state = self.letters[number].state
            if state is (S.CAPTURED if place.status == "waiting" else S.REDRIVING):
                ours[number] = place
            else:
                place.status = "skipped" if place.status == "waiting" else "redriven"
        return ours

    def settle(self, holding: Holding, number: int, kind: str, now_us: int) -> None:
        """A worker tells what became of a letter, in time or long after its lease ran out."""
        place, letter = holding.task.places[number], self.letters[number]
        if kind == "redriven":
            if place.status != "skipped":
                place.status = "redriven"
            if letter.state is S.CAPTURED:  # another worker thought that it had failed
                letter.move(S.REDRIVING, now_us)
            if letter.state is S.REDRIVING and not self.is_held_elsewhere(number, holding.task):
                letter.move(S.REDRIVEN, now_us)
            return
        if place.status in FINAL or place.until_us != holding.until_us:
            return  # another worker has it now: what became of it is his to say
        place.status, place.until_us = kind, 0
        if kind == "failed" and letter.state is S.REDRIVING:
            letter.move(S.CAPTURED, now_us)

    def release(self, now_us: int) -> int:
        """What nobody has in hand any more of cancelled tasks goes back; how many there were."""
        count = 0
        for task in self.tasks:
            for number, place in task.places.items():
                is_due = place.status in ("leased", "unknown") and place.until_us <= now_us
                if task.state != "cancelled" or not is_due:
                    continue
                count += 1
                letter = self.letters[number]
                place.status = "released" if letter.state is S.REDRIVING else "redriven"
                if letter.state is S.REDRIVING:
                    letter.move(S.CAPTURED, now_us)
        return count

    def is_held_elsewhere(self, number: int, task: Task) -> bool:
        """Whether another task has this letter in its hands."""
        return any(
            one is not task and number in one.places and one.places[number].status in ("leased", "unknown")
            for one in self.tasks
        )

    def check(self) -> None:
        """Nothing is lost, nothing came from nowhere, and nothing counts as sent back that was never published."""
        waiting = Counter(one.key for one in self.waiting)
        for key, sent in self.sent.items():
            assert self.stored[key] >= sent - waiting[key], f"{key} is lost"
            assert self.stored[key] <= sent + self.copies[key], f"{key} came from nowhere"
        for number, known in self.letters.items():
            if known.state in (S.REDRIVEN, S.RESOLVED, S.CAME_BACK):
                assert known.published, f"letter {number} is {known.state} and was never published"
        for holding in self.holdings:
            for number in holding.letters:
                place = holding.task.places[number]
                if place.status == "leased" and place.until_us == holding.until_us:
                    state = self.letters[number].state
                    assert state not in (S.CAPTURED, S.ARCHIVED, S.DISCARDED), f"letter {number} is leased and {state}"


class VaultMachine(RuleBasedStateMachine):
    """One vault; `kind` says on which store."""

    kind = "memory"
    url = ""  #: of the PostgreSQL database, which is emptied for each example

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = FrozenClock()
        self.model = VaultModel()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-vault-", dir=memory_place()))
        if self.kind == "postgres":
            emptied(self.url)
        self.open()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def open(self) -> None:
        self.vault = vault_on(self.kind, self.folder, self.url, self.clock)
        self.run(self.vault.open())

    def teardown(self) -> None:
        self.run(self.vault.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    @property
    def now_us(self) -> int:
        return self.clock.now_us()

    # --- letters come ---------------------------------------------------------------------------------------------

    @rule(
        queue=st.sampled_from(QUEUES), bodies=st.lists(st.sampled_from([b"", b"twin", b"\xff"]), min_size=1, max_size=4)
    )
    def send(self, queue: str, bodies: list[bytes]) -> None:
        for body in bodies:
            self.model.arrive(Message(queue, body))

    @precondition(lambda self: self.model.waiting)
    @rule(count=st.integers(1, 5), fate=st.sampled_from(FATES), data=st.data())
    def capture(self, count: int, fate: str, data: st.DataObject) -> None:
        """Some deliveries are taken in; the process may be killed at any of its steps."""
        taken = data.draw(st.permutations(self.model.waiting))[:count]
        for one in taken:
            self.model.waiting.remove(one)
        given_back = [replace_redelivered(one) for one in taken]
        if fate == "before put":
            self.model.waiting += given_back
            return
        stored = self.run(self.vault.letters.put([_letter(one) for one in taken], ACT))
        fresh: list[int] = []
        used: set[int] = set()
        rows = {id(one): self.model.may_match(one, set()) for one in taken}
        for one, place in zip(taken, stored, strict=True):
            left = rows[id(one)] - used
            assert place.matched == bool(left), f"{one} was {'' if place.matched else 'not '}taken for a stored one"
            if place.matched:
                assert place.letter in left
                used.add(place.letter)
                self.model.letters[place.letter].acked = True
            else:
                fresh.append(place.letter)
                self.model.take(place.letter, one, self.now_us)
        if fate == "after put":
            self._came_again(taken, stored_ids=[place.letter for place in stored], noted=used)
            return
        if fresh:
            self.run(self.vault.letters.acking(fresh))
        for number in fresh:
            self.model.letters[number].acked = True
        if fate == "after note":
            self._came_again(taken, stored_ids=[place.letter for place in stored], noted={*used, *fresh})
        elif fate == "unsent":
            ids = [place.letter for place in stored]
            self.run(self.vault.letters.acking(ids, sent=False))
            for number in ids:
                self.model.letters[number].acked = False
            self._came_again(taken, stored_ids=ids, noted=set())

    def _came_again(self, taken: list[Message], *, stored_ids: list[int], noted: set[int]) -> None:
        """The broker has them again. Where the row was noted as acked, a second letter of it is the price."""
        for one, number in zip(taken, stored_ids, strict=True):
            self.model.waiting.append(replace_redelivered(one))
            if number in noted:
                self.model.copies[one.key] += 1

    # --- operators ------------------------------------------------------------------------------------------------

    @rule(word=st.sampled_from(sorted(ACTIONS)), count=st.integers(1, 3), wrong=st.booleans(), data=st.data())
    def act(self, word: str, count: int, wrong: bool, data: st.DataObject) -> None:
        source, target = ACTIONS[word]
        fit = self.model.of_state(source)
        if not fit:
            return
        ids = data.draw(st.permutations(fit))[:count]
        other = next((n for n, one in self.model.letters.items() if one.state not in (source, S.DELETED)), None)
        if wrong and other is not None:
            try:
                self.run(self._move([*ids, other], source, target))
            except Conflict:
                return  # all or none: the invariant sees that nothing was moved
            raise AssertionError("a letter in another state was moved")
        assert self.run(self._move(ids, source, target)) == len(ids)
        for number in ids:
            self.model.letters[number].move(target, self.now_us)

    async def _move(self, ids: list[int], source: LetterState, target: LetterState) -> int:
        return await self.vault.letters.move(ids, source=source, target=target, act=act("move"), expected=len(ids))

    @precondition(lambda self: self.model.letters)
    @rule(data=st.data(), body=st.binary(max_size=4))
    def edit(self, data: st.DataObject, body: bytes) -> None:
        number = data.draw(st.sampled_from(sorted(n for n, o in self.model.letters.items())))
        one = self.model.letters[number]
        if one.state is S.DELETED:
            return
        work = self.vault.letters.revise(
            number, revision=len(one.edits), body=body, put={"a": 1}, drop=[], act=act("edit")
        )
        if one.state is not S.CAPTURED:
            try:
                self.run(work)
            except Conflict:
                return
            raise AssertionError(f"a letter that is {one.state} was edited")
        assert self.run(work) == len(one.edits) + 1
        one.edits.append(body)
        one.changed_us = self.now_us

    @rule(state=st.sampled_from([S.RESOLVED, S.CAME_BACK, S.DISCARDED]))
    def retention(self, state: LetterState) -> None:
        count = self.run(
            self.vault.letters.expire(state, before=moment(self.now_us), count_max=ALL, act=act("retention"))
        )
        due = [n for n in self.model.of_state(state) if self.model.letters[n].changed_us < self.now_us]
        assert count == len(due)
        for number in due:
            one = self.model.letters[number]
            if not one.acked:  # nothing is left to know it by, should the broker still have it
                self.model.copies[one.queue, one.body, one.redrive_id] += 1
            one.move(S.DELETED, self.now_us)

    @rule()
    def resolve_due(self) -> None:
        before = moment(self.now_us) - timedelta(seconds=LEASE_S)
        count = self.run(self.vault.letters.resolve_due(before=before, count_max=ALL, act=act("resolve")))
        due = [
            n
            for n in self.model.of_state(S.REDRIVEN)
            if self.model.letters[n].changed_us < self.now_us - LEASE_S * 1_000_000
        ]
        assert count == len(due)
        for number in due:
            self.model.letters[number].move(S.RESOLVED, self.now_us)

    # --- redrives -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.of_state(S.CAPTURED) and len(self.model.tasks) < 5)
    @rule(count=st.integers(1, 4), data=st.data())
    def start(self, count: int, data: st.DataObject) -> None:
        ids = sorted(data.draw(st.permutations(self.model.of_state(S.CAPTURED)))[:count])
        task, made = self.run(
            self.vault.redrives.start(
                plan=_plan(),
                letters=[(n, "x") for n in ids],
                wish=PlanOptions(),
                name="",
                operation="",
                act=act("start"),
            )
        )
        assert made
        self.model.tasks.append(Task(task.id, {number: Place() for number in ids}))

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), count=st.integers(1, 4), late=st.booleans())
    def lease(self, data: st.DataObject, count: int, late: bool) -> None:
        """A worker takes some; late, when the leases of the others have run out."""
        if late:
            self.wait(LEASE_S)
        task = data.draw(st.sampled_from(self.model.tasks))
        until_us = self.now_us + LEASE_S * 1_000_000
        ours = self.model.leasable(task, count, self.now_us)
        leased = self.run(self.vault.redrives.lease(task.id, count_max=count, until=moment(until_us), act=act("lease")))
        assert [one.letter for one in leased] == list(ours)
        for one in leased:
            place = ours[one.letter]
            assert place.redrive_id in ("", one.redrive_id), "a letter of a task has another redrive id now"
            place.redrive_id, place.until_us = one.redrive_id, until_us
            self.model.by_redrive_id[one.redrive_id] = one.letter
            if place.status == "waiting":
                self.model.letters[one.letter].move(S.REDRIVING, self.now_us)
            place.status = "leased"
        if leased:
            self.model.holdings.append(Holding(task, {one.letter: one.redrive_id for one in leased}, until_us))

    @precondition(lambda self: self.model.holdings)
    @rule(data=st.data(), told=st.booleans())
    def publish(self, data: st.DataObject, told: bool) -> None:
        """A worker publishes what it holds and settles it, or is killed before it does."""
        holding = data.draw(st.sampled_from(self.model.holdings))
        self.model.holdings.remove(holding)
        settled: list[Settled] = []
        for number, redrive_id in holding.letters.items():
            stored, heard = data.draw(st.sampled_from(OUTCOMES))
            one = self.model.letters[number]
            if stored:
                one.published += 1
                body = one.edits[-1] if one.edits else one.body
                self.model.out.append((number, Message(one.queue, body, redrive_id)))
            settled.append(Settled(number, heard))  # type: ignore[arg-type]  # one of the three
        if not told:
            return
        until = moment(holding.until_us)
        self.run(self.vault.redrives.settle(holding.task.id, settled, act("settle"), until=until))
        for outcome in settled:
            self.model.settle(holding, outcome.letter, outcome.kind, self.now_us)

    @precondition(lambda self: self.model.out)
    @rule(data=st.data())
    def die_again(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.model.out))
        self.model.out.remove(one)
        self.model.arrive(one[1])

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: st.DataObject, paused: bool) -> None:
        task = data.draw(st.sampled_from(self.model.tasks))
        state, source = (RedriveState.PAUSED, "running") if paused else (RedriveState.RUNNING, "paused")
        done = self.run(
            self.vault.redrives.set_state(task.id, state, sources=[RedriveState(source)], act=act("change"))
        )
        assert done == (task.state == source)
        task.state = state.value if done else task.state

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.model.tasks))
        sources = [RedriveState.RUNNING, RedriveState.PAUSED]
        done = self.run(
            self.vault.redrives.set_state(task.id, RedriveState.CANCELLED, sources=sources, act=act("cancel"))
        )
        assert done == (task.state != "cancelled")
        task.state = "cancelled"

    @rule()
    def release(self) -> None:
        """Letters of cancelled tasks that nobody has in hand are an operator's again, whatever became of them."""
        count = self.run(self.vault.redrives.release(count_max=ALL, act=act("release")))
        assert count == self.model.release(self.now_us)

    # --- around it ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, LEASE_S, 10 * LEASE_S]))
    def wait(self, seconds: int) -> None:
        self.run(self.clock.advance(seconds))

    @precondition(lambda self: self.kind != "memory")
    @rule()
    def restart(self) -> None:
        self.run(self.vault.close())
        self.open()

    # --- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        self.model.check()

    @invariant()
    def the_vault_is_as_the_model_says(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        page = await self.vault.letters.find(Selection(), count_max=ALL)
        contents = [await self.vault.letters.content(one.id) for one in page.letters]
        seen = {
            one.id: (one.queue, one.state, one.acked, one.revision, one.came_from, content and content.body)
            for one, content in zip(page.letters, contents, strict=True)
        }
        told = {
            number: (one.queue, one.state, one.acked, len(one.edits), one.came_from, [one.body, *one.edits][-1])
            for number, one in self.model.letters.items()
            if one.state is not S.DELETED
        }
        assert seen == told
        counts = Counter(one.group for one in page.letters)
        groups = await self.vault.groups.page(status=None, after=ID_MAX, count_max=ALL)
        assert Counter({group.key: group.count for group in groups}) == counts
        assert not (await self.vault.seals.verify()).why
        balance = await self.vault.ledger.balance()
        assert all(row.agrees for row in balance), balance
        ever = {row.queue: row.captured_ever for row in balance}
        assert ever == dict(Counter(one.queue for one in self.model.letters.values()))
        kept = await self.vault.ledger.tallies()
        assert {(one.queue, one.state): one.count for one in kept if one.count} == {
            (one.queue, state): count for one in balance for state, count in one.vault.items() if count
        }
        for task in self.model.tasks:
            found = await self.vault.redrives.find(task.id)
            assert found is not None
            status = Counter(place.status for place in task.places.values())
            assert (found.redriven, found.failed, found.skipped, found.unknown) == (
                status["redriven"],
                status["failed"],
                status["skipped"],
                status["unknown"] + status["leased"] + status["released"],
            )
            (listed,) = await self.vault.redrives.page(before=task.id + 1, count_max=1)
            assert listed == found, "a list counts as the task itself is counted"


def replace_redelivered(message: Message) -> Message:
    return Message(message.queue, message.body, message.redrive_id, redelivered=True)


def _letter(message: Message) -> NewLetter:
    made = letter(message.body, queue=message.queue, redelivered=message.redelivered, redrive_id=message.redrive_id)
    return replace(made, digest=made.digest + message.redrive_id.encode())


def _plan() -> Plan:
    return Plan(
        hash="h",
        wish=PlanOptions(),
        ids="",
        count=0,
        targets={},
        left_out=(),
        left_out_count=0,
        redriven_before=0,
        estimated_s=0.0,
        notes=(),
        made_at=moment(0),
        made_by="tester",
    )


class MemoryVault(VaultMachine):
    kind = "memory"


class SqliteVault(VaultMachine):
    kind = "sqlite"


class PostgresVault(VaultMachine):
    kind = "postgres"


def test_a_vault_in_memory_is_as_the_model_says() -> None:
    run_state_machine_as_test(MemoryVault, settings=settings_for(examples=25))


def test_a_vault_in_sqlite_is_as_the_model_says() -> None:
    run_state_machine_as_test(SqliteVault, settings=settings_for(examples=8))


@pytest.mark.postgres
def test_a_vault_in_postgresql_is_as_the_model_says(postgres_url: str) -> None:
    PostgresVault.url = postgres_url
    run_state_machine_as_test(PostgresVault, settings=settings_for(examples=3))
