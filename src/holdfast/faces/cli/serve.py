"""`holdfast serve`: the queue service over HTTP; `holdfast config show`: what is set, from where, and what it means."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import CannotStart, HoldfastError
from holdfast.faces.cli import app, groups
from holdfast.faces.cli.command import CONFIG_PARAMETER, JSON_PARAMETER, Config, Json, LogFormat, LogLevel, Url, command
from holdfast.faces.cli.context import CommandContext, report, server_of
from holdfast.faces.cli.output import Output, table
from holdfast.settings import check_serving, explain, load_settings

EXAMPLE = """Example:

  $ holdfast serve

  $ holdfast serve --url sqlite:////var/lib/holdfast --listen 127.0.0.1:8470

  $ holdfast serve --url postgresql://holdfast@db/holdfast --listen 0.0.0.0:8470 --tls-cert c.pem --tls-key k.pem"""

_SHARED = (
    inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Url),
    CONFIG_PARAMETER,
    JSON_PARAMETER,
)


@app.command("serve", epilog=EXAMPLE)
def serve(
    url: Annotated[
        str | None,
        typer.Option(
            help="Where queues are kept: sqlite:///FOLDER (relative), sqlite:////FOLDER (absolute), "
            "postgresql://…, memory://. Default: sqlite:///holdfast-data.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT; port 0 takes a free one. Default: 127.0.0.1:8470.", show_default=False),
    ] = None,
    auth: Annotated[
        str | None, typer.Option(help="'token' (default), or 'none', on a loopback address only.", show_default=False)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM) for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) of the certificate.")] = None,
    insecure_http: Annotated[
        bool | None, typer.Option("--insecure-http", help="Plain http on an address that others can reach.")
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Where the file admin-token is. Default: ./holdfast-data.", show_default=False)
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Serve queues over HTTP until SIGTERM or Ctrl-C. Ready when GET /health answers 200.

    The admin token is made at the first start, shown once on the terminal, and kept in a file that only you can read.
    """
    arguments = {
        "url": url,
        "listen": listen,
        "auth": auth,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "insecure_http": insecure_http,
        "data_folder": data_folder,
        "log_level": log_level,
        "log_format": log_format,
    }
    server = ""
    try:
        settings = load_settings(arguments, file=config)
        server = server_of(settings)
        from holdfast.faces.api.server import run

        run(settings, announce=Output(as_json=as_json).announce)
    except HoldfastError as error:
        return report(error, as_json=as_json, server=server)
    return 0


@command(groups["config"], "show", example="holdfast config show --explain", shared=_SHARED)
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
