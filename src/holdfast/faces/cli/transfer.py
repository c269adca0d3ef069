"""`holdfast queue produce`: one item from an argument or a file, or many from JSON Lines; and
`holdfast queue items import`: the items of an export, with their story.

JSON Lines are read in batches, as they come, and never more in memory than a few chunks. A batch is sent as soon as the
input pauses, so that `tail -f log | holdfast queue produce` does not hold items back.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec
import typer
from msgspec.structs import replace

from holdfast.core.checks import BATCH_COUNT_MAX
from holdfast.core.item import NewItem
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import HoldfastError, Unreachable
from holdfast.faces.cli.command import command, parse_moment
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, partly_done
from holdfast.faces.cli.output import plural
from holdfast.faces.cli.progress import Meter, meter
from holdfast.faces.cli.queues import Name

CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 100_000_000
#: Chunks that are read ahead while a batch is on its way.
AHEAD_COUNT = 2
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: Well below the 5 MB that a server takes by default.
PRODUCE_BYTES_MAX = 3_000_000
#: Well below the 64 MB that a server takes by default.
BATCH_BYTES_MAX = 16_000_000

T = TypeVar("T")


# --- produce --------------------------------------------------------------------------------------------------


@command(
    "queue produce",
    example="""orders 'hello' --kind greeting
orders --file photo.jpg --whole
echo '{"utf8": "hello", "reference": "a-1"}' | holdfast queue produce orders
tail -f app.log | holdfast queue produce log --raw""",
)
async def produce(
    context: CommandContext,
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
        count = await _produce_one(context, name, replace(common, payload=text.encode("utf-8", "surrogateescape")))
    elif whole:
        descriptor, _ = open_input(file)
        payload = b"".join([chunk async for chunk in read_chunks(descriptor)])
        count = await _produce_one(context, name, replace(common, payload=payload))
    else:
        count = await _produce_lines(context, name, common, file, raw=raw, from_line=from_line)
    context.out.say(f"{plural(count, 'item')} produced to '{name}'")


def _check_usage(text: str | None, *, file: Path | None, raw: bool, whole: bool, dedupe_key: str) -> None:
    if text is not None and (file is not None or raw or whole):
        raise BadUsage("TEXT is the whole payload; leave out --file, --raw and --whole, or leave out TEXT")
    if raw and whole:
        raise BadUsage("--raw and --whole exclude each other; one item a line, or one item")
    if dedupe_key and text is None and not whole:
        raise BadUsage('--dedupe-key is for one item; say "dedupe_key" in each line')


async def _produce_one(context: CommandContext, name: str, item: NewItem) -> int:
    async with context.open() as queues:
        reply = await queues.queue_produce(name, [item])
    context.out.documents(reply.items)
    return 1


async def _produce_lines(
    context: CommandContext, name: str, common: NewItem, file: Path | None, *, raw: bool, from_line: int
) -> int:
    descriptor, size = open_input(file)
    if os.isatty(descriptor):
        context.out.note("reading from the terminal, end with Ctrl-D")
    parse = (lambda line: replace(common, payload=line.text)) if raw else _with(common, json_parser(NewItem))
    async with context.open() as queues:

        async def call(batch: LineBatch[NewItem]) -> None:
            reply = await queues.queue_produce(name, batch.items)
            context.out.documents(reply.items)

        with meter(f"producing to '{name}'", total=size, quiet=context.as_json) as bar:
            lines = read_lines(counted(read_chunks(descriptor), bar), from_line=from_line)
            return await send(batches(lines, parse, bytes_max=PRODUCE_BYTES_MAX), call, bar, done="stored")


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


# --- import ---------------------------------------------------------------------------------------------------


@command(
    "queue items import",
    example="orders --file orders.jsonl\nzcat orders.jsonl.gz | holdfast queue items import orders --once",
)
async def import_items(
    context: CommandContext,
    name: Name,
    file: Annotated[Path | None, typer.Option(help="Read from this file instead of stdin.", show_default=False)] = None,
    partition: Annotated[
        int | None, typer.Option(help="Into this partition; by turns into all if left out.", show_default=False)
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Take an item's id as its source_id, so that a repeat stores none twice.")
    ] = False,
    from_line: Annotated[int, typer.Option(help="Skip the lines before this one.", min=1)] = 1,
) -> None:
    """Store the items of an export, with their story and under new ids. Items whose source_id is there are skipped."""
    descriptor, size = open_input(file)
    if os.isatty(descriptor):
        context.out.note("reading from the terminal, end with Ctrl-D")
    stored_count = 0
    async with context.open() as queues:
        found = await queues.queues_info(name)
        turns = cycle([p.partition for p in found.partitions] if partition is None else [partition])

        async def call(batch: LineBatch[ImportedItem]) -> None:
            nonlocal stored_count
            items = [replace(one, source_id=one.source_id or one.id) for one in batch.items] if once else batch.items
            stored_count += len(await queues.storage_items_import(name, items, partition=next(turns)))

        with meter(f"importing to '{name}'", total=size, quiet=context.as_json) as bar:
            lines = read_lines(counted(read_chunks(descriptor), bar), from_line=from_line)
            source = batches(lines, json_parser(ImportedItem), bytes_max=BATCH_BYTES_MAX)
            count = await send(source, call, bar, done="imported")
    context.out.document({"imported_count": stored_count, "already_there_count": count - stored_count})
    context.out.say(f"{plural(stored_count, 'item')} imported to '{name}', {count - stored_count} already there")


# --- lines ----------------------------------------------------------------------------------------------------


class InputLine(NamedTuple):
    """A line without its end; numbers begin with 1."""

    number: int
    text: bytes


@dataclass
class LineBatch(Generic[T]):
    """Items that go in one request, and the lines that they came from."""

    items: list[T] = field(default_factory=list)
    first: int = 0
    last: int = 0
    byte_count: int = 0


class BadLine(CommandFailed):
    """A line that is no item."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number} is invalid; {reason}", details={"line": number})
        self.number = number


def open_input(path: Path | None) -> tuple[int, int | None]:
    """The descriptor of a file, or of stdin, and its size if it has one. Raises BadUsage."""
    if path is None or str(path) == "-":
        return sys.stdin.fileno(), None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
    except OSError as error:
        raise BadUsage(f"file cannot be read; '{path}': {error.strerror}") from error
    return descriptor, os.fstat(descriptor).st_size or None


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """What the descriptor gives, as it comes.

    Read in a thread that nobody waits for: at Ctrl-C it may sit in a read of a terminal that never ends. It reads
    the descriptor and not `sys.stdin`, whose lock would hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(AHEAD_COUNT)

    def read() -> None:
        data: bytes | OSError = b"?"
        while data and isinstance(data, bytes):
            room.acquire()
            try:
                data = os.read(descriptor, CHUNK_BYTES)
            except OSError as error:
                data = error
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, data)
            except RuntimeError:  # the loop is closed: nobody reads any more
                return

    threading.Thread(target=read, name="input", daemon=True).start()
    while data := await arrived.get():
        if isinstance(data, OSError):
            raise CommandFailed(f"input cannot be read; {data.strerror}") from data
        room.release()
        yield data


async def counted(chunks: AsyncIterator[bytes], meter: Meter) -> AsyncIterator[bytes]:
    """The same chunks; the bar moves on by what has been read."""
    async for chunk in chunks:
        yield chunk
        meter.advance(len(chunk))


async def read_lines(chunks: AsyncIterator[bytes], *, from_line: int = 1) -> AsyncIterator[list[InputLine]]:
    """The lines of each chunk, from `from_line` on; the last one need not end with a newline."""
    number = 0
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if b"\n" not in chunk:
            if size > LINE_BYTES_MAX:
                raise BadLine(number + 1, f"it is longer than {LINE_BYTES_MAX} bytes")
            continue
        *texts, rest = b"".join(parts).split(b"\n")
        parts, size = [rest], len(rest)
        lines = [InputLine(number + index, text) for index, text in enumerate(texts, 1)]
        number += len(texts)
        yield [line for line in lines if line.number >= from_line]
    if (text := b"".join(parts)) and number + 1 >= from_line:
        yield [InputLine(number + 1, text)]


async def batches(
    lines: AsyncIterator[list[InputLine]], parse: Callable[[InputLine], T | None], *, bytes_max: int
) -> AsyncIterator[LineBatch[T]]:
    """Parsed items in batches of up to a thousand and about `bytes_max`; `parse` answers None for a line to skip.

    Raises BadLine after the items before it have been handed out.
    """
    async for chunk in lines:
        batch: LineBatch[T] = LineBatch()
        for line in chunk:
            try:
                item = parse(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if batch.items:
                    yield batch
                raise BadLine(line.number, _reason(error)) from error
            if item is None:
                continue
            # A payload is a third larger as base64, which is what a line mostly is already; raw lines are counted so.
            if batch.items and (
                len(batch.items) == BATCH_COUNT_MAX or batch.byte_count + 2 * len(line.text) > bytes_max
            ):
                yield batch
                batch = LineBatch()
            batch.items.append(item)
            batch.first = batch.first or line.number
            batch.last = line.number
            batch.byte_count += 2 * len(line.text)
        if batch.items:
            yield batch


async def send(
    source: AsyncIterator[LineBatch[T]], call: Callable[[LineBatch[T]], Awaitable[None]], meter: Meter, *, done: str
) -> int:
    """Send batch after batch; returns how many items. A failure says what was done before it and how to go on."""
    count = 0
    try:
        async for batch in source:
            try:
                await call(batch)
            except HoldfastError as error:
                raise _stopped(error, batch, count, done) from error
            count += len(batch.items)
            meter.add(len(batch.items))
    except BadLine as error:
        text = f"{error.message}; {_so_far(count, done)}, mend it and go on with --from-line {error.number}"
        raise partly_done(text, error, done_count=count, line=error.number) from error
    return count


def json_parser(kind: type[T]) -> Callable[[InputLine], T | None]:
    """A parser for lines that are JSON objects of this type; empty lines are skipped."""
    decoder = msgspec.json.Decoder(kind)

    def parse(line: InputLine) -> T | None:
        text = line.text
        if line.number == 1:
            text = text.removeprefix(BYTE_ORDER_MARK)
        return decoder.decode(text) if text.strip() else None

    return parse


def _stopped(error: HoldfastError, batch: LineBatch[T], count: int, done: str) -> CommandFailed:
    lines = f"line {batch.first}" if batch.first == batch.last else f"lines {batch.first} to {batch.last}"
    if isinstance(error, Unreachable):
        text = f"no answer for {lines}; {error.message}; {_so_far(count, done)}, {lines} may be {done} or not"
    else:
        text = f"{lines} refused; {error.message}; {_so_far(count, done)}, go on with --from-line {batch.first}"
    return partly_done(text, error, done_count=count, line=batch.first)


def _so_far(count: int, done: str) -> str:
    if not count:
        return f"nothing was {done} before"
    return f"the {plural(count, 'item')} before {'was' if count == 1 else 'were'} {done}"


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error).replace("`", "'")
    return text if text.startswith("JSON") else text[:1].lower() + text[1:]
