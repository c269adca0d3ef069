"""JSON Lines from a file or stdin, in batches: as they come, and never more in memory than a few chunks.

A batch is sent as soon as the input pauses, so that `tail -f log | holdfast queue produce` does not hold items back.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from holdfast.core.checks import BATCH_COUNT_MAX
from holdfast.errors import HoldfastError, Unreachable
from holdfast.faces.cli.context import BadUsage, CommandFailed, partly_done
from holdfast.faces.cli.output import plural
from holdfast.faces.cli.progress import Meter

CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 100_000_000
#: Chunks that are read ahead while a batch is on its way.
AHEAD_COUNT = 2
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

T = TypeVar("T")


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
