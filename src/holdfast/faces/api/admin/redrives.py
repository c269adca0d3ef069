"""/admin/groups, /admin/plans and /admin/redrives."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from holdfast.core.letter import Group, GroupStatus
from holdfast.core.plan import Plan, RedriveTask
from holdfast.core.selection import ID_MAX, PAGE_COUNT_DEFAULT, decode_cursor, encode_cursor
from holdfast.errors import NotFound
from holdfast.faces.api.admin.desk import AdminContext, Endpoint, Handler
from holdfast.faces.api.admin.views import (
    GroupChange,
    GroupsReply,
    GroupView,
    Limit,
    PageQuery,
    PlanRequest,
    RedrivesReply,
    StartRequest,
    Text,
)
from holdfast.services.vault.custody import check_all_queues, check_queue


class GroupsQuery(Struct, frozen=True, kw_only=True):
    """Which groups."""

    status: Literal["", "open", "resolved", "ignored", "regressed"] = ""
    limit: Limit = PAGE_COUNT_DEFAULT
    cursor: Text = ""


async def groups(desk: AdminContext) -> GroupsReply:
    query = desk.query(GroupsQuery)
    check_all_queues(desk.caller)
    after = decode_cursor("groups", query.cursor) if query.cursor else ID_MAX
    status = GroupStatus(query.status) if query.status else None
    found = await desk.vault.groups.page(status=status, after=after, count_max=query.limit)
    more = encode_cursor("groups", found[-1][0]) if len(found) == query.limit else ""
    return GroupsReply(groups=[_view(group) for _, group in found], next=more)


async def change_group(desk: AdminContext) -> GroupView:
    wanted = desk.body(GroupChange)
    check_all_queues(desk.caller)
    status = GroupStatus(wanted.status) if wanted.status else None
    key = desk.text("key")
    act = desk.act(reason=wanted.note or "", detail=f"{key[:50]} {wanted.status or ''}")
    group = await desk.vault.groups.change(key, status=status, note=wanted.note, act=act) if "\x00" not in key else None
    if group is None:
        raise NotFound(f"group does not exist; there is no group '{key[:50]}'")
    return _view(group)


def _view(group: Group) -> GroupView:
    return GroupView(
        key=group.key,
        title=group.title,
        count=group.count,
        first_at=group.first_at,
        last_at=group.last_at,
        sample=group.sample,
        status=group.status,
        note=group.note,
    )


async def make_plan(desk: AdminContext) -> Plan:
    return await desk.office.planner.plan(desk.body(PlanRequest).wish(desk.now_us), desk.caller)


async def show_plan(desk: AdminContext) -> Plan:
    return await desk.office.planner.find(desk.text("hash").replace("\x00", ""), desk.caller)


async def start(desk: AdminContext) -> RedriveTask:
    wanted = desk.body(StartRequest)
    redrive, _ = await desk.office.planner.execute(
        wanted.plan.replace("\x00", ""),
        desk.caller,
        desk.act(reason=wanted.reason, detail=wanted.name),
        name=wanted.name.replace("\x00", ""),
        operation=wanted.operation.replace("\x00", ""),
    )
    desk.office.redrives.begin(redrive)
    return redrive


async def redrives(desk: AdminContext) -> RedrivesReply:
    query = desk.query(PageQuery)
    check_all_queues(desk.caller)
    before = decode_cursor("redrives", query.cursor) if query.cursor else ID_MAX
    found = await desk.vault.redrives.page(before=before, count_max=query.limit)
    return RedrivesReply(
        redrives=found, next=encode_cursor("redrives", found[-1].id) if len(found) == query.limit else ""
    )


async def show(desk: AdminContext) -> RedriveTask:
    redrive = await desk.office.redrives.find(desk.number())
    if redrive.wish.selection.queue:
        check_queue(desk.caller, redrive.wish.selection.queue)
    else:
        check_all_queues(desk.caller)
    return redrive


def _change(word: str) -> Handler:
    async def change(desk: AdminContext) -> RedriveTask:
        redrive = await show(desk)
        return await desk.office.redrives.change(redrive.id, word, desk.act(detail=f"redrive {redrive.id}"))

    return change


ENDPOINTS = (
    Endpoint(
        "groups.list",
        "GET",
        "/admin/groups",
        groups,
        GroupsReply,
        "Letters that died of one cause",
        query=(GroupsQuery,),
    ),
    Endpoint(
        "groups.change",
        "POST",
        "/admin/groups/{key}",
        change_group,
        GroupView,
        "Resolve, ignore or reopen a group, or note something about it",
        request=GroupChange,
        is_change=True,
    ),
    Endpoint(
        "plans.make",
        "POST",
        "/admin/plans",
        make_plan,
        Plan,
        "What a redrive would do: the frozen set, its targets, and what is left out",
        request=PlanRequest,
    ),
    Endpoint("plans.show", "GET", "/admin/plans/{hash}", show_plan, Plan, "A plan"),
    Endpoint(
        "redrives.list", "GET", "/admin/redrives", redrives, RedrivesReply, "Tasks, newest first", query=(PageQuery,)
    ),
    Endpoint(
        "redrives.start",
        "POST",
        "/admin/redrives",
        start,
        RedriveTask,
        "Execute a plan, exactly",
        request=StartRequest,
        is_change=True,
    ),
    Endpoint("redrives.show", "GET", "/admin/redrives/{id}", show, RedriveTask, "One task and its progress"),
    *(
        Endpoint(
            f"redrives.{word}",
            "POST",
            f"/admin/redrives/{{id}}/{word}",
            _change(word),
            RedriveTask,
            f"{word.capitalize()} a task",
            is_change=True,
        )
        for word in ("pause", "resume", "cancel")
    ),
)
