"""Queues of the embedded service: how full they are, what is in one, and all that may be done to it.

Everything about a queue is at its own address, where a form says with `do` what is to be done: names of queues may hold
a slash, so nothing stands behind them. What is deleted is shown with its count, which is typed before it is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs
from starlette.responses import Response

from holdfast.core.item import Item, NewItem, QueueInfo
from holdfast.core.moments import SECOND_US, format_duration, moment, parse_duration, written_duration
from holdfast.core.requests.declare import Request
from holdfast.core.requests.queue import (
    ClearRequest,
    CreateQueueRequest,
    DeleteQueueRequest,
    DepthsRequest,
    InfoRequest,
    ListItemsRequest,
    ListScheduledRequest,
    PartitionStats,
    PauseRequest,
    ProduceRequest,
    ResumeRequest,
    StatsRequest,
    UpdateQueueRequest,
)
from holdfast.errors import BadMethod, Conflict, HoldfastError, Invalid, NotFound, QueueMissing
from holdfast.faces.web.bodies import HEX_LINE_BYTES, as_text, hex_lines, indented
from holdfast.faces.web.console import PAGE_HEADERS, Visit, page
from holdfast.faces.web.rendering import segment, span

PAGE_COUNT = 50
ITEMS_COUNT, STEP_COUNT = 20, 4
#: A page has fewer items when so many bytes were read for it.
READ_BYTES_MAX = 16 * 2**20
#: So many queues are offered as a dead queue; where there are more, the name is written.
OFFERED_COUNT_MAX = 500
#: So much of a payload is shown.
SHOWN_BYTES_MAX, SHOWN_HEX_BYTES_MAX = 4_096, 512
SEND_TIMEOUT = "10s"
#: A new queue, before somebody says otherwise.
NEW_QUEUE = {
    "queue_name": "",
    "lease_timeout": "1m",
    "expire_timeout": "24h",
    "max_attempts": "5",
    "dead_queue": "",
    "requested_partitions": "1",
    "dead_retention": "",
    "reference": "",
}
NUMBERS = ("max_attempts", "requested_partitions")


# --- all of them ----------------------------------------------------------------------------------------------


@page("GET /queues", bar="Queues", needs=DepthsRequest)
async def queues(visit: Visit) -> Response:
    """Queues with how many items each has, a page at a time."""
    wanted: dict[str, object] = {"exact": True, "limit": PAGE_COUNT}
    wanted |= {name: visit.query[name] for name in ("search", "sort", "paused", "cursor") if name in visit.query}
    try:
        asked = msgspec.convert(wanted, DepthsRequest, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"query is invalid; {error}") from error
    found = await visit.ask(asked)
    most = max((one.queued + one.leased + one.scheduled + one.dying for one in found.queues), default=0)
    may_create = visit.may(CreateQueueRequest)
    return visit.page("queues.html", title="Queues", asked=asked, found=found, most=most, may_create=may_create)


@page("GET /new-queue")
async def new_queue(visit: Visit) -> Response:
    """The form of a new queue."""
    visit.check_role(CreateQueueRequest)
    return await _form(visit, "", NEW_QUEUE)


@page("POST /new-queue")
async def create_queue(visit: Visit) -> Response:
    """Make it."""
    given = {name: visit.form.get(name, "").strip() for name in NEW_QUEUE}
    try:
        await visit.ask(CreateQueueRequest(**_settings(visit, given)))
    except HoldfastError as error:
        visit.refuse(error)
        return await _form(visit, "", given)
    return visit.redirect(_path(given["queue_name"]), f"Queue {given['queue_name']} was created.")


async def _form(visit: Visit, queue: str, given: Mapping[str, str]) -> Response:
    """The form of a queue's settings; of a new queue without a name."""
    offered = await visit.ask(DepthsRequest(dead_queue_for=queue or "~", limit=OFFERED_COUNT_MAX))
    names = [one.queue_name for one in offered.queues]
    if given["dead_queue"] and given["dead_queue"] not in names:
        names.append(given["dead_queue"])  # what it has stays to be chosen
    return visit.page(
        "queue_form.html",
        title=f"Settings of {queue}" if queue else "New queue",
        queue=queue,
        given=given,
        dead_queues=None if offered.next else names,
        help=_texts(CreateQueueRequest),
    )


def _texts(request: type[Request[Any]]) -> dict[str, str]:
    """What is said of each field where it is declared."""
    metas = {one.name: getattr(one.type, "__metadata__", ()) for one in structs.fields(request)}
    return {
        name: next((meta.description or "" for meta in found if isinstance(meta, Meta)), "")
        for name, found in metas.items()
    }


def _settings(visit: Visit, given: Mapping[str, str]) -> dict[str, Any]:
    """What a form says, as the fields of a request. Raises Invalid."""
    return {name: visit.number(name) if name in NUMBERS else text for name, text in given.items()}


# --- one queue ------------------------------------------------------------------------------------------------


class ItemView(NamedTuple):
    """An item without its payload, and what of that is shown: in one line, and as text or in hexadecimal."""

    item: Item
    payload_bytes: int
    line: str
    text: str
    is_hex: bool
    shown_bytes: int


class ItemsView(Struct, frozen=True, kw_only=True):
    """A page of the items of one partition."""

    items: Sequence[ItemView]
    partition: int
    scheduled: bool
    pivot: str
    next: str


@page("GET /queues/{queue:any}", needs=InfoRequest)
async def queue_page(visit: Visit) -> Response:
    """One queue, or with `edit` its settings as a form."""
    name = visit.name("queue")
    if "edit" in visit.query:
        return await _form(visit, name, _as_given(await _info(visit, name)))
    return await _queue_page(visit, name)


async def _info(visit: Visit, name: str) -> QueueInfo:
    try:
        return await visit.ask(InfoRequest(queue_name=name))
    except QueueMissing as error:
        raise NotFound(error.message) from error


async def _queue_page(visit: Visit, name: str) -> Response:
    info = await _info(visit, name)
    stats = await visit.ask(StatsRequest(queue_name=name))
    depths = await visit.ask(DepthsRequest(queue_name=name))
    return visit.page(
        "queue.html",
        title=name,
        info=info,
        is_dead_queue=any(one.is_dead_queue for one in depths.queues),
        total=_together(stats.partitions),
        waiting=stats.logical_queues[0],
        partitions=[_together([one]) for one in stats.partitions],
        given=_as_given(info),
        storages={place.partition: place.storage for place in info.partitions},
        # Somebody looks at them: they stay as they were, and are not read each time that a count changes.
        items=await _items(visit, info) if visit.may(ListItemsRequest) and not visit.is_part else None,
        may={word for word, request in MAY.items() if visit.may(request)},
    )


def _together(found: Sequence[PartitionStats]) -> PartitionStats:
    """The counts of partitions; ages as the mean over their items, in words, or none."""
    total, leased = sum(one.total for one in found), sum(one.total_leased for one in found)
    return PartitionStats(
        partition=found[0].partition,
        total=total,
        total_leased=leased,
        failures=sum(one.failures for one in found),
        average_age=_mean([(one.average_age, one.total) for one in found]),
        average_leased_age=_mean([(one.average_leased_age, one.total_leased) for one in found]),
        scheduled=sum(one.scheduled for one in found),
        dying=sum(one.dying for one in found),
        overdue=sum(one.overdue for one in found),
    )


def _mean(ages: Sequence[tuple[str, int]]) -> str:
    count = sum(one for _, one in ages)
    if not count:
        return ""
    return span(sum(written_duration(age) * one for age, one in ages) / count / SECOND_US)


def _as_given(info: QueueInfo) -> dict[str, str]:
    """The settings of a queue, as a form has them."""
    retention = info.dead_retention
    return {
        "queue_name": info.queue_name,
        "lease_timeout": format_duration(written_duration(info.lease_timeout)),
        "expire_timeout": format_duration(written_duration(info.expire_timeout)),
        "max_attempts": str(info.max_attempts),
        "dead_queue": info.dead_queue,
        "requested_partitions": str(info.requested_partitions),
        "dead_retention": format_duration(written_duration(retention)) if retention else "",
        "reference": info.reference,
    }


async def _items(visit: Visit, info: QueueInfo) -> ItemsView:
    """A page of items: those that are queued or leased, or the scheduled ones."""
    query = visit.query
    text = query.get("partition", "0")
    partition = int(text) if text.isascii() and text.isdigit() and len(text) < len("10000") else 0
    scheduled, pivot = "scheduled" in query, query.get("pivot", "")
    kind = ListScheduledRequest if scheduled else ListItemsRequest
    shown: list[ItemView] = []
    after, bytes_read = pivot, 0
    # A few at a time: payloads may be large, and only what is shown of each is kept.
    while len(shown) < ITEMS_COUNT and bytes_read < READ_BYTES_MAX:
        asked = kind(queue_name=info.queue_name, partition=partition, pivot=after, limit=STEP_COUNT + 1)
        found = (await visit.ask(asked)).items
        shown += [_shown(one) for one in found[:STEP_COUNT]]
        bytes_read += sum(len(one.payload) for one in found)
        after = found[STEP_COUNT].id if len(found) > STEP_COUNT else ""
        if not after:
            break
    return ItemsView(items=shown, partition=partition, scheduled=scheduled, pivot=pivot, next=after)


def _shown(item: Item) -> ItemView:
    """JSON and XML with line breaks where it is all there, other text as it is, anything else in hexadecimal."""
    payload, item = item.payload, structs.replace(item, payload=b"")
    part = payload[:SHOWN_BYTES_MAX]
    _, text = as_text(part, is_cut_behind=len(part) < len(payload))
    if text is None:
        part = part[:SHOWN_HEX_BYTES_MAX]
        line = part[:HEX_LINE_BYTES].hex(" ")
        return ItemView(item, len(payload), line, hex_lines(part), True, len(part))
    pretty = indented(text)[1] if len(part) == len(payload) else None
    return ItemView(item, len(payload), " ".join(text.split()), pretty or text, False, len(part))


@page("GET /queue-payload/{queue:any}", needs=ListItemsRequest)
async def payload_file(visit: Visit) -> Response:
    """The payload of one item, as a file: never as a page, whatever it is."""
    item_id, text = visit.query.get("id", ""), visit.query.get("partition", "0")
    kind = ListScheduledRequest if "scheduled" in visit.query else ListItemsRequest
    partition = int(text) if text.isascii() and text.isdigit() and len(text) < len("10000") else 0
    asked = kind(queue_name=visit.name("queue"), partition=partition, pivot=item_id, limit=1)
    found = (await visit.ask(asked)).items
    if not found or found[0].id != item_id:
        raise NotFound("item is not there; it was finished, moved or deleted meanwhile")
    headers = {**PAGE_HEADERS, "content-disposition": f'attachment; filename="{item_id}"'}
    return Response(found[0].payload, 200, headers, media_type="application/octet-stream")


# --- what is done to it ---------------------------------------------------------------------------------------


@page("POST /queues/{queue:any}")
async def change_queue(visit: Visit) -> Response:
    """Do what the form says to the queue of this address."""
    name, word = visit.name("queue"), visit.form.get("do", "")
    if word not in ACTIONS:
        raise BadMethod("POST without a word of what to do", ["GET", "POST"])
    try:
        notice = await ACTIONS[word](visit, name)
    except HoldfastError as error:
        visit.refuse(error)
        if word == "update":
            return await _form(visit, name, {one: visit.form.get(one, "").strip() for one in NEW_QUEUE})
        return await _queue_page(visit, name)
    return visit.redirect("/queues" if word == "delete" else _path(name), notice)


def _path(queue: str) -> str:
    return f"/queues/{segment(queue)}"


async def _update(visit: Visit, name: str) -> str:
    given = {one: visit.form.get(one, "").strip() for one in NEW_QUEUE}
    await visit.ask(UpdateQueueRequest(**{**_settings(visit, given), "queue_name": name}))
    return "The settings were changed."


async def _pause(visit: Visit, name: str) -> str:
    await visit.ask(PauseRequest(queue_name=name))
    return "The queue is paused: it takes items in and gives none out."


async def _resume(visit: Visit, name: str) -> str:
    await visit.ask(ResumeRequest(queue_name=name))
    return "The queue gives items out again."


async def _send(visit: Visit, name: str) -> str:
    form = {one: visit.form.get(one, "").strip() for one in ("kind", "encoding", "reference", "delay")}
    delay_us = parse_duration(form["delay"], what="delay")
    at = moment(visit.console.vault_app.now_us) + timedelta(microseconds=delay_us) if delay_us else None
    item = NewItem(
        utf8=visit.form.get("body", "").replace("\r\n", "\n"),  # what a browser makes of line breaks
        kind=form["kind"],
        encoding=form["encoding"],
        reference=form["reference"],
        enqueue_at=at,
    )
    reply = await visit.ask(ProduceRequest(queue_name=name, request_timeout=SEND_TIMEOUT, items=[item]))
    return f"The message was stored as item {reply.items[0].id}" + (f", for in {form['delay']}." if delay_us else ".")


async def _clear(visit: Visit, name: str) -> str:
    total = _together((await visit.ask(StatsRequest(queue_name=name))).partitions)
    chosen = visit.form.get("which", "")
    counts = {"queued": total.total - total.total_leased, "leased": total.total, "scheduled": total.scheduled}
    if chosen not in counts:
        raise Invalid("choice is missing; say which items are to be deleted")
    count = _typed(visit, counts[chosen])
    is_queue = chosen != "scheduled"
    await visit.ask(
        ClearRequest(queue_name=name, queue=is_queue, scheduled=not is_queue, destructive=chosen == "leased")
    )
    return f"{count} {'item was' if count == 1 else 'items were'} deleted."


async def _delete(visit: Visit, name: str) -> str:
    total = _together((await visit.ask(StatsRequest(queue_name=name))).partitions)
    count = _typed(visit, total.total + total.scheduled + total.dying)
    await visit.ask(DeleteQueueRequest(queue_name=name, force=count > 0))
    return f"Queue {name} was deleted."


def _typed(visit: Visit, count: int) -> int:
    """The count that was typed, if it still is the count. Raises Conflict."""
    if (typed := visit.number("count")) != count:
        raise Conflict(f"count is another one; {typed} was typed and it is {count} now, nothing was deleted")
    return count


MAY: Mapping[str, type[Request[Any]]] = {
    "update": UpdateQueueRequest,
    "pause": PauseRequest,
    "send": ProduceRequest,
    "clear": ClearRequest,
    "delete": DeleteQueueRequest,
}
ACTIONS: Mapping[str, Callable[[Visit, str], Awaitable[str]]] = {
    "update": _update,
    "pause": _pause,
    "resume": _resume,
    "send": _send,
    "clear": _clear,
    "delete": _delete,
}
