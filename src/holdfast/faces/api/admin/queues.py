"""/admin/dlq and /admin/captures: dead-letter queues, what is in them, and bringing it into custody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from holdfast.core.ledger import expand
from holdfast.core.plan import Plan, PlanOptions, RedriveState
from holdfast.core.selection import Selection, decode_cursor, encode_cursor
from holdfast.core.states import LetterState
from holdfast.errors import HoldfastError
from holdfast.faces.api.admin.desk import AdminContext, Endpoint
from holdfast.faces.api.admin.views import (
    CaptureRequest,
    FailedReply,
    FailedView,
    Limit,
    MessagesReply,
    MessageView,
    PageQuery,
    RedriveQueueReply,
    RedriveQueueRequest,
)
from holdfast.services.vault.capture import CaptureReport
from holdfast.services.vault.custody import QueueView, check_all_queues, check_queue

REDRIVE_TIMEOUT_S = 60.0
REDRIVE_STEP_S = 0.05
CAPTURE_IDLE_S = 0.5
#: So many letters are looked at, to find some that can go.
PASSED_OVER_MAX = 100_000


class MessagesQuery(Struct, frozen=True, kw_only=True):
    """How many, and whether the queue itself may be read where that costs something."""

    limit: Limit = 20
    live: bool = False


async def queues(desk: AdminContext) -> list[QueueView]:
    return await desk.custody.dead_queues(desk.caller)


async def messages(desk: AdminContext) -> MessagesReply:
    queue, query = desk.text("queue"), desk.query(MessagesQuery)
    check_queue(desk.caller, queue)
    selection = Selection(queue=queue, state=LetterState.CAPTURED)
    waiting = await desk.custody.waiting(queue, desk.caller)
    if not query.live and (await desk.vault.letters.count(selection)).count:
        page = await desk.vault.letters.find(selection, count_max=query.limit)
        found = [MessageView.of(one, (await desk.custody.content(one)).body) for one in page.letters]
        return MessagesReply(source="vault", messages=found, cost="none: read from the vault", waiting=waiting)
    letters = await desk.custody.peek(queue, desk.caller, count_max=query.limit, live=query.live)
    cost = "each letter was delivered once and given back; where the queue counts that, it counted"
    views = [MessageView.of(one, one.body) for one in letters]
    return MessagesReply(source="live", messages=views, cost=cost, waiting=waiting)


async def redrive(desk: AdminContext) -> RedriveQueueReply:
    """Into the vault, then out of it: committed, then acked; confirmed, then settled."""
    queue, limit = desk.text("queue"), desk.body(RedriveQueueRequest).limit
    await desk.custody.known(queue, desk.caller)
    plan = await _oldest_that_can_go(desk, queue, limit)
    if (plan.count if plan else 0) < limit and not desk.custody.is_capturing(queue):
        count = limit - (plan.count if plan else 0)
        await desk.custody.capture(queue, desk.caller, count_max=count, idle_s=CAPTURE_IDLE_S)
        plan = await _oldest_that_can_go(desk, queue, limit)
    if plan is None:
        return RedriveQueueReply(redriven=0, kept=0, possible_duplicates=0, reasons={})
    reasons, left_out_count = Counter({one.why: one.count for one in plan.reasons}), plan.left_out_count
    if not plan.count:
        return RedriveQueueReply(redriven=0, kept=left_out_count, possible_duplicates=0, reasons=dict(reasons))
    if plan.count > limit:
        plan = await _planned(desk, queue, expand(plan.ids)[:limit])
    act = desk.act(reason="re-drive")
    task, _ = await desk.office.planner.execute(plan.hash, desk.caller, act, name=f"re-drive of {queue}"[:200])
    desk.office.redrives.begin(task)
    deadline = asyncio.get_running_loop().time() + REDRIVE_TIMEOUT_S
    while (task := await desk.office.redrives.find(task.id)).state is RedriveState.RUNNING:
        if asyncio.get_running_loop().time() > deadline:
            reasons[f"still under way, see /admin/redrives/{task.id}"] += task.total - task.redriven
            break
        await asyncio.sleep(REDRIVE_STEP_S)
    if task.failed:
        reasons["the broker did not take it"] += task.failed
    return RedriveQueueReply(
        redriven=task.redriven,
        kept=left_out_count + task.total - task.redriven,
        possible_duplicates=max(task.possible_duplicates, task.unknown),
        reasons=dict(reasons),
    )


async def _oldest_that_can_go(desk: AdminContext, queue: str, limit: int) -> Plan | None:
    """What cannot go is passed over, or it would be in the way of all others for ever. None when there is no letter."""
    selection = Selection(queue=queue, state=LetterState.CAPTURED)
    count = limit
    while True:
        found = await desk.vault.letters.oldest_ids(selection, count_max=count)
        if not found:
            return None
        plan = await _planned(desk, queue, [one for one, _ in found])
        if plan.count >= limit or len(found) < count or count >= PASSED_OVER_MAX:
            return plan
        count = min(count * 10, PASSED_OVER_MAX)


async def _planned(desk: AdminContext, queue: str, ids: Sequence[int]) -> Plan:
    return await desk.office.planner.plan(PlanOptions(selection=Selection(ids=tuple(ids), queue=queue)), desk.caller)


async def captures(desk: AdminContext) -> list[CaptureReport]:
    return [one for one in desk.custody.captures() if desk.caller.may_touch(one.queue)]


async def start_capture(desk: AdminContext) -> CaptureReport:
    wanted = desk.body(CaptureRequest)
    if wanted.continuous:
        return await desk.custody.start_capture(wanted.queue, desk.caller)
    try:
        return await desk.custody.capture(wanted.queue, desk.caller, count_max=wanted.limit, idle_s=CAPTURE_IDLE_S)
    except HoldfastError:
        raise


async def failed(desk: AdminContext) -> FailedReply:
    query = desk.query(PageQuery)
    check_all_queues(desk.caller)
    after = decode_cursor("failed", query.cursor) if query.cursor else 0
    found = await desk.vault.letters.failed(after=after, count_max=query.limit)
    views = [
        FailedView(id=one.id, queue=one.queue, reason=one.reason, at=one.at, body=one.body, properties=one.properties)
        for one in found
    ]
    return FailedReply(failed=views, next=encode_cursor("failed", found[-1].id) if len(found) == query.limit else "")


ENDPOINTS = (
    Endpoint("dlq.queues", "GET", "/admin/dlq/queues", queues, list[QueueView], "Dead-letter queues and their letters"),
    Endpoint(
        "dlq.messages",
        "GET",
        "/admin/dlq/queues/{queue}/messages",
        messages,
        MessagesReply,
        "Letters of a queue, from the vault, or from the queue itself where that costs nothing",
        query=(MessagesQuery,),
    ),
    Endpoint(
        "dlq.redrive",
        "POST",
        "/admin/dlq/queues/{queue}/re-drive",
        redrive,
        RedriveQueueReply,
        "Send letters of a queue back to where they died",
        request=RedriveQueueRequest,
        is_change=True,
    ),
    Endpoint("captures.list", "GET", "/admin/captures", captures, list[CaptureReport], "Captures of this server"),
    Endpoint(
        "captures.start",
        "POST",
        "/admin/captures",
        start_capture,
        CaptureReport,
        "Take the letters of a queue into custody",
        request=CaptureRequest,
        is_change=True,
    ),
    Endpoint(
        "imports.failed",
        "GET",
        "/admin/imports/failed",
        failed,
        FailedReply,
        "What could not become a letter",
        query=(PageQuery,),
    ),
)
