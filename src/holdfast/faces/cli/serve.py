"""`holdfast serve`: the queue service over HTTP; `holdfast config show`: what is set, from where, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct
from msgspec.structs import asdict

from holdfast.errors import CannotStart
from holdfast.faces.cli.command import CONFIG, JSON, URL, LogFormat, LogLevel, command
from holdfast.faces.cli.context import CommandContext, collect_seldom
from holdfast.faces.cli.output import table
from holdfast.settings import check_serving, explain

EXAMPLE = """
--url sqlite:////var/lib/holdfast --listen 127.0.0.1:8470
--url postgresql://holdfast@db/holdfast --listen 0.0.0.0:8470 --tls-cert c.pem --tls-key k.pem"""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """Settings of a server that are options, too."""

    url: Annotated[
        str | None,
        typer.Option(
            help="Where queues are kept: sqlite:///FOLDER (relative), sqlite:////FOLDER (absolute), "
            "postgresql://…, memory://. Default: sqlite:///holdfast-data.",
            show_default=False,
        ),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT; port 0 takes a free one. Default: 127.0.0.1:8470.", show_default=False),
    ] = None
    auth: Annotated[
        str | None, typer.Option(help="'token' (default), or 'none', on a loopback address only.", show_default=False)
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM) for https.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) of the certificate.")] = None
    insecure_http: Annotated[
        bool | None, typer.Option("--insecure-http", help="Plain http on an address that others can reach.")
    ] = None
    trusted_proxy: Annotated[
        str | None,
        typer.Option(help="Proxies whose X-Forwarded-For and -Proto are believed: 127.0.0.1,10.0.0.0/8."),
    ] = None
    require_broker: Annotated[
        bool | None,
        typer.Option("--require-broker", help="End at the start when RabbitMQ is away; else it is waited for."),
    ] = None
    accept_clock: Annotated[
        bool | None,
        typer.Option("--accept-clock", help="Delete by time at once, also after more than 6 h without a write."),
    ] = None
    data_folder: Annotated[
        Path | None, typer.Option(help="Where the file admin-token is. Default: ./holdfast-data.", show_default=False)
    ] = None
    log_level: LogLevel = None
    log_format: LogFormat = None


@command("serve", ServeOptions, example=EXAMPLE, shared=(CONFIG, JSON))
def serve(context: CommandContext, asked: ServeOptions) -> None:
    """Serve queues over HTTP until SIGTERM or Ctrl-C. Ready when GET /health answers 200.

    The admin token is made at the first start, shown once on the terminal, and kept in a file that only you can read.
    """
    context.given = asdict(asked)
    check_serving(context.settings)
    from holdfast.faces.api.server import run

    collect_seldom()
    run(context.settings, announce=context.out.announce)


@command("config show", example="--explain", shared=(URL, CONFIG, JSON))
async def show(
    context: CommandContext,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say where each value came from and what it means.")
    ] = False,
) -> None:
    """Show every setting: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments. Secrets are masked."""
    rows = explain(context.settings)
    if explained:
        told = {row.key: {"value": row.plain, "source": row.source, "meaning": row.meaning} for row in rows}
        context.out.document(told)
        for row in rows:
            context.out.say(f"{row.key} = {', '.join(row.value.splitlines())}")
            context.out.say(f"    {row.meaning}")
            context.out.say(f"    from: {row.source}")
    else:
        context.out.document({row.key: row.plain for row in rows})
        context.out.show(table(("setting", "value"), [(row.key, ", ".join(row.value.splitlines())) for row in rows]))
    try:
        check_serving(context.settings)
    except CannotStart as error:
        context.out.note(f"note: 'holdfast serve' would refuse this; {error.message}")
