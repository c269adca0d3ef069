"""`holdfast config show`: what is set, where it came from, and what it means."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from holdfast.errors import CannotStart
from holdfast.faces.cli.app import config as app
from holdfast.faces.cli.command import CONFIG_PARAMETER, JSON_PARAMETER, Url, command
from holdfast.faces.cli.output import add_row, table
from holdfast.faces.cli.session import Session
from holdfast.settings import check_serving, explain

_SHARED = (
    inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Url),
    CONFIG_PARAMETER,
    JSON_PARAMETER,
)


@command(app, "show", example="holdfast config show --explain", shared=_SHARED)
async def show(
    session: Session,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say where each value came from and what it means.")
    ] = False,
) -> None:
    """Show every setting: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments. Secrets are masked."""
    rows = explain(session.settings)
    if explained:
        document: dict[str, object] = {row.key: row._asdict() for row in rows}
        shown = table("setting", "value", "from", "meaning", wraps=["value", "meaning"])
    else:
        document = {row.key: row.value for row in rows}
        shown = table("setting", "value", wraps=["value"])
    for row in rows:
        add_row(shown, *(row if explained else row[:2]))
    session.out.document(document)
    session.out.show(shown)
    try:
        check_serving(session.settings)
    except CannotStart as error:
        session.out.note(f"note: 'holdfast serve' would refuse this; {error.message}")
