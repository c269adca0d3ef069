"""State 1: headers and payloads are taken in until the index says that everything is there.

A header is kept in the index before it is acked; what contradicts another one, or the payloads, is parked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from holdfast.core.collect import (
    DEAD_QUEUE,
    Header,
    Part,
    SeriesState,
    header_contradiction,
    is_complete,
    known_set,
    read_header,
)
from holdfast.core.message import Delivery
from holdfast.ports.broker import Consumer
from holdfast.proof import crash_point
from holdfast.services.collect.payloads import Payloads, ack, held_max, park
from holdfast.services.collect.reading import gaps_of, read_part
from holdfast.services.collect.transaction import OwnedTransaction
from holdfast.telemetry.events import emit

BATCH_COUNT_MAX = 16
EXCESS_COUNT_MAX = 100
GAP_LOOK_S_MAX = 5.0
HEADERS_COUNT_MAX = 16
LOOK_S = 1.0


class Headers:
    """Takes the header messages of a transaction until it is stopped."""

    def __init__(self, work: OwnedTransaction, consumer: Consumer, *, on_change: Callable[[], None]) -> None:
        self._work = work
        self._consumer = consumer
        self._on_change = on_change

    async def run(self) -> None:
        """Work until the consumer is stopped."""
        while batch := await self._consumer.take(BATCH_COUNT_MAX):
            for delivery in batch:
                await self._one(delivery)

    async def _one(self, delivery: Delivery) -> None:
        work = self._work
        header = read_header(self._consumer.message(delivery), work.id)
        if isinstance(header, str):
            await park(work, self._consumer, delivery, header)
            return
        stand = await work.retrier.until_done(lambda: work.context.store.stand(work.id))
        if wrong := header_contradiction(header, work.transaction.series, stand):
            await park(work, self._consumer, delivery, wrong)
            return
        crash_point("collect.before_header")
        work.learn(await work.retrier.until_done(lambda: self._put(header)))
        crash_point("collect.after_header")
        await park_excess(work, header.series, header.count)
        await ack(work, self._consumer, delivery)
        self._on_change()

    async def _put(self, header: Header) -> Mapping[str, SeriesState]:
        return await self._work.context.store.put_header(self._work.id, header, fence=self._work.fence)


async def park_excess(work: OwnedTransaction, series: str, first: int, *, reason: str = "") -> None:
    """Parts from an ordinal on that cannot belong to the result: into the dead queue first, out of the index then."""
    store = work.context.store
    while True:
        parts = await work.retrier.until_done(
            lambda: store.parts(work.id, series, first=first, count_max=EXCESS_COUNT_MAX)
        )
        if not parts:
            return
        for part in parts:
            await park_part(
                work, part, reason or f"ordinal is beyond the count; {part.ordinal} of '{series}', which has {first}"
            )
        await work.retrier.until_done(partial(store.remove, work.id, parts, fence=work.fence))


async def park_part(work: OwnedTransaction, part: Part, reason: str) -> None:
    """Send a stored part to the dead queue as the message that it was."""
    body = await work.retrier.until_done(lambda: read_part(work.context.blobs, part))
    attributes = {
        "transaction-id": work.id,
        "series": part.series,
        "ordinal": part.ordinal,
        "source-queue": work.payload_queue,
    }
    await work.retrier.until_done(lambda: work.park(body, attributes=attributes, reason=reason))


async def await_results(work: OwnedTransaction) -> None:
    """Return when the result is complete. Raises LeaseLost, QueueMissing, ConsumerLost."""
    context = work.context
    work.learn(await work.retrier.until_done(lambda: context.store.stand(work.id)))
    changed = asyncio.Event()
    if may_be_complete(work) and await judge(work):
        return
    async with AsyncExitStack() as stack:
        headers_in = await stack.enter_async_context(
            context.broker.consumer(work.subscription(work.header_queue, count_max=HEADERS_COUNT_MAX))
        )
        payloads_in = await stack.enter_async_context(
            context.broker.consumer(work.subscription(work.payload_queue, count_max=held_max(work)))
        )
        headers = Headers(work, headers_in, on_change=changed.set)
        payloads = Payloads(work, payloads_in, on_change=changed.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(headers.run())
                tasks.create_task(payloads.run())
                watch = tasks.create_task(watch_gaps(work))
                while True:
                    await change(work, changed)
                    if may_be_complete(work) and await judge(work):
                        break
                watch.cancel()
                # What has been taken is settled before the state changes: it is stored, or parked, or given back.
                await headers_in.stop()
                await payloads_in.stop()
        except BaseExceptionGroup as group:
            raise first_of(group) from group


async def change(work: OwnedTransaction, changed: asyncio.Event) -> None:
    """Wait for news. Without any the store is asked: answers of two commits may have come in the wrong order."""
    try:
        async with asyncio.timeout(LOOK_S):
            await changed.wait()
            changed.clear()
    except TimeoutError:
        work.stand = await work.retrier.until_done(lambda: work.context.store.stand(work.id))


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error inside of a TaskGroup's."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def may_be_complete(work: OwnedTransaction) -> bool:
    """Whether the last commit leaves nothing to wait for, as far as its counts can say."""
    known = known_set(work.transaction.series, work.stand)
    if known is None:
        return False
    for name in known:
        series = work.stand.get(name)
        if series is None or series.count is None or series.stored_count < series.count:
            return False
    return True


async def judge(work: OwnedTransaction) -> bool:
    """Count the index row by row, take out what does not belong to the result, and say whether it is complete."""
    store = work.context.store
    counts = await work.retrier.until_done(lambda: store.count(work.id))
    known = known_set(work.transaction.series, work.stand) or frozenset()
    for name, (_, _, highest) in counts.items():
        limit = work.count_of(name)
        if name not in known:
            await park_excess(work, name, 0, reason=f"series is outside the known set; '{name}'")
        elif limit is not None and highest >= limit:
            await park_excess(work, name, limit)
    for name, series in work.stand.items():
        if name not in known and series.count is not None:
            await park_header(work, name, series.count)
    stand = await work.retrier.until_done(lambda: store.stand(work.id))
    work.stand = stand
    counts = await work.retrier.until_done(lambda: store.count(work.id))
    exact = all(counts.get(name, (0, 0, 0))[0] == work.count_of(name) for name in known)
    return exact and is_complete(work.transaction.series, stand)


async def park_header(work: OwnedTransaction, series: str, count: int) -> None:
    """A header of a series that does not belong to the result."""
    attributes = {
        "transaction-id": work.id,
        "series": series,
        "count": count,
        "source-queue": work.header_queue,
    }
    reason = f"series is outside the known set; '{series}'"
    await work.retrier.until_done(lambda: work.park(b"", attributes=attributes, reason=reason))
    await work.retrier.until_done(lambda: work.context.store.remove_header(work.id, series, fence=work.fence))


async def watch_gaps(work: OwnedTransaction) -> None:
    """Ask the producer again when nothing came for too long."""
    limit_s = work.context.limits.gap_after_us / 1_000_000
    while True:
        await asyncio.sleep(min(GAP_LOOK_S_MAX, limit_s / 4))
        if time.monotonic() - work.progress_s >= limit_s:
            await request_missing(work)
            work.progress_s = time.monotonic()


async def request_missing(work: OwnedTransaction) -> int:
    """Ask the producer for what is missing; returns how many ranges were asked for."""
    context = work.context
    missing = {
        gap.series: gap.missing
        for gap in await work.retrier.until_done(lambda: gaps_of(context.store, work.transaction))
        if gap.missing or gap.is_open
    }
    body = msgspec.json.encode({"transaction-id": work.id, "missing": missing})
    attributes = {
        "transaction-id": work.id,
        "kind": "missing",
        "header-queue": work.header_queue,
        "payload-queue": work.payload_queue,
        "dead-queue": DEAD_QUEUE,
    }
    # An id of its own: by the transaction's the producer would take it for a repeated request.
    message_id = f"{work.id}-missing-{time.time_ns()}"
    await work.retrier.until_done(
        lambda: work.send(work.transaction.producer, body, message_id=message_id, attributes=attributes)
    )
    count = sum(len(found) for found in missing.values())
    emit("collect.missing", transaction=work.id, count=count)
    return count
