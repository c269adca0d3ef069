"""Recovery: dead-letter queues as they stand at the broker, what a recovery of one would meet, and the runs of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from holdfast.core.plan import Place
from holdfast.core.requests.declare import QUERY_BYTES_MAX
from holdfast.core.requests.recover import (
    KEPT_COUNT_MAX,
    ListRecoveries,
    PreflightRecovery,
    ReadRecovery,
    RecoveryRequest,
    RecoveryView,
    StartRecovery,
    StopRecovery,
)
from holdfast.core.requests.vault import ReadOverview
from holdfast.errors import BrokerError, Conflict, HoldfastError, Invalid
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import query, segment

R = TypeVar("R", bound=RecoveryRequest[Any])

PAGE_COUNT = 25
#: What the form is filled with, by the names of its fields.
TEXTS = {
    "queue": "",
    "to": "routes",
    "routes": "",
    "exchange": "",
    "key": "",
    "source": "",
    "where": "",
    "limit": "",
    "rate": "",
    "total_timeout": "30m",
    "idle_timeout": "10s",
    "empty_timeout": "5s",
    "stall_timeout": "30s",
    "hold_timeout": "20m",
    "stop_timeout": "10s",
}
CHECKS = ("allow_copies", "keep_unroutable", "strict")


@page("GET /recovery", bar="Recovery", needs=ListRecoveries)
async def recovery(visit: Visit) -> Response:
    """Every dead queue with what is in it, what runs, and what ran before."""
    overview = await visit.ask(ReadOverview())
    runs = await visit.ask(visit.read(ListRecoveries, limit=PAGE_COUNT))
    live = {one.queue: one for one in runs.recoveries if one.ended_at is None}
    return visit.page(
        "recovery.html",
        title="Recovery",
        overview=overview,
        runs=runs,
        live=live,
        may_start=visit.may(StartRecovery),
    )


@page("GET /recovery/start", needs=StartRecovery)
async def start(visit: Visit) -> Response:
    """The form, filled in as the address says."""
    visit.console.vault_app.check(StartRecovery.declared, visit.caller)
    return await _form(visit, {**TEXTS, **visit.query})


@page("POST /recovery/start", needs=StartRecovery)
async def start_done(visit: Visit) -> Response:
    """Look before, try, or begin: by the button that was pressed."""
    wanted = visit.form.get("do", "preflight")
    try:
        if wanted == "preflight":
            return await _form(visit, visit.form, preflight=await visit.ask(_asked(visit, PreflightRecovery)))
        begun = await visit.ask(_asked(visit, StartRecovery, dry_run=wanted == "dry_run"))
    except HoldfastError as error:
        visit.refuse(Conflict(error.message) if isinstance(error, BrokerError) else error)
        return await _form(visit, visit.form)
    return visit.redirect(f"/recovery/runs/{segment(begun.recovery.run)}")


@page("GET /recovery/runs/{run}")
async def run(visit: Visit) -> Response:
    """One recovery: how far it is, or what it did."""
    found = await visit.ask(ReadRecovery(run=visit.name("run")))
    return visit.page(
        "recovery_run.html",
        title=f"Recovery of {found.recovery.queue}",
        found=found,
        one=found.recovery,
        again=_again(visit, found),
        may_stop=visit.may(StopRecovery),
    )


@page("POST /recovery/runs/{run}/stop")
async def stop(visit: Visit) -> Response:
    """End it; whoever was too late is told on its page."""
    try:
        found = await visit.ask(StopRecovery(run=visit.name("run")))
    except Conflict as error:
        visit.refuse(error)
        return await run(visit)
    return visit.redirect(f"/recovery/runs/{segment(found.recovery.run)}", "It stops: what is under way is finished.")


async def _form(visit: Visit, given: Mapping[str, str], **more: Any) -> Response:
    overview = await visit.ask(ReadOverview())
    return visit.page(
        "recovery_start.html",
        title="Start a recovery",
        overview=overview,
        given={name: given.get(name, text) for name, text in TEXTS.items()},
        checked={name for name in CHECKS if given.get(name)},
        found=next((one for one in overview.queues if one.queue == given.get("queue", "").strip()), None),
        preflight=more.get("preflight"),
    )


def _asked(visit: Visit, request: type[R], **more: object) -> R:
    """What the form says, as a program would ask it. Raises Invalid."""
    form = visit.form
    values: dict[str, Any] = {name: form[name].strip() for name in TEXTS if form.get(name, "").strip()}
    exchange, key = values.pop("exchange", ""), values.pop("key", "")
    if values.get("to") == "address":
        values["address"] = {"exchange": exchange, "routing_key": key}
    values["where"] = [line.strip() for line in values.get("where", "").splitlines() if line.strip()]
    if values.get("to", "routes") != "routes":
        values.pop("routes", None)
    values |= {name: bool(form.get(name)) for name in CHECKS}
    try:
        made: R = msgspec.convert({**values, **more}, request, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"form is invalid; {str(error).replace('`', '')}") from error
    return made


def _again(visit: Visit, found: RecoveryView) -> str:
    """The form with all that was asked for; none where that cannot be said in an address, or is not known here."""
    options = found.options
    if not visit.may(StartRecovery) or visit.caller.queues or len(options.routes) >= KEPT_COUNT_MAX:
        return ""
    lines = [f"type_header = {_toml(options.type_header)}"] if options.type_header else []
    lines += [f"redirect = {_entry(options.redirect)}"] if options.redirect else []
    lines += ["[routes]", *(f"{_toml(kind)} = {_entry(to)}" for kind, to in options.routes.items())]
    address = options.address or Place()
    values = {
        "queue": found.recovery.queue,
        "to": options.to,
        "routes": "\n".join(lines) if options.routes or options.redirect else "",
        "exchange": address.exchange,
        "key": address.routing_key,
        "source": options.source,
        "where": "\n".join(options.where),
        "limit": options.limit,
        "rate": f"{options.rate_per_s:g}" if options.rate_per_s else "",
        **{name: "on" for name in CHECKS if getattr(options, name)},
    }
    path = f"/recovery/start?{query(values)}"
    return path if len(path) <= QUERY_BYTES_MAX else ""


def _entry(place: Place) -> str:
    return f"{{ exchange = {_toml(place.exchange)}, key = {_toml(place.routing_key)} }}"


def _toml(text: str) -> str:
    return msgspec.json.encode(text).decode()
