"""The tree of commands: `holdfast`, `holdfast queue`, `holdfast queue items`, `holdfast config`."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import __version__

_CONTEXT = {"help_option_names": ["-h", "--help"]}


def _group(summary: str) -> typer.Typer:
    return typer.Typer(
        help=summary,
        no_args_is_help=True,
        context_settings=_CONTEXT,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


app = _group(
    "Holdfast keeps messages from getting lost: durable queues with leases, retries and dead queues.\n\n"
    "Commands work on the storage or the server that --url or HOLDFAST_URL names, and without one on "
    "./holdfast-data.\n\n"
    "Exit codes: 0 done, 1 failed, 2 bad usage, 3 partly done, 130 interrupted."
)
queue = _group("Queues and their items.")
items = _group("The items in a queue as they are stored: list, export, import, delete.")
config = _group("What Holdfast is configured with.")
topology = _group("Exchanges, queues and bindings of a RabbitMQ broker: plan, apply, check, export, import, draw.")

results = _group("Large results that arrive as numbered messages: start, list, show, gaps, cat, abandon.")

letters = _group("Letters in custody: list, search, show, edit, diff, archive, restore, discard, resolve, export.")
groups = _group("Letters that died of one cause: list, change.")
redrive = _group("Tasks that send letters back: start, list, watch, pause, resume, cancel.")
tokens = _group("API tokens: create, list, revoke.")
ledger = _group("Who did what to which letter: show, head, verify.")

queue.add_typer(items, name="items")
app.add_typer(queue, name="queue")
app.add_typer(topology, name="topology")
app.add_typer(results, name="results")
app.add_typer(letters, name="letters")
app.add_typer(groups, name="groups")
app.add_typer(redrive, name="redrive")
app.add_typer(tokens, name="token")
app.add_typer(ledger, name="ledger")
app.add_typer(config, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What comes before a command."""
