"""Looks at the real stores, behind all faults, and compares them with the model: item by item, count by count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from holdfast.core.item import Item
from holdfast.core.moments import microseconds
from holdfast.errors import StorageFailed
from holdfast.ports.queue_store import DyingItem
from tests.model.installation import ModelInstallation
from tests.model.queue_model import Dying, Entry, Queue, QueueModel, policy

ALL = 10_000


@dataclass
class Seen:
    """What a queue's store holds, by payload."""

    items: dict[bytes, tuple[Item, int, str]] = field(default_factory=dict)  # item, partition, place
    dying: dict[bytes, DyingItem] = field(default_factory=dict)
    loaded: bool = True

    def add(self, item: Item, partition: int, place: str) -> None:
        assert item.payload not in self.items, f"{item.payload!r} is in one queue twice"
        self.items[item.payload] = (item, partition, place)


async def look(installation: ModelInstallation, queue: Queue) -> Seen:
    """Everything that is in a queue's store; nothing, where it or a new partition of it could not be read yet.

    A shared storage is a database that can always be looked at, and a death there is one transaction: an item may have
    arrived in a dead queue that nobody has opened since the start.
    """
    unread = Seen(loaded=False)
    if not installation.is_shared and not installation.was_loaded(queue.name):
        return unread
    try:
        return await _look(installation, queue)
    except StorageFailed:
        assert not installation.is_healthy(queue.name), "a queue that is well cannot be read"
        return unread


async def _look(installation: ModelInstallation, queue: Queue) -> Seen:
    store, seen = installation.store(queue.name), Seen()
    for partition in range(queue.partitions):
        for item in await store.list_items(partition, pivot="", count_max=ALL, scheduled=False):
            seen.add(item, partition, "leased" if item.is_leased else "queued")
        for item in await store.list_items(partition, pivot="", count_max=ALL, scheduled=True):
            seen.add(item, partition, "scheduled")
        for dying_item in await store.dying_items(partition, count_max=ALL):
            assert dying_item.payload not in seen.dying, f"{dying_item.payload!r} is dying twice"
            assert dying_item.payload not in seen.items, f"{dying_item.payload!r} is dying and in sight"
            seen.dying[dying_item.payload] = dying_item
    return seen


async def audit(installation: ModelInstallation, model: QueueModel) -> None:
    """Bring the model to the present moment, and compare."""
    now_us = installation.clock.now_us()
    seen = await catch_up(installation, model)
    for name, queue in model.queues.items():
        _fill_in(queue, seen[name])
        if installation.is_healthy(name):
            _compare(queue, seen[name], now_us)
            await _compare_counts(installation, queue, seen[name])
        elif queue.dead_queue and all(one.loaded for one in seen.values()):
            _still_there(model, queue, seen)


async def catch_up(installation: ModelInstallation, model: QueueModel) -> dict[str, Seen]:
    """Bring the model to the present moment: deadlines, new ids, and where dying items have got to."""
    now_us = installation.clock.now_us()
    seen = {name: await look(installation, queue) for name, queue in model.queues.items()}
    for queue in model.queues.values():
        _fill_in(queue, seen[queue.name])
        if installation.is_healthy(queue.name):
            model.due(queue, now_us)
        elif seen[queue.name].loaded:
            _moved_on(model, queue, seen[queue.name], now_us)
    for queue in model.queues.values():
        for dying in list(queue.dying.values()):
            _follow(model, queue, dying, seen, now_us)
    return seen


def _fill_in(queue: Queue, seen: Seen) -> None:
    """New ids, and until when a lease runs of which nobody was told."""
    for entry in queue.entries.values():
        if entry.token not in seen.items:
            continue
        item = seen.items[entry.token][0]
        if entry.id is None and item.id != entry.old_id:
            assert item.id > entry.old_id or item.source_id, f"{entry}: the new id {item.id} is not after the old one"
            entry.id, entry.old_id = item.id, item.id
        if entry.lease_us is None:
            assert item.lease_deadline is not None, f"{entry} is not leased"
            entry.lease_us = microseconds(item.lease_deadline)


def _moved_on(model: QueueModel, queue: Queue, seen: Seen, now_us: int) -> None:
    """The store fails now, but before that it may have carried out some deadlines: those that can be seen."""
    for token, entry in list(queue.entries.items()):
        if token not in seen.items:
            model.due(queue, now_us, only={token})
        elif entry.id not in {None, seen.items[token][0].id}:
            entry.renumber()
            model.enqueue(queue, entry, at_us=0, now_us=now_us)


def _follow(model: QueueModel, queue: Queue, dying: Dying, seen: dict[str, Seen], now_us: int) -> None:
    """Where a dying item has got to."""
    token = dying.entry.token
    if not seen[queue.name].loaded or not (model.is_target_gone(dying) or seen[dying.target].loaded):
        return  # a store that could not be read since the start shows nothing
    dying_item = seen[queue.name].dying.get(token)
    if model.is_target_gone(dying):
        if dying_item is None or dying_item.target.generation != dying.generation:
            model.revive(queue, dying, now_us)
            model.due(queue, now_us)
            if token in queue.dying:
                _follow(model, queue, queue.dying[token], seen, now_us)
        return
    if dying_item is not None:
        assert dying.source_id in {None, dying_item.source_id}
        assert dying_item.death_reason in dying.reasons
        assert dying_item.death_attempts == dying.entry.attempts
        assert dying_item.target.queue_name == dying.target
        dying.source_id = dying_item.source_id
    found = seen[dying.target].items.get(token)
    if found is not None and not dying.arrived:
        item, partition, _ = found
        assert item.death_reason in dying.reasons
        assert item.expire_deadline is not None
        dying.arrived = True
        model.queues[dying.target].entries[token] = Entry(
            token=token,
            partition=partition,
            place="queued",
            expire_us=microseconds(item.expire_deadline),
            old_id=dying.entry.old_id,
            source_id=dying.source_id,
            source_queue=queue.name,
            death_reason=item.death_reason,
            death_attempts=dying.entry.attempts,
        )
    if dying_item is None:
        assert dying.arrived, f"{token!r} died in '{queue.name}' and is nowhere"
        del queue.dying[token]


def _still_there(model: QueueModel, queue: Queue, seen: dict[str, Seen]) -> None:
    """Its store fails: whether the last commit took effect is open, but nothing may be gone."""
    for token in queue.entries:
        places = [name for name in model.queues if token in seen[name].items or token in seen[name].dying]
        assert places, f"{token!r} of '{queue.name}' is nowhere"


def _compare(queue: Queue, seen: Seen, now_us: int) -> None:
    assert seen.items.keys() == queue.entries.keys(), (
        f"'{queue.name}': lost {queue.entries.keys() - seen.items.keys()}, "
        f"unexpected {seen.items.keys() - queue.entries.keys()}"
    )
    for token, (item, partition, place) in seen.items.items():
        _compare_one(queue.entries[token], item, partition, place, now_us)
    assert seen.dying.keys() == queue.dying.keys()
    sources = Counter(item.source_id for item, _, _ in seen.items.values() if item.source_id)
    assert all(count == 1 for count in sources.values()), f"'{queue.name}': a source_id twice: {sources}"


def _compare_one(entry: Entry, item: Item, partition: int, place: str, now_us: int) -> None:
    if entry.source_id is None:
        assert item.source_id
        entry.source_id = item.source_id
    lease_us = microseconds(item.lease_deadline) if item.lease_deadline else 0
    assert not 0 < lease_us <= now_us, f"{entry} is leased past its deadline"
    assert item.expire_deadline is not None
    found = Entry(
        token=item.payload,
        partition=partition,
        place=place,
        expire_us=microseconds(item.expire_deadline),
        id=item.id,
        old_id=entry.old_id,
        attempts=item.attempts,
        lease_us=lease_us,
        enqueue_us=microseconds(item.enqueue_at) if item.enqueue_at else 0,
        dedupe_key=item.dedupe_key,
        source_id=item.source_id,
        source_queue=item.source_queue,
        death_reason=item.death_reason,
        death_attempts=item.death_attempts,
    )
    assert found == entry, f"\nseen     {found}\nexpected {entry}"


async def _compare_counts(installation: ModelInstallation, queue: Queue, seen: Seen) -> None:
    stats = await installation.queues.queue_stats(queue.name)
    (logical,) = stats.logical_queues
    assert (logical.produce_waiting, logical.lease_waiting, logical.complete_waiting, logical.in_flight) == (0, 0, 0, 0)
    places = Counter((partition, place) for _, partition, place in seen.items.values())
    opened = installation.manager.find(queue.name)
    assert opened is not None
    states = {number: state for share in opened.shares for number, state in share.states.items()}
    for counted in logical.partitions:
        number = counted.partition
        expected = tuple(places[number, place] for place in ("queued", "leased", "scheduled"))
        assert (counted.total - counted.total_leased, counted.total_leased, counted.scheduled) == expected
        if installation.is_shared:
            continue  # other servers may have changed it since: what is known here is a hint
        state = states[number]
        assert (state.queued, state.leased, state.scheduled, state.dying) == (*expected, counted.dying)
    assert sum(counted.dying for counted in logical.partitions) == len(seen.dying)
    rows = await installation.store(queue.name).ledger(after=0, count_max=ALL)
    ledger: Counter[tuple[str, str]] = Counter()
    for row in rows:
        ledger[row.action, policy(row.reason)] += row.count
    assert ledger == +queue.ledger, f"'{queue.name}': the ledger has {ledger}, expected {queue.ledger}"
