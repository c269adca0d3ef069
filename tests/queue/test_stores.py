"""One list of scenarios for every store, at the port: what a batch answers, what it leaves, and what is refused.

The suite over the service is beside it; here the store alone is asked, so that a difference is found where it is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from holdfast.core.item import Item, LeasedItem, NewItem, PartitionInfo, QueueRecord, RetryItem
from holdfast.core.moments import moment
from holdfast.core.requests.queue import ImportedItem
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.errors import Invalid
from holdfast.ports.queue_store import (
    Arrive,
    Clear,
    Committed,
    Complete,
    Counted,
    DeathRules,
    Delete,
    Due,
    Ended,
    Extend,
    Forget,
    IdsRefused,
    Import,
    LeaseItems,
    LedgerEntry,
    PartitionState,
    Produce,
    QueueStore,
    RelatedQueues,
    Release,
    Remove,
    RetryItems,
    Revive,
    SendBack,
    SentBack,
    Storage,
)
from holdfast.testing import FrozenClock
from tests.engines.postgres.conftest import HOUR, LEASE, LIVES, SECOND, ids, lease, new_name, one, produce, target


class StoreUnderTest:
    """A store with queues, on a frozen clock."""

    def __init__(self, storage: Storage, clock: FrozenClock) -> None:
        self.storage = storage
        self.clock = clock
        self.catalog = storage.catalog()

    async def queue(self, *, partitions: int = 1, dead_queue: str = "") -> tuple[QueueRecord, QueueStore]:
        """A new queue with a name of its own."""
        name = new_name()
        record = QueueRecord(
            name=name,
            lease_timeout_us=LEASE,
            expire_timeout_us=HOUR,
            dead_queue=dead_queue,
            partitions=tuple(PartitionInfo(number, "here") for number in range(partitions)),
        )
        record = await self.catalog.change(name, dead_queue=dead_queue, decide=lambda _, now: record)
        store = self.storage.queue_store(record, range(partitions))
        await store.load()
        return record, store


def items(*payloads: bytes, dedupe_key: str = "", kind: str = "") -> list[NewItem]:
    return [NewItem(payload=payload, dedupe_key=dedupe_key, kind=kind) for payload in payloads]


async def due(store: QueueStore, rules: DeathRules = LIVES, *, count_max: int = 100) -> Ended:
    return await one(store, Due(0, count_max, rules), Ended)


async def listed(store: QueueStore, *, scheduled: bool = False, partition: int = 0) -> list[Item]:
    return list(await store.list_items(partition, pivot="", count_max=1_000, scheduled=scheduled))


def ended_as(*, requeued: int = 0, dying: int = 0, more: bool = False) -> Ended:
    return Ended(requeued=requeued, dying=dying, deleted=[], more=more)


def bodies(leased: Sequence[LeasedItem] | Sequence[Item]) -> list[bytes]:
    return [item.payload for item in leased]


def counts(state: PartitionState) -> tuple[int, int, int, int]:
    return state.queued, state.leased, state.scheduled, state.dying


class StoreSuite:
    """Not collected itself: each store below runs it."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()

    @pytest.fixture
    async def under_test(self, storage: Storage, clock: FrozenClock) -> AsyncIterator[StoreUnderTest]:
        await storage.open()
        yield StoreUnderTest(storage, clock)
        await storage.close()

    # --- produce and lease ------------------------------------------------------------------------------------

    async def test_items_are_leased_in_the_order_they_came(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        first = await produce(store, b"a", b"b")
        second = await produce(store, b"c")
        leased = await lease(store, 2)
        assert ids(leased) == first
        assert bodies(leased) == [b"a", b"b"]
        assert ids(await lease(store)) == second
        assert await lease(store) == []
        assert sorted([*first, *second]) == [*first, *second]

    async def test_every_field_comes_back_as_it_went_in(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        given = NewItem(payload=bytes(range(256)), kind="käse", encoding="x", reference="r" * 2_000)
        await one(store, Produce(0, [given], HOUR), list)
        (item,) = await lease(store)
        assert (item.payload, item.kind, item.encoding, item.reference) == (
            given.payload,
            given.kind,
            given.encoding,
            given.reference,
        )
        assert item.attempts == 1
        assert item.lease_deadline == moment(under_test.clock.now_us() + LEASE)

    async def test_an_empty_and_a_large_payload(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"", b"x" * 1_000_000)
        assert bodies(await lease(store)) == [b"", b"x" * 1_000_000]

    async def test_what_one_batch_produces_it_can_lease_and_complete(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        committed = await store.commit([Produce(0, items(b"a", b"b"), HOUR), LeaseItems(0, 1, LEASE, LIVES)])
        assert bodies(cast(list[LeasedItem], committed.results[1])) == [b"a"]
        assert counts(committed.states[0]) == (1, 1, 0, 0)
        assert committed.now_us == under_test.clock.now_us()

    async def test_partitions_are_apart(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue(partitions=2)
        (first,) = await produce(store, b"a", partition=0)
        await produce(store, b"b", partition=1)
        assert bodies(await lease(store, partition=1)) == [b"b"]
        refused = await one(store, Complete(1, [first]), IdsRefused)
        assert refused.missing == [first]
        assert bodies(await lease(store, partition=0)) == [b"a"]

    async def test_a_schedule_is_leased_when_it_is_due(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        at_us = under_test.clock.now_us() + 5 * SECOND
        soon = NewItem(payload=b"now", enqueue_at=moment(under_test.clock.now_us() + SECOND // 20))
        committed = await store.commit([Produce(0, [NewItem(payload=b"later", enqueue_at=moment(at_us)), soon], HOUR)])
        assert counts(committed.states[0]) == (1, 0, 1, 0)
        assert committed.states[0].next_due_us == at_us
        assert bodies(await lease(store)) == [b"now"]
        (waiting,) = await listed(store, scheduled=True)
        assert waiting.enqueue_at == moment(at_us)
        await under_test.clock.advance(5)
        assert (await due(store)).enqueued == 1
        assert bodies(await lease(store)) == [b"later"]

    async def test_a_dedupe_key_is_one_item_until_it_has_left(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue(partitions=2)
        twice = items(b"a", b"b", dedupe_key="k")
        first = await one(store, Produce(0, [*twice, NewItem(payload=b"c")], HOUR), list)
        assert first[0] == first[1] != first[2]
        again = await one(store, Produce(1, items(b"d", dedupe_key="k"), HOUR), list)
        assert again == [first[0]]
        await one(store, Complete(0, ids(await lease(store, 1))), Counted)
        anew = await one(store, Produce(1, items(b"e", dedupe_key="k"), HOUR), list)
        assert anew[0] not in first
        assert bodies(await lease(store, partition=1)) == [b"e"]

    # --- settling ---------------------------------------------------------------------------------------------

    async def test_complete_removes_all_or_none(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a", b"b", b"c")
        held = ids(await lease(store, 2))
        (queued,) = [item.id for item in await listed(store) if not item.is_leased]
        refused = await one(store, Complete(0, [*held, queued, "nonsense"]), IdsRefused)
        assert (refused.missing, refused.unleased) == (["nonsense"], [queued])
        assert len(await listed(store)) == 3
        assert await one(store, Complete(0, held), Counted) == Counted(2)
        assert [item.id for item in await listed(store)] == [queued]
        assert (await one(store, Complete(0, held[:1]), IdsRefused)).missing == held[:1]

    async def test_a_refused_operation_leaves_its_neighbours_alone(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a", b"b", b"c")
        a, b, c = ids(await lease(store))
        committed = await store.commit(
            [
                Complete(0, [a]),
                Complete(0, [a, b]),
                Extend(0, [b, "x"], LEASE),
                RetryItems(0, [RetryItem(id=c), RetryItem(id=a)], LIVES),
                Complete(0, [b]),
            ]
        )
        assert [type(result) for result in committed.results] == [Counted, IdsRefused, IdsRefused, IdsRefused, Counted]
        assert committed.results[3] == IdsRefused([a], [])
        assert [(item.id, item.is_leased) for item in await listed(store)] == [(c, True)]
        assert counts(committed.states[0]) == (0, 1, 0, 0)

    async def test_extend_moves_the_deadline(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a")
        held = ids(await lease(store))
        await under_test.clock.advance(20)
        extended = await one(store, Extend(0, held, LEASE), list)
        assert extended[0].lease_deadline == moment(under_test.clock.now_us() + LEASE)
        await under_test.clock.advance(15)
        assert (await due(store)).requeued == 0
        await one(store, Extend(0, held, SECOND), list)
        await under_test.clock.advance(1)
        assert (await due(store)).requeued == 1

    async def test_retry_goes_to_the_tail_with_a_new_id(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a", b"b", b"c")
        a, b, _ = ids(await lease(store))
        later = moment(under_test.clock.now_us() + 10 * SECOND)
        ended = await one(store, RetryItems(0, [RetryItem(id=b, retry_at=later), RetryItem(id=a)], LIVES), Ended)
        assert ended == ended_as(requeued=2)
        assert (await one(store, Complete(0, [a]), IdsRefused)).missing == [a]
        (again,) = await lease(store)
        assert (again.payload, again.attempts) == (b"a", 2)
        assert again.id > b
        (waiting,) = await listed(store, scheduled=True)
        assert (waiting.payload, waiting.attempts, waiting.enqueue_at) == (b"b", 1, later)

    async def test_release_undoes_a_lease(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        first = await produce(store, b"a", b"b")
        await lease(store)
        released = await one(store, Release(0, [*first, "nonsense"]), Counted)
        assert released.count == 2
        leased = await lease(store)
        assert ids(leased) == first
        assert [item.attempts for item in leased] == [1, 1]

    async def test_items_that_come_back_to_the_head_are_leased_first(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        everything = await produce(store, *[b"x"] * 100)
        given: list[str] = []
        for _ in range(5):
            given += ids(await lease(store, 10))
        assert given == everything[:50]
        await one(store, Release(0, given[:3]), Counted)
        assert ids(await lease(store, 10)) == [*given[:3], *everything[50:57]]

    # --- deadlines and death ----------------------------------------------------------------------------------

    async def test_a_lease_that_ran_out_goes_to_the_tail(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        (first,) = await produce(store, b"a")
        committed = await store.commit([LeaseItems(0, 1, LEASE, LIVES)])
        assert committed.states[0].next_due_us == under_test.clock.now_us() + LEASE
        await produce(store, b"b")
        await under_test.clock.advance(30)
        assert await due(store) == ended_as(requeued=1)
        leased = await lease(store)
        assert bodies(leased) == [b"b", b"a"]
        assert leased[1].id > leased[0].id > first
        assert leased[1].attempts == 2

    async def test_an_item_past_its_expiry_is_not_leased_and_dies(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        (old,) = await produce(store, b"a")
        await under_test.clock.advance(3_600)
        await produce(store, b"b")
        assert bodies(await lease(store)) == [b"b"]
        assert (await due(store)).deleted == [(old, "expired")]
        (entry,) = await store.ledger(after=0, count_max=10)
        assert (entry.action, entry.item_id, entry.reason) == ("deleted", old, "expired")

    async def test_attempts_run_out_at_retry_at_the_deadline_and_by_a_lower_limit(
        self, under_test: StoreUnderTest
    ) -> None:
        _, store = await under_test.queue()
        once = DeathRules(max_attempts=1)
        await produce(store, b"a", b"b", b"c")
        a, b, c = ids(await lease(store, rules=DeathRules(max_attempts=2)))
        ended = await one(store, RetryItems(0, [RetryItem(id=a)], once), Ended)
        assert ended.deleted == [(a, "max_attempts")]
        await one(store, RetryItems(0, [RetryItem(id=b)], LIVES), Ended)
        await under_test.clock.advance(30)
        assert await lease(store, rules=once) == []
        ended = await due(store, once)
        (again,) = {item_id for item_id, _ in ended.deleted} - {c}
        assert set(ended.deleted) == {(c, "max_attempts"), (again, "max_attempts")}
        assert await listed(store) == []

    async def test_deadlines_are_carried_out_a_bounded_number_at_a_time(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, *[b"x"] * 5)
        await lease(store)
        await under_test.clock.advance(30)
        assert await due(store, count_max=3) == ended_as(requeued=3, more=True)
        assert (await due(store, count_max=3)).requeued == 2

    async def test_nothing_dies_in_a_dead_queue_but_by_retention(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        immortal = DeathRules(max_attempts=1, immortal=True)
        died_at_us = under_test.clock.now_us() - 10 * SECOND
        letter = ImportedItem(payload=b"a", attempts=5, source_id="s", died_at=moment(died_at_us), death_reason="r")
        await one(store, Import(0, [letter], SECOND), list)
        committed = await store.commit([Due(0, 10, immortal)])
        assert committed.states[0].oldest_death_us == died_at_us
        await under_test.clock.advance(5)
        assert await due(store, immortal) == ended_as()
        assert (await store.tally(0, rules=immortal)).overdue == 1
        (held,) = await lease(store, rules=immortal)
        rejected = await one(store, RetryItems(0, [RetryItem(id=held.id, dead=True)], immortal), Ended)
        assert rejected == ended_as(requeued=1)
        kept = replace(immortal, retention_us=20 * SECOND)
        assert await due(store, kept) == ended_as()
        await under_test.clock.advance(5)
        ((_, reason),) = (await due(store, kept)).deleted
        assert reason == "retention"
        assert await listed(store) == []

    async def test_a_death_into_another_storage_takes_three_commits(self, under_test: StoreUnderTest) -> None:
        source_record, source = await under_test.queue()
        dead_record, dead = await under_test.queue()
        rules = DeathRules(max_attempts=1, target=target(dead_record, "elsewhere"))
        await one(source, Produce(0, items(b"a", dedupe_key="k", kind="t"), HOUR), list)
        (held,) = await lease(source)
        ended = await one(source, RetryItems(0, [RetryItem(id=held.id, dead=True, reason="why")], rules), Ended)
        assert ended == ended_as(dying=1)
        assert await listed(source) == []
        assert await one(source, Delete(0, [held.id]), Counted) == Counted(0)
        assert (await source.load()).states[0].dying == 1
        await one(source, Produce(0, items(b"z", dedupe_key="k"), HOUR), list)
        dying = await source.dying_items(0, count_max=10)
        assert [(c.source_id, c.target, c.payload) for c in dying] == [(held.id, rules.target, b"a")]
        assert await one(dead, Arrive(0, dying, 2 * HOUR), Counted) == Counted(1)
        assert await one(dead, Arrive(0, dying, 2 * HOUR), Counted) == Counted(0)
        assert await dead.arrivals(source_queue=source_record.name, count_max=10) == [held.id]
        (letter,) = await listed(dead)
        assert (letter.source_id, letter.source_queue, letter.death_reason) == (held.id, source_record.name, "why")
        assert (letter.death_attempts, letter.attempts, letter.kind) == (1, 0, "t")
        assert letter.expire_deadline == moment(under_test.clock.now_us() + 2 * HOUR)
        await one(dead, Complete(0, ids(await lease(dead))), Counted)
        assert await one(dead, Arrive(0, dying, 2 * HOUR), Counted) == Counted(0)
        committed = await source.commit([Remove(0, [held.id])])
        assert committed.results == [Counted(1)]
        assert committed.states[0].dying == 0
        await one(dead, Forget(0, [held.id]), Counted)
        assert await dead.arrivals(source_queue=source_record.name, count_max=10) == []

    async def test_a_letter_that_was_imported_before_has_arrived(self, under_test: StoreUnderTest) -> None:
        record, source = await under_test.queue()
        _, dead = await under_test.queue()
        await produce(source, b"a")
        (held,) = await lease(source)
        rules = DeathRules(target=target(record, "elsewhere"))
        await one(source, RetryItems(0, [RetryItem(id=held.id, dead=True)], rules), Ended)
        dying = await source.dying_items(0, count_max=10)
        await one(dead, Import(0, [ImportedItem(payload=b"a", source_id=held.id)], HOUR), list)
        assert await one(dead, Arrive(0, dying, HOUR), Counted) == Counted(0)
        await one(dead, Complete(0, ids(await lease(dead))), Counted)
        assert await one(dead, Arrive(0, dying, HOUR), Counted) == Counted(0)
        assert await listed(dead) == []

    async def test_a_death_whose_target_is_gone_is_revived(self, under_test: StoreUnderTest) -> None:
        record, source = await under_test.queue()
        rules = DeathRules(target=target(record, "elsewhere"))
        await produce(source, b"a")
        (held,) = await lease(source)
        await one(source, RetryItems(0, [RetryItem(id=held.id, dead=True)], rules), Ended)
        committed = await source.commit([Revive(0, [held.id])])
        assert counts(committed.states[0]) == (1, 0, 0, 0)
        (again,) = await lease(source)
        assert (again.payload, again.attempts) == (b"a", 2)
        assert again.id != held.id

    async def test_a_redrive_takes_what_died_there_and_leaves_the_rest(self, under_test: StoreUnderTest) -> None:
        record, source = await under_test.queue()
        _, dead = await under_test.queue()
        story = ImportedItem(payload=b"a", source_id="s", source_queue=record.name, attempts=3, death_reason="why")
        letters = [story, replace(story, payload=b"b", source_id="t"), ImportedItem(payload=b"c", source_queue="x")]
        stored = await one(dead, Import(0, letters, HOUR), list)
        first, second, other = [item.id for item in stored]
        await lease(dead, 1)
        back = SendBack(0, [first, second, second, other, "nonsense"], target(record, "elsewhere"))
        committed = await dead.commit([back])
        assert committed.results == [SentBack([second])]
        assert counts(committed.states[0]) == (1, 1, 0, 1)
        dying = await dead.dying_items(0, count_max=10)
        assert [(dying_item.source_id, dying_item.is_redrive, dying_item.payload) for dying_item in dying] == [
            (second, True, b"b")
        ]
        assert await one(source, Arrive(0, dying, HOUR), Counted) == Counted(1)
        assert await one(source, Arrive(0, dying, HOUR), Counted) == Counted(0)
        (item,) = await listed(source)
        assert (item.source_id, item.payload, item.attempts) == (second, b"b", 0)
        assert (item.source_queue, item.death_reason, item.death_attempts, item.died_at) == ("", "", 0, None)
        assert await one(dead, Remove(0, [second]), Counted) == Counted(1)
        assert counts((await dead.load()).states[0]) == (1, 1, 0, 0)
        assert [entry.action for entry in await dead.ledger(after=0, count_max=10)] == ["redriven"]

    async def test_a_redrive_that_cannot_arrive_keeps_its_story(self, under_test: StoreUnderTest) -> None:
        record, _ = await under_test.queue()
        _, dead = await under_test.queue()
        story = ImportedItem(payload=b"a", source_id="s", source_queue=record.name, attempts=3, death_reason="why")
        (letter,) = await one(dead, Import(0, [story], HOUR), list)
        await one(dead, SendBack(0, [letter.id], target(record, "elsewhere")), SentBack)
        assert await listed(dead) == []
        await one(dead, Revive(0, [letter.id]), Counted)
        (again,) = await listed(dead)
        assert again.id != letter.id
        assert (again.source_id, again.source_queue, again.death_reason, again.attempts) == (
            "s",
            record.name,
            "why",
            3,
        )

    # --- import, delete, clear --------------------------------------------------------------------------------

    async def test_an_import_keeps_the_story_and_leaves_out_what_is_there(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        created = moment(under_test.clock.now_us() - HOUR)
        letter = ImportedItem(
            payload=b"a",
            source_id="s",
            source_queue="q",
            attempts=3,
            created_at=created,
            death_reason="expired",
            death_attempts=7,
            died_at=created,
            kind="t",
            dedupe_key="d",
        )
        first = await one(store, Import(0, [letter, letter], HOUR), list)
        assert first == await listed(store)
        (item,) = first
        assert (item.source_id, item.attempts, item.created_at, item.death_attempts) == ("s", 3, created, 7)
        assert (await one(store, Import(0, [letter], HOUR), list)) == []
        await one(store, Complete(0, ids(await lease(store))), Counted)
        assert len(await one(store, Import(0, [letter], HOUR), list)) == 1

    async def test_delete_skips_what_is_unknown(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a", b"b")
        (held,) = ids(await lease(store, 1))
        later = NewItem(payload=b"c", enqueue_at=moment(under_test.clock.now_us() + HOUR))
        (scheduled,) = await one(store, Produce(0, [later], HOUR), list)
        committed = await store.commit([Delete(0, [held, scheduled, "nonsense"])])
        assert committed.results == [Counted(2)]
        assert counts(committed.states[0]) == (1, 0, 0, 0)
        entries = await store.ledger(after=0, count_max=10)
        assert {(entry.action, entry.item_id) for entry in entries} == {("deleted", held), ("deleted", scheduled)}
        assert list(await store.ledger(after=1, count_max=10)) == list(entries)[1:]

    @pytest.mark.parametrize(
        ("queued", "scheduled", "leased", "left"),
        [(True, False, False, (0, 1, 1)), (False, True, False, (2, 1, 0)), (True, True, True, (0, 0, 0))],
    )
    async def test_clear_takes_what_was_named(
        self, under_test: StoreUnderTest, queued: bool, scheduled: bool, leased: bool, left: tuple[int, int, int]
    ) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a", b"b", b"c")
        await lease(store, 1)
        later = NewItem(payload=b"d", enqueue_at=moment(under_test.clock.now_us() + HOUR))
        await one(store, Produce(0, [later], HOUR), list)
        committed = await store.commit([Clear(0, queued, scheduled, leased, 100)])
        assert counts(committed.states[0])[:3] == left
        tally = await store.tally(0, rules=LIVES)
        assert (tally.total - tally.total_leased, tally.total_leased, tally.scheduled) == left
        (entry,) = await store.ledger(after=0, count_max=10)
        assert (entry.action, entry.count) == ("cleared", 4 - sum(left))

    # --- reading ----------------------------------------------------------------------------------------------

    async def test_listing_goes_by_id_from_the_pivot(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        everything = await produce(store, *[bytes([n]) for n in range(10)])
        await lease(store, 3)
        page = await store.list_items(0, pivot=everything[1], count_max=4, scheduled=False)
        assert [item.id for item in page] == everything[1:5]
        assert [item.is_leased for item in page] == [True, True, False, False]
        await one(store, Delete(0, [everything[4]]), Counted)
        page = await store.list_items(0, pivot=everything[4], count_max=2, scheduled=False)
        assert [item.id for item in page] == everything[5:7]
        with pytest.raises(Invalid, match="is not an id of this partition"):
            await store.list_items(0, pivot="nonsense", count_max=1, scheduled=False)

    async def test_tally_counts_and_averages(self, under_test: StoreUnderTest) -> None:
        _, store = await under_test.queue()
        await produce(store, b"a")
        await under_test.clock.advance(10)
        await produce(store, b"b")
        await lease(store, 1)
        await under_test.clock.advance(4)
        tally = await store.tally(0, rules=LIVES)
        assert (tally.total, tally.total_leased, tally.scheduled, tally.dying, tally.overdue) == (2, 1, 0, 0, 0)
        assert tally.average_age == "9s"
        assert tally.average_leased_age == "4s"

    async def test_load_tells_how_every_partition_stands(self, under_test: StoreUnderTest) -> None:
        record, store = await under_test.queue(partitions=2)
        await produce(store, b"a", b"b")
        await produce(store, b"c", partition=1)
        await lease(store, 1)
        at_us = under_test.clock.now_us() + SECOND
        await one(store, Produce(1, [NewItem(payload=b"d", enqueue_at=moment(at_us))], HOUR), list)
        await store.close()
        loaded: Committed = await under_test.storage.queue_store(record, (0, 1)).load()
        assert {number: counts(state) for number, state in loaded.states.items()} == {
            0: (1, 1, 0, 0),
            1: (1, 0, 1, 0),
        }
        assert loaded.states[1].next_due_us == at_us
        assert loaded.states[0].next_expiry_us == under_test.clock.now_us() + HOUR

    # --- the catalog ------------------------------------------------------------------------------------------

    async def test_a_change_is_decided_over_its_neighbours(self, under_test: StoreUnderTest) -> None:
        dead, _ = await under_test.queue()
        record, _ = await under_test.queue(dead_queue=dead.name)
        seen: list[RelatedQueues] = []

        def decide(neighbours: RelatedQueues, now_us: int) -> QueueRecord:
            seen.append(neighbours)
            assert now_us == under_test.clock.now_us()
            return replace(record, max_attempts=7, paused=True)

        version = await under_test.catalog.version()
        changed = await under_test.catalog.change(record.name, dead_queue=dead.name, decide=decide)
        assert await under_test.catalog.version() > version
        assert (seen[0].current, seen[0].dead_queue, list(seen[0].source_queues)) == (record, dead, [])
        assert changed in await under_test.catalog.queues()

        def refuse(neighbours: RelatedQueues, now_us: int) -> QueueRecord:
            assert list(neighbours.source_queues) == [record.name]
            raise Invalid("no")

        with pytest.raises(Invalid, match="no"):
            await under_test.catalog.change(dead.name, dead_queue="", decide=refuse)
        assert dead in await under_test.catalog.queues()

    async def test_a_queue_made_anew_is_empty_and_another(self, under_test: StoreUnderTest) -> None:
        record, store = await under_test.queue()
        (old,) = await produce(store, b"a")
        await under_test.catalog.delete(record.name, decide=lambda _: record, count=1)
        await store.close()
        await under_test.storage.drop(record)
        assert record.name not in {known.name for known in await under_test.catalog.queues()}
        anew = await under_test.catalog.change(
            record.name, dead_queue="", decide=lambda _, now: replace(record, generation=0)
        )
        assert anew.generation != record.generation
        fresh = under_test.storage.queue_store(anew, [0])
        assert counts((await fresh.load()).states[0]) == (0, 0, 0, 0)
        assert (await one(fresh, Complete(0, [old]), IdsRefused)).missing == [old]
        rows: list[LedgerEntry] = [
            entry
            for entry in await under_test.catalog.ledger(after=0, count_max=10_000)
            if entry.queue_name == record.name
        ]
        assert [(entry.action, entry.count) for entry in rows] == [("queue_deleted", 1)]

    async def test_what_is_kept_first_holds(self, under_test: StoreUnderTest) -> None:
        key = new_name()
        assert await under_test.catalog.keep(key, "one") == "one"
        assert await under_test.catalog.keep(key, "two") == "one"


class TestMemory(StoreSuite):
    @pytest.fixture
    def storage(self, clock: FrozenClock) -> Storage:
        return SqliteStorage(None, clock=clock)


class TestSqlite(StoreSuite):
    @pytest.fixture
    def storage(self, clock: FrozenClock, tmp_path: Path) -> Storage:
        return SqliteStorage(tmp_path, clock=clock)


@pytest.mark.postgres
class TestPostgres(StoreSuite):
    @pytest.fixture
    def storage(self, clock: FrozenClock, postgres_url: str) -> Storage:
        return PostgresStorage(postgres_url, name="here", clock=clock)
