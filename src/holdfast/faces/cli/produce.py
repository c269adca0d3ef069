"""`holdfast queue produce`: one item from an argument or a file, or many from JSON Lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from holdfast.core.item import NewItem
from holdfast.faces.cli.app import queue as app
from holdfast.faces.cli.command import command, parse_moment
from holdfast.faces.cli.context import BadUsage, CommandContext
from holdfast.faces.cli.lines import (
    InputLine,
    LineBatch,
    batches,
    counted,
    json_parser,
    open_input,
    read_chunks,
    read_lines,
    send,
)
from holdfast.faces.cli.output import plural
from holdfast.faces.cli.progress import meter
from holdfast.faces.cli.queues import Name

#: Well below the 5 MB that a server takes by default.
PRODUCE_BYTES_MAX = 3_000_000


@command(
    app,
    "produce",
    example="holdfast queue produce orders 'hello' --kind greeting\n"
    "holdfast queue produce orders --file photo.jpg --whole\n"
    """echo '{"utf8": "hello", "reference": "a-1"}' | holdfast queue produce orders\n"""
    "tail -f app.log | holdfast queue produce log --raw",
)
async def produce(
    session: CommandContext,
    name: Name,
    text: Annotated[
        str | None, typer.Argument(help="The payload of one item. Without it, JSON Lines are read.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read from this file instead of stdin.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Each line's bytes are a payload, not JSON.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="All of the input is the payload of one item.")] = False,
    from_line: Annotated[int, typer.Option(help="Skip the lines before this one.", min=1)] = 1,
    kind: Annotated[str, typer.Option(help="The items' kind, where a line does not say.", show_default=False)] = "",
    encoding: Annotated[str, typer.Option(help="The payload's encoding, likewise.", show_default=False)] = "",
    reference: Annotated[str, typer.Option(help="A reference, likewise.", show_default=False)] = "",
    enqueue_at: Annotated[
        str, typer.Option(help="Schedule: 2030-01-31T08:00:00Z, or +10m from now; likewise.", show_default=False)
    ] = "",
    dedupe_key: Annotated[
        str, typer.Option(help="Of one item: stored only if the queue has none with this key.", show_default=False)
    ] = "",
) -> None:
    """Store items; when this ends without an error, they are committed.

    A JSON line is an object with "utf8" or "bytes" (base64), and "kind", "encoding", "reference", "enqueue_at",
    "dedupe_key" if wanted.
    """
    _check_usage(text, file=file, raw=raw, whole=whole, dedupe_key=dedupe_key)
    common = NewItem(
        kind=kind,
        encoding=encoding,
        reference=reference,
        enqueue_at=parse_moment(enqueue_at, option="--enqueue-at") if enqueue_at else None,
        dedupe_key=dedupe_key,
    )
    if text is not None:
        count = await _produce_one(session, name, replace(common, payload=text.encode("utf-8", "surrogateescape")))
    elif whole:
        descriptor, _ = open_input(file)
        payload = b"".join([chunk async for chunk in read_chunks(descriptor)])
        count = await _produce_one(session, name, replace(common, payload=payload))
    else:
        count = await _produce_lines(session, name, common, file, raw=raw, from_line=from_line)
    session.out.say(f"{plural(count, 'item')} produced to '{name}'")


def _check_usage(text: str | None, *, file: Path | None, raw: bool, whole: bool, dedupe_key: str) -> None:
    if text is not None and (file is not None or raw or whole):
        raise BadUsage("TEXT is the whole payload; leave out --file, --raw and --whole, or leave out TEXT")
    if raw and whole:
        raise BadUsage("--raw and --whole exclude each other; one item a line, or one item")
    if dedupe_key and text is None and not whole:
        raise BadUsage('--dedupe-key is for one item; say "dedupe_key" in each line')


async def _produce_one(session: CommandContext, name: str, item: NewItem) -> int:
    async with session.open() as queues:
        reply = await queues.queue_produce(name, [item])
    session.out.documents(reply.items)
    return 1


async def _produce_lines(
    session: CommandContext, name: str, common: NewItem, file: Path | None, *, raw: bool, from_line: int
) -> int:
    descriptor, size = open_input(file)
    if os.isatty(descriptor):
        session.out.note("reading from the terminal, end with Ctrl-D")
    parse = _raw_parser(common) if raw else _with(common, json_parser(NewItem))
    async with session.open() as queues:

        async def call(batch: LineBatch[NewItem]) -> None:
            reply = await queues.queue_produce(name, batch.items)
            session.out.documents(reply.items)

        with meter(f"producing to '{name}'", total=size, quiet=session.as_json) as bar:
            lines = read_lines(counted(read_chunks(descriptor), bar), from_line=from_line)
            return await send(batches(lines, parse, bytes_max=PRODUCE_BYTES_MAX), call, bar, done="stored")


def _raw_parser(common: NewItem) -> Callable[[InputLine], NewItem | None]:
    return lambda line: replace(common, payload=line.text)


def _with(common: NewItem, parse: Callable[[InputLine], NewItem | None]) -> Callable[[InputLine], NewItem | None]:
    """What a line does not say is taken from the options."""
    given = {key: value for key in ("kind", "encoding", "reference", "enqueue_at") if (value := getattr(common, key))}
    if not given:
        return parse

    def parse_with(line: InputLine) -> NewItem | None:
        item = parse(line)
        missing = {} if item is None else {key: value for key, value in given.items() if not getattr(item, key)}
        return replace(item, **missing) if item is not None and missing else item

    return parse_with
