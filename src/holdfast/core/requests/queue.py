"""The verbs of the queue service: one request type and one reply type each.

The same types are the JSON of `POST /v1/<noun>.<verb>`, the source of `/openapi.json`, and what the Python
client sends. Unknown fields are refused; texts and limits are checked in `core.checks`, not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, convert, field
from msgspec.structs import replace

from holdfast.core import checks
from holdfast.core.item import At, ExtendedItem, Item, LeasedItem, NewItem, PlacedItem, QueueInfo, RetryItem
from holdfast.core.moments import DURATION_CHARACTERS_MAX, in_utc, microseconds_or_zero, moment, moment_or_none
from holdfast.core.requests.declare import REQUESTS, Access, Request, Role, declare

R = TypeVar("R")

# What `core.checks` refuses is told to `/openapi.json`, and only told: checks refuse it, in their order and with the
# texts that clients match. A default that is refused is none: the document says that the field is required.
NAME = {"minLength": 1, "maxLength": checks.QUEUE_NAME_CHARACTERS_MAX, "pattern": r"^[^\s~]+$"}
NAME_OR_NONE = {"maxLength": checks.QUEUE_NAME_CHARACTERS_MAX, "pattern": r"^[^\s~]*$"}
DURATION = {"maxLength": DURATION_CHARACTERS_MAX, "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"}
DURATION_OR_NONE = {"maxLength": DURATION_CHARACTERS_MAX, "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))*$"}
BATCH = {"minItems": 1, "maxItems": checks.BATCH_COUNT_MAX}
ATTEMPTS_COUNT = {"minimum": 0, "maximum": checks.ATTEMPTS_MAX}
ONE_BODY = Meta(extra_json_schema={"not": {"required": ["bytes", "utf8"]}})
PARTITION_NUMBER = {"minimum": 0, "maximum": checks.PARTITIONS_COUNT_MAX - 1}


def told(description: str, schema: dict[str, Any]) -> Meta:
    """What the document says of a field."""
    return Meta(description=description, extra_json_schema=schema)


QueueName = Annotated[str, told("The queue's name.", NAME)]
Partition = Annotated[int, told("The partition that they are in.", PARTITION_NUMBER)]
Ids = Annotated[list[str], told("The ids, as 'queue lease' shows them.", BATCH)]
Wait = Annotated[str, told("How long the request may wait, 10ms to 15m.", {"minLength": 1, **DURATION})]
Pivot = Annotated[str, Meta(description="Begin with this one.")]
QueuePivot = Annotated[str, told("Begin with this one.", {"pattern": "^[^~]*$"})]
Count = Annotated[
    int, told("At most so many; 0 is as many as a page has.", {"minimum": 0, "maximum": checks.LIST_COUNT_MAX})
]
Moment = Annotated[At, Meta(description="Accepted and ignored: the server alone decides it.")]
Partitions = Annotated[
    list[dict[str, int | str]], Meta(description="Accepted and ignored: the server alone decides them.")
]

#: The field with the queue that a verb is about.
QUEUE = "queue_name"

LEASE = told("How long a lease lasts, such as 30s or 5m.", {"minLength": 1, **DURATION})
EXPIRE = told("How long an item may wait before it dies, such as 24h.", {"minLength": 1, **DURATION})
ATTEMPTS = told("How often an item may be leased before it dies; 0 is without limit.", ATTEMPTS_COUNT)
DEAD = told("The queue that dead items go to; it must exist.", NAME_OR_NONE)
REFERENCE = told("A text of your own to find the queue by.", {"maxLength": checks.REFERENCE_CHARACTERS_MAX})
PARTITIONS = told(
    "How many partitions it has; an update may only raise it.",
    {"minimum": 0, "maximum": checks.PARTITIONS_COUNT_MAX},
)
RETENTION = told(
    "In a dead queue: how long an item is kept before it is deleted; for ever if left out.", DURATION_OR_NONE
)


# --- what is answered -----------------------------------------------------------------------------------------


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

    @property
    def partitions(self) -> list[PartitionStats]:
        """Those of all logical queues."""
        return [partition for logical in self.logical_queues for partition in logical.partitions]


class QueuesReply(Struct, frozen=True):
    items: list[QueueInfo]


class QueueDepth(Struct, frozen=True, kw_only=True):
    """A queue with how many items it has: queued ones, which can be leased, leased ones, scheduled ones, and those on
    their way to the dead queue."""

    queue_name: str
    queued: int
    leased: int
    scheduled: int
    dying: int
    partitions: int
    dead_queue: str
    is_dead_queue: bool  #: other queues have it as theirs
    paused: bool
    is_healthy: bool  #: false while a storage of it does not answer; the counts are then of before


class DepthsReply(Struct, frozen=True, kw_only=True):
    """A page of queues; `count` is how many fit in all."""

    queues: list[QueueDepth]
    count: int
    next: str = ""


class ItemsReply(Struct, frozen=True):
    items: list[Item]


class ErrorReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    code: int
    code_text: str
    message: str
    details: dict[str, list[str]] = {}


# --- what is asked --------------------------------------------------------------------------------------------


class QueueRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """What every request may carry: other services of this family send a namespace."""

    namespace: Annotated[str, told("Left out, or _system.", {"enum": ["", checks.NAMESPACE]})] = ""


class QueueNameRequest(QueueRequest[R], Generic[R], frozen=True, kw_only=True):
    """A queue by its name."""

    queue_name: QueueName = ""


@declare("queue.produce", "POST /v1/queue.produce", role=Role.OPERATOR, about=QUEUE, limit="produce")
class ProduceRequest(QueueNameRequest[ProduceReply], frozen=True, kw_only=True):
    """Store items; 200 means committed."""

    request_timeout: Wait = ""
    items: Annotated[list[Annotated[NewItem, ONE_BODY]], told("What to store, 1 to 1000 of them.", BATCH)] = []


@declare("queue.lease", "POST /v1/queue.lease", role=Role.OPERATOR, about=QUEUE)
class LeaseRequest(QueueNameRequest[LeaseReply], frozen=True, kw_only=True):
    """Wait for items and lease them."""

    batch_size: Annotated[
        int, told("At most so many items, 1 to 1000.", {"minimum": 1, "maximum": checks.BATCH_COUNT_MAX})
    ] = 0
    request_timeout: Wait = ""
    client_id: Annotated[
        str,
        told(
            "Who leases; unique among those who wait.",
            {"minLength": 1, "maxLength": checks.TEXT_CHARACTERS_MAX, "pattern": r"\S"},
        ),
    ] = ""


@declare("queue.complete", "POST /v1/queue.complete", role=Role.OPERATOR, about=QUEUE)
class CompleteRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Finish leased items: all or none."""

    partition: Partition = 0
    request_timeout: Wait = ""
    ids: Ids = []


@declare("queue.retry", "POST /v1/queue.retry", role=Role.OPERATOR, about=QUEUE)
class RetryRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Give leased items back, later, or to the dead queue."""

    partition: Partition = 0
    items: Annotated[list[RetryItem], told("Which, and how each goes back.", BATCH)] = []


@declare("queue.extend", "POST /v1/queue.extend", role=Role.OPERATOR, about=QUEUE)
class ExtendRequest(QueueNameRequest[ExtendReply], frozen=True, kw_only=True):
    """Let leases run longer: all or none."""

    partition: Partition = 0
    ids: Ids = []
    lease_timeout: Annotated[str, told("From now on; the queue's own if left out.", DURATION_OR_NONE)] = ""


@declare("queue.stats", "POST /v1/queue.stats", role=Role.VIEWER, about=QUEUE)
class StatsRequest(QueueNameRequest[StatsReply], frozen=True, kw_only=True):
    """Count what waits, is leased, scheduled, dying."""


@declare("queue.clear", "POST /v1/queue.clear", role=Role.ADMIN, about=QUEUE)
class ClearRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Delete queued or scheduled items."""

    queue: Annotated[bool, Meta(description="Delete the queued items.")] = False
    scheduled: Annotated[bool, Meta(description="Delete the scheduled items.")] = False
    destructive: Annotated[bool, Meta(description="With --queue: leased items too.")] = False


@declare("queue.pause", "POST /v1/queue.pause", role=Role.ADMIN, about=QUEUE)
class PauseRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Take items in and give none out."""


@declare("queue.resume", "POST /v1/queue.resume", role=Role.ADMIN, about=QUEUE)
class ResumeRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Give items out again."""


@declare("queue.reload", "POST /v1/queue.reload", role=Role.ADMIN, about=QUEUE)
class ReloadRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Read the queue's state from its store again."""


@declare(
    "queue.redrive",
    "POST /v1/queue.redrive",
    role=Role.OPERATOR,
    about=QUEUE,
    names=("source_queue",),
    redrives=True,
)
class RedriveItemsRequest(QueueNameRequest[RedriveItemsReply], frozen=True, kw_only=True):
    """Move dead items back to the queue they died in."""

    partition: Partition = 0
    source_queue: Annotated[str, told("The queue that they died in.", NAME)] = ""
    ids: Ids = []


@declare("queues.create", "POST /v1/queues.create", role=Role.ADMIN, about=QUEUE, names=("dead_queue",))
class CreateQueueRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Make a queue.

    What the server alone decides is accepted, so that a listing can be sent back, and ignored.
    """

    lease_timeout: Annotated[str, LEASE] = ""
    expire_timeout: Annotated[str, EXPIRE] = ""
    max_attempts: Annotated[int, ATTEMPTS] = 0
    dead_queue: Annotated[str, DEAD] = ""
    reference: Annotated[str, REFERENCE] = ""
    requested_partitions: Annotated[int, PARTITIONS] = 0
    dead_retention: Annotated[str, RETENTION] = ""
    created_at: Moment = None
    updated_at: Moment = None
    partitions: Partitions = []
    paused: Annotated[bool, Meta(description="Accepted and ignored: 'queue pause' does that.")] = False


@declare("queues.update", "POST /v1/queues.update", role=Role.ADMIN, about=QUEUE, names=("dead_queue",))
class UpdateQueueRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Change a queue's settings.

    What is left out stays as it is.
    """

    lease_timeout: Annotated[str | UnsetType, LEASE] = UNSET
    expire_timeout: Annotated[str | UnsetType, EXPIRE] = UNSET
    max_attempts: Annotated[int | UnsetType, ATTEMPTS] = UNSET
    dead_queue: Annotated[str | UnsetType, DEAD] = UNSET
    reference: Annotated[str | UnsetType, REFERENCE] = UNSET
    requested_partitions: Annotated[int | UnsetType, PARTITIONS] = UNSET
    dead_retention: Annotated[str | UnsetType, RETENTION] = UNSET
    created_at: Moment = None
    updated_at: Moment = None
    partitions: Partitions = []


@declare("queues.list", "POST /v1/queues.list", role=Role.VIEWER, about=Access.EACH)
class ListRequest(QueueRequest[QueuesReply], frozen=True, kw_only=True):
    """List queues by name."""

    pivot: QueuePivot = ""
    limit: Count = 0


@declare("queues.depths", "POST /v1/queues.depths", role=Role.VIEWER, about=Access.EACH)
class DepthsRequest(QueueRequest[DepthsReply], frozen=True, kw_only=True):
    """List queues with how many items each has.

    They are counted as this server knows them, which costs no storage anything.
    """

    queue_name: Annotated[str, told("Only this one.", NAME_OR_NONE)] = ""
    search: Annotated[str, told("A part of the name.", NAME_OR_NONE)] = ""
    sort: Annotated[Literal["name", "depth"], Meta(description="By name, or the fullest first.")] = "name"
    paused: Annotated[bool, Meta(description="Only those that are paused.")] = False
    failing: Annotated[bool, Meta(description="Only those of which a storage does not answer.")] = False
    dead_queue_for: Annotated[
        str,
        told("Only those that may be the dead queue of this one; of a new queue with ~.", {"maxLength": 512}),
    ] = ""
    exact: Annotated[
        bool, Meta(description="Read those of the page from storages that servers share: others change them too.")
    ] = False
    limit: Count = 0
    cursor: Annotated[str, told("Where the page before ended.", {"pattern": "^([0-9]{1,18}~[^\\s~]*)?$"})] = ""


@declare("queues.info", "POST /v1/queues.info", role=Role.VIEWER, about=QUEUE)
class InfoRequest(QueueNameRequest[QueueInfo], frozen=True, kw_only=True):
    """Show one queue."""


@declare("queues.delete", "POST /v1/queues.delete", role=Role.ADMIN, about=QUEUE)
class DeleteQueueRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Delete a queue and its items."""

    force: Annotated[bool, Meta(description="Delete it with the items that are in it.")] = False


@declare("storage/items.list", "POST /v1/storage/items.list", role=Role.OPERATOR, about=QUEUE)
class ListItemsRequest(QueueNameRequest[ItemsReply], frozen=True, kw_only=True):
    """List queued and leased items."""

    partition: Partition = 0
    pivot: Pivot = ""
    limit: Count = 0


@declare("storage/scheduled.list", "POST /v1/storage/scheduled.list", role=Role.OPERATOR, about=QUEUE)
class ListScheduledRequest(ListItemsRequest, frozen=True, kw_only=True):
    """List scheduled items."""


class ImportedItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item to import. What is leased stays leased until its `lease_deadline`, under its new id. `id`, `updated_at`,
    `dead_deadline`, `max_attempts` are accepted, so that an export can be sent back, and ignored."""

    dead_deadline: At = None
    updated_at: At = None


def leased_until_us(item: ImportedItem, now_us: int) -> int:
    """Until when an imported item is leased; 0 when it is not, or no more."""
    until_us = microseconds_or_zero(item.lease_deadline) if item.is_leased else 0
    return until_us if until_us > now_us else 0


def imported_item(
    item: ImportedItem, item_id: str, *, created_at_us: int, expire_at_us: int, scheduled: bool, until_us: int
) -> Item:
    """An item that was imported, as it stands now."""
    return replace(
        convert(item, Item, from_attributes=True),
        id=item_id,
        created_at=moment(created_at_us),
        enqueue_at=in_utc(item.enqueue_at) if scheduled else None,
        expire_deadline=moment(expire_at_us),
        died_at=in_utc(item.died_at),
        lease_deadline=moment_or_none(until_us),
        is_leased=until_us > 0,
        max_attempts=0,
    )


@declare(
    "storage/items.import",
    "POST /v1/storage/items.import",
    role=Role.ADMIN,
    about=QUEUE,
    names=("items.source_queue",),
    limit="import",
)
class ImportItemsRequest(QueueNameRequest[ItemsReply], frozen=True, kw_only=True):
    """Store items with their story."""

    partition: Annotated[int, told("The partition that they go into.", PARTITION_NUMBER)] = 0
    items: Annotated[list[ImportedItem], told("What to store, 1 to 1000 of them.", BATCH)] = []


@declare("storage/items.delete", "POST /v1/storage/items.delete", role=Role.ADMIN, about=QUEUE)
class DeleteItemsRequest(QueueNameRequest[CodeReply], frozen=True, kw_only=True):
    """Delete items by id."""

    partition: Partition = 0
    ids: Ids = []


#: The verbs of the contract, by name.
VERBS = {name: one for name, one in REQUESTS.items() if issubclass(one.request, QueueRequest)}
