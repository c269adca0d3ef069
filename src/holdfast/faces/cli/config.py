"""`holdfast config show`: what is set, where it came from, and what it means."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from holdfast.errors import CannotStart
from holdfast.faces.cli.app import config as app
from holdfast.faces.cli.command import CONFIG_PARAMETER, JSON_PARAMETER, Url, command
from holdfast.faces.cli.context import CommandContext
from holdfast.faces.cli.output import add_row, table
from holdfast.settings import check_serving, explain

_SHARED = (
    inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Url),
    CONFIG_PARAMETER,
    JSON_PARAMETER,
)


@command(app, "show", example="holdfast config show --explain", shared=_SHARED)
async def show(
    session: CommandContext,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say where each value came from and what it means.")
    ] = False,
) -> None:
    """Show every setting: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments. Secrets are masked."""
    rows = explain(session.settings)
    if explained:
        told = {row.key: {"value": row.plain, "source": row.source, "meaning": row.meaning} for row in rows}
        session.out.document(told)
        for row in rows:
            session.out.say(f"{row.key} = {', '.join(row.value.splitlines())}")
            session.out.say(f"    {row.meaning}")
            session.out.say(f"    from: {row.source}")
    else:
        session.out.document({row.key: row.plain for row in rows})
        shown = table("setting", "value")
        for row in rows:
            add_row(shown, row.key, ", ".join(row.value.splitlines()))
        session.out.show(shown)
    try:
        check_serving(session.settings)
    except CannotStart as error:
        session.out.note(f"note: 'holdfast serve' would refuse this; {error.message}")
