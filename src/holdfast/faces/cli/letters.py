"""`holdfast letters`: find, look at, edit, archive, restore, discard and export letters in custody."""

from __future__ import annotations

import base64
import difflib
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.faces.cli.admin import LIST_COUNT_DEFAULT, Admin, as_selection, filtered, open_admin
from holdfast.faces.cli.app import letters as app
from holdfast.faces.cli.command import command, read_file
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode
from holdfast.faces.cli.output import Output, filled_table, plural

BODY_BYTES_MAX = 64 * 1024 * 1024
PAGE_COUNT_MAX = 1_000
COLUMNS = ("#id", "state", "queue", "type", "reason", "error", "died at", "#redriven")
FIELDS = ("id", "state", "queue", "type", "reason", "error_type", "died_at", "redriven_count")

Id = Annotated[int, typer.Argument(metavar="ID", help="The letter's id.", min=1, show_default=False)]
Limit = Annotated[int, typer.Option(help="At most so many.", min=1)]
Reason = Annotated[str, typer.Option(help="Why, for the ledger.", show_default=False)]


@command(app, "list", example="holdfast letters list --queue orders.dlq --state captured --limit 20")
@filtered
async def list_letters(session: CommandContext, filters: dict[str, str], limit: Limit = LIST_COUNT_DEFAULT) -> None:
    """List letters, newest first; all of the given conditions must fit."""
    await _list(session, filters, limit)


@command(app, "search", example="holdfast letters search 'payment refused'")
async def search(
    session: CommandContext,
    words: Annotated[str, typer.Argument(metavar="WORDS", help="All of them must be there.", show_default=False)],
    limit: Limit = LIST_COUNT_DEFAULT,
) -> None:
    """Find letters by words in their bodies and errors."""
    await _list(session, {"text": words}, limit)


async def _list(session: CommandContext, filters: dict[str, str], limit: int) -> None:
    found: list[dict[str, Any]] = []
    async with open_admin(session) as admin:
        cursor = ""
        while True:
            count = min(PAGE_COUNT_MAX, limit - len(found))
            page = await admin.get("/admin/letters", **filters, limit=count, cursor=cursor)
            found += page["letters"]
            cursor = page["next"]
            if not cursor or len(found) >= limit:
                break
    session.out.documents(found)
    total = f"{'' if page['count_is_exact'] else 'at least '}{plural(page['count'], 'letter')}"
    rows = [[letter[name] for name in FIELDS] for letter in found]
    session.out.show(filled_table(COLUMNS, rows, title=f"{total}, {len(found)} shown"))


@command(app, "show", example="holdfast letters show 42\nholdfast letters show 42 --body > body.bin")
async def show(
    session: CommandContext,
    letter: Id,
    body: Annotated[bool, typer.Option("--body", help="Write the bytes of its body, and nothing else.")] = False,
) -> None:
    """Show one letter with its history, or its body."""
    async with open_admin(session) as admin:
        if body:
            sys.stdout.buffer.write(await admin.raw(f"/admin/letters/{letter}/body"))
            return
        found = await admin.get(f"/admin/letters/{letter}")
        history = (await admin.get(f"/admin/letters/{letter}/history"))["rows"]
    session.out.document({**found, "history": history})
    _show_letter(session.out, found)
    rows = [[row["at"], row["actor"], row["action"], row["to_state"], row["reason"]] for row in history]
    session.out.show(filled_table(("at", "who", "what", "state", "why"), rows, title="History"))


def _show_letter(out: Output, found: dict[str, Any]) -> None:
    """What is short as a record; headers, properties and the stack trace as blocks below it."""
    blocks = {name: value for name, value in found.items() if isinstance(value, dict | list) or name == "error_stack"}
    out.record([(name, value) for name, value in found.items() if name not in blocks and value not in (None, "")])
    for name, value in blocks.items():
        if isinstance(value, str):
            lines = value.splitlines()
        elif isinstance(value, dict):
            lines = [f"{key} = {msgspec.json.encode(each).decode()}" for key, each in value.items()]
        else:
            lines = [msgspec.json.encode(each).decode() for each in value]
        if lines:
            out.block(name.replace("_", " ").capitalize(), lines)
    out.say("")


@command(app, "edit", example="holdfast letters edit 42 --revision 0 --body-file mended.json --set tenant=7")
async def edit(
    session: CommandContext,
    letter: Id,
    revision: Annotated[int, typer.Option(help="The newest revision that you have seen; 0 is the original.", min=0)],
    body_file: Annotated[Path | None, typer.Option(help="A file with the new body.", show_default=False)] = None,
    put: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of a header; JSON or text.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A header to take off.")] = None,
    sensitive: Annotated[bool, typer.Option("--sensitive", help="Also headers that decide where it goes.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Make the original the newest revision.")] = False,
    reason: Reason = "",
) -> None:
    """Edit a letter: a new revision. The original stays, and letters diff shows what changed."""
    request: dict[str, object] = {"revision": revision, "sensitive": sensitive, "restore": restore, "reason": reason}
    if body_file is not None:
        request["body"] = base64.b64encode(read_file(body_file, bytes_max=BODY_BYTES_MAX)).decode()
    request["put"] = dict(_header(text) for text in put or [])
    request["drop"] = drop or []
    async with open_admin(session) as admin:
        made = await admin.post(f"/admin/letters/{letter}/revisions", request)
    session.out.document(made)
    session.out.say(f"letter {letter} has revision {made['revision']} now")


def _header(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadUsage(f"--set takes NAME=VALUE, not '{text}'")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


@command(app, "diff", example="holdfast letters diff 42")
async def diff(session: CommandContext, letter: Id) -> None:
    """Show what the newest revision changes against the original."""
    async with open_admin(session) as admin:
        original = await admin.raw(f"/admin/letters/{letter}/body", original=True)
        newest = await admin.raw(f"/admin/letters/{letter}/body")
        revisions = await admin.get(f"/admin/letters/{letter}/revisions")
    last: dict[str, Any] = revisions[-1] if revisions else {"number": 0, "put": {}, "drop": []}
    lines = list(
        difflib.unified_diff(
            original.decode("utf-8", "backslashreplace").splitlines(),
            newest.decode("utf-8", "backslashreplace").splitlines(),
            "original",
            f"revision {last['number']}",
            lineterm="",
        )
    )
    session.out.document({"revision": last["number"], "put": last["put"], "drop": last["drop"], "body": lines})
    for name, value in last["put"].items():
        session.out.say(f"header {name} = {msgspec.json.encode(value).decode()}")
    for name in last["drop"]:
        session.out.say(f"header {name} is taken off")
    for line in lines:
        session.out.say(line)


def _action(word: str, state: str) -> None:
    async def act(
        session: CommandContext,
        filters: dict[str, str],
        count: Annotated[
            int | None, typer.Option(help="How many letters you expect; without it they are only counted.", min=0)
        ] = None,
        reason: Reason = "",
    ) -> ExitCode | None:
        if filters.get("state", state) != state:
            lost = "; discarded letters cannot be restored" if (word, filters["state"]) == LOST else ""
            raise BadUsage(f"--state is {filters['state']}; {word} takes letters that are {state} alone{lost}")
        selection = {"state": state, **as_selection(filters)}
        filters = {"state": state, **filters}
        async with open_admin(session) as admin:
            if count is None:
                return await _only_counted(session, admin, filters, word)
            done = await admin.post(
                f"/admin/letters/{word}", {"selection": selection, "count": count, "reason": reason}
            )
        session.out.document(done)
        session.out.say(f"{plural(done['count'], 'letter')}: {word} is done")
        return ExitCode.DONE

    act.__doc__ = (
        f"{word.capitalize()} letters that are {state}. Without --count they are only counted; with it exactly so many "
        "are changed, or none."
    )
    example = f"holdfast letters {word} --group 3f2a9c0d1e4b5a68 --count 12 --reason 'test data'"
    command(app, word, example=example)(filtered(act))


async def _only_counted(session: CommandContext, admin: Admin, filters: dict[str, str], word: str) -> ExitCode:
    page = await admin.get("/admin/letters", **filters, limit=1)
    session.out.document({"count": page["count"], "count_is_exact": page["count_is_exact"], "done": False})
    if not page["count"]:
        text = f"no letter that is {filters['state']} fits; there is nothing to {word}"
        if word == "restore":
            lost = await admin.get("/admin/letters", **{**filters, "state": "discarded"}, limit=1)
            text += f"; {lost['count']} of them are gone: discarded letters cannot be restored" if lost["count"] else ""
        session.out.say(text)
        return ExitCode.FAILED
    session.out.say(f"{plural(page['count'], 'letter')} would be changed; say --count {page['count']} to {word} them")
    return ExitCode.BAD_USAGE


LOST = ("restore", "discarded")
ACTIONS: dict[str, str] = {"archive": "captured", "restore": "archived", "discard": "captured", "resolve": "redriven"}
for _word, _state in ACTIONS.items():
    _action(_word, _state)


@command(app, "export", example="holdfast letters export --queue orders.dlq > letters.jsonl")
@filtered
async def export(session: CommandContext, filters: dict[str, str]) -> None:
    """Write letters as JSON Lines, byte for byte: bodies and raw properties are base64."""
    async with open_admin(session) as admin:
        async for line in admin.lines("/admin/export", **filters):
            sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
