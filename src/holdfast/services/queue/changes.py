"""Which changes of queues are allowed: pure decisions over a queue and its relatives, under the catalog's lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.core import checks
from holdfast.core.item import PartitionInfo, QueueRecord
from holdfast.core.moments import parse_duration
from holdfast.core.requests.queue import CreateQueueRequest, UpdateQueueRequest
from holdfast.errors import Invalid, QueueMissing
from holdfast.ports.queue_store import RelatedQueues


def spread(partition_count: int, affinities: Mapping[str, float]) -> list[PartitionInfo]:
    """Where a queue's partitions go: in proportion to the storages' affinities and interleaved."""
    total = sum(affinities.values())
    debt = dict.fromkeys(affinities, 0.0)
    places = []
    for partition in range(partition_count):
        for name, affinity in affinities.items():
            debt[name] += affinity / total
        chosen = max(debt, key=lambda name: debt[name])
        debt[chosen] -= 1.0
        places.append(PartitionInfo(partition, chosen))
    return places


def created(
    request: CreateQueueRequest, affinities: Mapping[str, float]
) -> Callable[[RelatedQueues, int], QueueRecord]:
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
        check_dead_queue(record, related)
        return replace(record, created_at_us=now_us, updated_at_us=now_us)

    return decide


def updated(
    request: UpdateQueueRequest, affinities: Mapping[str, float]
) -> Callable[[RelatedQueues, int], QueueRecord]:
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
        check_dead_queue(record, related)
        return record

    return decide


def _changed(request: UpdateQueueRequest) -> dict[str, int | str]:
    changes: dict[str, int | str] = {}
    for name in ("lease_timeout", "expire_timeout", "dead_retention"):
        if (text := getattr(request, name)) is not UNSET:
            changes[f"{name}_us"] = parse_duration(text, what=name.replace("_", " "))
    for name in ("max_attempts", "dead_queue", "reference"):
        if (value := getattr(request, name)) is not UNSET:
            changes[name] = value
    return changes


def paused(name: str, *, pause: bool) -> Callable[[RelatedQueues, int], QueueRecord]:
    """A paused queue takes items in and gives none out."""

    def decide(related: RelatedQueues, now_us: int) -> QueueRecord:
        if related.current is None:
            raise QueueMissing(name)
        return replace(related.current, paused=pause, updated_at_us=max(now_us, related.current.updated_at_us))

    return decide


def deleted(name: str, *, force: bool, item_count: int) -> Callable[[RelatedQueues], QueueRecord]:
    """A dead queue in use stays, also by force; one with items goes only by force."""

    def decide(related: RelatedQueues) -> QueueRecord:
        if related.current is None:
            raise QueueMissing(name)
        others = [source for source in related.source_queues if source != name]
        if others:
            raise Invalid(f"queue is in use; '{name}' is the dead_queue of '{others[0]}'")
        count = item_count if related.item_count is None else related.item_count
        if count and not force:
            items = "1 item" if count == 1 else f"{count} items"
            raise Invalid(f"queue is not empty; '{name}' has {items}, use force")
        return related.current

    return decide


def check_dead_queue(record: QueueRecord, related: RelatedQueues) -> None:
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
        raise Invalid(
            f"dead_queue is invalid; '{record.name}' is the dead_queue of '{related.source_queues[0]}' "
            "and cannot have its own dead_queue"
        )


def _check_texts(dead_queue: str, reference: str) -> None:
    if dead_queue:
        checks.queue_name(dead_queue, what="dead queue")
    checks.text_field(reference, what="reference", characters_max=checks.REFERENCE_CHARACTERS_MAX)
