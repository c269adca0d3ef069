"""`holdfast demo`: a server with an incident to look at, in a folder of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.faces.cli.command import JSON, command
from holdfast.faces.cli.context import CommandContext, collect_seldom

EXAMPLE = """
--listen 127.0.0.1:9000
--remove"""


@command("demo", example=EXAMPLE, shared=(JSON,))
def demo(
    context: CommandContext,
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:0",
    removes: Annotated[bool, typer.Option("--remove", help="Delete the folder that a demo made, and end.")] = False,
) -> None:
    """Serve an incident to look at, in ./holdfast-demo, until SIGTERM or Ctrl-C.

    Four queues of a shop with their consumers, a day in which some of its messages died, and what goes on arriving. It
    touches nothing but its folder, which '--remove' deletes; started again it goes on.
    """
    from holdfast.faces import demo as incident

    folder = incident.FOLDER
    with incident.held(folder, makes=not removes) as is_new:
        if removes:
            incident.remove(folder)
            context.out.document({"removed": str(folder)})
            context.out.say(f"{folder} is deleted")
            return
        from holdfast.faces.api.server import run

        settings = incident.settings_of(folder, listen)
        incident.be_quiet()
        if is_new:
            incident.make(folder, settings, tell=_progress)
        context.out.announce(f"The demo is in {folder}; 'holdfast demo --remove' deletes it.")
        collect_seldom()
        run(settings, announce=context.out.announce, beside=incident.at_work)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        end = "\n" if text.endswith("100 %") else ""
        typer.echo(f"\r{text}{end}", nl=False, err=True)
