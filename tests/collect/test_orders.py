"""Any order of headers and payloads, with duplicates, ends in the same result, and never early."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.states import TransactionState
from tests.collect.producing import NOTIFY, PRODUCER, body_of, header, make_queues, notices, payload, take_request
from tests.support.eventually import eventually

SHAPE = {"a": 4, "b": 0, "c": 2}
MESSAGES = [("header", name, count) for name, count in SHAPE.items()] + [
    ("payload", name, ordinal) for name, count in SHAPE.items() for ordinal in range(count)
]

Order = list[tuple[str, str, int]]


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, Order]:
    """A permutation cut before the last message that is missing: duplicates of what came before are mixed in."""
    order = draw(st.permutations(MESSAGES))
    copies = draw(st.lists(st.sampled_from(order[:-1]), max_size=12))
    before = draw(st.permutations([*order[:-1], *copies]))
    after = draw(st.permutations([order[-1], *draw(st.lists(st.sampled_from(order), max_size=6))]))
    return before, after


async def send(queues: holdfast.Queues, order: Order, *, by_count: bool) -> None:
    for kind, name, number in order:
        if kind == "header":
            more = {"series_count": len(SHAPE)} if by_count else {}
            await queues.queue_produce("transaction-t-header", [header("t", name, number, **more)])
        else:
            await queues.queue_produce("transaction-t-payload", [payload("t", name, number)])


async def collect(before: Order, after: Order, *, by_count: bool, folder: Path) -> None:
    async with holdfast.open("memory://") as queues:
        await make_queues(queues)
        async with holdfast.Collector("memory://", blobs=str(folder), queues=queues, uploads_max=3) as collector:
            series = None if by_count else list(SHAPE)
            await collector.start(b"", producer=PRODUCER, notify=NOTIFY, transaction_id="t", series=series)
            await take_request(queues)
            await send(queues, before, by_count=by_count)

            async def is_taken_in() -> bool:
                stats = [await queues.queue_stats(f"transaction-t-{kind}") for kind in ("header", "payload")]
                return not any(part.total for each in stats for part in each.logical_queues[0].partitions)

            await eventually(is_taken_in)
            assert (await collector.find("t")).state is TransactionState.AWAITING, "completed early"
            assert await notices(queues) == []
            with suppress(holdfast.QueueMissing):  # it was complete before the last duplicates: their queue is gone
                await send(queues, after, by_count=by_count)
            assert (await collector.wait("t", timeout_s=60)).state is TransactionState.COMPLETED
            for name, count in SHAPE.items():
                got = [part.body async for part in collector.parts("t", name)]
                assert got == [body_of(name, number) for number in range(count)]
            (notice,) = await notices(queues)
            assert f'"parts_count":{sum(SHAPE.values())}'.encode() in notice


@given(orders(), st.booleans())
@settings(max_examples=25)
def test_any_order_with_duplicates_ends_in_the_same_result(order: tuple[Order, Order], by_count: bool) -> None:
    before, after = order
    with tempfile.TemporaryDirectory(prefix="holdfast-orders-") as folder:
        asyncio.run(collect(before, after, by_count=by_count, folder=Path(folder)))
