"""The verbs of the queue service: one request type and one reply type each.

The same types are the JSON of `POST /v1/<noun>.<verb>`, the source of `/openapi.json`, and what the Python
client sends. Unknown fields are refused; texts and limits are checked in `core.checks`, not here.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType, field

from holdfast.core.item import ExtendedItem, Item, LeasedItem, NewItem, PlacedItem, QueueInfo, RetryItem


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every request may carry: other services of this family send a namespace."""

    namespace: str = ""


class ProduceRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    request_timeout: str = ""
    items: list[NewItem] = []


class LeaseRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    client_id: str = ""
    batch_size: int = 0
    request_timeout: str = ""


class CompleteRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    request_timeout: str = ""
    ids: list[str] = []


class RetryRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    items: list[RetryItem] = []


class ExtendRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    ids: list[str] = []
    lease_timeout: str = ""


class ClearRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    queue: bool = False
    scheduled: bool = False
    destructive: bool = False


class QueueNameRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""


class DeleteQueueRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    force: bool = False


class CreateQueueRequest(Request, frozen=True, kw_only=True):
    """A Queue; what the server alone decides is accepted, so that a listing can be sent back, and ignored."""

    queue_name: str = ""
    lease_timeout: str = ""
    expire_timeout: str = ""
    max_attempts: int = 0
    dead_queue: str = ""
    reference: str = ""
    requested_partitions: int = 0
    dead_retention: str = ""
    created_at: datetime | None = None
    updated_at: datetime | None = None
    partitions: list[dict[str, int | str]] = []
    paused: bool = False


class UpdateQueueRequest(Request, frozen=True, kw_only=True):
    """A Queue; what is left out stays as it is."""

    queue_name: str = ""
    lease_timeout: str | UnsetType = UNSET
    expire_timeout: str | UnsetType = UNSET
    max_attempts: int | UnsetType = UNSET
    dead_queue: str | UnsetType = UNSET
    reference: str | UnsetType = UNSET
    requested_partitions: int | UnsetType = UNSET
    dead_retention: str | UnsetType = UNSET
    created_at: datetime | None = None
    updated_at: datetime | None = None
    partitions: list[dict[str, int | str]] = []


class ListRequest(Request, frozen=True, kw_only=True):
    pivot: str = ""
    limit: int = 0


class ListItemsRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    pivot: str = ""
    limit: int = 0


class ImportedItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item to import. `id`, `is_leased`, `lease_deadline`, `updated_at`, `dead_deadline`, `max_attempts` are
    accepted, so that an export can be sent back, and ignored: an imported item is new and un-leased."""

    id: str = ""
    source_id: str = ""
    attempts: int = 0
    created_at: datetime | None = None
    enqueue_at: datetime | None = None
    lease_deadline: datetime | None = None
    expire_deadline: datetime | None = None
    dead_deadline: datetime | None = None
    updated_at: datetime | None = None
    is_leased: bool = False
    max_attempts: int = 0
    reference: str = ""
    encoding: str = ""
    kind: str = ""
    payload: bytes = b""
    dedupe_key: str = ""
    source_queue: str = ""
    death_reason: str = ""
    death_attempts: int = 0
    died_at: datetime | None = None
    former_key: str = ""


class ImportItemsRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    items: list[ImportedItem] = []


class DeleteItemsRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    ids: list[str] = []


class RedriveItemsRequest(Request, frozen=True, kw_only=True):
    queue_name: str = ""
    partition: int = 0
    source_queue: str = ""
    ids: list[str] = []


class RedriveItemsReply(Struct, frozen=True):
    ids: list[str]
    code: int = 200


class CodeReply(Struct, frozen=True, omit_defaults=True):
    code: int
    message: str = ""


class ProduceReply(Struct, frozen=True):
    items: list[PlacedItem]
    code: int = 200


class LeaseReply(Struct, frozen=True):
    queue_name: str
    partition: int
    items: list[LeasedItem]


class ExtendReply(Struct, frozen=True):
    items: list[ExtendedItem]
    code: int = 200


class PartitionStats(Struct, frozen=True, kw_only=True):
    partition: int
    total: int = 0
    total_leased: int = 0
    failures: int = 0
    average_age: str = "0s"
    average_leased_age: str = "0s"
    scheduled: int = 0
    dying: int = 0
    overdue: int = 0


class LogicalQueueStats(Struct, frozen=True, kw_only=True):
    produce_waiting: int = 0
    lease_waiting: int = 0
    complete_waiting: int = 0
    in_flight: int = 0
    partitions: list[PartitionStats] = []


class StatsReply(Struct, frozen=True, kw_only=True):
    queue_name: str
    logical_queues: list[LogicalQueueStats] = field(name="logicalQueues", default_factory=list)


class QueuesReply(Struct, frozen=True):
    items: list[QueueInfo]


class ItemsReply(Struct, frozen=True):
    items: list[Item]


class ErrorReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    code: int
    code_text: str
    message: str
    details: dict[str, list[str]] = {}


class Verb(NamedTuple):
    """A verb: what it takes, what it answers, and how large its body may be."""

    request: type[Request]
    reply: type[Struct]
    body: str  # which body limit applies: "produce", "import" or "other"
    summary: str


VERBS: dict[str, Verb] = {
    "queue.produce": Verb(ProduceRequest, ProduceReply, "produce", "Store items; 200 means committed"),
    "queue.lease": Verb(LeaseRequest, LeaseReply, "other", "Wait for items and lease them"),
    "queue.complete": Verb(CompleteRequest, CodeReply, "other", "Finish leased items: all or none"),
    "queue.retry": Verb(RetryRequest, CodeReply, "other", "Give leased items back, later, or to the dead queue"),
    "queue.extend": Verb(ExtendRequest, ExtendReply, "other", "Let leases run longer: all or none"),
    "queue.stats": Verb(QueueNameRequest, StatsReply, "other", "Count what waits, is leased, scheduled, dying"),
    "queue.clear": Verb(ClearRequest, CodeReply, "other", "Delete queued or scheduled items"),
    "queue.pause": Verb(QueueNameRequest, CodeReply, "other", "Take items in and give none out"),
    "queue.resume": Verb(QueueNameRequest, CodeReply, "other", "Give items out again"),
    "queue.reload": Verb(QueueNameRequest, CodeReply, "other", "Read the queue's state from its store again"),
    "queue.redrive": Verb(
        RedriveItemsRequest, RedriveItemsReply, "other", "Move dead items back to the queue they died in"
    ),
    "queues.create": Verb(CreateQueueRequest, CodeReply, "other", "Make a queue"),
    "queues.update": Verb(UpdateQueueRequest, CodeReply, "other", "Change a queue's settings"),
    "queues.list": Verb(ListRequest, QueuesReply, "other", "List queues by name"),
    "queues.info": Verb(QueueNameRequest, QueueInfo, "other", "Show one queue"),
    "queues.delete": Verb(DeleteQueueRequest, CodeReply, "other", "Delete a queue and its items"),
    "storage/items.list": Verb(ListItemsRequest, ItemsReply, "other", "List queued and leased items"),
    "storage/scheduled.list": Verb(ListItemsRequest, ItemsReply, "other", "List scheduled items"),
    "storage/items.import": Verb(ImportItemsRequest, ItemsReply, "import", "Store items with their story"),
    "storage/items.delete": Verb(DeleteItemsRequest, CodeReply, "other", "Delete items by id"),
}
