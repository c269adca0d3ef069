"""`holdfast plan` and `holdfast redrive`: what would be done, then exactly that; Ctrl-C pauses cleanly."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from holdfast.core.message import Address
from holdfast.core.moments import format_duration
from holdfast.core.plan import Target
from holdfast.core.routes import TYPE_HEADER, parse_routes
from holdfast.errors import Invalid
from holdfast.faces.cli.admin import LIST_COUNT_DEFAULT, Admin, as_selection, filtered, open_admin
from holdfast.faces.cli.app import app
from holdfast.faces.cli.app import redrive as group
from holdfast.faces.cli.command import command, one_of
from holdfast.faces.cli.context import CommandContext, ExitCode
from holdfast.faces.cli.output import filled_table, plural, readable
from holdfast.faces.cli.progress import meter

STEP_S = 0.2
#: For so long a running task may be in nobody's hands: one that has just begun, or goes from one process to another.
ORPHAN_S = 3.0
STEPS_MAX = 5 * 86_400 * 7
TARGETS = get_args(get_type_hints(Target)["kind"])

Limit = Annotated[int, typer.Option(help="At most so many.", min=1, max=1_000)]
Id = Annotated[int, typer.Argument(metavar="ID", help="The id of the task.", min=1, show_default=False)]


@command(app, "plan", example="holdfast plan --queue orders.dlq --error Timeout --max-per-s 100")
@filtered
async def plan(
    session: CommandContext,
    filters: dict[str, str],
    target: Annotated[str, typer.Option(help="queue (it died in), wait, original, address, or type.")] = "queue",
    exchange: Annotated[str, typer.Option(help="With --target address.", show_default=False)] = "",
    routing_key: Annotated[str, typer.Option(help="With --target address.", show_default=False)] = "",
    routes: Annotated[
        Path | None,
        typer.Option(help="With --target type: a routes file, as that of holdfast recover.", show_default=False),
    ] = None,
    max_per_s: Annotated[int, typer.Option(help="At most so many letters a second; 0 is no limit.", min=0)] = 0,
    redrives_max: Annotated[int, typer.Option(help="Leave out what was redriven so often.", min=1)] = 5,
    force: Annotated[bool, typer.Option("--force", help="Do not leave it out.")] = False,
    canary: Annotated[int, typer.Option(help="Send so many first and see whether they come back.", min=0)] = 0,
    canary_wait: Annotated[str, typer.Option(help="For how long: a duration, or auto.")] = "auto",
    canary_widen: Annotated[float, typer.Option(help="How many times as many go next.")] = 2.0,
    canary_stop_above: Annotated[float, typer.Option(help="The part that may come back.")] = 0.05,
) -> ExitCode:
    """Show what a redrive would do: how many letters go where, what is left out and why. Changes nothing."""
    one_of(target, TARGETS, option="--target")
    request: dict[str, object] = {
        "selection": as_selection(filters),
        "target": {"kind": target, "exchange": exchange, "routing_key": routing_key, **_table(routes)},
        "max_per_s": max_per_s,
        "redrives_max": redrives_max,
        "force": force,
    }
    if canary:
        request["canary"] = {
            "first": canary,
            "wait": canary_wait,
            "widen": canary_widen,
            "stop_above": canary_stop_above,
        }
    async with open_admin(session) as admin:
        made = await admin.post("/admin/plans", request)
    session.out.document(made)
    _show_plan(session, made)
    return ExitCode.DONE if made["count"] else ExitCode.FAILED


def _show_plan(session: CommandContext, made: dict[str, Any]) -> None:
    rows = [[address, count] for address, count in made["targets"].items()]
    session.out.show(filled_table(("to", "#letters"), rows, title=f"{plural(made['count'], 'letter')} can go"))
    for note in made["notes"]:
        session.out.say(note)
    for one in made["reasons"]:
        letters = "1 letter is" if one["count"] == 1 else f"{one['count']} letters are"
        session.out.say(f"{letters} left out, {one['sample']} for one: {one['why']}")
    if not made["count"]:
        session.out.say("there is nothing to execute")
        return
    session.out.say(f"it takes about {readable(format_duration(max(1, round(made['estimated_s'])) * 1_000_000))}")
    session.out.say(f"execute it: holdfast redrive start {made['hash']}")


def _table(file: Path | None) -> dict[str, object]:
    """A routes file as a request names it. Raises Invalid."""
    if file is None:
        return {}
    try:
        table = parse_routes(file.read_bytes(), source=str(file))
    except OSError as error:
        raise Invalid(f"routes file cannot be read; {file}: {error.strerror}") from error
    found: dict[str, object] = {"routes": {name: _place(address) for name, address in table.routes.items()}}
    if table.redirect is not None:
        found["redirect"] = _place(table.redirect)
    if table.type_header != TYPE_HEADER:
        found["type_header"] = table.type_header
    return found


def _place(address: Address) -> dict[str, str]:
    return {"exchange": address.exchange, "routing_key": address.routing_key}


@command(group, "start", example="holdfast redrive start 5d4d242a… --reason 'fixed in 1.4'")
async def start(
    session: CommandContext,
    plan_hash: Annotated[str, typer.Argument(metavar="PLAN", help="The hash of a plan.", show_default=False)],
    name: Annotated[str, typer.Option(help="What the task is called.", show_default=False)] = "",
    reason: Annotated[str, typer.Option(help="Why, for the ledger.", show_default=False)] = "",
    operation: Annotated[str, typer.Option(help="Two starts with one of these make one task.")] = "",
) -> ExitCode:
    """Execute a plan and watch it; Ctrl-C pauses the task and leaves it to be resumed."""
    async with open_admin(session) as admin:
        request = {"plan": plan_hash, "name": name, "reason": reason, "operation": operation}
        task = await admin.post("/admin/redrives", request)
        return await _watched(session, admin, task)


@command(group, "resume", example="holdfast redrive resume 7")
async def resume(session: CommandContext, number: Id) -> ExitCode:
    """Go on with a task that was paused or stopped, or whose process is gone, and watch it."""
    async with open_admin(session) as admin:
        task = await admin.post(f"/admin/redrives/{number}/resume")
        if task["unknown"]:
            session.out.say(
                f"{plural(task['unknown'], 'letter')} may be on the way already; sent again when the lease of the "
                "process before has run out, within 2 minutes"
            )
        return await _watched(session, admin, task)


@command(group, "watch", example="holdfast redrive watch 7")
async def watch(session: CommandContext, number: Id) -> ExitCode:
    """Watch a task of a server until it ends."""
    async with open_admin(session) as admin:
        return await _watched(session, admin, await admin.get(f"/admin/redrives/{number}"), pauses=False)


@command(group, "pause", example="holdfast redrive pause 7")
async def pause(session: CommandContext, number: Id) -> None:
    """Pause a task, after the letters that are in flight."""
    async with open_admin(session) as admin:
        _told(session, await admin.post(f"/admin/redrives/{number}/pause"))


@command(group, "cancel", example="holdfast redrive cancel 7")
async def cancel(session: CommandContext, number: Id) -> None:
    """End a task for good; what was not redriven is captured, also what may have been: its history says so."""
    async with open_admin(session) as admin:
        _told(session, await admin.post(f"/admin/redrives/{number}/cancel"))


@command(group, "list", example="holdfast redrive list")
async def list_redrives(
    session: CommandContext,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=1_000)] = LIST_COUNT_DEFAULT,
) -> None:
    """List tasks, newest first."""
    async with open_admin(session) as admin:
        found = (await admin.get("/admin/redrives", limit=limit))["redrives"]
    session.out.documents(found)
    names = (
        "id", "state", "total", "redriven", "possible_duplicates", "failed", "skipped", "came_back", "name",
        "started_by", "why",
    )  # fmt: skip
    rows = [[one[name] for name in names] for one in found]
    columns = ("#id", "state", "#letters", "#redriven", "#twice?", "#failed", "#skipped", "#back", "name", "who", "why")
    session.out.show(filled_table(columns, rows))


async def _watched(session: CommandContext, admin: Admin, task: dict[str, Any], *, pauses: bool = True) -> ExitCode:
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    try:
        with meter(f"redrive {task['id']}", total=task["total"], quiet=session.as_json) as bar:
            done, held_at_s = 0, loop.time()
            for _ in range(STEPS_MAX):
                now = task["redriven"] + task["failed"] + task["skipped"]
                bar.add(now - done)
                bar.advance(now - done)
                done = now
                held_at_s = loop.time() if task["held_by"] else held_at_s
                if task["state"] != "running" or loop.time() - held_at_s > ORPHAN_S:
                    break
                try:
                    await asyncio.wait_for(interrupted.wait(), STEP_S)
                    if not pauses:
                        break
                    task = await admin.post(f"/admin/redrives/{task['id']}/pause")
                except TimeoutError:
                    task = await admin.get(f"/admin/redrives/{task['id']}")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    _told(session, task)
    if task["state"] == "done" and not task["failed"] and not task["skipped"]:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if task["redriven"] else ExitCode.FAILED


def _told(session: CommandContext, task: dict[str, Any]) -> None:
    session.out.document(task)
    text = f"redrive {task['id']} is {task['state']}: {task['redriven']} of {task['total']} redriven"
    if task["failed"] or task["skipped"]:
        text += f", {task['failed']} failed, {task['skipped']} skipped"
    if task["possible_duplicates"]:
        text += f", {task['possible_duplicates']} of them maybe twice"
    if task["why"] and task["why"] != f"redrive {task['id']}":
        text += f"; {task['why']}"
    session.out.say(text)
    if task["state"] == "cancelled" and task["unknown"]:
        session.out.say(
            f"{plural(task['unknown'], 'letter')} may have been published; captured again now, or within 3 minutes: "
            "redriven once more, they may be there twice"
        )
    if task["state"] == "running" and not task["held_by"]:
        session.out.say("nobody seems to run it: its process is gone")
    if task["state"] in ("paused", "stopped") or (task["state"] == "running" and not task["held_by"]):
        session.out.say(f"go on with: holdfast redrive resume {task['id']}")
