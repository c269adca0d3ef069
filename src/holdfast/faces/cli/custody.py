"""`holdfast capture`, `groups`, `token`, `ledger` and `balance`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from holdfast.core.ledger import is_anchor
from holdfast.faces.cli.admin import LIST_COUNT_DEFAULT, open_admin, quoted
from holdfast.faces.cli.app import app, groups, ledger, tokens
from holdfast.faces.cli.command import command, duration, one_of
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode
from holdfast.faces.cli.output import filled_table, plural

Limit = Annotated[int, typer.Option(help="At most so many.", min=1, max=1_000)]


@command(app, "capture", example="holdfast capture orders.dlq\nholdfast capture orders.dlq --continuous")
async def capture(
    session: CommandContext,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="A dead-letter queue.", show_default=False)],
    limit: Annotated[int, typer.Option(help="At most so many letters.", min=1, max=1_000_000)] = 100_000,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="On a server: go on until it stops, and return at once.")
    ] = False,
) -> ExitCode:
    """Take the letters of a dead-letter queue into custody: stored first, acked second."""
    async with open_admin(session) as admin:
        request = {"queue": queue, "limit": limit, "continuous": continuous}
        try:
            done = await admin.post("/admin/captures", request)
        except CommandFailed as error:
            raise _without_broker(session, error) from error
    session.out.document(done)
    text = f"{plural(done['captured'], 'letter')} of '{queue}' captured"
    if done["matched"]:
        text += f", {plural(done['matched'], 'letter')} recognised"
    if done["failed_imports"]:
        text += f", {plural(done['failed_imports'], 'message')} could not become letters"
    session.out.say(text)
    return ExitCode.PARTLY_DONE if done["failed_imports"] or done["not_acked"] else ExitCode.DONE


def _without_broker(session: CommandContext, error: CommandFailed) -> CommandFailed:
    """A queue that is unknown may be one of a broker that nobody told us of."""
    is_here = urlsplit(session.settings.storages[0].url).scheme not in {"http", "https"}
    if is_here and session.settings.broker is None and error.message.startswith("queue is unknown"):
        error.message += (
            "; no broker is configured: for a queue of RabbitMQ set HOLDFAST_BROKER_URL to "
            "amqp://user:password@host/vhost, or broker in holdfast.toml"
        )
    return error


@command(groups, "list", example="holdfast groups list --status open")
async def list_groups(
    session: CommandContext,
    status: Annotated[str, typer.Option(help="open, resolved, ignored or regressed.", show_default=False)] = "",
    limit: Limit = LIST_COUNT_DEFAULT,
) -> None:
    """List failure groups; the one that got a letter last comes first."""
    if status:
        one_of(status, ("open", "resolved", "ignored", "regressed"), option="--status")
    async with open_admin(session) as admin:
        found = (await admin.get("/admin/groups", status=status, limit=limit))["groups"]
    session.out.documents(found)
    names = ("key", "title", "count", "status", "last_at", "sample", "note")
    rows = [[group[name] for name in names] for group in found]
    columns = ("key", "title", "#letters", "status", "last", "#sample", "note")
    session.out.show(filled_table(columns, rows))


@command(groups, "change", example="holdfast groups change 3f2a9c0d1e4b5a68 --status resolved --note 'fixed in 1.4'")
async def change_group(
    session: CommandContext,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of the group.", show_default=False)],
    status: Annotated[str | None, typer.Option(help="open, resolved or ignored.", show_default=False)] = None,
    note: Annotated[str | None, typer.Option(help="What is known about it.", show_default=False)] = None,
) -> None:
    """Resolve, ignore or reopen a group. One that is resolved and gets another letter is regressed."""
    if status is not None:
        one_of(status, ("open", "resolved", "ignored"), option="--status")
    async with open_admin(session) as admin:
        request = {name: text for name, text in (("status", status), ("note", note)) if text is not None}
        changed = await admin.post(f"/admin/groups/{quoted(key)}", request)
    session.out.document(changed)
    session.out.say(f"group {changed['key']} is {changed['status']}")


@command(tokens, "create", example="holdfast token create ci --role operator --expires-in 720h --queue 'orders.*'")
async def create_token(
    session: CommandContext,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called.", show_default=False)],
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")] = "viewer",
    expires_in: Annotated[str, typer.Option(help="For how long it is valid; for ever if left out.")] = "",
    queue: Annotated[list[str] | None, typer.Option(help="A pattern of queues that it is for.")] = None,
) -> None:
    """Make an API token. It is shown this once; only its hash is kept."""
    one_of(role, ("viewer", "operator", "admin"), option="--role")
    duration(expires_in, option="--expires-in")
    request = {"name": name, "role": role, "expires_in": expires_in, "queues": queue or []}
    async with open_admin(session) as admin:
        made = await admin.post("/admin/tokens", request)
    session.out.document(made)
    session.out.say(made["token"])


@command(tokens, "list", example="holdfast token list")
async def list_tokens(session: CommandContext) -> None:
    """List API tokens, without the tokens themselves."""
    async with open_admin(session) as admin:
        found = await admin.get("/admin/tokens")
    session.out.documents(found)
    names = ("name", "role", "queues", "made_at", "made_by", "expires_at", "revoked_at")
    rows = [[", ".join(one[name]) if name == "queues" else one[name] for name in names] for one in found]
    session.out.show(filled_table(names, rows))


@command(tokens, "revoke", example="holdfast token revoke ci")
async def revoke_token(
    session: CommandContext, name: Annotated[str, typer.Argument(metavar="NAME", help="Which one.", show_default=False)]
) -> None:
    """Revoke an API token, at once."""
    async with open_admin(session) as admin:
        done = await admin.delete(f"/admin/tokens/{quoted(name)}")
    session.out.document(done)
    session.out.say(f"token '{name}' is revoked")


@command(ledger, "show", example="holdfast ledger show --limit 100")
async def show_ledger(
    session: CommandContext,
    limit: Limit = LIST_COUNT_DEFAULT,
    cursor: Annotated[str, typer.Option(help="Where the page before ended.", show_default=False)] = "",
) -> None:
    """Show who did what to which letters, oldest first."""
    async with open_admin(session) as admin:
        page = await admin.get("/admin/ledger", limit=limit, cursor=cursor)
    session.out.document(page)
    names = ("number", "at", "actor", "action", "outcome", "queue", "to_state", "count", "reason")
    rows = [[row[name] for name in names] for row in page["rows"]]
    columns = ("#row", "at", "who", "what", "outcome", "queue", "state", "#letters", "why")
    session.out.show(filled_table(columns, rows))
    if page["next"]:
        session.out.note(f"more with --cursor {page['next']}")


@command(ledger, "head", example="holdfast ledger head >> somewhere-else.txt")
async def head(session: CommandContext) -> None:
    """Print the anchor of the chain. Kept elsewhere, it makes a tail that was cut off visible."""
    async with open_admin(session) as admin:
        found = await admin.get("/admin/ledger/head")
    session.out.document(found)
    session.out.say(found["head"])


@command(ledger, "verify", example="holdfast ledger verify --anchor 1234:9f3c…")
async def verify(
    session: CommandContext,
    anchor: Annotated[str, typer.Option(help="A head that was noted before.", show_default=False)] = "",
) -> ExitCode:
    """Walk the whole chain; exit code 1 names the first row that was changed, removed or inserted."""
    if anchor and not is_anchor(anchor):
        raise BadUsage("--anchor is invalid; it is not what 'holdfast ledger head' prints, NUMBER:HASH")
    async with open_admin(session) as admin:
        found = await admin.get("/admin/ledger/verify", anchor=anchor)
    session.out.document(found)
    session.out.say(f"broken: {found['why']}" if found["why"] else f"{plural(found['rows'], 'row')}, the chain holds")
    return ExitCode.FAILED if found["why"] else ExitCode.DONE


@command(app, "balance", example="holdfast balance || echo 'the ledger and the vault differ'")
async def balance(session: CommandContext) -> ExitCode:
    """Count letters by queue and state, from the ledger and from the vault; exit code 1 when they differ."""
    async with open_admin(session) as admin:
        found = await admin.get("/admin/balance")
    session.out.document(found)
    rows: list[list[object]] = []
    agrees = True
    for row in found:
        told, counted = row["ledger"], row["vault"]
        agrees = agrees and told == counted and row["captured_ever"] == sum(counted.values())
        rows += [
            [row["queue"], state, told.get(state, 0), counted.get(state, 0)] for state in sorted({*told, *counted})
        ]
        rows.append([row["queue"], "captured ever", row["captured_ever"], sum(counted.values())])
    session.out.show(filled_table(("queue", "state", "#ledger", "#vault"), rows))
    session.out.say("they agree" if agrees else "they differ")
    return ExitCode.DONE if agrees else ExitCode.FAILED
