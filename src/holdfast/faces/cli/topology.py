"""`holdfast topology plan|apply|check|export|import|draw`: the exchanges, queues and bindings of a RabbitMQ broker.

What was found or done is shown as JSON for programs and as lines for people.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from msgspec import structs

from holdfast.core.topology.definitions import Definitions, from_definitions, to_definitions
from holdfast.core.topology.diff import Difference, DifferenceKind
from holdfast.core.topology.layouts import FILE_BYTES_MAX, TopologyFile, design, parse_file
from holdfast.core.topology.model import Design, Version, in_force
from holdfast.core.topology.rules import Hazard
from holdfast.faces.cli.command import CONFIG, JSON, command, private, read_file, shared_option
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode
from holdfast.faces.cli.output import Output, plural
from holdfast.faces.draw import mermaid, svg
from holdfast.ports.topology import ProbeResult
from holdfast.services.topology import Applied, ImportReport, Topologies, TopologyPlan

DEFINITIONS_BYTES_MAX = 64_000_000
VERSION_DEFAULT = "3.10"
NAMES_COUNT_MAX = 3

_SIGNS = {DifferenceKind.MISSING: "+", DifferenceKind.DIFFERENT: "!", DifferenceKind.SUPERFLUOUS: "-"}

Result = TopologyPlan | Applied | ImportReport

File = Annotated[Path, typer.Argument(metavar="FILE", help="The topology file (TOML).", show_default=False)]
AnyFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The topology file (TOML), or a definitions.json.", show_default=False)
]
BrokerVersion = Annotated[
    str,
    typer.Option(help="The RabbitMQ version to design for; arguments differ between 3.x and 4.x.", metavar="VERSION"),
]
Target = Annotated[Path | None, typer.Option("--output", help="Write to this file instead of stdout.")]

SHARED = (
    shared_option(
        "management",
        "The broker's management API, http://user:password@host:15672; by default on the broker's host with its "
        "login. Also HOLDFAST_MANAGEMENT_URL.",
        panel=None,
    ),
    shared_option("url", "The broker: amqp://user:password@host/vhost, or amqps://…. Also HOLDFAST_URL."),
    CONFIG,
    JSON,
)


class Format(StrEnum):
    """What can be drawn."""

    MERMAID = "mermaid"
    SVG = "svg"


@command("topology plan", example="topology.toml --url amqp://guest:guest@localhost", shared=SHARED)
async def plan(context: CommandContext, file: AnyFile) -> None:
    """Show what apply would change, and what cannot be changed with the way out of it. Changes nothing."""
    read = _read_any(file)
    async with _open(context) as topologies:
        found = await topologies.check(read(topologies.vhost))
    _show(context.out, found)


@command("topology apply", example="topology.toml\ntopology.toml --delete --probe", shared=SHARED)
async def apply(
    context: CommandContext,
    file: File,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete",
            help="Also delete what is superfluous, and make queues anew whose arguments differ: only queues that are "
            "empty and without consumers.",
        ),
    ] = False,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Send a probe through every path, or none; by default through queues that are new or idle.",
            show_default=False,
        ),
    ] = None,
) -> ExitCode:
    """Make what is missing, read it back, and send a probe through the retry and dead-letter paths."""
    wanted = _read(file)
    async with _open(context) as topologies:
        done = await topologies.apply(wanted, delete=delete, probe=probe)
    _show(context.out, done)
    if done.is_done:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if done.has_changed else ExitCode.FAILED


@command("topology check", example="topology.toml || echo 'the broker has drifted'", shared=SHARED)
async def check(
    context: CommandContext,
    file: AnyFile,
    probe: Annotated[
        bool, typer.Option("--probe", help="Send a probe through every path as well, busy queues included.")
    ] = False,
) -> ExitCode:
    """Compare the broker with the file; exit code 1 when they differ or a probe does not arrive."""
    read = _read_any(file)
    async with _open(context) as topologies:
        found = await topologies.check(read(topologies.vhost), probe=probe)
    _show(context.out, found)
    return ExitCode.DONE if found.is_clean else ExitCode.FAILED


@command(
    "topology export",
    example="--url amqp://guest:guest@localhost > definitions.json\ntopology.toml --broker-version 4.0",
    shared=SHARED,
)
async def export(
    context: CommandContext,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A topology file; without one, the broker as it is.", show_default=False),
    ] = None,
    broker_version: BrokerVersion = VERSION_DEFAULT,
    vhost: Annotated[str, typer.Option(help="With FILE: the virtual host that the definitions name.")] = "/",
    output: Target = None,
) -> None:
    """Write RabbitMQ's definitions.json, of a broker or of a topology file. Users and permissions are not in it."""
    if file is not None:
        made = design(_read(file), Version.parse(broker_version))
        found = {"rabbit_version": str(made.version), **to_definitions(made.topology, vhost=vhost)}
    else:
        async with _open(context) as topologies:
            found = await topologies.export()
    _write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n", output)


@command("topology import", example="definitions.json", shared=SHARED)
async def import_definitions(
    context: CommandContext,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A definitions.json.", show_default=False)],
    accept_hazards: Annotated[
        bool, typer.Option("--accept-hazards", help="Import also what is known to lose messages; it is named.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be made, and what of it loses messages. Changes nothing.")
    ] = False,
) -> ExitCode:
    """Import exchanges, queues, bindings and policies, read them back, and name every difference that is left.

    The broker ignores changed arguments without a word; this does not. Users and permissions are left out.
    """
    read = _read_definitions(file)
    async with _open(context) as topologies:
        given = read(topologies.vhost)
        if dry_run:
            found = await topologies.check(given)
            _show(context.out, found)
            is_safe = accept_hazards or not any(hazard.fatal for hazard in found.remarks)
            return ExitCode.DONE if is_safe else ExitCode.FAILED
        done = await topologies.import_definitions(given, accept_hazards=accept_hazards)
    _show(context.out, done)
    if not done.remaining and not done.failure:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if done.created or done.failure else ExitCode.FAILED


@command("topology draw", example="topology.toml --format svg > topology.svg", shared=(JSON,))
async def draw(
    context: CommandContext,
    file: AnyFile,
    form: Annotated[Format, typer.Option("--format", help="mermaid or svg.")] = Format.MERMAID,
    broker_version: BrokerVersion = VERSION_DEFAULT,
    output: Target = None,
) -> None:
    """Draw a topology file or a definitions.json as a Mermaid flowchart or as SVG. Needs no broker."""
    version, read = Version.parse(broker_version), _read_any(file)("/")
    made = (
        Design(topology=in_force(read.topology), version=version)
        if isinstance(read, Definitions)
        else design(read, version)
    )
    picture = mermaid(made) if form is Format.MERMAID else svg(made)
    if context.as_json:
        context.out.document({"format": form.value, "picture": picture})
    else:
        _write(picture.encode(), output)


def _show(out: Output, found: Result) -> None:
    out.document(_document(found))
    out.say(f"RabbitMQ {found.version}, virtual host '{found.vhost}'")
    match found:
        case TopologyPlan():
            _show_differences(out, found.differences)
            _show_remarks(out, found.remarks)
            _show_probes(out, found.probes)
            _show_left_out(out, found.left_out)
            if not found.differences:
                out.say("the broker is as the file says")
        case Applied():
            _show_applied(out, found)
        case ImportReport():
            for name in found.created:
                out.say(f"+ {name} was made")
            _show_differences(out, found.remaining)
            _show_left_out(out, found.left_out)
            for hazard in found.hazards:
                out.say(f"! {hazard}")
            if found.failure:
                out.say(f"! {found.failure}; what was made before that is there")
            made = plural(len(found.created), "thing")
            left = "nothing differs" if not found.remaining else plural(len(found.remaining), "difference") + " left"
            out.say(f"{made} made; read back: {left}")


def _show_left_out(out: Output, sections: Iterable[str]) -> None:
    for section in sections:
        out.say(f"  left out: {section}")


def _show_applied(out: Output, done: Applied) -> None:
    for name in done.deleted:
        out.say(f"- {name} was deleted")
    for name in done.created:
        out.say(f"+ {name} was made")
    for name, reason in done.kept.items():
        out.say(f"! '{name}' was not deleted: {reason}")
    _show_differences(out, done.remaining)
    _show_probes(out, done.probes)
    if done.failure:
        out.say(f"! {done.failure}; nothing was made after that")
    if not done.has_changed and done.is_done:
        out.say("nothing was to be done: the broker is as the file says")
    else:
        out.say(f"{plural(len(done.created), 'thing')} made, {plural(len(done.deleted), 'thing')} deleted")


def _show_differences(out: Output, differences: Iterable[Difference]) -> None:
    for difference in differences:
        out.say(f"{_SIGNS[difference.kind]} {difference}")
        if difference.way_out:
            out.say(f"    way out: {difference.way_out}")


def _show_remarks(out: Output, remarks: Iterable[Hazard]) -> None:
    by_reason: dict[str, list[str]] = {}
    for remark in remarks:
        if remark.fatal:
            out.say(f"! {remark}")
            continue
        by_reason.setdefault(remark.reason, []).append(remark.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - NAMES_COUNT_MAX} more" if len(names) > NAMES_COUNT_MAX else ""
        out.say(f"  remark: {', '.join(names[:NAMES_COUNT_MAX])}{more}: {reason}")


def _show_probes(out: Output, probes: Iterable[ProbeResult]) -> None:
    arrived = 0
    for probe in probes:
        if probe.outcome == "arrived":
            arrived += 1
        else:
            sign = "!" if probe.outcome == "lost" else " "
            out.say(f"{sign} probe {probe.name}: {probe.outcome}; {probe.reason}")
    if arrived:
        out.say(f"{plural(arrived, 'probe')} arrived")


def _document(found: Result) -> dict[str, object]:
    verdict = {"clean": found.is_clean} if isinstance(found, TopologyPlan) else {}
    verdict |= {"done": found.is_done} if isinstance(found, Applied) else {}
    fields = {name: _plain(value) for name, value in structs.asdict(found).items()}
    return {"vhost": found.vhost, "version": str(found.version)} | verdict | fields


def _plain(value: object) -> object:
    match value:
        case tuple() if not isinstance(value, Version):
            return [_plain(each) for each in value]
        case Difference():
            names = ("kind", "what", "name", "aspects", "way_out")
            return {name: _plain(getattr(value, name)) for name in names}
        case Hazard():
            return {"name": value.name, "reason": value.reason}
        case Version():
            return str(value)
    return value


@asynccontextmanager
async def _open(context: CommandContext) -> AsyncIterator[Topologies]:
    url = context.settings.storages[0].url
    if urlsplit(url).scheme not in ("amqp", "amqps"):
        raise BadUsage("no broker was named; give its address with --url amqp://user:password@host/vhost")
    from holdfast.wiring import open_topology

    management = context.management or os.environ.get("HOLDFAST_MANAGEMENT_URL")
    async with open_topology(url, management=management) as topologies:
        yield topologies


def _read(path: Path) -> TopologyFile:
    return parse_file(read_file(path, bytes_max=FILE_BYTES_MAX), source=str(path))


def _read_any(path: Path) -> Callable[[str], TopologyFile | Definitions]:
    """By its name a definitions.json, else a topology file; for the virtual host that it is then given."""
    if path.suffix == ".json":
        return _read_definitions(path)
    made = _read(path)
    return lambda vhost: made


def _read_definitions(path: Path) -> Callable[[str], Definitions]:
    data = read_file(path, bytes_max=DEFINITIONS_BYTES_MAX)
    return lambda vhost: from_definitions(data, vhost=vhost, source=str(path))


def _write(data: bytes, path: Path | None) -> None:
    if path is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        with open(path, "wb", opener=private) as file:
            file.write(data)
    except OSError as error:
        raise CommandFailed(f"file cannot be written; '{path}': {error.strerror or error}") from error
