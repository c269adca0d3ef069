"""Listing page by page: every item once, large payloads in small pages, and an end even when the queue grows."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from holdfast import Item, NewItem
from holdfast.faces.cli.context import CommandFailed, ExitCode
from holdfast.faces.cli.items import GROWTH_COUNT_MAX, PAGE_COUNT_MAX, pages
from holdfast.faces.cli.transfer import InputLine, LineBatch, batches, read_lines
from holdfast.services.queue.queues import Queues
from holdfast.testing import memory_queues


async def test_every_item_of_every_partition_is_listed_once() -> None:
    async with memory_queues() as queues:
        await queues.queues_create("q", requested_partitions=3)
        for start in range(0, 3_000, 500):
            await queues.queue_produce("q", [str(n) for n in range(start, start + 500)])
        found = [item async for _, page in pages(queues, "q") for item in page]
        assert sorted(int(item.payload) for item in found) == list(range(3_000))
        some = [item async for _, page in pages(queues, "q", limit=1_234) for item in page]
        assert some == found[:1_234]


async def test_a_pivot_that_is_gone_loses_nothing() -> None:
    async with memory_queues() as queues:
        await queues.queues_create("q")
        await queues.queue_produce("q", [str(n) for n in range(300)])
        found = []
        async for _, page in pages(queues, "q"):
            found += page
            await queues.storage_items_delete("q", [page[-1].id])
        assert [int(item.payload) for item in found] == list(range(300))


async def test_large_payloads_come_in_small_pages() -> None:
    async with memory_queues() as queues:
        await queues.queues_create("q")
        for _ in range(12):
            await queues.queue_produce("q", [NewItem(payload=bytes(400_000))] * 10)
        sizes = [len(page) async for _, page in pages(queues, "q")]
        assert sum(sizes) == 120
        assert max(sizes[1:]) <= 10


class Growing(Queues):
    """A queue that has a full page of new items whenever one looks."""

    def __init__(self, queues: Queues) -> None:
        super().__init__(queues._caller)
        self.count = 0

    async def storage_items_list(
        self, queue_name: str, *, partition: int = 0, pivot: str = "", limit: int = 0
    ) -> list[Item]:
        self.count += limit
        return [Item(id=f"{self.count + n:014x}-1-0") for n in range(limit)]


async def test_a_queue_that_grows_without_end_is_not_listed_without_end() -> None:
    async with memory_queues() as queues:
        await queues.queues_create("q")
        growing = Growing(queues)
        with pytest.raises(CommandFailed, match="pause it first") as stopped:
            async for _ in pages(growing, "q"):
                pass
        assert stopped.value.exit_code == ExitCode.PARTLY_DONE
        assert growing.count <= GROWTH_COUNT_MAX + 2 * PAGE_COUNT_MAX


async def split(*chunks: bytes, from_line: int = 1) -> list[InputLine]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [line async for some in read_lines(source(), from_line=from_line) for line in some]


async def test_lines_are_the_same_however_they_arrive() -> None:
    text = b"one\n\ntwo\r\nthree"
    expected = [InputLine(1, b"one"), InputLine(2, b""), InputLine(3, b"two\r"), InputLine(4, b"three")]
    for cut in range(len(text)):
        assert await split(text[:cut], text[cut:]) == expected
    assert await split(*(bytes([byte]) for byte in text)) == expected
    assert await split(text, from_line=3) == expected[2:]
    assert await split(text + b"\n") == expected
    assert await split() == []


async def test_batches_keep_to_count_and_bytes() -> None:
    async def lines() -> AsyncIterator[list[InputLine]]:
        yield [InputLine(n, b"x" * 100) for n in range(1, 2_502)]
        yield [InputLine(2_502, b"y" * 5_000), InputLine(2_503, b"z")]

    found: list[LineBatch[bytes]] = [b async for b in batches(lines(), lambda line: line.text, bytes_max=1_000_000)]
    assert [(b.first, b.last, len(b.items)) for b in found] == [
        (1, 1_000, 1_000),
        (1_001, 2_000, 1_000),
        (2_001, 2_501, 501),
        (2_502, 2_503, 2),
    ]
    small = [b async for b in batches(lines(), lambda line: line.text, bytes_max=4_000)]
    assert max(len(b.items) for b in small) == 20
    assert sum(len(b.items) for b in small) == 2_503
