"""Plans and redrives: what will happen, before it happens; then the task while it runs, and its report afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from msgspec.structs import asdict, fields
from starlette.responses import Response

from holdfast.core.moments import moment
from holdfast.core.plan import REDRIVES_MAX_DEFAULT, Canary, Plan, PlanOptions, RedriveState, RedriveTask, Target
from holdfast.core.requests.declare import Request, from_wire, view
from holdfast.core.requests.vault import (
    CancelRedrive,
    Filter,
    LettersReply,
    ListRedriveLetters,
    ListRedrives,
    PauseRedrive,
    PlanRedrive,
    ReadGroup,
    ReadPlan,
    ReadRedrive,
    RedriveOutcome,
    ResumeRedrive,
    SearchLetters,
    StartRedrive,
)
from holdfast.core.selection import MOMENTS
from holdfast.errors import Forbidden, HoldfastError, Invalid, NotFound
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import query

FILTER = tuple(one.name for one in fields(Filter))
#: Where letters can be sent, as the form says it: not `Target.kind`. `home` is its `queue`; `queue` and `exchange` are
#: its `address`.
TARGETS = ("home", "wait", "original", "queue", "exchange")
CANARY = Canary()
#: What the form holds before anybody has written into it.
BLANK = {
    "to": "home",
    "source": "",
    "to_queue": "",
    "exchange": "",
    "routing_key": "",
    "max_per_s": "",
    "redrives_max": str(REDRIVES_MAX_DEFAULT),
    "first": str(CANARY.first),
    "wait": CANARY.wait,
    "widen": f"{CANARY.widen:g}",
    "stop_above": f"{CANARY.stop_above * 100:g}",
}
SWITCHES = ("force", "canary")
#: With more letters than this a canary is offered first.
CANARY_OFFERED_ABOVE = 20
LIST_COUNT, LETTERS_COUNT = 50, 25
NAME_CHARACTERS_MAX = 200
#: More do not fit into an address.
IDS_CHARACTERS_MAX = 1_500
OUTCOMES: Mapping[RedriveOutcome, str] = {
    "redriven": "Redriven",
    "failed": "Failed",
    "came_back": "Came back",
    "unknown": "Not known",
    "skipped": "Skipped",
    "under_way": "Under way",
    "waiting": "Waiting",
}
WORDS: Mapping[str, tuple[type[Request[RedriveTask]], str]] = {
    "pause": (PauseRedrive, "is paused"),
    "resume": (ResumeRedrive, "goes on"),
    "cancel": (CancelRedrive, "is cancelled; what was not redriven is captured"),
}


# --- the plan -------------------------------------------------------------------------------------------------


@page("GET /plans/new")
async def plan_form(visit: Visit) -> Response:
    """Asks for a plan of the letters that the address names."""
    return await _form_page(visit, visit.query)


@page("POST /plans/new", form_of=PlanRedrive)
async def make_plan(visit: Visit) -> Response:
    """Shows the form for letters that are too many for an address; or makes the plan that it asks for."""
    given = {name: text.strip() for name, text in visit.form.items() if text.strip() and name != "csrf"}
    # Rows that were selected come as a field each.
    if ids := ",".join(text for name, text in visit.form_items if name == "ids" and text):
        given["ids"] = ids
    if given.pop("make", "") == "":
        return await _form_page(visit, given)
    try:
        plan = await visit.ask(_wish(given))
    except HoldfastError as error:
        visit.refuse(error)
        return await _form_page(visit, given)
    return visit.redirect(f"/plans/{plan.hash}")


async def _form_page(visit: Visit, given: Mapping[str, str]) -> Response:
    if not visit.may(PlanRedrive):
        await visit.ask(PlanRedrive(selection=Filter(ids=(1,))))  # says why
    chosen = {name: given[name] for name in FILTER if name in given}
    found: LettersReply | None = None
    if chosen:
        try:
            found = await visit.ask(_search(chosen))
        except Invalid as error:
            visit.refuse(error)
        except Forbidden as error:  # of a token that is held to queues, and they are not named
            visit.status, visit.is_refused, visit.notice = 403, True, f"{error.message.partition('; ')[2]}."
    is_written = any(name in given for name in (*BLANK, *SWITCHES))
    values = {**BLANK, **{name: text for name, text in given.items() if name in BLANK}}
    switches = {name: name in given for name in SWITCHES}
    if not is_written and found is not None:
        switches["canary"] = found.count > CANARY_OFFERED_ABOVE
    return visit.page(
        "plan_form.html",
        title="Plan a redrive",
        chosen=chosen,
        group_title=await _group_title(visit, chosen),
        found=found,
        values=values,
        switches=switches,
    )


async def _group_title(visit: Visit, chosen: Mapping[str, str]) -> str:
    """What the group among the conditions is called, for those who may see groups."""
    if not chosen.get("group") or not visit.may(ReadGroup):
        return ""
    try:
        return (await visit.ask(ReadGroup(key=chosen["group"]))).title
    except NotFound:
        return ""


def _called(chosen: Mapping[str, str], group_title: str) -> str:
    """A name for what is redriven, until somebody has a better one."""
    ids = chosen.get("ids", "")
    return (group_title or (f"letter {ids}" if ids.isdigit() else "") or chosen.get("queue", ""))[:NAME_CHARACTERS_MAX]


def _search(chosen: Mapping[str, str]) -> SearchLetters:
    return cast("SearchLetters", from_wire(SearchLetters.declared, {}, [*chosen.items(), ("limit", "1")], b""))


def _wish(given: Mapping[str, str]) -> PlanRedrive:
    """What the form asks for. Raises Invalid."""
    chosen = _search({name: given[name] for name in FILTER if name in given})
    values = {**BLANK, **given}
    canary = None
    if "canary" in given:
        part = _decimal(values["stop_above"], "the part that may come back") / 100
        widen = _decimal(values["widen"], "widen")
        canary = Canary(first=_whole(values["first"], "the canary"), wait=values["wait"], widen=widen, stop_above=part)
    return PlanRedrive(
        selection=view(Filter, chosen),
        target=_target(values),
        max_per_s=_whole(values["max_per_s"] or "0", "letters a second"),
        redrives_max=_whole(values["redrives_max"], "earlier redrives"),
        force="force" in given,
        canary=canary,
    )


def _target(values: Mapping[str, str]) -> Target:
    match values["to"]:
        case "home":
            return Target(source=values["source"])
        case "wait" | "original" as kind:
            return Target(kind=kind)
        case "queue":
            if not values["to_queue"]:
                raise Invalid("target is invalid; name the queue that the letters go to")
            return Target(kind="address", routing_key=values["to_queue"])
        case "exchange":
            if not values["exchange"]:
                raise Invalid("target is invalid; name the exchange that the letters go to")
            return Target(kind="address", exchange=values["exchange"], routing_key=values["routing_key"])
        case other:
            raise Invalid(f"target is invalid; '{other[:40]}' is none of {', '.join(TARGETS)}")


def _whole(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Invalid(f"{what} is invalid; '{text[:40]}' is not a whole number")
    return int(text)


def _decimal(text: str, what: str) -> float:
    whole, _, rest = text.partition(".")
    if not (f"{whole}{rest}".isascii() and f"{whole}{rest}".isdigit() and len(text) < 10):
        raise Invalid(f"{what} is invalid; '{text[:40]}' is not a number")
    return float(text)


def form_values(wish: PlanOptions) -> dict[str, str]:
    """The form that asks for this wish."""
    chosen = asdict(wish.selection)
    for name in MOMENTS:
        if at_us := chosen.pop(name):
            chosen[name.removesuffix("_us")] = moment(at_us).isoformat()
    chosen["ids"] = ",".join(map(str, chosen["ids"]))
    chosen["state"] = wish.selection.state.value if wish.selection.state else ""
    target = wish.target
    to = {"queue": "home", "address": "exchange" if target.exchange else "queue"}.get(target.kind, target.kind)
    values = {
        **chosen,
        "to": to,
        "source": target.source,
        "exchange": target.exchange,
        "to_queue": target.routing_key if to == "queue" else "",
        "routing_key": target.routing_key if to == "exchange" else "",
        "max_per_s": str(wish.max_per_s or ""),
        "redrives_max": str(wish.redrives_max),
        "force": "on" if wish.force else "",
    }
    if wish.canary is not None:
        values |= {name: f"{getattr(wish.canary, name)}" for name in ("first", "wait")}
        values |= {"canary": "on", "widen": f"{wish.canary.widen:g}", "stop_above": f"{wish.canary.stop_above * 100:g}"}
    return {name: text for name, text in values.items() if text}


@page("GET /plans/{hash}")
async def plan_page(visit: Visit) -> Response:
    """What a plan would do, and the button that does it."""
    plan = await visit.ask(ReadPlan(hash=visit.name("hash")))
    return await _plan_page(visit, plan)


@page("POST /plans/{hash}")
async def start(visit: Visit) -> Response:
    """Carries it out, once, however often the button is pressed."""
    try:
        given = {name: visit.form.get(name, "").strip() for name in ("name", "reason", "operation")}
        task = await visit.ask(visit.made(StartRedrive, plan=visit.name("hash"), **given))
    except HoldfastError as error:
        visit.refuse(error)
        return await plan_page(visit)
    return visit.redirect(f"/redrives/{task.id}")


async def _plan_page(visit: Visit, plan: Plan) -> Response:
    started = await visit.ask(ListRedrives(plan=plan.hash, limit=10)) if visit.may(ListRedrives) else None
    form = form_values(plan.wish)
    return visit.page(
        "plan.html",
        title=f"Plan for {plan.count} letters",
        plan=plan,
        form=form,
        chosen={name: text for name, text in form.items() if name in FILTER},
        group_title=(group_title := await _group_title(visit, form)),
        called=_called(form, group_title),
        can_repeat=plan.wish.target.kind != "type",
        started=started.redrives if started else [],
        # Of the page, not of the press: a second press of the same button is the same start.
        operation=visit.form.get("operation") or uuid.uuid4().hex,
        may_start=visit.may(StartRedrive),
    )


# --- the task -------------------------------------------------------------------------------------------------


@page("GET /redrives", bar="Redrives", needs=ListRedrives)
async def redrives_page(visit: Visit) -> Response:
    """All redrives, those that are under way first."""
    cursor = visit.query.get("cursor", "")
    now = await visit.ask(ListRedrives(under_way=True, limit=LIST_COUNT)) if not cursor else None
    before = await visit.ask(ListRedrives(under_way=False, limit=LIST_COUNT, cursor=cursor))
    return visit.page(
        "redrives.html", title="Redrives", now=now.redrives if now else [], before=before, is_first=not cursor
    )


@page("GET /redrives/{id}")
async def redrive_page(visit: Visit) -> Response:
    """One task: how far it is, what became of its letters, and what can be said to it."""
    task = await visit.ask(ReadRedrive(id=_id(visit)))
    outcome = visit.query.get("outcome", "")
    if outcome not in ("", "all", *OUTCOMES):
        raise Invalid(f"outcome is invalid; '{outcome[:40]}' is none of {', '.join(OUTCOMES)}")
    # What went wrong is shown first.
    first = "failed" if task.failed else "came_back" if task.came_back else "all"
    told = (outcome or first).replace("all", "")
    cursor = visit.query.get("cursor", "")
    asked = visit.made(ListRedriveLetters, id=task.id, outcome=told, limit=LETTERS_COUNT, cursor=cursor)
    letters = await visit.ask(asked)
    plan = await _plan_of(visit, task)
    form = form_values(task.wish)
    return visit.page(
        "redrive.html",
        title=task.name or f"Redrive {task.id}",
        task=task,
        plan=plan,
        chosen={name: text for name, text in form.items() if name in FILTER},
        group_title=await _group_title(visit, form),
        is_judged=_is_judged(task),
        plan_anew=query(form) if _is_judged(task) and _can_plan_anew(visit, task, form) else "",
        begun_s=(datetime.now(UTC) - (task.changed_at or task.started_at)).total_seconds(),
        letters=letters,
        outcome=told,
        outcomes=OUTCOMES,
        counts=_counts(task),
        took_s=_took_s(task),
        left_s=_left_s(task),
        now=datetime.now(UTC),
        may={word: visit.may(request) and word in _can(task) for word, (request, _) in WORDS.items()},
        why="" if task.why == f"redrive {task.id}" else task.why,
    )


@page("POST /redrives/{id}")
async def change_redrive(visit: Visit) -> Response:
    """Pause, resume or cancel it."""
    word = visit.form.get("do", "")
    try:
        if word not in WORDS:
            raise Invalid(f"redrive cannot do that; '{word[:40]}' is none of {', '.join(WORDS)}")
        request, told = WORDS[word]
        task = await visit.ask(cast("Any", request)(id=_id(visit)))
    except HoldfastError as error:
        visit.refuse(error)
        return await redrive_page(visit)
    return visit.redirect(visit.path, f"Redrive {task.id} {told}.")


def _id(visit: Visit) -> int:
    return cast("ReadRedrive", visit.read(ReadRedrive)).id


async def _plan_of(visit: Visit, task: RedriveTask) -> Plan | None:
    """What was planned, for those who may see it."""
    if not visit.may(ReadPlan):
        return None
    try:
        return await visit.ask(ReadPlan(hash=task.plan))
    except (NotFound, Forbidden):
        return None


def _counts(task: RedriveTask) -> dict[RedriveOutcome, int]:
    """How many letters have each outcome; what came back was redriven before, and is among those."""
    return {
        "redriven": task.redriven,
        "failed": task.failed,
        "skipped": task.skipped,
        "unknown": task.unknown,
        "came_back": task.came_back,
        "waiting": max(0, task.total - task.settled - task.unknown),
    }


def _can(task: RedriveTask) -> tuple[str, ...]:
    """What can be said to it now."""
    match task.state:
        case RedriveState.RUNNING:
            return ("pause", "cancel") if task.held_by else ("pause", "resume", "cancel")
        case RedriveState.PAUSED | RedriveState.STOPPED:
            return ("resume", "cancel")
    return ()


def _is_judged(task: RedriveTask) -> bool:
    """Whether its canary stopped it, and would again: what came back counts for as long as the task is there."""
    canary = task.wish.canary
    is_above = canary is not None and bool(task.redriven) and task.came_back / task.redriven > canary.stop_above
    return is_above and task.state is RedriveState.STOPPED


def _can_plan_anew(visit: Visit, task: RedriveTask, form: Mapping[str, str]) -> bool:
    """Whether an address holds the same wish."""
    return visit.may(PlanRedrive) and task.wish.target.kind != "type" and len(form.get("ids", "")) < IDS_CHARACTERS_MAX


def _took_s(task: RedriveTask) -> float:
    """From its start to its last change, or until now while it runs."""
    ended_at = datetime.now(UTC) if task.state is RedriveState.RUNNING else task.changed_at
    return max(0.0, (ended_at - task.started_at).total_seconds()) if ended_at else 0.0


def _left_s(task: RedriveTask) -> float | None:
    """How long it will still take at the pace that it had so far; none where a canary decides that."""
    if task.state is not RedriveState.RUNNING or task.wish.canary is not None or not task.settled:
        return None
    pace = min(task.settled / (_took_s(task) or 1.0), task.wish.max_per_s or float("inf"))
    return (task.total - task.settled) / pace
