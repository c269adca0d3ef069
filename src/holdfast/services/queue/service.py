"""The verbs, carried out: checks in the order of the contract (name, existence, timeout, partition, list, ids), then
the queue. Every face calls `call`; none of them decides anything."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias, TypeVar, cast

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.core import checks
from holdfast.core.item import NewItem, PartitionInfo, QueueInfo, QueueRecord
from holdfast.core.moments import parse_duration
from holdfast.core.requests import queue as requests
from holdfast.core.requests.declare import HANDLERS, Access, Caller, Role, handles
from holdfast.errors import BadDeadQueue, BadIds, Invalid, QueueMissing, ShuttingDown, StorageFailed
from holdfast.ports.queue_store import (
    Clear,
    Complete,
    Delete,
    Extend,
    IdsRefused,
    Import,
    PartitionOperation,
    RelatedQueues,
    RetryItems,
    SendBack,
)
from holdfast.services.queue.logical_queue import OPERATION_TIMEOUT_US, LogicalQueue
from holdfast.services.queue.manager import QueueManager
from holdfast.telemetry.events import emit

CLEAR_COUNT_MAX = 10_000
ID_DIGITS_MAX = 20
#: Who asks in the service's own process.
OWNER = Caller(name="owner", role=Role.ADMIN)
IMPORTED_TEXTS = ("source_id", "source_queue", "death_reason", "encoding", "kind", "reference", "dedupe_key")
OK = requests.CodeReply(200)
SPREAD = "queue is spread over several storages; dedupe_key and source_id are unique within each of them alone"

R = TypeVar("R")
#: From the queues related to one, and the moment, to what the catalog keeps of it.
Decide: TypeAlias = Callable[[RelatedQueues, int], QueueRecord]


class QueueService:
    """The queue service over a manager. New partitions go to storages by their affinities."""

    def __init__(self, manager: QueueManager, *, affinities: Mapping[str, float]) -> None:
        self.manager = manager
        self._affinities = affinities

    async def call(self, request: requests.QueueRequest[R], caller: Caller = OWNER) -> R:
        """Carry out a verb for somebody who may ask for it: role and queues are checked by the face, with what the
        request declares. Raises HoldfastError; then nothing of the request is acknowledged."""
        if self.manager.closing:
            raise ShuttingDown
        if request.namespace:
            checks.namespace(request.namespace)
        if request.declared.about is Access.EACH:
            return cast(R, await HANDLERS[type(request)](self, request, caller))
        return cast(R, await HANDLERS[type(request)](self, request))

    def _queue(self, name: str) -> LogicalQueue:
        queue = self.manager.find(name)
        if queue is not None:
            return queue  # a queue that exists has a good name
        checks.queue_name(name)
        return self.manager.get(name)

    # --- items ------------------------------------------------------------------------------------------------

    @handles(requests.ProduceRequest)
    async def produce(self, request: requests.ProduceRequest) -> requests.ProduceReply:
        queue = self._queue(request.queue_name)
        timeout_us = checks.request_timeout(request.request_timeout)
        checks.items(request.items)
        items, byte_count = _checked(request.items)
        return requests.ProduceReply(await queue.produce(items, byte_count=byte_count, timeout_us=timeout_us))

    @handles(requests.LeaseRequest)
    async def lease(self, request: requests.LeaseRequest) -> requests.LeaseReply:
        queue = self._queue(request.queue_name)
        timeout_us = checks.request_timeout(request.request_timeout)
        checks.client_id(request.client_id)
        checks.batch_size(request.batch_size)
        return await queue.lease(request.client_id, request.batch_size, timeout_us=timeout_us)

    @handles(requests.CompleteRequest)
    async def complete(self, request: requests.CompleteRequest) -> requests.CodeReply:
        queue = self._queue(request.queue_name)
        timeout_us = checks.request_timeout(request.request_timeout)
        queue.share_of(request.partition)
        checks.ids(request.ids)
        await _settled(queue, Complete(request.partition, _unique(request.ids)), "completed", timeout_us)
        return OK

    @handles(requests.RetryRequest)
    async def retry(self, request: requests.RetryRequest) -> requests.CodeReply:
        queue = self._queue(request.queue_name)
        queue.share_of(request.partition)
        checks.items(request.items, "retry")
        for item in request.items:
            checks.text_field(item.reason, what="reason")
        items = list({item.id: item for item in request.items}.values())
        await _settled(queue, RetryItems(request.partition, items, queue.rules()), "retried")
        return OK

    @handles(requests.ExtendRequest)
    async def extend(self, request: requests.ExtendRequest) -> requests.ExtendReply:
        queue = self._queue(request.queue_name)
        lease_timeout_us = parse_duration(request.lease_timeout, what="lease timeout")
        queue.share_of(request.partition)
        checks.ids(request.ids)
        lease_timeout_us = lease_timeout_us or queue.record.lease_timeout_us
        operation = Extend(request.partition, _unique(request.ids), lease_timeout_us)
        return requests.ExtendReply(await _settled(queue, operation, "extended"))

    # --- one queue --------------------------------------------------------------------------------------------

    @handles(requests.StatsRequest)
    async def stats(self, request: requests.StatsRequest) -> requests.StatsReply:
        queue = self._queue(request.queue_name)
        rules = queue.rules()
        partitions = []
        for share in queue.shares:
            for partition in share.partitions:
                try:
                    tally = await share.store.tally(partition, rules=rules)
                    partitions.append(replace(tally, failures=share.failures))
                except StorageFailed:
                    partitions.append(requests.PartitionStats(partition=partition, failures=max(1, share.failures)))
        logical = requests.LogicalQueueStats(
            produce_waiting=len(queue.waiting.produces),
            lease_waiting=len(queue.waiting.leases),
            complete_waiting=queue.waiting.settling_count(),
            in_flight=queue.in_flight,
            partitions=sorted(partitions, key=lambda stats: stats.partition),
        )
        return requests.StatsReply(queue_name=request.queue_name, logical_queues=[logical])

    @handles(requests.ClearRequest)
    async def clear(self, request: requests.ClearRequest) -> requests.CodeReply:
        queue = self._queue(request.queue_name)
        if not (request.queue or request.scheduled):
            raise Invalid("invalid clear request; one of 'queue', 'scheduled' must be true")
        total = 0
        for share in queue.shares:
            for partition in share.partitions:
                leased = request.queue and request.destructive
                clear = Clear(partition, request.queue, request.scheduled, leased, CLEAR_COUNT_MAX)
                more = True
                while more:  # ends: each round deletes CLEAR_COUNT_MAX items that were there, or is the last
                    counted = await queue.operate(clear)
                    total += counted.count
                    more = counted.more
        if total:
            emit("queue.cleared", queue=request.queue_name, count=total)
        return OK

    @handles(requests.PauseRequest)
    @handles(requests.ResumeRequest)
    async def pause(self, request: requests.PauseRequest | requests.ResumeRequest) -> requests.CodeReply:
        name = request.queue_name
        self._queue(name)
        async with self.manager.changing() as catalog:
            decide = _paused(name, pause=isinstance(request, requests.PauseRequest))
            await self.manager.put(await catalog.change(name, dead_queue="", decide=decide))
        return OK

    @handles(requests.RedriveItemsRequest)
    async def redrive(self, request: requests.RedriveItemsRequest) -> requests.RedriveItemsReply:
        queue = self._queue(request.queue_name)
        queue.share_of(request.partition)
        checks.ids(request.ids)
        if request.source_queue == request.queue_name:
            raise Invalid(f"source queue is invalid; '{request.queue_name}' cannot be redriven into itself")
        target = self.manager.target(request.source_queue)
        if target is None:
            raise QueueMissing(request.source_queue)
        redriven = await queue.operate(SendBack(request.partition, _unique(request.ids), target))
        return requests.RedriveItemsReply(list(redriven.ids))

    @handles(requests.ReloadRequest)
    async def reload(self, request: requests.ReloadRequest) -> requests.CodeReply:
        await self._queue(request.queue_name).reload()
        return OK

    # --- queues -----------------------------------------------------------------------------------------------

    @handles(requests.CreateQueueRequest)
    async def create(self, request: requests.CreateQueueRequest) -> requests.CodeReply:
        decide = _created(request, self._affinities)
        async with self.manager.changing() as catalog:
            record = await catalog.change(request.queue_name, dead_queue=request.dead_queue, decide=decide)
            await self.manager.put(record)
        emit("queue.created", queue=request.queue_name)
        if len({one.storage for one in record.partitions}) > 1:
            emit("queue.spread", queue=request.queue_name)
            return requests.CodeReply(200, SPREAD)
        return OK

    @handles(requests.UpdateQueueRequest)
    async def update(self, request: requests.UpdateQueueRequest) -> requests.CodeReply:
        current = self._queue(request.queue_name).record
        decide = _updated(request, self._affinities)
        dead_queue = request.dead_queue if isinstance(request.dead_queue, str) else current.dead_queue
        async with self.manager.changing() as catalog:
            record = await catalog.change(request.queue_name, dead_queue=dead_queue, decide=decide)
            await self.manager.put(record)
        emit("queue.updated", queue=request.queue_name)
        return OK

    @handles(requests.ListRequest)
    async def list(self, request: requests.ListRequest, caller: Caller) -> requests.QueuesReply:
        count_max = checks.list_limit(request.limit)
        checks.queue_pivot(request.pivot)
        names = filter(caller.may_touch, self.manager.names(pivot=request.pivot))
        return requests.QueuesReply([self.manager.get(name).record.info() for name in islice(names, count_max)])

    @handles(requests.DepthsRequest)
    async def depths(self, request: requests.DepthsRequest, caller: Caller) -> requests.DepthsReply:
        count_max = checks.list_limit(request.limit)
        found = [
            queue
            for name in ([request.queue_name] if request.queue_name else self.manager.names())
            if self.manager.find(name) is not None
            and caller.may_touch(name)
            and self._fits(request, queue := self.manager.get(name))
        ]
        order = _ORDERS[request.sort]
        found.sort(key=order)
        start = bisect_right(found, _read_cursor(request.cursor, request.sort), key=order) if request.cursor else 0
        page = found[start : start + count_max]
        more = len(found) > start + len(page)
        return requests.DepthsReply(
            queues=[await self._depth(queue, exact=request.exact) for queue in page],
            count=len(found),
            next=_cursor_of(page[-1], request.sort) if page and more else "",
        )

    def _fits(self, request: requests.DepthsRequest, queue: LogicalQueue) -> bool:
        record, wanted = queue.record, request.dead_queue_for
        if request.search.lower() not in record.name.lower() or (request.paused and not record.paused):
            return False
        if request.failing and all(share.healthy for share in queue.shares):
            return False
        return not wanted or (not record.dead_queue and record.name != wanted and not self.manager.sources(wanted))

    async def _depth(self, queue: LogicalQueue, *, exact: bool) -> requests.QueueDepth:
        record, is_healthy = queue.record, all(share.healthy for share in queue.shares)
        queued, leased, scheduled, dying = _counts_of(queue)
        if exact and is_healthy and any(share.abilities.shared for share in queue.shares):
            try:
                stats = [
                    await share.store.tally(p, rules=queue.rules()) for share in queue.shares for p in share.partitions
                ]
                leased, scheduled, dying = (
                    sum(getattr(one, name) for one in stats) for name in ("total_leased", "scheduled", "dying")
                )
                queued = sum(one.total for one in stats) - leased
            except StorageFailed:
                is_healthy = False
        return requests.QueueDepth(
            queue_name=record.name,
            queued=queued,
            leased=leased,
            scheduled=scheduled,
            dying=dying,
            partitions=len(record.partitions),
            dead_queue=record.dead_queue,
            is_dead_queue=bool(self.manager.sources(record.name)),
            paused=record.paused,
            is_healthy=is_healthy,
        )

    @handles(requests.InfoRequest)
    async def info(self, request: requests.InfoRequest) -> QueueInfo:
        return self._queue(request.queue_name).record.info()

    @handles(requests.DeleteQueueRequest)
    async def delete(self, request: requests.DeleteQueueRequest) -> requests.CodeReply:
        name = request.queue_name
        queue = self._queue(name)
        async with self.manager.changing() as catalog, queue.freeze():
            count = sum(
                state.queued + state.leased + state.scheduled + state.dying
                for share in queue.shares
                for state in share.states.values()
            )
            decide = _deleted(name, force=request.force, item_count=count)
            record = await catalog.delete(name, decide=decide, count=count)
            await self.manager.drop(queue)
            for storage in {one.storage for one in record.partitions}:
                await self.manager.storages[storage].drop(record)
        emit("queue.deleted", queue=name, count=count)
        return OK

    # --- storage ----------------------------------------------------------------------------------------------

    @handles(requests.ListItemsRequest)
    @handles(requests.ListScheduledRequest)
    async def list_items(self, request: requests.ListItemsRequest) -> requests.ItemsReply:
        scheduled = isinstance(request, requests.ListScheduledRequest)
        queue = self._queue(request.queue_name)
        share = queue.share_of(request.partition)
        count_max = checks.list_limit(request.limit)
        items = await share.store.list_items(
            request.partition, pivot=request.pivot, count_max=count_max, scheduled=scheduled
        )
        return requests.ItemsReply(list(items))

    @handles(requests.ImportItemsRequest)
    async def import_items(self, request: requests.ImportItemsRequest) -> requests.ItemsReply:
        queue = self._queue(request.queue_name)
        queue.share_of(request.partition)
        checks.items(request.items, "import")
        for item in request.items:
            for what in IMPORTED_TEXTS:
                checks.text_field(getattr(item, what), what=what)
            for what in ("attempts", "death_attempts"):
                if not 0 <= getattr(item, what) <= checks.ATTEMPTS_MAX:
                    raise Invalid(f"{what} is invalid; must be between 0 and {checks.ATTEMPTS_MAX}")
        operation = Import(request.partition, request.items, queue.record.expire_timeout_us)
        return requests.ItemsReply(await queue.operate(operation))

    @handles(requests.DeleteItemsRequest)
    async def delete_items(self, request: requests.DeleteItemsRequest) -> requests.CodeReply:
        queue = self._queue(request.queue_name)
        queue.share_of(request.partition)
        checks.ids(request.ids, empty="cannot be empty")
        await queue.operate(Delete(request.partition, _unique(request.ids)))
        return OK


def _checked(items: Sequence[NewItem]) -> tuple[Sequence[NewItem], int]:
    """The items with their payload in one place, and how many bytes they are."""
    byte_count = 0
    utf8 = False
    for item in items:
        byte_count += len(item.payload)
        if item.utf8:
            utf8 = True
            if item.payload:
                raise Invalid("item is invalid; 'bytes' and 'utf8' cannot both be given")
        if item.kind or item.encoding or item.reference or item.dedupe_key:
            checks.item_texts(item.kind, item.encoding, item.reference, item.dedupe_key)
    if not utf8:
        return items, byte_count
    whole = [replace(item, payload=item.utf8.encode(), utf8="") if item.utf8 else item for item in items]
    return whole, sum(len(item.payload) for item in whole)


def _unique(ids: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(ids))


def _counts_of(queue: LogicalQueue) -> tuple[int, int, int, int]:
    """Items that are queued, leased, scheduled and dying, as they are known here."""
    states = [state for share in queue.shares for state in share.states.values()]
    return (
        sum(state.queued for state in states),
        sum(state.leased for state in states),
        sum(state.scheduled for state in states),
        sum(state.dying for state in states),
    )


#: By what a page of queues is in order.
_ORDERS: Mapping[str, Callable[[LogicalQueue], tuple[int, str]]] = {
    "name": lambda queue: (0, queue.record.name),
    "depth": lambda queue: (-sum(_counts_of(queue)), queue.record.name),
}


def _cursor_of(queue: LogicalQueue, sort: str) -> str:
    """The place of a queue in its order; no name holds the mark between the two."""
    depth, name = _ORDERS[sort](queue)
    return f"{-depth}~{name}"


def _read_cursor(cursor: str, sort: str) -> tuple[int, str]:
    """Raises Invalid for what we never gave out."""
    depth, mark, name = cursor.partition("~")
    if not mark or not (depth.isascii() and depth.isdigit() and len(depth) < ID_DIGITS_MAX):
        raise Invalid("cursor is invalid; begin without one")
    return (-int(depth) if sort == "depth" else 0), name


async def _settled(
    queue: LogicalQueue, operation: PartitionOperation[R | IdsRefused], did: str, timeout_us: int = OPERATION_TIMEOUT_US
) -> R:
    """The result of a settlement. Raises BadIds, which names all that do not exist or are not leased."""
    result = await queue.operate(operation, settles=True, timeout_us=timeout_us)
    if not isinstance(result, IdsRefused):
        return result
    ids = [*result.missing, *result.unleased]
    if result.missing:
        raise BadIds(f"invalid storage id; '{result.missing[0]}' does not exist", ids=ids)
    raise BadIds(f"item(s) cannot be {did}; '{result.unleased[0]}' is not marked as leased", ids=ids)


# --- which changes of queues are allowed: pure decisions over a queue and its relatives, under the catalog's lock -----


def spread(partition_count: int, affinities: Mapping[str, float]) -> list[PartitionInfo]:
    """Where a queue's partitions go: in proportion to the storages' affinities and interleaved."""
    total = sum(affinities.values())
    debt = dict.fromkeys(affinities, 0.0)
    partitions = []
    for partition in range(partition_count):
        for name, affinity in affinities.items():
            debt[name] += affinity / total
        chosen = max(debt, key=lambda name: debt[name])
        debt[chosen] -= 1.0
        partitions.append(PartitionInfo(partition, chosen))
    return partitions


def _created(request: requests.CreateQueueRequest, affinities: Mapping[str, float]) -> Decide:
    """Checks a new queue's settings now, and the queues related to it under the lock."""
    checks.queue_name(request.queue_name)
    _check_texts(request.dead_queue, request.reference)
    checks.max_attempts(request.max_attempts)
    lease_timeout_us = parse_duration(request.lease_timeout, what="lease timeout")
    expire_timeout_us = parse_duration(request.expire_timeout, what="expire timeout")
    checks.timeouts(lease_timeout_us, expire_timeout_us)
    record = QueueRecord(
        name=request.queue_name,
        lease_timeout_us=lease_timeout_us,
        expire_timeout_us=expire_timeout_us,
        max_attempts=request.max_attempts,
        dead_queue=request.dead_queue,
        reference=request.reference,
        dead_retention_us=parse_duration(request.dead_retention, what="dead retention"),
        paused=request.paused,
        partitions=tuple(spread(checks.partitions(request.requested_partitions), affinities)),
    )

    def decide(related: RelatedQueues, now_us: int) -> QueueRecord:
        if related.current is not None:
            raise Invalid(f"invalid queue; '{record.name}' already exists")
        _check_dead_queue(record, related)
        return replace(record, created_at_us=now_us, updated_at_us=now_us)

    return decide


def _updated(request: requests.UpdateQueueRequest, affinities: Mapping[str, float]) -> Decide:
    """What is left out stays as it is; `""` and `0` are said explicitly."""
    checks.queue_name(request.queue_name)
    dead_queue = "" if request.dead_queue is UNSET else request.dead_queue
    _check_texts(dead_queue, "" if request.reference is UNSET else request.reference)

    def decide(related: RelatedQueues, now_us: int) -> QueueRecord:
        current = related.current
        if current is None:
            raise QueueMissing(request.queue_name)
        record = replace(current, updated_at_us=max(now_us, current.updated_at_us + 1), **_changed(request))
        checks.max_attempts(record.max_attempts)
        checks.timeouts(record.lease_timeout_us, record.expire_timeout_us)
        if request.requested_partitions is not UNSET:
            count = checks.partitions(request.requested_partitions, now=len(current.partitions))
            added = spread(count, affinities)[len(current.partitions) :]
            record = replace(record, partitions=current.partitions + tuple(added))
        _check_dead_queue(record, related)
        return record

    return decide


def _changed(request: requests.UpdateQueueRequest) -> dict[str, int | str]:
    changes: dict[str, int | str] = {}
    for name in ("lease_timeout", "expire_timeout", "dead_retention"):
        if (text := getattr(request, name)) is not UNSET:
            changes[f"{name}_us"] = parse_duration(text, what=name.replace("_", " "))
    for name in ("max_attempts", "dead_queue", "reference"):
        if (value := getattr(request, name)) is not UNSET:
            changes[name] = value
    return changes


def _paused(name: str, *, pause: bool) -> Decide:
    """A paused queue takes items in and gives none out."""

    def decide(related: RelatedQueues, now_us: int) -> QueueRecord:
        if related.current is None:
            raise QueueMissing(name)
        return replace(related.current, paused=pause, updated_at_us=max(now_us, related.current.updated_at_us))

    return decide


def _deleted(name: str, *, force: bool, item_count: int) -> Callable[[RelatedQueues], QueueRecord]:
    """A dead queue in use stays, also by force; one with items goes only by force."""

    def decide(related: RelatedQueues) -> QueueRecord:
        if related.current is None:
            raise QueueMissing(name)
        others = [source for source in related.source_queues if source != name]
        if others:
            raise BadDeadQueue(f"queue is in use; '{name}' is the dead_queue of", others[0])
        count = item_count if related.item_count is None else related.item_count
        if count and not force:
            items = "1 item" if count == 1 else f"{count} items"
            raise Invalid(f"queue is not empty; '{name}' has {items}, use force")
        return related.current

    return decide


def _check_dead_queue(record: QueueRecord, related: RelatedQueues) -> None:
    """A dead queue exists, is another queue, and neither it nor a dead queue has a dead queue of its own."""
    if not record.dead_queue:
        return
    if record.dead_queue == record.name:
        raise Invalid("dead_queue cannot reference itself")
    if related.dead_queue is None:
        raise Invalid(f"dead_queue does not exist; '{record.dead_queue}' was not found, create it first")
    if related.dead_queue.dead_queue:
        raise Invalid(
            f"dead_queue is invalid; '{record.dead_queue}' already has its own dead_queue configured, "
            "a dead_queue cannot have its own dead_queue"
        )
    if related.source_queues:
        text = f"dead_queue is invalid; '{record.name}' is the dead_queue of"
        raise BadDeadQueue(text, related.source_queues[0], " and cannot have its own dead_queue")


def _check_texts(dead_queue: str, reference: str) -> None:
    if dead_queue:
        checks.queue_name(dead_queue, what="dead queue")
    checks.text_field(reference, what="reference", characters_max=checks.REFERENCE_CHARACTERS_MAX)
