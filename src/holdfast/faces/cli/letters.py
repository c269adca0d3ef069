"""`holdfast letters`: find, look at, edit, archive, restore, discard and export letters in custody; `holdfast plan`:
what would be done with them. Which letters is said with the same options everywhere: FILTERS.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args, get_type_hints

import msgspec
import typer
from msgspec.structs import asdict, replace

from holdfast.core.moments import format_duration
from holdfast.core.plan import Canary, Place, Plan, Target
from holdfast.core.requests import vault as requests
from holdfast.core.requests.declare import view
from holdfast.core.routes import TYPE_HEADER, RouteTable, parse_routes
from holdfast.errors import Invalid
from holdfast.faces.cli.command import LIST_COUNT_DEFAULT, CommandOption, asks, command, one_of, read_file
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode
from holdfast.faces.cli.output import Output, plural, readable, table

if TYPE_CHECKING:
    from holdfast.faces.client import RequestClient


BODY_BYTES_MAX = 64 * 1024 * 1024
PAGE_COUNT_MAX = 1_000
PANEL = "Which letters"
TARGETS = get_args(get_type_hints(Target)["kind"])
COLUMNS = ("#id", "state", "queue", "type", "reason", "error", "died at", "#redriven")
FIELDS = ("id", "state", "queue", "type", "reason", "error_type", "died_at", "redriven_count")
LOST = ("restore", "discarded")

Reason = Annotated[str, typer.Option(help="Why, for the ledger.", show_default=False)]


def _ids(text: str, *, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadUsage(f"{option} takes whole numbers with commas between them") from error


LIMIT = CommandOption(default=LIST_COUNT_DEFAULT, limits=(1, None))
#: What a query may say of letters and a command does not.
UNASKED = ("header_value", "captured_after", "captured_before", "died_after", "died_before")
#: The options that say which letters.
FILTERS = {one: CommandOption(panel=PANEL) for one in requests.Filter.__struct_fields__ if one not in UNASKED} | {
    "ids": CommandOption(kind=str, default="", read=_ids, panel=PANEL),
    "reason": CommandOption(name="death_reason", panel=PANEL),
    "header": CommandOption(help="NAME, or NAME=VALUE of a header.", rest="header_value", panel=PANEL),
}


def named(filters: requests.Filter) -> requests.Filter:
    """The same, when anything was named. Raises BadUsage."""
    if filters == requests.Filter():
        raise BadUsage("no letters were named; use --ids, --group, --queue or another filter")
    return filters


# --- commands -------------------------------------------------------------------------------------------------


@command(
    "letters list",
    requests.SearchLetters,
    example="--queue orders.dlq --state captured --limit 20",
    only={"limit": LIMIT, **FILTERS},
)
async def list_letters(context: CommandContext, asked: requests.SearchLetters) -> None:
    """List letters, newest first; all of the given conditions must fit."""
    await _list(context, asked)


@command(
    "letters search",
    requests.SearchLetters,
    example="'payment refused'",
    only={"text": CommandOption(name="words", metavar="WORDS", help="All of them must be there."), "limit": LIMIT},
)
async def search(context: CommandContext, asked: requests.SearchLetters) -> None:
    """Find letters by words in their bodies and errors."""
    await _list(context, asked)


async def _list(context: CommandContext, asked: requests.SearchLetters) -> None:
    async with context.connect(requests.SearchLetters) as custody:
        page = await custody.call(replace(asked, limit=min(PAGE_COUNT_MAX, asked.limit)))
        found = list(page.letters)
        while page.next and len(found) < asked.limit:
            limit = min(PAGE_COUNT_MAX, asked.limit - len(found))
            page = await custody.call(replace(asked, limit=limit, cursor=page.next))
            found += page.letters
    context.out.documents(found)
    total = f"{'' if page.count_is_exact else 'at least '}{plural(page.count, 'letter')}"
    rows = [[getattr(letter, name) for name in FIELDS] for letter in found]
    context.out.show(table(COLUMNS, rows, title=f"{total}, {len(found)} shown"))


@command("letters show", requests.ReadLetter, example="42\n42 --body > body.bin")
async def show(
    context: CommandContext,
    asked: requests.ReadLetter,
    body: Annotated[bool, typer.Option("--body", help="Write the bytes of its body, and nothing else.")] = False,
) -> None:
    """Show one letter with its history, or its body."""
    async with context.connect(requests.ReadLetter) as custody:
        if body:
            sys.stdout.buffer.write(await custody.call(requests.ReadBody(id=asked.id)))
            return
        found = asdict(await custody.call(asked))
        history = (await custody.call(requests.ReadHistory(id=asked.id))).rows
    context.out.document({**found, "history": history})
    _show_letter(context.out, found)
    rows = [[row.at, row.actor, row.action, row.to_state, row.reason] for row in history]
    context.out.show(table(("at", "who", "what", "state", "why"), rows, title="History"))


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


def _body(path: Path, *, option: str) -> bytes:
    return read_file(path, bytes_max=BODY_BYTES_MAX)


def _headers(texts: list[str], *, option: str) -> dict[str, object]:
    return dict(_header(text, option) for text in texts)


def _header(text: str, option: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadUsage(f"{option} takes NAME=VALUE, not '{text}'")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


@asks(
    "letters edit",
    requests.EditLetter,
    example="42 --revision 0 --body-file mended.json --set tenant=7",
    revision=CommandOption(limits=(0, None)),
    body=CommandOption(name="body_file", help="A file with the new body.", kind=Path, read=_body),
    put=CommandOption(
        name="set", help="NAME=VALUE of a header; JSON or text.", default=None, kind=list[str], read=_headers
    ),
    drop=CommandOption(default=None),
)
def edit(out: Output, asked: requests.EditLetter, made: requests.EditReply) -> None:
    """Edit a letter: a new revision. The original stays, and letters diff shows what changed."""
    out.say(f"letter {asked.id} has revision {made.revision} now")


@command("letters diff", requests.ReadBody, example="42", but=["revision", "original", "skip", "limit"])
async def diff(context: CommandContext, asked: requests.ReadBody) -> None:
    """Show what the newest revision changes against the original."""
    async with context.connect(requests.ReadBody) as custody:
        original = await custody.call(replace(asked, original=True))
        newest = await custody.call(asked)
        revisions = await custody.call(requests.ListRevisions(id=asked.id))
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
        selection = replace(named(filters), state=state)
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
    example = "--group 3f2a9c0d1e4b5a68 --count 12 --reason 'test data'"
    command(f"letters {word}", requests.Filter, example=example, only=FILTERS)(act)


async def _only_counted(
    context: CommandContext, custody: RequestClient, filters: requests.Filter, word: str
) -> ExitCode:
    count = (await custody.call(requests.CountLetters(**asdict(filters)))).count
    context.out.document({"count": count, "count_is_exact": True, "done": False})
    if not count:
        text = f"no letter that is {filters.state} fits; there is nothing to {word}"
        if word == "restore":
            lost = await custody.call(requests.SearchLetters(**asdict(replace(filters, state="discarded")), limit=1))
            text += f"; {lost.count} of them are gone: discarded letters cannot be restored" if lost.count else ""
        context.out.say(text)
        return ExitCode.FAILED
    context.out.say(f"{plural(count, 'letter')} would be changed; say --count {count} to {word} them")
    return ExitCode.BAD_USAGE


_action("archive", "captured", requests.ArchiveLetters)
_action("restore", "archived", requests.RestoreLetters)
_action("discard", "captured", requests.DiscardLetters)
_action("resolve", "redriven", requests.ResolveLetters)


@command("letters export", requests.ExportLetters, example="--queue orders.dlq > letters.jsonl", only=FILTERS)
async def export(context: CommandContext, asked: requests.ExportLetters) -> None:
    """Write letters as JSON Lines, byte for byte: bodies and raw properties are base64."""
    async with context.connect(requests.ExportLetters) as custody:
        lines = await custody.call(asked)
        async with aclosing(lines):
            async for line in lines:
                sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


# --- plan -----------------------------------------------------------------------------------------------------


@command("plan", requests.Filter, example="--queue orders.dlq --error Timeout --max-per-s 100", only=FILTERS)
async def plan(
    context: CommandContext,
    filters: requests.Filter,
    target: Annotated[str, typer.Option(help="queue (it died in), wait, original, address, or type.")] = "queue",
    exchange: Annotated[str, typer.Option(help="With --target address.", show_default=False)] = "",
    routing_key: Annotated[str, typer.Option(help="With --target address.", show_default=False)] = "",
    routes: Annotated[
        Path | None,
        typer.Option(help="With --target type: a routes file, as that of holdfast recover.", show_default=False),
    ] = None,
    source: Annotated[
        str, typer.Option(metavar="QUEUE", help="The queue that letters died in that do not tell.", show_default=False)
    ] = "",
    max_per_s: Annotated[int, typer.Option(help="At most so many letters a second; 0 is no limit.", min=0)] = 0,
    redrives_max: Annotated[int, typer.Option(help="Leave out what was redriven so often.", min=1)] = 5,
    force: Annotated[bool, typer.Option("--force", help="Do not leave it out.")] = False,
    canary: Annotated[int, typer.Option(help="Send so many first and see whether they come back.", min=0)] = 0,
    canary_wait: Annotated[str, typer.Option(help="For how long: a duration, or auto.")] = "auto",
    canary_widen: Annotated[float, typer.Option(help="How many times as many go next.")] = 2.0,
    canary_stop_above: Annotated[float, typer.Option(help="The part that may come back.")] = 0.05,
) -> ExitCode:
    """Show what a redrive would do: how many letters go where, what is left out and why. Changes nothing."""
    one_of(target, TARGETS, option="--target")
    request = requests.PlanRedrive(
        selection=named(filters),
        target=replace(_target(target, exchange, routing_key, routes), source=source),
        max_per_s=max_per_s,
        redrives_max=redrives_max,
        force=force,
        canary=Canary(first=canary, wait=canary_wait, widen=canary_widen, stop_above=canary_stop_above)
        if canary
        else None,
    )
    async with context.connect(requests.PlanRedrive) as custody:
        made = await custody.call(request)
    context.out.document(made)
    _show_plan(context.out, made)
    return ExitCode.DONE if made.count else ExitCode.FAILED


def _show_plan(out: Output, made: Plan) -> None:
    rows = list(made.targets.items())
    out.show(table(("to", "#letters"), rows, title=f"{plural(made.count, 'letter')} can go"))
    for note in made.notes:
        out.say(note)
    for one in made.reasons:
        letters = "1 letter is" if one.count == 1 else f"{one.count} letters are"
        out.say(f"{letters} left out, {one.sample} for one: {one.why}")
    if not made.count:
        out.say("there is nothing to execute")
        return
    out.say(f"it takes about {readable(format_duration(max(1, round(made.estimated_s)) * 1_000_000))}")
    out.say(f"execute it: holdfast redrive start {made.hash}")


def _target(kind: str, exchange: str, routing_key: str, file: Path | None) -> Target:
    """Where letters are to go; with a routes file, as it says. Raises Invalid."""
    table = RouteTable()
    if file is not None:
        try:
            table = parse_routes(file.read_bytes(), source=str(file))
        except OSError as error:
            raise Invalid(f"routes file cannot be read; {file}: {error.strerror}") from error
    return Target(
        kind=kind,  # type: ignore[arg-type]  # it is one of TARGETS
        exchange=exchange,
        routing_key=routing_key,
        routes={name: view(Place, address) for name, address in table.routes.items()},
        redirect=view(Place, table.redirect) if table.redirect is not None else None,
        type_header=table.type_header if table.type_header != TYPE_HEADER else "",
    )
