"""What /admin takes and answers: the JSON shapes, each once, for the handlers and the OpenAPI document."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from holdfast.core.ledger import LedgerRow
from holdfast.core.letter import GroupStatus, Letter, NewLetter
from holdfast.core.moments import microseconds, moment, moment_or_none, parse_duration
from holdfast.core.plan import Canary, PlanOptions, RedriveTask, Target
from holdfast.core.selection import ID_MAX, PAGE_COUNT_DEFAULT, PAGE_COUNT_MAX, TEXT_CHARACTERS_MAX, Selection
from holdfast.core.states import LetterState

Id = Annotated[int, Meta(ge=1, le=ID_MAX)]
Limit = Annotated[int, Meta(ge=1, le=PAGE_COUNT_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
LongText = Annotated[str, Meta(max_length=2_000)]
State = Literal["", "captured", "redriving", "redriven", "resolved", "came_back", "archived", "discarded"]


class Filter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which letters: all of what is set must fit."""

    ids: Annotated[tuple[Id, ...], Meta(max_length=100_000)] = ()
    queue: Text = ""
    source_queue: Text = ""
    type: Text = ""
    reason: Text = ""
    error: Text = ""
    group: Text = ""
    state: State = ""
    header: Text = ""
    header_value: Text = ""
    text: Text = ""
    captured_after: datetime | None = None
    captured_before: datetime | None = None
    died_after: datetime | None = None
    died_before: datetime | None = None
    older_than: Annotated[str, Meta(max_length=15)] = ""  #: a duration: died at least so long ago

    def selection(self, now_us: int) -> Selection:
        """The same for the vault."""
        died_before_us = microseconds(self.died_before) if self.died_before else 0
        if self.older_than:
            age_us = parse_duration(self.older_than, what="older_than")
            latest = max(1, microseconds(moment(now_us)) - age_us)
            died_before_us = min(died_before_us or latest, latest)
        return Selection(
            ids=self.ids,
            queue=self.queue,
            source_queue=self.source_queue,
            type=self.type,
            reason=self.reason,
            error=self.error,
            group=self.group,
            state=LetterState(self.state) if self.state else None,
            header=self.header,
            header_value=self.header_value,
            text=self.text,
            captured_after_us=microseconds(self.captured_after) if self.captured_after else 0,
            captured_before_us=microseconds(self.captured_before) if self.captured_before else 0,
            died_after_us=microseconds(self.died_after) if self.died_after else 0,
            died_before_us=died_before_us,
        )


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
        return cls(
            id=letter.id,
            queue=letter.queue,
            state=letter.state.value,
            message_id=letter.message_id,
            type=letter.type,
            exchange=letter.exchange,
            routing_key=letter.routing_key,
            source_queue=death.queue,
            reason=death.reason,
            attempts=death.count,
            first_died_at=moment_or_none(death.first_at_us),
            died_at=moment_or_none(death.last_at_us),
            error_type=death.error_type,
            error_message=death.error_message,
            error_stack=death.error_stack,
            group=letter.group,
            redriven_count=letter.redriven_count,
            revision=letter.revision,
            came_from=letter.came_from,
            captured_at=moment(letter.captured_at_us),
            body_bytes=letter.body_bytes,
            headers=letter.headers,
            properties=letter.shown,
        )


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
        return cls(
            id=str(letter.id) if isinstance(letter, Letter) else "",
            message_id=letter.message_id,
            type=letter.type,
            reason=letter.death.reason,
            attempts=letter.death.count,
            died_at=moment_or_none(letter.death.last_at_us),
            exchange=letter.exchange,
            routing_key=letter.routing_key,
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


class RedriveQueueRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many letters of a queue to send back."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10


class RedriveQueueReply(Struct, frozen=True, kw_only=True):
    """What became of them. Kept ones are in the vault."""

    redriven: int
    kept: int
    possible_duplicates: int
    reasons: dict[str, int]


class ActionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A selection, and how many letters the caller saw in it: with another number nothing is done."""

    selection: Filter
    count: Annotated[int, Meta(ge=0, le=1_000_000)]
    reason: LongText = ""


class ActionReply(Struct, frozen=True):
    """How many letters changed."""

    count: int


class EditRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edit of the revision that the caller saw. `restore` makes the original the newest revision."""

    revision: Annotated[int, Meta(ge=0, le=ID_MAX)]
    body: bytes | None = None
    put: dict[str, Any] = {}
    drop: list[Text] = []
    sensitive: bool = False
    restore: bool = False
    reason: LongText = ""


class EditReply(Struct, frozen=True):
    """The number of the new revision."""

    revision: int


class RevisionView(Struct, frozen=True, kw_only=True):
    """One edit."""

    number: int
    at: datetime
    by: str
    note: str
    body: bytes | None
    put: dict[str, Any]
    drop: list[str]


class GroupView(Struct, frozen=True, kw_only=True):
    """A failure group."""

    key: str
    title: str
    count: int
    first_at: datetime
    last_at: datetime
    sample: int
    status: GroupStatus
    note: str


class GroupsReply(Struct, frozen=True, kw_only=True):
    """A page of groups."""

    groups: list[GroupView]
    next: str = ""


class GroupChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of a group."""

    status: Literal["open", "resolved", "ignored"] | None = None
    note: LongText | None = None


class PlanRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan is asked for."""

    selection: Filter
    target: Target = Target()
    max_per_s: Annotated[int, Meta(ge=0, le=100_000)] = 0
    redrives_max: Annotated[int, Meta(ge=1, le=1_000)] = 5
    force: bool = False
    canary: Canary | None = None

    def wish(self, now_us: int) -> PlanOptions:
        """The same for the planner."""
        return PlanOptions(
            selection=self.selection.selection(now_us),
            target=self.target,
            max_per_s=self.max_per_s,
            redrives_max=self.redrives_max,
            force=self.force,
            canary=self.canary,
        )


class StartRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Execute a plan. Two requests with one `operation` make one task."""

    plan: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(max_length=200)] = ""
    reason: LongText = ""
    operation: Annotated[str, Meta(max_length=200)] = ""


class RedrivesReply(Struct, frozen=True, kw_only=True):
    """A page of tasks."""

    redrives: list[RedriveTask]
    next: str = ""


class CaptureRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capture what is in a queue now, or from now on."""

    queue: Text
    continuous: bool = False
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100_000


class FailedView(Struct, frozen=True, kw_only=True):
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


class TokenRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to make."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    role: Literal["viewer", "operator", "admin"]
    expires_in: Annotated[str, Meta(max_length=15)] = ""
    queues: list[Text] = []

    def expires_at(self, now_us: int) -> datetime | None:
        """The moment, or none for a token that does not expire."""
        if not self.expires_in:
            return None
        return moment(now_us) + timedelta(microseconds=parse_duration(self.expires_in, what="expires_in"))


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


class Problem(Struct, frozen=True, kw_only=True):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    ids: list[str] = field(default_factory=list)


class PageQuery(Struct, frozen=True, kw_only=True):
    """Which page of a list."""

    limit: Limit = PAGE_COUNT_DEFAULT
    cursor: Annotated[str, Meta(max_length=200)] = ""
