"""`holdfast topology plan|apply|check|export|import|draw`: the exchanges, queues and bindings of a RabbitMQ broker."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from holdfast.core.topology import Version
from holdfast.core.topology_definitions import from_definitions, to_definitions
from holdfast.core.topology_draw import mermaid, svg
from holdfast.core.topology_file import FILE_BYTES_MAX, TopologyFile, parse_file
from holdfast.core.topology_layouts import design
from holdfast.faces.cli.app import topology as app
from holdfast.faces.cli.checks import read_file
from holdfast.faces.cli.command import CONFIG_PARAMETER, JSON_PARAMETER, PANEL, command
from holdfast.faces.cli.failures import BadUsage, CommandFailed, ExitCode
from holdfast.faces.cli.session import CommandContext
from holdfast.faces.cli.topology_output import applied_document, imported_document, plan_document, show
from holdfast.services.topology import Topologies

DEFINITIONS_BYTES_MAX = 64_000_000
VERSION_DEFAULT = "3.10"

Url = Annotated[
    str | None,
    typer.Option(
        help="The broker: amqp://user:password@host/vhost, or amqps://…. Also HOLDFAST_URL.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
Management = Annotated[
    str | None,
    typer.Option(
        help="The broker's management API, http://user:password@host:15672; by default on the broker's host with its "
        "login. Also HOLDFAST_MANAGEMENT_URL.",
        show_default=False,
    ),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The topology file (TOML).", show_default=False)]
BrokerVersion = Annotated[
    str,
    typer.Option(help="The RabbitMQ version to design for; arguments differ between 3.x and 4.x.", metavar="VERSION"),
]
Target = Annotated[Path | None, typer.Option("--output", help="Write to this file instead of stdout.")]

SHARED = (
    inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Url),
    CONFIG_PARAMETER,
    JSON_PARAMETER,
)
OFFLINE = (JSON_PARAMETER,)


class Format(StrEnum):
    """What can be drawn."""

    MERMAID = "mermaid"
    SVG = "svg"


@command(app, "plan", example="holdfast topology plan topology.toml --url amqp://guest:guest@localhost", shared=SHARED)
async def plan(session: CommandContext, file: File, management: Management = None) -> None:
    """Show what apply would change, and what cannot be changed with the way out of it. Changes nothing."""
    wanted = _read(file)
    async with _open(session, management) as topologies:
        found = await topologies.plan(wanted)
    session.out.document(plan_document(found))
    show(session.out, found)


@command(
    app,
    "apply",
    example="holdfast topology apply topology.toml\nholdfast topology apply topology.toml --delete --probe",
    shared=SHARED,
)
async def apply(
    session: CommandContext,
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
    management: Management = None,
) -> ExitCode:
    """Make what is missing, read it back, and send a probe through the retry and dead-letter paths."""
    wanted = _read(file)
    async with _open(session, management) as topologies:
        done = await topologies.apply(wanted, delete=delete, probe=probe)
    session.out.document(applied_document(done))
    show(session.out, done)
    if done.is_done:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if done.has_changed else ExitCode.FAILED


@command(app, "check", example="holdfast topology check topology.toml || echo 'the broker has drifted'", shared=SHARED)
async def check(
    session: CommandContext,
    file: File,
    probe: Annotated[
        bool, typer.Option("--probe", help="Send a probe through every path as well, busy queues included.")
    ] = False,
    management: Management = None,
) -> ExitCode:
    """Compare the broker with the file; exit code 1 when they differ or a probe does not arrive."""
    wanted = _read(file)
    async with _open(session, management) as topologies:
        found = await topologies.check(wanted, probe=probe)
    session.out.document(plan_document(found))
    show(session.out, found)
    return ExitCode.DONE if found.is_clean else ExitCode.FAILED


@command(
    app,
    "export",
    example="holdfast topology export --url amqp://guest:guest@localhost > definitions.json\n"
    "holdfast topology export topology.toml --broker-version 4.0",
    shared=SHARED,
)
async def export(
    session: CommandContext,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A topology file; without one, the broker as it is.", show_default=False),
    ] = None,
    broker_version: BrokerVersion = VERSION_DEFAULT,
    vhost: Annotated[str, typer.Option(help="With FILE: the virtual host that the definitions name.")] = "/",
    output: Target = None,
    management: Management = None,
) -> None:
    """Write RabbitMQ's definitions.json, of a broker or of a topology file. Users and permissions are not in it."""
    if file is not None:
        made = design(_read(file), Version.parse(broker_version))
        found = {"rabbit_version": str(made.version), **to_definitions(made.topology, vhost=vhost)}
    else:
        async with _open(session, management) as topologies:
            found = await topologies.export()
    _write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n", output)


@command(app, "import", example="holdfast topology import definitions.json", shared=SHARED)
async def import_definitions(
    session: CommandContext,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A definitions.json.", show_default=False)],
    accept_hazards: Annotated[
        bool, typer.Option("--accept-hazards", help="Import also what is known to lose messages; it is named.")
    ] = False,
    management: Management = None,
) -> ExitCode:
    """Import exchanges, queues, bindings and policies, read them back, and name every difference that is left.

    The broker ignores changed arguments without a word; this does not. Users and permissions are left out.
    """
    data = read_file(file, bytes_max=DEFINITIONS_BYTES_MAX)
    async with _open(session, management) as topologies:
        given = from_definitions(data, vhost=topologies.vhost, source=str(file))
        done = await topologies.import_definitions(given, accept_hazards=accept_hazards)
    session.out.document(imported_document(done))
    show(session.out, done)
    if not done.remaining:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if done.created else ExitCode.FAILED


@command(app, "draw", example="holdfast topology draw topology.toml --format svg > topology.svg", shared=OFFLINE)
async def draw(
    session: CommandContext,
    file: File,
    form: Annotated[Format, typer.Option("--format", help="mermaid or svg.")] = Format.MERMAID,
    broker_version: BrokerVersion = VERSION_DEFAULT,
    output: Target = None,
) -> None:
    """Draw a topology file as a Mermaid flowchart or as SVG. Needs no broker."""
    made = design(_read(file), Version.parse(broker_version))
    picture = mermaid(made) if form is Format.MERMAID else svg(made)
    if session.as_json:
        session.out.document({"format": form.value, "picture": picture})
    else:
        _write(picture.encode(), output)


@asynccontextmanager
async def _open(session: CommandContext, management: str | None) -> AsyncIterator[Topologies]:
    url = session.settings.storages[0].url
    if urlsplit(url).scheme not in ("amqp", "amqps"):
        raise BadUsage("no broker was named; give its address with --url amqp://user:password@host/vhost")
    from holdfast.wiring import open_topology

    async with open_topology(url, management=management or os.environ.get("HOLDFAST_MANAGEMENT_URL")) as topologies:
        yield topologies


def _read(path: Path) -> TopologyFile:
    return parse_file(read_file(path, bytes_max=FILE_BYTES_MAX), source=str(path))


def _write(data: bytes, path: Path | None) -> None:
    if path is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CommandFailed(f"file cannot be written; '{path}': {error.strerror or error}") from error
