"""`holdfast console`: a link that signs a browser of this machine in, once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.core.requests.vault import LinkSession
from holdfast.faces.cli.command import command
from holdfast.faces.cli.context import CommandContext, CommandFailed

EXAMPLE = """
--open
--url http://127.0.0.1:9000 --token-file viewer-token"""


@command("console", example=EXAMPLE)
async def console(
    context: CommandContext,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser instead of printing it.")] = False,
) -> None:
    """Print a link to the console of a server on this machine: it signs in once, within five minutes.

    Whoever has the link is signed in, so it is printed on a terminal alone; what it may do is what the token may. The
    server is the one at --url, else the one that 'holdfast serve' would be here; for that one the token in the data
    folder is found.
    """
    if not opens and not sys.stdout.isatty():
        raise CommandFailed(
            "link is not printed; whoever reads it is signed in, use a terminal, or --open for a browser"
        )
    async with context.connect_server() as (address, client):
        link = await client.call(LinkSession())
    url = f"{address}{link.path}"
    if opens:
        import webbrowser

        if not webbrowser.open(url):
            raise CommandFailed("browser cannot be opened; none was found, print the link without --open")
        url = f"{address}/"
    context.out.document({"url": url, "expires_at": link.expires_at})
    if not opens:
        context.out.say(url)
        note = "needs no token here" if link.expires_at is None else "works once, within 5 minutes"
        context.out.note(f"This {note}.")
