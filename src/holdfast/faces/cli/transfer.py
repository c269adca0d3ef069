"""`holdfast queue items export|import`: all items of a queue to JSON Lines and back, byte for byte, page by page."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer
from msgspec.structs import replace

from holdfast.core.requests.queue import ImportedItem
from holdfast.faces.cli.app import items as app
from holdfast.faces.cli.command import command
from holdfast.faces.cli.context import CommandContext, CommandFailed
from holdfast.faces.cli.items import OnePartition, count_items, pages
from holdfast.faces.cli.lines import LineBatch, batches, counted, json_parser, open_input, read_chunks, read_lines, send
from holdfast.faces.cli.output import plural
from holdfast.faces.cli.progress import meter
from holdfast.faces.cli.queues import Name

#: Well below the 64 MB that a server takes by default.
BATCH_BYTES_MAX = 16_000_000


@command(
    app,
    "export",
    example="holdfast queue items export orders --output orders.jsonl\n"
    "holdfast queue items export orders --scheduled | gzip > orders.jsonl.gz",
)
async def export(
    session: CommandContext,
    name: Name,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file instead of stdout.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    scheduled: Annotated[bool, typer.Option("--scheduled", help="The scheduled items too.")] = False,
    partition: OnePartition = None,
) -> None:
    """Write the items of a queue as JSON Lines; payloads are base64. Nothing is taken from the queue.

    In a queue that is at work an item may move meanwhile and appear twice; pause the queue for an exact copy.
    """
    encoder = msgspec.json.Encoder()
    kinds = (False, True) if scheduled else (False,)
    async with session.open() as queues:
        total = sum([await count_items(queues, name, scheduled=kind) for kind in kinds])
        what = f"exporting '{name}'"
        with (
            _sink(output, overwrite=overwrite) as sink,
            meter(what, total=total, quiet=session.as_json) as bar,
        ):
            for kind in kinds:
                async for _, page in pages(queues, name, partition=partition, scheduled=kind):
                    sink.write(encoder.encode_lines(page))
                    bar.add(len(page))
                    bar.advance(len(page))
    if output is not None:
        session.out.document({"exported_count": bar.count, "file": str(output)})
    session.out.note(f"{plural(bar.count, 'item')} exported from '{name}'")


@command(
    app,
    "import",
    example="holdfast queue items import orders --file orders.jsonl\n"
    "zcat orders.jsonl.gz | holdfast queue items import orders --once",
)
async def import_items(
    session: CommandContext,
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
        session.out.note("reading from the terminal, end with Ctrl-D")
    stored_count = 0
    async with session.open() as queues:
        found = await queues.queues_info(name)
        turns = cycle([p.partition for p in found.partitions] if partition is None else [partition])

        async def call(batch: LineBatch[ImportedItem]) -> None:
            nonlocal stored_count
            items = [_once(item) for item in batch.items] if once else batch.items
            stored_count += len(await queues.storage_items_import(name, items, partition=next(turns)))

        with meter(f"importing to '{name}'", total=size, quiet=session.as_json) as bar:
            lines = read_lines(counted(read_chunks(descriptor), bar), from_line=from_line)
            source = batches(lines, json_parser(ImportedItem), bytes_max=BATCH_BYTES_MAX)
            count = await send(source, call, bar, done="imported")
    session.out.document({"imported_count": stored_count, "already_there_count": count - stored_count})
    session.out.say(f"{plural(stored_count, 'item')} imported to '{name}', {count - stored_count} already there")


def _once(item: ImportedItem) -> ImportedItem:
    return item if item.source_id else replace(item, source_id=item.id)


@contextmanager
def _sink(path: Path | None, *, overwrite: bool) -> Iterator[BinaryIO]:
    """stdout, or a file that gets its name only when everything is in it: half an export never looks like a whole."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.exists() and not overwrite:
        raise CommandFailed(f"file is there already; '{path}', choose another name or give --overwrite")
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
    except OSError as error:
        raise CommandFailed(f"file cannot be written; '{error.filename or partial}': {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
