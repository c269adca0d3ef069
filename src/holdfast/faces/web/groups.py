"""Failure groups: letters that died of one cause, what is known of it, and what is to become of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from starlette.responses import Response

from holdfast.core.requests.vault import (
    ChangeGroup,
    GroupView,
    LetterView,
    ListDeadQueues,
    ListGroups,
    PlanRedrive,
    ReadGroup,
    SearchLetters,
)
from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import query

#: A group is new for so long.
NEW_H = 24
#: So many hours of arrivals are drawn, in a list and of one group.
HOURS, HOURS_OF_ONE = 24, 72
#: So many groups are in a part of the first page, and so many on a page of one part.
PART_COUNT, PAGE_COUNT = 25, 50
#: What can be looked at, as the address says it and as the page does.
SHOWN = {
    "": "To look at",
    "regressed": "Regressed",
    "new": "New",
    "open": "Open",
    "resolved": "Resolved",
    "ignored": "Ignored",
    "all": "All",
}
HEADINGS = {
    "": ("Open", "known for longer"),
    "regressed": ("Regressed", "resolved once, and here again"),
    "new": ("New", f"first seen in the last {NEW_H} hours"),
}
#: What is said after a change.
CHANGED = {"resolved": "is resolved", "ignored": "is ignored", "open": "is open again", "": "has your note"}


class GroupsPart(NamedTuple):
    """Some groups under a heading; `more` is the address of the others."""

    show: str
    title: str
    note: str
    groups: list[GroupView]
    more: str


@page("GET /groups", bar="Groups", needs=ListGroups)
async def groups_page(visit: Visit) -> Response:
    """All groups, those first that need somebody."""
    if visit.caller.queues:
        visit.status = 403
        return visit.page("groups_held.html", title="Groups", queues=await visit.ask(ListDeadQueues()))
    show, text = visit.query.get("show", ""), visit.query.get("text", "")
    parts = await _parts(visit, show, text, visit.query.get("cursor", ""))
    samples = await _samples(visit, [one.sample for part in parts for one in part.groups])
    return visit.page(
        "groups.html",
        title="Groups",
        parts=parts,
        samples=samples,
        show=show,
        text=text,
        shown=SHOWN,
        hours=HOURS,
        new_since=_new_since(),
        may_change=visit.may(ChangeGroup),
        may_plan=visit.may(PlanRedrive),
    )


@page("POST /groups")
async def change_in_list(visit: Visit) -> Response:
    """Resolve, ignore or reopen one of them, and see the same list again."""
    try:
        notice = await _change(visit, visit.form.get("key", ""))
    except HoldfastError as error:
        visit.refuse(error)
        return await groups_page(visit)
    return visit.redirect(visit.path, notice)


@page("GET /groups/{key:any}")
async def group_page(visit: Visit) -> Response:
    """One group: its numbers, its newest letter, and what is known of it."""
    group = await visit.ask(ReadGroup(key=visit.name("key"), hours=HOURS_OF_ONE))
    samples = await _samples(visit, [group.sample])
    return visit.page(
        "group.html",
        title=group.title or group.key,
        group=group,
        sample=samples.get(group.sample),
        hours=HOURS_OF_ONE,
        is_new=group.first_at >= _new_since(),
        note=visit.form.get("note", group.note),
        may_change=visit.may(ChangeGroup),
        may_plan=visit.may(PlanRedrive),
    )


@page("POST /groups/{key:any}")
async def change_group(visit: Visit) -> Response:
    """Resolve, ignore or reopen it, or note something."""
    try:
        notice = await _change(visit, visit.name("key"))
    except HoldfastError as error:
        visit.refuse(error)
        return await group_page(visit)
    return visit.redirect(visit.path, notice)


async def _parts(visit: Visit, show: str, text: str, cursor: str) -> list[GroupsPart]:
    new_since = _new_since()
    of: dict[str, dict[str, Any]] = {
        "regressed": {"status": "regressed"},
        "new": {"status": "open", "first_after": new_since},
        "": {"status": "open", "first_before": new_since},
        "open": {"status": "open"},
        "resolved": {"status": "resolved"},
        "ignored": {"status": "ignored"},
        "all": {},
    }
    if show not in of:
        raise Invalid(f"groups cannot be shown so; '{show[:40]}' is none of {', '.join(one for one in of if one)}")
    found = []
    for one in ("regressed", "new", "") if not show and not cursor else (show,):
        is_this = one == show
        limit = PAGE_COUNT if is_this else PART_COUNT
        asked = {**of[one], "text": text, "hours": HOURS, "limit": limit, "cursor": cursor if is_this else ""}
        reply = await visit.ask(visit.made(ListGroups, **asked))
        more = query({"show": one, "text": text, "cursor": reply.next if is_this else ""}) if reply.next else ""
        title, note = HEADINGS.get(one, (SHOWN[one], ""))
        found.append(GroupsPart(one, title, note, reply.groups, more))
    return found


async def _samples(visit: Visit, ids: list[int]) -> dict[int, LetterView]:
    """The newest letter of each group, as far as it is there."""
    if not ids:
        return {}
    found = await visit.ask(SearchLetters(ids=tuple(ids), limit=len(ids)))
    return {one.id: one for one in found.letters}


async def _change(visit: Visit, key: str) -> str:
    """What the form says of a group; returns what is said then."""
    status = visit.form.get("status", "")
    if status not in CHANGED:
        raise Invalid(f"status is invalid; '{status[:40]}' is none of resolved, ignored and open")
    asked = visit.made(ChangeGroup, key=key, status=status or None, note=visit.form.get("note"))
    changed = await visit.ask(asked)
    return f"{changed.title or changed.key} {CHANGED[status]}."


def _new_since() -> datetime:
    return datetime.now(UTC) - timedelta(hours=NEW_H)
