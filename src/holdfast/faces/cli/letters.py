"""`holdfast letters`: find, look at, edit, archive, restore, discard and export letters in custody.

Which letters is said with the same options everywhere: `filtered` gives them to a command.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
import typer
from msgspec import structs

from holdfast.core.requests import vault as requests
from holdfast.faces.cli import groups
from holdfast.faces.cli.command import command, duration, one_of, read_file
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode
from holdfast.faces.cli.output import Output, filled_table, plural

if TYPE_CHECKING:
    from holdfast.faces.client import RequestClient

app = groups["letters"]

LIST_COUNT_DEFAULT = 50
BODY_BYTES_MAX = 64 * 1024 * 1024
PAGE_COUNT_MAX = 1_000
PANEL = "Which letters"
STATES = tuple(word for word in get_args(requests.State) if word)
COLUMNS = ("#id", "state", "queue", "type", "reason", "error", "died at", "#redriven")
FIELDS = ("id", "state", "queue", "type", "reason", "error_type", "died_at", "redriven_count")

Id = Annotated[int, typer.Argument(metavar="ID", help="The letter's id.", min=1, show_default=False)]
Limit = Annotated[int, typer.Option(help="At most so many.", min=1)]
Reason = Annotated[str, typer.Option(help="Why, for the ledger.", show_default=False)]

# --- the options that say which letters -----------------------------------------------------------------------

#: Fields of a filter, in the order of their options.
FILTERS = ["ids", "queue", "source_queue", "type", "reason", "error", "group", "state", "header", "text", "older_than"]
#: Where the option is called otherwise.
NAMES = {"reason": "death_reason"}
HEADER = "NAME, or NAME=VALUE of a header."

Filtered = Callable[..., Coroutine[Any, Any, ExitCode | None]]
LOST = ("restore", "discarded")


def filtered(body: Filtered) -> Filtered:
    """Give a command the options of FILTERS; its second parameter is the requests.Filter that they make."""
    context, _filters, *own = inspect.signature(body, eval_str=True).parameters.values()

    async def run(given_session: CommandContext, **given: Any) -> ExitCode | None:
        wanted = {field: given.pop(NAMES.get(field, field)) for field in FILTERS}
        return await body(given_session, _filter(wanted), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    texts = {one.name: msgspec.json.schema(one.type)["description"] for one in structs.fields(requests.Filter)}
    options = []
    for field in FILTERS:
        text = HEADER if field == "header" else texts[field]
        hint = typer.Option(help=text, rich_help_panel=PANEL, show_default=False)
        options.append(inspect.Parameter(NAMES.get(field, field), keyword, default="", annotation=Annotated[str, hint]))
    parameters = [context, *(one.replace(kind=keyword) for one in own), *options]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by `command`
    run.__doc__ = body.__doc__
    return run


def _filter(given: Mapping[str, str]) -> requests.Filter:
    """What was set. Raises BadUsage."""
    duration(given["older_than"], option="--older-than")
    if given["state"]:
        one_of(given["state"], STATES, option="--state")
    try:
        ids = tuple(int(part) for part in given["ids"].split(",") if part.strip())
    except ValueError as error:
        raise BadUsage("--ids takes whole numbers with commas between them") from error
    name, _, value = given["header"].partition("=")
    return requests.Filter(**{**given, "ids": ids, "header": name, "header_value": value})  # type: ignore[arg-type]  # texts


def named(filters: requests.Filter) -> requests.Filter:
    """The same, when anything was named. Raises BadUsage."""
    if filters == requests.Filter():
        raise BadUsage("no letters were named; use --ids, --group, --queue or another filter")
    return filters


# --- commands -------------------------------------------------------------------------------------------------


@command(app, "list", example="holdfast letters list --queue orders.dlq --state captured --limit 20")
@filtered
async def list_letters(context: CommandContext, filters: requests.Filter, limit: Limit = LIST_COUNT_DEFAULT) -> None:
    """List letters, newest first; all of the given conditions must fit."""
    await _list(context, filters, limit)


@command(app, "search", example="holdfast letters search 'payment refused'")
async def search(
    context: CommandContext,
    words: Annotated[str, typer.Argument(metavar="WORDS", help="All of them must be there.", show_default=False)],
    limit: Limit = LIST_COUNT_DEFAULT,
) -> None:
    """Find letters by words in their bodies and errors."""
    await _list(context, requests.Filter(text=words), limit)


def _search(filters: requests.Filter, limit: int, cursor: str = "") -> requests.SearchLetters:
    return requests.SearchLetters(**structs.asdict(filters), limit=limit, cursor=cursor)


async def _list(context: CommandContext, filters: requests.Filter, limit: int) -> None:
    async with context.connect(requests.SearchLetters) as custody:
        page = await custody.call(_search(filters, min(PAGE_COUNT_MAX, limit)))
        found = list(page.letters)
        while page.next and len(found) < limit:
            page = await custody.call(_search(filters, min(PAGE_COUNT_MAX, limit - len(found)), page.next))
            found += page.letters
    context.out.documents(found)
    total = f"{'' if page.count_is_exact else 'at least '}{plural(page.count, 'letter')}"
    rows = [[getattr(letter, name) for name in FIELDS] for letter in found]
    context.out.show(filled_table(COLUMNS, rows, title=f"{total}, {len(found)} shown"))


@command(app, "show", example="holdfast letters show 42\nholdfast letters show 42 --body > body.bin")
async def show(
    context: CommandContext,
    letter: Id,
    body: Annotated[bool, typer.Option("--body", help="Write the bytes of its body, and nothing else.")] = False,
) -> None:
    """Show one letter with its history, or its body."""
    async with context.connect(requests.ReadLetter) as custody:
        if body:
            sys.stdout.buffer.write(await custody.call(requests.ReadBody(id=letter)))
            return
        found = structs.asdict(await custody.call(requests.ReadLetter(id=letter)))
        history = (await custody.call(requests.ReadHistory(id=letter))).rows
    context.out.document({**found, "history": history})
    _show_letter(context.out, found)
    rows = [[row.at, row.actor, row.action, row.to_state, row.reason] for row in history]
    context.out.show(filled_table(("at", "who", "what", "state", "why"), rows, title="History"))


def _show_letter(out: Output, found: Mapping[str, object]) -> None:
    """What is short as a record; headers, properties and the stack trace as blocks below it."""
    blocks = {name: value for name, value in found.items() if isinstance(value, dict | list) or name == "error_stack"}
    out.record([(name, value) for name, value in found.items() if name not in blocks and value not in (None, "")])
    for name, value in blocks.items():
        if isinstance(value, dict):
            lines = [f"{key} = {msgspec.json.encode(each).decode()}" for key, each in value.items()]
        elif isinstance(value, list):
            lines = [msgspec.json.encode(each).decode() for each in value]
        else:
            lines = str(value).splitlines()
        if lines:
            out.block(name.replace("_", " ").capitalize(), lines)
    out.say("")


@command(app, "edit", example="holdfast letters edit 42 --revision 0 --body-file mended.json --set tenant=7")
async def edit(
    context: CommandContext,
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
    request = requests.EditLetter(
        id=letter,
        revision=revision,
        body=read_file(body_file, bytes_max=BODY_BYTES_MAX) if body_file is not None else None,
        put=dict(_header(text) for text in put or []),
        drop=drop or [],
        sensitive=sensitive,
        restore=restore,
        reason=reason,
    )
    async with context.connect(requests.EditLetter) as custody:
        made = await custody.call(request)
    context.out.document(made)
    context.out.say(f"letter {letter} has revision {made.revision} now")


def _header(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadUsage(f"--set takes NAME=VALUE, not '{text}'")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


@command(app, "diff", example="holdfast letters diff 42")
async def diff(context: CommandContext, letter: Id) -> None:
    """Show what the newest revision changes against the original."""
    async with context.connect(requests.ReadBody) as custody:
        original = await custody.call(requests.ReadBody(id=letter, original=True))
        newest = await custody.call(requests.ReadBody(id=letter))
        revisions = await custody.call(requests.ListRevisions(id=letter))
    number, put, drop = (revisions[-1].number, revisions[-1].put, revisions[-1].drop) if revisions else (0, {}, [])
    lines = list(
        difflib.unified_diff(
            original.decode("utf-8", "backslashreplace").splitlines(),
            newest.decode("utf-8", "backslashreplace").splitlines(),
            "original",
            f"revision {number}",
            lineterm="",
        )
    )
    context.out.document({"revision": number, "put": put, "drop": drop, "body": lines})
    for name, value in put.items():
        context.out.say(f"header {name} = {msgspec.json.encode(value).decode()}")
    for name in drop:
        context.out.say(f"header {name} is taken off")
    for line in lines:
        context.out.say(line)


def _action(word: str, state: requests.State, request: type[requests.ActionRequest]) -> None:
    async def act(
        context: CommandContext,
        filters: requests.Filter,
        count: Annotated[
            int | None, typer.Option(help="How many letters you expect; without it they are only counted.", min=0)
        ] = None,
        reason: Reason = "",
    ) -> ExitCode | None:
        if (filters.state or state) != state:
            lost = "; discarded letters cannot be restored" if (word, filters.state) == LOST else ""
            raise BadUsage(f"--state is {filters.state}; {word} takes letters that are {state} alone{lost}")
        selection = structs.replace(named(filters), state=state)
        async with context.connect(request) as custody:
            if count is None:
                return await _only_counted(context, custody, selection, word)
            done = await custody.call(request(selection=selection, count=count, reason=reason))
        context.out.document(done)
        context.out.say(f"{plural(done.count, 'letter')}: {word} is done")
        return ExitCode.DONE

    act.__doc__ = (
        f"{word.capitalize()} letters that are {state}. Without --count they are only counted; with it exactly so many "
        "are changed, or none."
    )
    example = f"holdfast letters {word} --group 3f2a9c0d1e4b5a68 --count 12 --reason 'test data'"
    command(app, word, example=example)(filtered(act))


async def _only_counted(
    context: CommandContext, custody: RequestClient, filters: requests.Filter, word: str
) -> ExitCode:
    page = await custody.call(_search(filters, 1))
    context.out.document({"count": page.count, "count_is_exact": page.count_is_exact, "done": False})
    if not page.count:
        text = f"no letter that is {filters.state} fits; there is nothing to {word}"
        if word == "restore":
            lost = await custody.call(_search(structs.replace(filters, state="discarded"), 1))
            text += f"; {lost.count} of them are gone: discarded letters cannot be restored" if lost.count else ""
        context.out.say(text)
        return ExitCode.FAILED
    context.out.say(f"{plural(page.count, 'letter')} would be changed; say --count {page.count} to {word} them")
    return ExitCode.BAD_USAGE


_action("archive", "captured", requests.ArchiveLetters)
_action("restore", "archived", requests.RestoreLetters)
_action("discard", "captured", requests.DiscardLetters)
_action("resolve", "redriven", requests.ResolveLetters)


@command(app, "export", example="holdfast letters export --queue orders.dlq > letters.jsonl")
@filtered
async def export(context: CommandContext, filters: requests.Filter) -> None:
    """Write letters as JSON Lines, byte for byte: bodies and raw properties are base64."""
    async with context.connect(requests.ExportLetters) as custody:
        lines = await custody.call(requests.ExportLetters(**structs.asdict(filters)))
        async with aclosing(lines):
            async for line in lines:
                sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
