"""The whole in-process service against its model: any order of requests, time, faults, restarts and crashes.

PostgreSQL's machine has few examples here, because one takes a second or two there; the soak has more.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.core.item import LeasedItem, NewItem, RetryItem
from holdfast.core.moments import format_duration, microseconds, moment
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import BadIds, HoldfastError, Invalid, NothingToLease, TryAgain
from holdfast.ports.queue_store import (
    Arrive,
    Clear,
    Committed,
    Complete,
    Delete,
    Due,
    Extend,
    Forget,
    Import,
    LeaseItems,
    Produce,
    Remove,
    RetryItems,
)
from tests.model.audit import audit, catch_up, look
from tests.model.installation import Backend, ModelInstallation, settings_for
from tests.model.queue_model import SECOND_US, Entry, Queue, QueueModel

pytestmark = pytest.mark.slow

MINUTE_US = 60 * SECOND_US
NAMES = ("work", "plain", "dead", "grave")
OPERATIONS = (None, "load", Produce, LeaseItems, Complete, RetryItems, Due, Arrive, Remove, Forget)
DELAYS_S = (0.05, 1.0, 30.0, 61.0, 600.0, 4000.0)
keys = st.sampled_from(["", "", "", "k1", "k2"])
names = st.sampled_from(["work", "work", "work", "dead", "dead", "plain", "grave"])
choice = st.integers(0, 1000)
fault = st.sampled_from(["", "", "", "", "before", "after"])


class ServiceMachine(RuleBasedStateMachine):
    """`kind` is the store; a subclass names it."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.real = ModelInstallation(self.kind)
        self.model = QueueModel()
        self._count = 0

    @initialize(partitions=st.sampled_from([1, 1, 2]), max_attempts=st.sampled_from([0, 1, 2]))
    def begin(self, partitions: int, max_attempts: int) -> None:
        for name, dead_queue in (("dead", ""), ("grave", ""), ("work", "dead"), ("plain", "")):
            self._create(name, dead_queue, partitions, max_attempts if name in {"work", "plain"} else 0)

    def _create(self, name: str, dead_queue: str, partitions: int, max_attempts: int) -> None:
        answer = self.real.attempt(
            self.real.queues.queues_create(
                name,
                lease_timeout="1m",
                expire_timeout="1h",
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                requested_partitions=partitions,
            )
        )
        assert answer is None, answer
        opened = self.real.manager.find(name)
        assert opened is not None
        queue = Queue(name, 0, MINUTE_US, 60 * MINUTE_US, max_attempts, dead_queue, partitions)
        self.model.create(queue)
        queue.generation = opened.record.generation

    def teardown(self) -> None:
        try:
            if self.model.queues:
                self._heal()
        finally:
            self.real.close()

    # --- after each step --------------------------------------------------------------------------------------

    @invariant()
    def the_model_is_right(self) -> None:
        if self.model.queues:
            self.real.run(audit(self.real, self.model))

    def _heal(self) -> None:
        """Nothing fails any more: then everything is healthy and nothing is on its way."""
        self.real.heal(lambda: all(self._is_settled(name) for name in self.model.queues))
        self.the_model_is_right()
        assert not any(queue.dying for queue in self.model.queues.values())

    def _is_settled(self, name: str) -> bool:
        opened = self.real.manager.find(name)
        return opened is not None and all(
            share.healthy and not state.dying for share in opened.shares for state in share.states.values()
        )

    # --- helpers ----------------------------------------------------------------------------------------------

    @property
    def now_us(self) -> int:
        return self.real.clock.now_us()

    def _arm(self, fault: Any, name: str) -> None:
        if fault:
            self.real.faults.arm(fault, name)

    def _token(self) -> bytes:
        self._count += 1
        return b"%d" % self._count

    def _verb(self, call: Any, name: str, operation: type) -> tuple[Any, tuple[Any, ...]]:
        """The answer or the error, and the operations that took effect although they were reported as failed."""
        known = len(self.real.faults.lost_answers)
        healthy, armed = self.real.is_healthy(name), list(self.real.faults.armed)
        answer = self.real.attempt(call)
        lost = [
            one
            for queue_name, operations in self.real.faults.lost_answers[known:]
            for one in operations
            if queue_name == name and isinstance(one, operation)
        ]
        if isinstance(answer, TryAgain):
            fired = len(armed) != len(self.real.faults.armed)
            assert fired or not healthy or name in self.real.faults.down, f"refused without a fault: {answer}"
        else:
            assert not lost, "acknowledged, and reported as failed"
        return answer, tuple(lost)

    def _have_leases(self, name: str) -> None:
        """Something to settle, where that can be had."""
        queue = self.model.queues[name]
        if not queue.at("leased") and not queue.paused:
            if not queue.at("queued"):
                self.produce(name, [("", 0.0), ("", 0.0), ("", 0.0)])
                self.the_model_is_right()
            self.lease(name, 2, 0.01)
            self.the_model_is_right()

    def _pick(self, name: str, place: str, seed: int) -> list[Entry]:
        """A few entries of one partition."""
        entries = self.model.queues[name].at(place)
        if not entries:
            return []
        number = entries[seed % len(entries)].partition
        mine = [entry for entry in entries if entry.partition == number and entry.id]
        start = seed % len(mine) if mine else 0
        return mine[start : start + 1 + seed % 3]

    # --- requests ---------------------------------------------------------------------------------------------

    @rule(
        name=names,
        specs=st.lists(st.tuples(keys, st.sampled_from([0, 0, 0.05, 5.0, 90.0])), min_size=1, max_size=3),
        fault=fault,
    )
    def produce(self, name: str, specs: list[tuple[str, float]], fault: Any = "") -> None:
        self._arm(fault, name)
        queue, now_us = self.model.queues[name], self.now_us
        items = [
            NewItem(
                payload=self._token(),
                dedupe_key=key,
                enqueue_at=moment(now_us + round(after_s * SECOND_US)) if after_s else None,
            )
            for key, after_s in specs
        ]
        answer, lost = self._verb(self.real.queues.queue_produce(name, items), name, Produce)
        if isinstance(answer, HoldfastError):
            assert isinstance(answer, TryAgain), answer
            for operation in lost:
                self._produced(queue, items, operation.partition, None, now_us)
            return
        un_leased = queue.un_leased()
        best = min(un_leased, key=lambda number: (un_leased[number], number))
        self._produced(queue, items, best, answer.items, now_us)

    def _produced(self, queue: Queue, items: list[NewItem], partition: int, placed: Any, now_us: int) -> None:
        for index, item in enumerate(items):
            known = queue.by_key(item.dedupe_key)
            if known is not None:
                if placed is not None:
                    assert placed[index].id == known.id
                    assert placed[index].partition == known.partition, "the partition of a known key is wrong"
                continue
            entry = Entry(
                token=item.payload,
                partition=partition,
                place="",
                expire_us=now_us + queue.expire_us,
                dedupe_key=item.dedupe_key,
            )
            if placed is not None:
                entry.id = entry.old_id = placed[index].id
                assert placed[index].partition == partition, "not the partition with the fewest items"
            at_us = microseconds(item.enqueue_at) if item.enqueue_at else 0
            self.model.enqueue(queue, entry, at_us=at_us, now_us=now_us)

    @rule(name=names, size=st.integers(1, 4), wait_s=st.sampled_from([0.01, 0.01, 1.0]), fault=fault)
    def lease(self, name: str, size: int, wait_s: float, fault: Any = "") -> None:
        self._arm(fault, name)
        queue, faults, began_us = self.model.queues[name], self.real.faults, self.now_us
        known, armed = len(faults.lost_answers), len(faults.armed)
        healthy = self.real.is_healthy(name)
        before = {partition: self._queued(queue, partition) for partition in range(queue.partitions)}
        call = self.real.queues.queue_lease(
            name, batch_size=size, request_timeout=format_duration(round(wait_s * SECOND_US))
        )
        answer = self.real.attempt(call, within_s=wait_s)
        smooth = healthy and armed == len(faults.armed) and name not in faults.down
        if self.now_us > began_us:
            self.real.run(catch_up(self.real, self.model))  # it waited: time may have brought items
        for (queue_name, _), committed in zip(faults.lost_answers[known:], faults.lost_results[known:], strict=True):
            if queue_name == name and isinstance(committed, Committed):
                self._leased_untold(queue, committed)
        if isinstance(answer, NothingToLease):
            waited = self.now_us > began_us
            assert waited
            assert queue.paused or not smooth or not any(before.values()), "there was something to lease"
            return
        assert not isinstance(answer, HoldfastError), answer
        assert not queue.paused, "a paused queue gave items out"
        present = {entry.token for entry in before[answer.partition]}
        self._leased(queue, answer, size, present, smooth=smooth, began_us=began_us)

    def _leased_untold(self, queue: Queue, committed: Committed) -> None:
        """Leases that took effect and of which nobody was told: they run out."""
        for result in committed.results:
            for item in result if isinstance(result, list) else ():
                if not isinstance(item, LeasedItem):
                    continue
                entry = queue.entries[item.payload]
                assert entry.place == "queued", "leased twice at once"
                self.model.lease(queue, entry, until_us=None)

    def _queued(self, queue: Queue, partition: int) -> list[Entry]:
        return [entry for entry in queue.at("queued") if entry.partition == partition]

    def _leased(
        self, queue: Queue, answer: Any, size: int, present: set[bytes], *, smooth: bool, began_us: int
    ) -> None:
        expected = self._queued(queue, answer.partition)
        if self.now_us > began_us:
            # It waited: what came later than the lease, or was leased untold before it, was not there for it.
            given = {item.payload for item in answer.items}
            last = max(item.id for item in answer.items)
            expected = [e for e in expected if e.token in given or (e.token in present and (e.id or "~") < last)]
        expected = expected[:size]
        if smooth and self.now_us == began_us:
            counts = queue.un_leased()
            assert counts[answer.partition] == max(counts.values()), "not the partition with the most items"
        assert [item.payload for item in answer.items] == [entry.token for entry in expected], "not the oldest first"
        for item, entry in zip(answer.items, expected, strict=True):
            assert entry.id in {None, item.id}
            entry.id = entry.old_id = item.id
            self.model.lease(queue, entry, until_us=microseconds(item.lease_deadline))
            assert item.attempts == entry.attempts, "attempts are wrong"
            assert began_us + queue.lease_us <= microseconds(item.lease_deadline) <= self.now_us + queue.lease_us

    @rule(name=names, sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4))
    @precondition(lambda self: not self.real.faults.armed and not self.real.faults.down)
    def lease_at_once(self, name: str, sizes: list[int]) -> None:
        queue = self.model.queues[name]
        if not self.real.is_healthy(name) or queue.paused:
            return

        async def all_at_once() -> list[Any]:
            calls = [self.real.queues.queue_lease(name, batch_size=size, request_timeout="10ms") for size in sizes]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await self.real.faults.rest()
            await self.real.clock.advance(0.01)
            return await asyncio.gather(*tasks, return_exceptions=True)

        answers = self.real.run(all_at_once())
        given: set[bytes] = set()
        for answer, size in zip(answers, sizes, strict=True):
            if isinstance(answer, NothingToLease):
                continue
            assert len(answer.items) <= size
            for item in answer.items:
                entry = queue.entries[item.payload]
                assert entry.place == "queued", "leased twice at once"
                assert entry.partition == answer.partition
                assert entry.id in {None, item.id}
                given.add(item.payload)
                self.model.lease(queue, entry, until_us=microseconds(item.lease_deadline))
                assert item.attempts == entry.attempts
        if queue.partitions == 1:
            assert len(given) == min(sum(sizes), len(given) + len(queue.at("queued"))), "items were kept back"

    @rule(
        name=names,
        seed=choice,
        how=st.sampled_from(["complete", "complete", "stale", "retry", "retry", "dead", "extend", "delete"]),
        after_s=st.sampled_from([0, 0, 0.05, 20.0, 90.0]),
        detail=st.integers(0, 2),
        fault=fault,
    )
    def settle(self, name: str, seed: int, how: str, after_s: float, detail: int, fault: Any) -> None:
        self._have_leases(name)
        self._arm(fault, name)
        match how:
            case "complete" | "stale":
                self._complete(name, seed, stale=how == "stale")
            case "retry" | "dead":
                self._retry(name, seed, after_s, dead=how == "dead", why=detail > 0)
            case "extend":
                self._extend(name, seed, ("", "1s", "10m")[detail])
            case _:
                self._delete(name, seed, ("queued", "leased", "scheduled")[detail])

    def _complete(self, name: str, seed: int, *, stale: bool) -> None:
        queue, entries = self.model.queues[name], self._pick(name, "leased", seed)
        bad = [entry.id for entry in self._pick(name, "queued", seed)][:1] if stale else []
        ids = [entry.id or "" for entry in entries] + [one or "" for one in bad]
        if not ids:
            return
        partition = entries[0].partition if entries else self._pick(name, "queued", seed)[0].partition
        call = self.real.queues.queue_complete(name, ids, partition=partition)
        answer, lost = self._verb(call, name, Complete)
        if bad and not isinstance(answer, TryAgain):
            assert isinstance(answer, BadIds)
            assert set(answer.ids) == set(bad), "not exactly the bad ids are named"
            return
        if answer is None or (lost and not bad):
            for entry in entries:
                del queue.entries[entry.token]
        else:
            assert isinstance(answer, TryAgain), answer

    def _retry(self, name: str, seed: int, after_s: float, *, dead: bool, why: bool) -> None:
        queue, entries, now_us = self.model.queues[name], self._pick(name, "leased", seed), self.now_us
        if not entries:
            return
        at_us = now_us + round(after_s * SECOND_US)
        reason = "no such customer" if why and dead else ""
        items = [
            RetryItem(id=e.id or "", retry_at=moment(at_us) if after_s else None, dead=dead, reason=reason)
            for e in entries
        ]
        call = self.real.queues.queue_retry(name, items, partition=entries[0].partition)
        answer, lost = self._verb(call, name, RetryItems)
        if answer is None or lost:
            for entry in entries:
                self.model.retry(queue, entry, at_us=at_us, dead=dead, reason=reason, now_us=now_us)
        else:
            assert isinstance(answer, TryAgain), answer

    def _extend(self, name: str, seed: int, timeout: str) -> None:
        queue, entries, now_us = self.model.queues[name], self._pick(name, "leased", seed), self.now_us
        if not entries:
            return
        ids = [entry.id or "" for entry in entries]
        call = self.real.queues.queue_extend(name, ids, partition=entries[0].partition, lease_timeout=timeout)
        answer, lost = self._verb(call, name, Extend)
        if isinstance(answer, HoldfastError) and not lost:
            assert isinstance(answer, TryAgain), answer
            return
        for entry in entries:
            entry.lease_us = now_us + {"": queue.lease_us, "1s": SECOND_US, "10m": 10 * MINUTE_US}[timeout]

    def _delete(self, name: str, seed: int, place: str) -> None:
        queue, entries = self.model.queues[name], self._pick(name, place, seed)
        if not entries:
            return
        ids = [*[entry.id or "" for entry in entries], "no-such-id"]
        call = self.real.queues.storage_items_delete(name, ids, partition=entries[0].partition)
        answer, lost = self._verb(call, name, Delete)
        if answer is None or lost:
            for entry in entries:
                del queue.entries[entry.token]
            queue.ledger["deleted", "items.delete"] += len(entries)
        else:
            assert isinstance(answer, TryAgain), answer

    @rule(name=names, queued=st.booleans(), destructive=st.booleans(), rare=st.integers(0, 4))
    def clear(self, name: str, queued: bool, destructive: bool, rare: int) -> None:
        queue = self.model.queues[name]
        if rare:
            return
        call = self.real.queues.queue_clear(name, queue=queued, scheduled=not queued, destructive=destructive)
        known = dict(queue.entries)
        answer, lost = self._verb(call, name, Clear)
        gone = ["scheduled"] if not queued else ["queued", "leased"] if destructive else ["queued"]
        # A clear of two partitions is two commits: the first may have been carried out when the second failed.
        seen = {e.token for e in known.values() if e.place in gone}
        if answer is None or (queue.partitions == 1 and lost):
            cleared = seen
        elif queue.partitions == 1:
            cleared = set()
        else:
            cleared = self._missing(queue, seen)
        for token in cleared:
            del queue.entries[token]
        queue.ledger["cleared", "queue.clear"] += len(cleared)

    def _missing(self, queue: Queue, tokens: set[bytes]) -> set[bytes]:
        seen = self.real.run(look(self.real, queue))
        return tokens - seen.items.keys() if seen.loaded else set()  # what cannot be read was not cleared

    @rule(
        name=names,
        specs=st.lists(
            st.tuples(st.sampled_from(["", "s1", "s2", "known"]), keys, st.integers(0, 3), st.sampled_from([0, 5.0])),
            min_size=1,
            max_size=3,
        ),
        seed=choice,
    )
    def imported(self, name: str, specs: list[tuple[str, str, int, float]], seed: int) -> None:
        queue, now_us = self.model.queues[name], self.now_us
        present = sorted(e.source_id for e in queue.entries.values() if e.source_id)
        items = []
        for source, key, attempts, after_s in specs:
            source_id = (present[seed % len(present)] if present else "s3") if source == "known" else source
            items.append(
                ImportedItem(
                    payload=self._token(),
                    source_id=source_id,
                    dedupe_key=key,
                    attempts=attempts,
                    enqueue_at=moment(now_us + round(after_s * SECOND_US)) if after_s else None,
                )
            )
        partition = seed % queue.partitions
        call = self.real.queues.storage_items_import(name, items, partition=partition)
        answer, lost = self._verb(call, name, Import)
        if isinstance(answer, HoldfastError) and not lost:
            assert isinstance(answer, TryAgain), answer
            return
        stored = []
        for item in items:
            sources = {entry.source_id for entry in queue.entries.values()}
            if queue.by_key(item.dedupe_key) or (item.source_id and item.source_id in sources):
                continue
            entry = Entry(
                token=item.payload,
                partition=partition,
                place="",
                expire_us=now_us + queue.expire_us,
                attempts=item.attempts,
                dedupe_key=item.dedupe_key,
                source_id=item.source_id,
            )
            stored.append(item.payload)
            at_us = microseconds(item.enqueue_at) if item.enqueue_at else 0
            self.model.enqueue(queue, entry, at_us=at_us, now_us=now_us)
        if not isinstance(answer, HoldfastError):
            assert [item.payload for item in answer] == stored

    # --- queues -----------------------------------------------------------------------------------------------

    @rule(
        name=names,
        what=st.sampled_from(
            ["pause", "resume", "resume", "attempts", "attempts", "dead", "dead", "partition", "anew"]
        ),
        number=st.integers(0, 3),
        flag=st.booleans(),
    )
    def administer(self, name: str, what: str, number: int, flag: bool) -> None:
        match what:
            case "pause" | "resume":
                self._pause_or_resume(name, pause=what == "pause")
            case "attempts":
                self._change_max_attempts("plain" if name == "plain" else "work", number)
            case "dead":
                dead_queue = ("", "dead", "dead", "grave")[number]
                self._change_dead_queue("plain" if name == "plain" else "work", dead_queue, healed=flag)
            case "partition":
                self._add_a_partition(name)
            case _:
                self._delete_and_create(name, force=flag)

    def _pause_or_resume(self, name: str, *, pause: bool) -> None:
        call = self.real.queues.queue_pause(name) if pause else self.real.queues.queue_resume(name)
        assert self.real.attempt(call) is None
        self.model.queues[name].paused = pause

    def _change_max_attempts(self, name: str, max_attempts: int) -> None:
        self._heal()
        assert self.real.attempt(self.real.queues.queues_update(name, max_attempts=max_attempts)) is None
        self.model.queues[name].max_attempts = max_attempts

    def _change_dead_queue(self, name: str, dead_queue: str, *, healed: bool) -> None:
        if healed or not all(self.real.is_healthy(one) for one in NAMES):
            self._heal()
        assert self.real.attempt(self.real.queues.queues_update(name, dead_queue=dead_queue)) is None
        self.model.queues[name].dead_queue = dead_queue

    def _add_a_partition(self, name: str) -> None:
        queue = self.model.queues[name]
        if queue.partitions < 3 and self.real.is_healthy(name):
            call = self.real.queues.queues_update(name, requested_partitions=queue.partitions + 1)
            assert self.real.attempt(call) is None
            queue.partitions += 1

    def _delete_and_create(self, name: str, *, force: bool) -> None:
        queue = self.model.queues[name]
        if not self.real.is_healthy(name):
            return
        answer = self.real.attempt(self.real.queues.queues_delete(name, force=force))
        if self.model.is_immortal(name):
            assert isinstance(answer, Invalid)
            assert answer.message.startswith("queue is in use; ")
            return
        if (queue.entries or queue.dying) and not force:
            assert isinstance(answer, Invalid)
            assert answer.message.startswith("queue is not empty; ")
            return
        assert answer is None, answer
        del self.model.queues[name]
        self.the_model_is_right()  # its dead queue, if it had one, is an ordinary queue for a moment
        dead_queue = queue.dead_queue if force else ""
        self._create(name, dead_queue, queue.partitions, queue.max_attempts)

    # --- time and trouble -------------------------------------------------------------------------------------

    @rule(delay_s=st.sampled_from(DELAYS_S), name=names, fault=fault)
    def time_passes(self, delay_s: float, name: str, fault: Any) -> None:
        self._arm(fault, name)
        self.real.advance(delay_s)

    @rule(
        name=names,
        what=st.sampled_from(["before", "before", "after", "after", "after", "down", "up", "heal", "restart", "crash"]),
        operation=st.sampled_from(OPERATIONS),
    )
    def trouble(self, name: str, what: Any, operation: Any) -> None:
        faults = self.real.faults
        match what:
            case "before" | "after":
                if len(faults.armed) < 3:
                    faults.arm(what, name, str if operation == "load" else operation)
            case "down":
                faults.down.add(name)
            case "up":
                faults.down.clear()
            case "heal":
                self._heal()
            case "restart":
                self.real.restart()
            case _:
                self.real.crash()


class MemoryMachine(ServiceMachine):
    kind = "memory"


class SqliteMachine(ServiceMachine):
    kind = "sqlite"


class PostgresMachine(ServiceMachine):
    kind = "postgres"


def test_the_memory_store_is_as_the_model_says() -> None:
    run_state_machine_as_test(MemoryMachine, settings=settings_for(examples=150))


def test_the_sqlite_store_is_as_the_model_says() -> None:
    run_state_machine_as_test(SqliteMachine, settings=settings_for(examples=60))


def test_the_postgres_store_is_as_the_model_says(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "url", postgres_url)
    run_state_machine_as_test(PostgresMachine, settings=settings_for(examples=5, steps=25))


def test_a_death_in_postgres_whose_answer_was_lost_can_be_leased_at_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "url", postgres_url)
    machine = PostgresMachine()
    try:
        machine.begin(partitions=1, max_attempts=0)
        machine.lease("dead", 2, 1.0)  # its counts are known, and nothing is hinted any more
        machine.settle("work", 0, "dead", 0, 0, "after")
        machine.the_model_is_right()
        machine.lease("dead", 1, 0.01)
    finally:
        machine.teardown()
