"""The first page: what died, where, since when; what is done about it; and what needs somebody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from starlette.responses import Response

from holdfast.core.plan import RedriveState, RedriveTask
from holdfast.core.requests.queue import CreateQueueRequest, DepthsReply, DepthsRequest
from holdfast.core.requests.vault import (
    CaptureReport,
    DeadQueueView,
    GroupView,
    LetterView,
    ListGroups,
    ListRedrives,
    OverviewReply,
    QueueHistory,
    ReadOverview,
    ReadOverviewHistory,
    SearchLetters,
    StartCapture,
)
from holdfast.core.states import LetterState
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import segment

#: So many hours are drawn, and a group is new for so long.
HOURS_COUNT = 24
#: Rows of each part; the others are on pages of their own.
QUEUES_COUNT = 100
GROUPS_COUNT = 5
REDRIVES_COUNT = 8
CAPTURED = LetterState.CAPTURED.value
#: What people call them.
BROKERS = {"rabbitmq": "RabbitMQ", "queue": "the queues of this server"}


class DeadQueueRow(NamedTuple):
    """One dead queue, with its last hours."""

    view: DeadQueueView
    history: QueueHistory

    @property
    def captured(self) -> int:
        return self.view.states.get(CAPTURED, 0)


class OverviewWarning(NamedTuple):
    """Something that needs somebody: what, why, and where it is seen."""

    tone: str
    text: str
    why: str = ""
    path: str = ""


class OverviewParts(NamedTuple):
    """What the page shows, and what of it needs somebody."""

    rows: Sequence[DeadQueueRow]
    reply: OverviewReply
    regressed: Sequence[GroupView]
    new: Sequence[GroupView]
    samples: Mapping[int, LetterView]  #: the newest letter of each of these groups
    redrives: Sequence[RedriveTask]
    queues: DepthsReply  #: of the embedded service: how many there are
    failing: DepthsReply

    @property
    def captured(self) -> int:
        return sum(row.captured for row in self.rows)

    @property
    def uncaptured(self) -> int:
        """In the queues themselves, as far as that is known."""
        return sum(row.view.ready or 0 for row in self.rows)

    @property
    def letters(self) -> int:
        """In the vault, whatever became of them; those that retention took are not."""
        gone = LetterState.DELETED.value
        return sum(count for row in self.rows for state, count in row.view.states.items() if state != gone)

    @property
    def oldest_at(self) -> datetime | None:
        return min((row.view.oldest_at for row in self.rows if row.view.oldest_at), default=None)

    def hours(self, kind: str) -> list[int]:
        """Of all queues together."""
        found = [getattr(row.history, kind) for row in self.rows]
        return [sum(values) for values in zip(*found, strict=True)] or [0] * HOURS_COUNT

    @property
    def causes(self) -> list[GroupView]:
        """Those that are back come first."""
        return [*self.regressed, *self.new]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever here."""
        return not self.rows and not self.queues.count

    @property
    def standing(self) -> list[CaptureReport]:
        """Captures that should run and do not."""
        captures = [row.view.capture for row in self.rows]
        return [one for one in captures if one is not None and one.state in ("waiting", "failed")]

    def attention(self) -> Iterator[OverviewWarning]:
        """The worst first; letters that wait are no trouble by themselves, they have a number of their own."""
        for broker in self.reply.brokers:
            if broker.reachable is False:
                yield OverviewWarning("bad", f"No answer from {BROKERS[broker.broker]}", broker.why)
            if broker.redrives_wait:
                yield OverviewWarning("bad", f"Redrives to {BROKERS[broker.broker]} wait", broker.redrives_why)
        for queue in self.failing.queues:
            yield OverviewWarning("bad", f"A storage of the queue {queue.queue_name} does not answer", "", "/queues")
        for capture in self.standing:
            yield OverviewWarning("warn", f"The capture of {capture.queue} stands still", capture.why)
        for row in self.rows:
            if row.view.capture and (count := row.view.capture.failed_imports):
                what = f"{count} message{'s' if count != 1 else ''} of {row.view.queue} could not be made a letter"
                yield OverviewWarning("warn", what, "kept, with their bodies: GET /admin/imports/failed")
        for redrive in self.redrives:
            if redrive.state is RedriveState.STOPPED:
                name = redrive.name or f"Redrive {redrive.id}"
                yield OverviewWarning("warn", f"{name} was stopped", redrive.why, f"/redrives/{redrive.id}")
        for group in self.regressed:
            what = f"{group.title or group.key} is back, after it was resolved"
            yield OverviewWarning("bad", what, group.note, f"/groups/{segment(group.key)}")


@page("GET /", bar="Overview")
async def overview(visit: Visit) -> Response:
    """Every dead queue, and whether anything stands still."""
    parts, trouble = None, ""
    try:
        parts = await _parts(visit)
    except StorageFailed as error:
        visit.status, trouble = 503, error.message
    rows = parts.rows if parts else []
    return visit.page(
        "overview.html",
        title="Overview",
        parts=parts,
        trouble=trouble,
        shown=rows if visit.query.get("queues") == "all" else rows[:QUEUES_COUNT],
        attention=list(parts.attention()) if parts else [],
        samples=parts.samples if parts else {},
        sees_groups=visit.may(ListGroups),
        captures=visit.may(StartCapture),
        makes_queues=visit.may(CreateQueueRequest),
        brokers=BROKERS,
    )


@page("POST /captures")
async def capture(visit: Visit) -> Response:
    """Begins to capture what dies into a queue."""
    queue = visit.form.get("queue", "")
    try:
        await visit.ask(StartCapture(queue=queue, continuous=True))
    except HoldfastError as error:
        visit.refuse(error)
        return await overview(visit)
    return visit.redirect("/", f"What dies into {queue} is captured from now on, until this server ends.")


async def _parts(visit: Visit) -> OverviewParts:
    reply = await visit.ask(ReadOverview())
    history = {one.queue: one for one in (await visit.ask(ReadOverviewHistory(hours=HOURS_COUNT))).queues}
    none = [0] * HOURS_COUNT
    rows = [
        DeadQueueRow(one, history.get(one.queue) or QueueHistory(one.queue, none, none, none)) for one in reply.queues
    ]
    rows.sort(key=lambda row: (-row.captured, row.view.queue))
    regressed: Sequence[GroupView] = ()
    new: Sequence[GroupView] = ()
    if visit.may(ListGroups):
        since = datetime.now(UTC) - timedelta(hours=HOURS_COUNT)
        asked = ListGroups(status="regressed", limit=GROUPS_COUNT, hours=HOURS_COUNT)
        regressed = (await visit.ask(asked)).groups
        asked = ListGroups(status="open", first_after=since, limit=GROUPS_COUNT, hours=HOURS_COUNT)
        new = (await visit.ask(asked)).groups
    ids = tuple(one.sample for one in (*regressed, *new))
    samples = (await visit.ask(SearchLetters(ids=ids, limit=len(ids)))).letters if ids else ()
    return OverviewParts(
        rows=rows,
        reply=reply,
        regressed=regressed,
        new=new,
        samples={one.id: one for one in samples},
        redrives=(await visit.ask(ListRedrives(under_way=True, limit=REDRIVES_COUNT))).redrives,
        queues=await visit.ask(DepthsRequest(limit=1)),
        failing=await visit.ask(DepthsRequest(failing=True, limit=GROUPS_COUNT)),
    )
