"""`/admin`: what can be asked of custody, and what is answered: the JSON shapes, each once. Recoveries and the topology
are in `recover`."""

from __future__ import annotations

from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct, field

from holdfast.core.ledger import ChainBreak, LedgerRow
from holdfast.core.letter import GroupStatus, Kinds, Letter, NewLetter, Origin
from holdfast.core.moments import microseconds, moment, moment_or_none, parse_duration
from holdfast.core.plan import Canary, Plan, PlanOptions, RedriveTask, Target
from holdfast.core.requests.declare import BYTES, Access, Request, Role, Stream, declare, view
from holdfast.core.selection import ID_MAX, PAGE_COUNT_DEFAULT, PAGE_COUNT_MAX, TEXT_CHARACTERS_MAX, Selection
from holdfast.core.states import LetterState
from holdfast.errors import BadBody, BrokerError, HoldfastError, ShuttingDown, TryAgain

R = TypeVar("R")

Id = Annotated[int, Meta(ge=1, le=ID_MAX)]
Limit = Annotated[int, Meta(ge=1, le=PAGE_COUNT_MAX)]
Hours = Annotated[int, Meta(ge=1, le=14 * 24)]
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Duration = Annotated[str, Meta(max_length=15)]
LongText = Annotated[str, Meta(max_length=2_000)]
RedriveOutcome = Literal["waiting", "under_way", "redriven", "failed", "skipped", "unknown", "came_back"]
State = Literal["", "captured", "redriving", "redriven", "resolved", "came_back", "archived", "discarded"]

LetterId = Annotated[Id, Meta(description="The letter's id.")]
TaskId = Annotated[Id, Meta(description="The id of the task.")]
Reason = Annotated[LongText, Meta(description="Why, for the ledger.")]


# --- what is answered -----------------------------------------------------------------------------------------


class QueueView(Struct, frozen=True, kw_only=True):
    """A dead-letter queue: what the broker has, and what the vault has of it."""

    queue: str
    source_queue: str | None  #: null when none is known
    ready: int | None  #: null when its broker does not say
    captured: int
    oldest_at: datetime | None
    consumers: int | None


class CaptureReport(Struct, kw_only=True):
    """What a capture did. `waiting` is one that stands still until its broker or the vault is back."""

    queue: str
    captured: int = 0
    matched: int = 0
    failed_imports: int = 0
    #: Stored, and the ack could not be written: they come again and are recognised.
    not_acked: int = 0
    #: From the death of the letter that was captured last to its capture.
    lag_s: float = 0.0
    state: str = "running"
    why: str = ""


class DeadQueueView(Struct, frozen=True, kw_only=True):
    """A dead-letter queue on the overview: what the vault has of it, and what its broker said last."""

    queue: str
    source_queue: str | None  #: null when none is known
    broker: Origin | None  #: whose queue it is; null when no broker that is configured here knows it
    ready: int | None  #: how many letters are in the queue itself; null when its broker does not say
    consumers: int | None
    states: dict[str, int]  #: letters in the vault by state
    oldest_at: datetime | None  #: when the oldest captured letter died
    capture: CaptureReport | None  #: by this server, with why it stands still


class BrokerView(Struct, frozen=True, kw_only=True):
    """Whether a broker answers, and takes what is redriven. The reasons are for those to whom no queue is closed."""

    broker: Origin
    reachable: bool | None  #: null until it was asked for the first time, which is under way
    why: str
    redrives_wait: bool
    redrives_why: str
    asked_at: datetime | None


class OverviewReply(Struct, frozen=True, kw_only=True):
    """Every dead-letter queue, and the brokers."""

    queues: list[DeadQueueView]
    brokers: list[BrokerView]


class QueueHistory(Struct, frozen=True):
    """What happened to the letters of one dead-letter queue in each hour, oldest first."""

    queue: str
    arrived: list[int]
    redriven: list[int]
    came_back: list[int]


class OverviewHistory(Struct, frozen=True, kw_only=True):
    """The last hours of every dead-letter queue in which anything happened."""

    until: datetime  #: the end of the last hour, which is not over
    queues: list[QueueHistory]


class Verified(Struct, frozen=True, kw_only=True):
    """What a look at the whole chain found."""

    rows: int
    head: str
    broken_at: int = 0
    why: str = ""
    broken: list[ChainBreak] = []  #: all that was found, up to a hundred; the first one is said above
    sealed_from: int = 0  #: from this row on letters, revisions and tokens are vouched for
    letters: int = 0
    unknown: list[str] = []  #: what cannot be told from here


class BalanceRow(Struct, frozen=True, kw_only=True):
    """Letters of one queue by state: as the ledger tells it, and as the vault counts them."""

    queue: str
    captured_ever: int
    ledger: dict[str, int]
    vault: dict[str, int]

    @property
    def agrees(self) -> bool:
        return self.ledger == self.vault and self.captured_ever == sum(self.vault.values())


class SessionReply(Struct, frozen=True, kw_only=True):
    """Who the session belongs to. `csrf_token` goes into the header x-csrf-token of every change."""

    name: str
    role: str
    queues: list[str]
    csrf_token: str
    expires_at: datetime


class LinkReply(Struct, frozen=True, kw_only=True):
    """Where a browser of this machine is let in: the path of a page, which holds a secret. It works once, until
    `expires_at`; null where no token is needed, and so no secret."""

    path: str
    expires_at: datetime | None


class LetterView(Struct, frozen=True, kw_only=True):
    """A letter without its body."""

    id: int
    queue: str
    state: str
    message_id: str
    type: str
    exchange: str
    routing_key: str
    source_queue: str
    reason: str
    attempts: int
    first_died_at: datetime | None
    died_at: datetime | None
    error_type: str
    error_message: str
    error_stack: str
    group: str
    redriven_count: int
    revision: int
    came_from: int
    captured_at: datetime
    body_bytes: int
    headers: dict[str, Any]
    properties: dict[str, Any]

    @classmethod
    def of(cls, letter: Letter) -> LetterView:
        death = letter.death
        return view(
            cls,
            letter,
            state=letter.state.value,
            source_queue=death.queue,
            reason=death.reason,
            attempts=death.count,
            first_died_at=moment_or_none(death.first_at_us),
            died_at=moment_or_none(death.last_at_us),
            error_type=death.error_type,
            error_message=death.error_message,
            error_stack=death.error_stack,
            captured_at=moment(letter.captured_at_us),
            properties=letter.shown,
        )


class LetterReply(LetterView, frozen=True, kw_only=True):
    """A letter without its body, and what is only looked up for one."""

    origin: Origin
    changed_at: datetime
    kinds: Kinds
    came_back_as: list[int]  #: the letters that this one is again, after it was redriven


class CountReply(Struct, frozen=True):
    """How many letters fit."""

    count: int


class ValuesReply(Struct, frozen=True, kw_only=True):
    """Field → its values, each with how many of the newest letters have it, the most frequent first."""

    values: dict[str, dict[str, int]]
    groups: dict[str, str]  #: the key of a group → what its newest letter died of
    looked_at: int  #: how many letters were looked at


class LettersReply(Struct, frozen=True, kw_only=True):
    """A page. `next` is where the next one begins; `stopped` says that the search gave up there."""

    letters: list[LetterView]
    count: int
    count_is_exact: bool
    next: str = ""
    stopped: bool = False


class MessageView(Struct, frozen=True, kw_only=True):
    """A dead letter, with its body in base64."""

    id: str
    message_id: str
    type: str
    reason: str
    attempts: int
    died_at: datetime | None
    exchange: str
    routing_key: str
    headers: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, letter: Letter | NewLetter, body: bytes) -> MessageView:
        return view(
            cls,
            letter,
            id=str(letter.id) if isinstance(letter, Letter) else "",
            reason=letter.death.reason,
            attempts=letter.death.count,
            died_at=moment_or_none(letter.death.last_at_us),
            headers=dict(letter.headers),
            body=body,
        )


class MessagesReply(Struct, frozen=True, kw_only=True):
    """`live` is read from the queue itself; `cost` says what that did to it. `waiting` is how many letters are in the
    queue itself and not in the vault; null when its broker does not say."""

    source: Literal["vault", "live"]
    messages: list[MessageView]
    cost: str
    waiting: int | None


class RedriveQueueReply(Struct, frozen=True, kw_only=True):
    """What became of them. `kept_in` is where the kept ones are found, in the vault, and `kept_ids` are the first."""

    redriven: int
    kept: int
    possible_duplicates: int
    reasons: dict[str, int]
    kept_in: str = ""
    kept_ids: list[int] = []


class ActionReply(Struct, frozen=True):
    """How many letters changed."""

    count: int


class EditReply(Struct, frozen=True):
    """The number of the new revision."""

    revision: int


class RevisionView(Struct, frozen=True):
    """One edit."""

    number: int
    at: datetime
    by: str
    note: str
    body: bytes | None
    put: dict[str, Any]
    drop: list[str]


class GroupView(Struct, frozen=True):
    """A failure group."""

    key: str
    title: str
    count: int
    first_at: datetime
    last_at: datetime
    sample: int
    status: GroupStatus
    note: str
    captured: int = 0  #: how many of them wait for somebody
    captured_is_exact: bool = True
    arrived: list[int] = []  #: in each of the hours that were asked for, oldest first


class GroupsReply(Struct, frozen=True, kw_only=True):
    """A page of groups."""

    groups: list[GroupView]
    next: str = ""


class RedrivesReply(Struct, frozen=True, kw_only=True):
    """A page of tasks."""

    redrives: list[RedriveTask]
    next: str = ""


class RedriveLetterView(Struct, frozen=True):
    """What became of one letter of a task. `state` is the letter's now; `came_back_as` is the letter that it came back
    as, 0 for none."""

    letter: int
    outcome: RedriveOutcome
    why: str
    target: str
    is_repeated: bool  #: published again, because nobody knew whether the first copy arrived
    state: str
    came_back_as: int


class ReasonView(Struct, frozen=True):
    """One reason, how many letters have it, and the id of one of them."""

    why: str
    count: int
    sample: int


class RedriveLettersReply(Struct, frozen=True, kw_only=True):
    """A page of a task's letters; `reasons` are those of the outcome that was asked for, the most frequent first."""

    letters: list[RedriveLetterView]
    reasons: list[ReasonView]
    next: str = ""


class FailedView(Struct, frozen=True):
    """What could not become a letter."""

    id: int
    queue: str
    reason: str
    at: datetime
    body: bytes
    properties: bytes


class FailedReply(Struct, frozen=True, kw_only=True):
    """A page of them."""

    failed: list[FailedView]
    next: str = ""


class LedgerReply(Struct, frozen=True, kw_only=True):
    """A page of the ledger, oldest first."""

    rows: list[LedgerRow]
    next: str = ""


class HistoryReply(Struct, frozen=True):
    """What was done to one letter."""

    rows: list[LedgerRow]


class HeadReply(Struct, frozen=True):
    """The anchor of the chain."""

    head: str


class TokenReply(Struct, frozen=True):
    """The token itself: this once."""

    token: str


class TokenView(Struct, frozen=True, kw_only=True):
    """A token, without itself."""

    name: str
    role: str
    made_at: datetime
    made_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    queues: list[str]


class SettingView(Struct, frozen=True, kw_only=True):
    """One setting, safe to show: `text` is its value for people."""

    key: str
    value: Any
    text: str
    source: str
    meaning: str


class Problem(Struct, frozen=True, kw_only=True):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    ids: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, error: HoldfastError) -> Problem:
        """An error; its type is the constant part of its text."""
        status = _status(error)
        constant, _, _ = error.message.partition(";")
        return cls(
            type=f"urn:holdfast:{constant.strip().lower().replace(' ', '-')[:80]}",
            title=HTTPStatus(status).phrase,
            status=status,
            detail=error.message,
            ids=list(error.ids),
        )


def _status(error: HoldfastError) -> int:
    match error:
        case BrokerError():
            return 502
        case BadBody():
            return 400
        case ShuttingDown() | TryAgain():
            return 503
    return error.code if 400 <= error.code < 600 and error.code in HTTPStatus.__members__.values() else 500


# --- dead-letter queues and captures --------------------------------------------------------------------------


class PageRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """Which page of a list."""

    limit: Annotated[Limit, Meta(description="At most so many.")] = PAGE_COUNT_DEFAULT
    cursor: Annotated[str, Meta(max_length=200, description="Where the page before ended.")] = ""


@declare("dlq.queues", "GET /admin/dlq/queues", role=Role.VIEWER, about=Access.EACH)
class ListDeadQueues(Request[list[QueueView]], frozen=True, kw_only=True):
    """Dead-letter queues and their letters."""


@declare("overview.read", "GET /admin/overview", role=Role.VIEWER, about=Access.EACH)
class ReadOverview(Request[OverviewReply], frozen=True, kw_only=True):
    """Every dead-letter queue at a glance; a broker that does not answer is said and holds nothing up."""


@declare("overview.hours", "GET /admin/overview/hours", role=Role.VIEWER, about=Access.EACH)
class ReadOverviewHistory(Request[OverviewHistory], frozen=True, kw_only=True):
    """What happened to letters in each of the last hours: arrivals, redrives, and what came back."""

    hours: Annotated[Hours, Meta(description="So many hours; the last one is not over.")] = 24


@declare("dlq.messages", "GET /admin/dlq/queues/{queue}/messages", role=Role.OPERATOR, about="queue")
class ListMessages(Request[MessagesReply], frozen=True, kw_only=True):
    """Letters of a queue, from the vault, or from the queue itself where that costs nothing."""

    queue: Annotated[str, Meta(description="A dead-letter queue.")]
    limit: Annotated[Limit, Meta(description="At most so many.")] = 20
    live: Annotated[bool, Meta(description="Read the queue itself, also where that costs something.")] = False


@declare(
    "dlq.redrive",
    "POST /admin/dlq/queues/{queue}/re-drive",
    role=Role.OPERATOR,
    about="queue",
    redrives=True,
    schema="RedriveQueueRequest",
)
class RedriveQueue(Request[RedriveQueueReply], frozen=True, kw_only=True):
    """Send letters of a queue back to where they died."""

    queue: Annotated[str, Meta(description="A dead-letter queue.")]
    limit: Annotated[int, Meta(ge=1, le=10_000, description="How many letters to send back.")] = 10
    via: Annotated[
        Literal["queue", "retry"], Meta(description="Straight, or through the exchange of the wait queue.")
    ] = "queue"


@declare("captures.list", "GET /admin/captures", role=Role.VIEWER, about=Access.EACH)
class ListCaptures(Request[list[CaptureReport]], frozen=True, kw_only=True):
    """Captures of this server."""


@declare("captures.start", "POST /admin/captures", role=Role.OPERATOR, about="queue", schema="CaptureRequest")
class StartCapture(Request[CaptureReport], frozen=True, kw_only=True):
    """Take the letters of a queue into custody.

    What is in it now, or what comes from now on.
    """

    queue: Annotated[Text, Meta(description="A dead-letter queue.")]
    limit: Annotated[int, Meta(ge=1, le=1_000_000, description="At most so many letters.")] = 100_000
    continuous: Annotated[bool, Meta(description="On a server: go on until it stops, and return at once.")] = False


@declare("imports.failed", "GET /admin/imports/failed", role=Role.OPERATOR, about=Access.ALL)
class ListFailed(PageRequest[FailedReply], frozen=True, kw_only=True):
    """What could not become a letter."""


# --- letters --------------------------------------------------------------------------------------------------


class Filter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which letters: all of what is set must fit."""

    # None at all, said explicitly, would be all letters.
    ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=100_000, description="Ids, separated by commas.")] = ()
    queue: Annotated[Text, Meta(description="The dead-letter queue it was captured from.")] = ""
    source_queue: Annotated[Text, Meta(description="The queue it died in.")] = ""
    type: Annotated[Text, Meta(description="The message type.")] = ""
    reason: Annotated[Text, Meta(description="Why it died: rejected, expired, attempts, …")] = ""
    error: Annotated[Text, Meta(description="A part of the error's type or message.")] = ""
    group: Annotated[Text, Meta(description="The key of a failure group.")] = ""
    state: Annotated[
        State, Meta(description="captured, redriving, redriven, resolved, came_back, archived or discarded.")
    ] = ""
    header: Annotated[Text, Meta(description="The name of a header.")] = ""
    header_value: Annotated[Text, Meta(description="The value of that header.")] = ""
    text: Annotated[Text, Meta(description="Words in the body or the error.")] = ""
    captured_after: Annotated[datetime | None, Meta(description="Captured after this moment.")] = None
    captured_before: Annotated[datetime | None, Meta(description="Captured before this moment.")] = None
    died_after: Annotated[datetime | None, Meta(description="Died after this moment.")] = None
    died_before: Annotated[datetime | None, Meta(description="Died before this moment.")] = None
    older_than: Annotated[Duration, Meta(description="Died at least so long ago: 90m, 24h.")] = ""

    def selection(self, now_us: int) -> Selection:
        """The same for the vault."""
        died_before_us = microseconds(self.died_before) if self.died_before else 0
        if self.older_than:
            age_us = parse_duration(self.older_than, what="older_than")
            latest = max(1, microseconds(moment(now_us)) - age_us)
            died_before_us = min(died_before_us or latest, latest)
        return view(
            Selection,
            self,
            state=LetterState(self.state) if self.state else None,
            captured_after_us=microseconds(self.captured_after) if self.captured_after else 0,
            captured_before_us=microseconds(self.captured_before) if self.captured_before else 0,
            died_after_us=microseconds(self.died_after) if self.died_after else 0,
            died_before_us=died_before_us,
        )


@declare("letters.search", "GET /admin/letters", role=Role.VIEWER, about="queue", limit="ids")
class SearchLetters(Filter, Request[LettersReply], frozen=True, kw_only=True):
    """Find letters, newest first."""

    limit: Annotated[Limit, Meta(description="At most so many.")] = PAGE_COUNT_DEFAULT
    cursor: Annotated[str, Meta(max_length=200, description="Where the page before ended.")] = ""


@declare("letters.count", "GET /admin/letters/count", role=Role.VIEWER, about="queue", limit="ids")
class CountLetters(Filter, Request[CountReply], frozen=True, kw_only=True):
    """Count letters exactly, however long that takes: as many as an action on them is to be told."""


@declare("letters.values", "GET /admin/letters/values", role=Role.VIEWER, about="queue")
class ListValues(Request[ValuesReply], frozen=True, kw_only=True):
    """What the newest letters can be found by: their queues, types, reasons, errors, groups and headers."""

    queue: Annotated[Text, Meta(description="Of the letters of this dead-letter queue.")] = ""


class ActionRequest(Request[ActionReply], frozen=True, kw_only=True):
    """A selection, and how many letters the caller saw in it: with another number nothing is done."""

    selection: Annotated[Filter, Meta(description="Which letters.")]
    count: Annotated[
        int, Meta(ge=0, le=1_000_000, description="How many letters you expect; without it they are only counted.")
    ]
    reason: Reason = ""


@declare("letters.archive", "POST /admin/letters/archive", role=Role.OPERATOR, about="selection.queue", limit="ids")
class ArchiveLetters(ActionRequest, frozen=True, kw_only=True):
    """Archive a selection: as many letters as were seen, or none."""


@declare("letters.restore", "POST /admin/letters/restore", role=Role.OPERATOR, about="selection.queue", limit="ids")
class RestoreLetters(ActionRequest, frozen=True, kw_only=True):
    """Restore a selection: as many letters as were seen, or none."""


@declare("letters.discard", "POST /admin/letters/discard", role=Role.ADMIN, about="selection.queue", limit="ids")
class DiscardLetters(ActionRequest, frozen=True, kw_only=True):
    """Discard a selection: as many letters as were seen, or none."""


@declare("letters.resolve", "POST /admin/letters/resolve", role=Role.OPERATOR, about="selection.queue", limit="ids")
class ResolveLetters(ActionRequest, frozen=True, kw_only=True):
    """Resolve a selection: as many letters as were seen, or none."""


@declare("letters.show", "GET /admin/letters/{id}", role=Role.VIEWER, about=Access.FOUND)
class ReadLetter(Request[LetterReply], frozen=True, kw_only=True):
    """One letter."""

    id: LetterId


@declare("letters.body", "GET /admin/letters/{id}/body", role=Role.OPERATOR, about=Access.FOUND, media=BYTES)
class ReadBody(Request[bytes], frozen=True, kw_only=True):
    """The bytes of a letter, or a part of them."""

    id: LetterId
    revision: Annotated[Id | None, Meta(description="Of this revision; of the newest if left out.")] = None
    original: Annotated[bool, Meta(description="Of the original.")] = False
    skip: Annotated[int, Meta(ge=0, le=ID_MAX, description="From this byte on.")] = 0
    limit: Annotated[Id | None, Meta(description="At most so many bytes; all of them if left out.")] = None


@declare("letters.revisions", "GET /admin/letters/{id}/revisions", role=Role.OPERATOR, about=Access.FOUND)
class ListRevisions(Request[list[RevisionView]], frozen=True, kw_only=True):
    """Edits of a letter."""

    id: LetterId


@declare(
    "letters.edit",
    "POST /admin/letters/{id}/revisions",
    role=Role.ADMIN,
    about=Access.FOUND,
    schema="EditRequest",
    limit="letter",
)
class EditLetter(Request[EditReply], frozen=True, kw_only=True):
    """Edit a letter: a new revision, the original stays.

    It edits the revision that the caller saw.
    """

    id: LetterId
    revision: Annotated[
        int, Meta(ge=0, le=ID_MAX, description="The newest revision that you have seen; 0 is the original.")
    ]
    body: Annotated[bytes | None, Meta(description="The new body.")] = None
    put: Annotated[dict[str, Any], Meta(description="Headers to set.")] = {}
    drop: Annotated[list[Text], Meta(description="A header to take off.")] = []
    sensitive: Annotated[bool, Meta(description="Also headers that decide where it goes.")] = False
    restore: Annotated[bool, Meta(description="Make the original the newest revision.")] = False
    reason: Reason = ""


@declare("letters.history", "GET /admin/letters/{id}/history", role=Role.VIEWER, about=Access.FOUND)
class ReadHistory(Request[HistoryReply], frozen=True, kw_only=True):
    """What was done to it."""

    id: LetterId


@declare(
    "letters.export", "GET /admin/export", role=Role.OPERATOR, about="queue", media="application/jsonl", limit="ids"
)
class ExportLetters(Filter, Request[Stream], frozen=True, kw_only=True):
    """Letters as JSON Lines, byte for byte."""


# --- groups, plans and redrives -------------------------------------------------------------------------------


@declare("groups.list", "GET /admin/groups", role=Role.VIEWER, about=Access.ALL)
class ListGroups(Request[GroupsReply], frozen=True, kw_only=True):
    """Letters that died of one cause."""

    status: Annotated[
        Literal["", "open", "resolved", "ignored", "regressed"],
        Meta(description="open, resolved, ignored or regressed."),
    ] = ""
    text: Annotated[Text, Meta(description="A part of its title or its note.")] = ""
    first_after: Annotated[datetime | None, Meta(description="Seen for the first time after this moment.")] = None
    first_before: Annotated[datetime | None, Meta(description="Seen for the first time before this moment.")] = None
    hours: Annotated[
        Hours | None, Meta(description="Also the arrivals of each of so many hours; the last one is not over.")
    ] = None
    limit: Annotated[Limit, Meta(description="At most so many.")] = PAGE_COUNT_DEFAULT
    cursor: Annotated[Text, Meta(description="Where the page before ended.")] = ""


@declare("groups.show", "GET /admin/groups/{key}", role=Role.VIEWER, about=Access.ALL)
class ReadGroup(Request[GroupView], frozen=True, kw_only=True):
    """One group."""

    key: Annotated[str, Meta(description="The key of the group.")]
    hours: Annotated[
        Hours | None, Meta(description="Also the arrivals of each of so many hours; the last one is not over.")
    ] = None


@declare("groups.change", "POST /admin/groups/{key}", role=Role.OPERATOR, about=Access.ALL, schema="GroupChange")
class ChangeGroup(Request[GroupView], frozen=True, kw_only=True):
    """Resolve, ignore or reopen a group, or note something about it."""

    key: Annotated[str, Meta(description="The key of the group.")]
    status: Annotated[Literal["open", "resolved", "ignored"] | None, Meta(description="open, resolved or ignored.")] = (
        None
    )
    note: Annotated[LongText | None, Meta(description="What is known about it.")] = None


@declare(
    "plans.make",
    "POST /admin/plans",
    role=Role.OPERATOR,
    about="selection.queue",
    names=("target",),
    redrives=True,
    is_change=False,
    schema="PlanRequest",
    limit="ids",
)
class PlanRedrive(Request[Plan], frozen=True, kw_only=True):
    """What a redrive would do: the frozen set, its targets, and what is left out."""

    selection: Annotated[Filter, Meta(description="Which letters.")]
    target: Annotated[Target, Meta(description="Where they go; each to the queue it died in if left out.")] = Target()
    max_per_s: Annotated[
        int, Meta(ge=0, le=100_000, description="At most so many letters a second; 0 is no limit.")
    ] = 0
    redrives_max: Annotated[int, Meta(ge=1, le=1_000, description="Leave out what was redriven so often.")] = 5
    force: Annotated[bool, Meta(description="Do not leave it out.")] = False
    canary: Annotated[Canary | None, Meta(description="Send a few first and see whether they come back.")] = None

    def wish(self, now_us: int) -> PlanOptions:
        """The same for the planner."""
        return view(PlanOptions, self, selection=self.selection.selection(now_us))


@declare("plans.show", "GET /admin/plans/{hash}", role=Role.OPERATOR, about=Access.FOUND, redrives=True)
class ReadPlan(Request[Plan], frozen=True, kw_only=True):
    """A plan."""

    hash: Annotated[str, Meta(description="The hash of a plan.")]


@declare("redrives.list", "GET /admin/redrives", role=Role.VIEWER, about=Access.EACH)
class ListRedrives(PageRequest[RedrivesReply], frozen=True, kw_only=True):
    """Tasks, newest first."""

    under_way: Annotated[bool | None, Meta(description="Only tasks that go on or can; false: only the others.")] = None
    plan: Annotated[str, Meta(max_length=64, description="Only those of the plan with this hash.")] = ""


@declare(
    "redrives.start",
    "POST /admin/redrives",
    role=Role.OPERATOR,
    about=Access.FOUND,
    redrives=True,
    schema="StartRequest",
)
class StartRedrive(Request[RedriveTask], frozen=True, kw_only=True):
    """Execute a plan, exactly."""

    plan: Annotated[str, Meta(max_length=64, description="The hash of a plan.")]
    name: Annotated[str, Meta(max_length=200, description="What the task is called.")] = ""
    reason: Reason = ""
    operation: Annotated[str, Meta(max_length=200, description="Two starts with one of these make one task.")] = ""


class TaskRequest(Request[RedriveTask], frozen=True, kw_only=True):
    """A task by its id."""

    id: TaskId


@declare("redrives.show", "GET /admin/redrives/{id}", role=Role.VIEWER, about=Access.FOUND)
class ReadRedrive(TaskRequest, frozen=True, kw_only=True):
    """One task and its progress."""


@declare("redrives.letters", "GET /admin/redrives/{id}/letters", role=Role.VIEWER, about=Access.FOUND)
class ListRedriveLetters(PageRequest[RedriveLettersReply], frozen=True, kw_only=True):
    """What became of each letter of a task."""

    id: TaskId
    outcome: Annotated[
        Literal["", "waiting", "under_way", "redriven", "failed", "skipped", "unknown", "came_back"],
        Meta(description="Only those with this outcome."),
    ] = ""


@declare("redrives.pause", "POST /admin/redrives/{id}/pause", role=Role.OPERATOR, about=Access.FOUND, redrives=True)
class PauseRedrive(TaskRequest, frozen=True, kw_only=True):
    """Pause a task."""


@declare("redrives.resume", "POST /admin/redrives/{id}/resume", role=Role.OPERATOR, about=Access.FOUND, redrives=True)
class ResumeRedrive(TaskRequest, frozen=True, kw_only=True):
    """Resume a task."""


@declare("redrives.cancel", "POST /admin/redrives/{id}/cancel", role=Role.OPERATOR, about=Access.FOUND, redrives=True)
class CancelRedrive(TaskRequest, frozen=True, kw_only=True):
    """Cancel a task."""


# --- ledger, tokens, events and sessions ----------------------------------------------------------------------


class LedgerFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows of the ledger: all of what is set must fit."""

    actor: Annotated[Text, Meta(description="Who did it.")] = ""
    action: Annotated[Text, Meta(description="What was done, such as letters.discard.")] = ""
    outcome: Annotated[
        Literal["", "done", "refused", "denied", "failed"], Meta(description="done, refused, denied or failed.")
    ] = ""
    queue: Annotated[Text, Meta(description="The dead-letter queue of the letters.")] = ""
    letter: Annotated[Id | None, Meta(description="The id of a letter that it names.")] = None
    done_after: Annotated[datetime | None, Meta(description="Done after this moment.")] = None
    done_before: Annotated[datetime | None, Meta(description="Done before this moment.")] = None


@declare("ledger.read", "GET /admin/ledger", role=Role.OPERATOR, about=Access.ALL)
class ReadLedger(LedgerFilter, Request[LedgerReply], frozen=True, kw_only=True):
    """Who did what, oldest first."""

    limit: Annotated[Limit, Meta(description="At most so many.")] = PAGE_COUNT_DEFAULT
    cursor: Annotated[str, Meta(max_length=200, description="Where the page before ended.")] = ""
    newest_first: Annotated[bool, Meta(description="The newest rows first.")] = False


@declare("ledger.export", "GET /admin/ledger/export", role=Role.OPERATOR, about=Access.ALL, media="text/csv")
class ExportLedger(LedgerFilter, Request[Stream], frozen=True, kw_only=True):
    """Who did what, as a table for a spreadsheet (CSV), oldest first."""


@declare("ledger.head", "GET /admin/ledger/head", role=Role.VIEWER, about=Access.ALL)
class ReadHead(Request[HeadReply], frozen=True, kw_only=True):
    """The anchor of the chain."""


@declare("ledger.verify", "GET /admin/ledger/verify", role=Role.OPERATOR, about=Access.ALL)
class VerifyLedger(Request[Verified], frozen=True, kw_only=True):
    """Whether the chain holds."""

    anchor: Annotated[str, Meta(description="A head that was noted before.")] = ""


@declare("balance.read", "GET /admin/balance", role=Role.VIEWER, about=Access.EACH)
class ReadBalance(Request[list[BalanceRow]], frozen=True, kw_only=True):
    """Letters by queue and state, from two sides."""


@declare("config.show", "GET /admin/config", role=Role.ADMIN, about=Access.ALL)
class ReadSettings(Request[list[SettingView]], frozen=True, kw_only=True):
    """What this server was started with, and where each value came from; secrets are hidden."""


@declare("tokens.list", "GET /admin/tokens", role=Role.ADMIN, about=Access.ALL)
class ListTokens(Request[list[TokenView]], frozen=True, kw_only=True):
    """API tokens."""


@declare("tokens.create", "POST /admin/tokens", role=Role.ADMIN, about=Access.ALL, schema="TokenRequest")
class CreateToken(Request[TokenReply], frozen=True, kw_only=True):
    """Make a token; it is shown this once."""

    name: Annotated[str, Meta(min_length=1, max_length=512, description="What it is called.")]
    role: Annotated[Literal["viewer", "operator", "admin"], Meta(description="viewer, operator or admin.")]
    expires_in: Annotated[Duration, Meta(description="For how long it is valid; for ever if left out.")] = ""
    queues: Annotated[list[Text], Meta(description="A pattern of queues that it is for.")] = []

    def expires_at(self, now_us: int) -> datetime | None:
        """The moment, or none for a token that does not expire."""
        if not self.expires_in:
            return None
        return moment(now_us) + timedelta(microseconds=parse_duration(self.expires_in, what="expires_in"))


@declare("tokens.revoke", "DELETE /admin/tokens/{name}", role=Role.ADMIN, about=Access.ALL)
class RevokeToken(Request[ActionReply], frozen=True, kw_only=True):
    """Revoke a token."""

    name: Annotated[str, Meta(description="Which one.")]


@declare("events.watch", "GET /admin/events", role=Role.VIEWER, about=Access.ALL, media="text/event-stream")
class WatchEvents(Request[Stream], frozen=True, kw_only=True):
    """Progress and arrivals as server-sent events."""


@declare("session.open", "POST /admin/session", role=Role.VIEWER, about=Access.ITSELF)
class OpenSession(Request[SessionReply], frozen=True, kw_only=True):
    """Open a session with a token: a cookie, and the token that every change by cookie needs."""


@declare("session.show", "GET /admin/session", role=Role.VIEWER, about=Access.ITSELF)
class ReadSession(Request[SessionReply], frozen=True, kw_only=True):
    """The session of this cookie."""


@declare("session.close", "DELETE /admin/session", role=Role.VIEWER, about=Access.ITSELF)
class CloseSession(Request[ActionReply], frozen=True, kw_only=True):
    """End the session of this cookie."""


@declare("session.link", "POST /admin/session/link", role=Role.VIEWER, about=Access.ITSELF)
class LinkSession(Request[LinkReply], frozen=True, kw_only=True):
    """Make a link that opens a session once, within five minutes, in a browser on the server's own machine."""
