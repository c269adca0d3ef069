"""State 1: headers and payloads are taken in until the index says that everything is there.

A header is kept in the index before it is acked; what contradicts another one, or the payloads, is parked. A payload is
stored as a blob, written to the index, and acked, in this order.

Payloads go in small groups, several at a time: a group shares its fsyncs, its commit and its ack, and what fails of it
goes on alone. Index writes that wait at the same time go into one commit. Memory is bounded by what is taken: at most
twice `uploads_max` messages of a transaction are here at a time, and fewer when they are large. Whatever fails for now
is tried again with the message still held.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

import msgspec
from msgspec import Struct

from holdfast.core.collect import (
    Part,
    Payload,
    blob_path,
    digest,
    header_contradiction,
    is_complete,
    known_set,
    read_header,
    read_payload,
)
from holdfast.core.message import Delivery
from holdfast.errors import HoldfastError, NotOurs
from holdfast.ports.blobs import BlobContent
from holdfast.ports.broker import Consumer
from holdfast.proof import crash_point
from holdfast.services.collect.completion import gaps_of, read_part
from holdfast.services.collect.transaction import FOR_NOW, OwnedTransaction
from holdfast.stores.collect import CollectStore, PartsStored
from holdfast.telemetry.events import emit

BATCH_COUNT_MAX = 16
EXCESS_COUNT_MAX = 100
GAP_LOOK_S_MAX = 5.0
HEADERS_COUNT_MAX = 16
LOOK_S = 1.0
COMMIT_COUNT_MAX = 256
#: Less is hashed sooner than a thread is woken.
THREAD_BYTES_MIN = 64 * 1024
#: How many are taken before it is known how large they are.
FIRST_COUNT_MAX = 4
#: How many groups are on their way when there is enough to do.
GROUPS_COUNT = 4


async def take_headers(work: OwnedTransaction, consumer: Consumer, *, on_change: Callable[[], None]) -> None:
    """Take the header messages of a transaction until the consumer is stopped."""
    while batch := await consumer.take(BATCH_COUNT_MAX):
        for delivery in batch:
            if wrong := await keep_header(work, consumer, delivery):
                await work.park_delivery(consumer, delivery, wrong)
            else:
                on_change()


async def keep_header(work: OwnedTransaction, consumer: Consumer, delivery: Delivery) -> str:
    """Keep what a header says, then ack it; why it cannot be true, or the empty text."""
    store = work.context.store
    header = read_header(consumer.message(delivery), work.id)
    if isinstance(header, str):
        return header
    if wrong := header_contradiction(header, work.transaction.series, await work.ask(store.stand)):
        return wrong
    crash_point("collect.before_header")
    work.learn(await work.ask(store.put_header, header, fence=work.fence))
    crash_point("collect.after_header")
    await park_excess(work, header.series, header.count)
    await ack(work, consumer, delivery)
    return ""


async def park_excess(work: OwnedTransaction, series: str, first: int, *, reason: str = "") -> None:
    """Parts from an ordinal on that cannot belong to the result: into the dead queue first, out of the index then."""
    store = work.context.store
    while True:
        parts = await work.ask(store.parts, series, first=first, count_max=EXCESS_COUNT_MAX)
        if not parts:
            return
        for part in parts:
            await park_part(
                work, part, reason or f"ordinal is beyond the count; {part.ordinal} of '{series}', which has {first}"
            )
        await work.ask(store.remove, parts, fence=work.fence)


async def park_part(work: OwnedTransaction, part: Part, reason: str) -> None:
    """Send a stored part to the dead queue as the message that it was."""
    body = await work.until_done(lambda: read_part(work.context.blobs, part))
    await work.park(body, queue=work.payload_queue, reason=reason, series=part.series, ordinal=part.ordinal)


async def await_results(work: OwnedTransaction) -> None:
    """Return when the result is complete. Raises LeaseLost, QueueMissing, ConsumerLost."""
    context = work.context
    work.learn(await work.ask(context.store.stand))
    changed = asyncio.Event()
    if may_be_complete(work) and await judge(work):
        return
    async with AsyncExitStack() as stack:
        headers_in = await stack.enter_async_context(
            context.broker.consumer(work.subscription(work.header_queue, count_max=HEADERS_COUNT_MAX))
        )
        payloads_in = await stack.enter_async_context(
            context.broker.consumer(work.subscription(work.payload_queue, count_max=unsettled_max(work)))
        )
        payloads = Payloads(work, payloads_in, on_change=changed.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(take_headers(work, headers_in, on_change=changed.set))
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
        work.stand = await work.ask(work.context.store.stand)


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
    counts = await work.ask(store.count)
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
    stand = await work.ask(store.stand)
    work.stand = stand
    counts = await work.ask(store.count)
    exact = all(counts.get(name, (0, 0, 0))[0] == work.count_of(name) for name in known)
    return exact and is_complete(work.transaction.series, stand)


async def park_header(work: OwnedTransaction, series: str, count: int) -> None:
    """A header of a series that does not belong to the result."""
    reason = f"series is outside the known set; '{series}'"
    await work.park(b"", queue=work.header_queue, reason=reason, series=series, count=count)
    await work.ask(work.context.store.remove_header, series, fence=work.fence)


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
        for gap in await work.until_done(lambda: gaps_of(context.store, work.transaction))
        if gap.missing or gap.is_open
    }
    body = msgspec.json.encode({"transaction-id": work.id, "missing": missing})
    # An id of its own: by the transaction's the producer would take it for a repeated request.
    message_id = f"{work.id}-missing-{time.time_ns()}"
    await work.ask_producer("missing", body, message_id=message_id)
    count = sum(len(found) for found in missing.values())
    emit("collect.missing", transaction=work.id, count=count)
    return count


class NewPart(Struct, frozen=True):
    """A payload that is not in the index yet."""

    delivery: Delivery
    part: Part


class Payloads:
    """Takes the payload messages of a transaction until it is stopped."""

    def __init__(self, work: OwnedTransaction, consumer: Consumer, *, on_change: Callable[[], None]) -> None:
        self._work = work
        self._consumer = consumer
        self._on_change = on_change
        self._writer = IndexWriter(work.context.store, work.id, fence=work.fence)
        self._unsettled_count = 0
        self._unsettled_bytes = 0
        self._largest_bytes = 0  # nobody has seen one yet
        self._freed = asyncio.Event()
        self._unsettled_max = unsettled_max(work)
        self._group_max = max(1, work.context.limits.uploads_max // GROUPS_COUNT)
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Work until the consumer is stopped and everything taken is settled. Raises what ended it."""
        async with self._tasks:
            while True:
                while (room := self._room()) < self._worth:
                    self._freed.clear()
                    await self._freed.wait()
                batch = await self._consumer.take(room)
                if not batch:
                    return
                for delivery in batch:
                    size = len(delivery.body)
                    self._largest_bytes = max(self._largest_bytes, size, 1)
                    self._unsettled_bytes += size
                self._unsettled_count += len(batch)
                self._tasks.create_task(self._sort(batch))

    @property
    def _worth(self) -> int:
        """How many messages are worth a round trip: half of what may be here, or whatever fits when it is idle."""
        return 1 if self._unsettled_count < self._work.context.limits.uploads_max // 2 else self._unsettled_max // 2

    def _room(self) -> int:
        limits = self._work.context.limits
        if not self._largest_bytes:
            return min(FIRST_COUNT_MAX, self._unsettled_max) - self._unsettled_count
        if not self._unsettled_count:
            room_bytes = limits.uploads_bytes_max
        else:
            room_bytes = limits.uploads_bytes_max - self._unsettled_bytes
            if room_bytes < self._largest_bytes:
                return 0
        by_size = max(1, room_bytes // self._largest_bytes)
        return min(self._unsettled_max - self._unsettled_count, by_size)

    def _let_go(self, delivery: Delivery) -> None:
        self._unsettled_count -= 1
        self._unsettled_bytes -= len(delivery.body)
        self._freed.set()

    async def _sort(self, batch: Sequence[Delivery]) -> None:
        """What is new goes on in groups, everything else by itself."""
        work = self._work
        read = [read_payload(self._consumer.message(delivery), work.id) for delivery in batch]
        keys = [(payload.series, payload.ordinal) for payload in read if isinstance(payload, Payload)]
        known: Mapping[tuple[str, int], Part] = {}
        if keys:
            known = await work.ask(work.context.store.find_parts, keys)
        digests = await digests_of([delivery.body for delivery in batch])
        new: list[NewPart] = []
        for delivery, payload, sha256 in zip(batch, read, digests, strict=True):
            if isinstance(payload, str):
                self._tasks.create_task(self._park(delivery, payload))
                continue
            existing = known.get((payload.series, payload.ordinal))
            series, ordinal, size_bytes = payload.series, payload.ordinal, len(delivery.body)
            path = blob_path(work.id, series, ordinal, sha256)
            part = Part(series=series, ordinal=ordinal, path=path, size_bytes=size_bytes, sha256=sha256)
            if existing is None and not self._is_beyond(part):
                new.append(NewPart(delivery, part))
                continue
            if existing is not None:
                emit("collect.skipped", ordinal=ordinal, transaction=work.id)
            self._tasks.create_task(self._judge(delivery, part, existing))
        for start in range(0, len(new), self._group_max):
            self._tasks.create_task(self._store(new[start : start + self._group_max]))

    async def _store(self, group: Sequence[NewPart], *, failures: int = 0) -> None:
        """Upload, index and ack; one whose upload fails for now is tried again by itself."""
        work = self._work
        async with work.context.uploads.take(len(group)):
            crash_point("collect.before_upload")
            stored = await self._upload(group, failures)
            if not stored:
                return
            crash_point("collect.after_upload")
            # Still counted as uploads: what a kill makes us upload again is what is not in the index yet.
            crash_point("collect.before_index")
            parts = [fresh.part for fresh in stored]
            winners, put = await work.until_done(lambda: self._writer.put_all(parts))
            crash_point("collect.after_index")
        work.learn(put.stand)
        won = []
        for fresh, winner in zip(stored, winners, strict=True):
            if winner.path == fresh.part.path and not self._is_beyond(fresh.part):
                won.append(fresh.delivery)
            else:
                self._tasks.create_task(self._judge(fresh.delivery, fresh.part, winner))
        await self._ack(won)

    async def _upload(self, group: Sequence[NewPart], failures: int) -> list[NewPart]:
        """Those whose bytes are stored now. Raises what no other attempt can cure."""
        wanted = [
            BlobContent(path=fresh.part.path, content=fresh.delivery.body, sha256=fresh.part.sha256) for fresh in group
        ]
        stored = []
        for fresh, outcome in zip(group, await self._work.context.blobs.put_all(wanted), strict=True):
            if not isinstance(outcome, HoldfastError):
                emit("collect.uploaded", ordinal=fresh.part.ordinal, path=fresh.part.path)
                stored.append(fresh)
            elif isinstance(outcome, FOR_NOW):
                self._tasks.create_task(self._again(fresh, outcome, failures + 1))
            else:
                raise outcome
        return stored

    async def _again(self, fresh: NewPart, error: HoldfastError, failures: int) -> None:
        await self._work.wait(error, failures)
        await self._store([fresh], failures=failures)

    async def _ack(self, stored: Sequence[Delivery]) -> None:
        """They are stored: the messages may go."""
        if not stored:
            return
        crash_point("collect.before_ack")
        unsettled = await self._consumer.ack(stored)
        crash_point("collect.after_ack")
        for one in unsettled:
            if not isinstance(one.error, NotOurs):  # which comes again, and is known then
                await ack(self._work, self._consumer, one.delivery)
        for delivery in stored:
            self._let_go(delivery)
        self._on_change()

    def _is_beyond(self, part: Part) -> bool:
        count = self._work.count_of(part.series)
        return count is not None and part.ordinal >= count

    async def _park(self, delivery: Delivery, reason: str) -> None:
        await self._work.park_delivery(self._consumer, delivery, reason)
        self._let_go(delivery)

    async def _judge(self, delivery: Delivery, part: Part, existing: Part | None) -> None:
        """A message whose ordinal is taken or cannot be."""
        work, store = self._work, self._work.context.store
        if self._is_beyond(part):
            count = work.count_of(part.series)
            if existing is not None:
                await work.ask(store.remove, [existing], fence=work.fence)
                self._on_change()
            reason = f"ordinal is beyond the count; {part.ordinal} of series '{part.series}', which has {count}"
            await self._park(delivery, reason)
        elif existing is not None and existing.sha256 == part.sha256:
            await self._ack([delivery])
        else:
            await work.ask(store.note_stray, [part.path], fence=work.fence)
            reason = f"ordinal came with other bytes; {part.ordinal} of series '{part.series}' is stored already"
            await self._park(delivery, reason)


#: For each part the one that counts for its ordinal, and how everything stands.
_Put: TypeAlias = tuple[Sequence[Part], PartsStored]


class IndexWriter:
    """Writes the parts of one transaction. The first waiter commits for all who came in the meantime."""

    def __init__(self, index: CollectStore, transaction: str, *, fence: int) -> None:
        self._index = index
        self._transaction = transaction
        self._fence = fence
        self._waiting: deque[tuple[Sequence[Part], asyncio.Future[_Put]]] = deque()
        self._busy = asyncio.Lock()

    async def put_all(self, parts: Sequence[Part]) -> _Put:
        """Put parts, together with those of others who wait. Raises LeaseLost, StorageFailed."""
        done: asyncio.Future[_Put] = asyncio.get_running_loop().create_future()
        self._waiting.append((parts, done))
        async with self._busy:
            while not done.done():
                await self._commit()
        return done.result()

    async def _commit(self) -> None:
        groups = [self._waiting.popleft()]
        batch = [*groups[0][0]]
        while self._waiting and len(batch) + len(self._waiting[0][0]) <= COMMIT_COUNT_MAX:
            groups.append(self._waiting.popleft())
            batch += groups[-1][0]
        try:
            put = await self._index.put_parts(self._transaction, batch, fence=self._fence)
        except HoldfastError as error:
            for _, done in groups:
                if not done.done():
                    done.set_exception(error)
                    done.exception()  # seen: whoever waits for it raises it, unless he was cancelled
            return
        except BaseException:
            for _, done in groups:
                done.cancel()
            raise
        winners = iter(put.winners)
        for parts, done in groups:
            own = [next(winners) for _ in parts]
            if not done.done():
                done.set_result((own, put))


async def ack(work: OwnedTransaction, consumer: Consumer, delivery: Delivery) -> None:
    """It is stored: the message may go."""
    crash_point("collect.before_ack")
    await work.ack(consumer, delivery)
    crash_point("collect.after_ack")


async def digests_of(bodies: Sequence[bytes]) -> list[str]:
    """Of a whole batch; large ones in a thread, beside the loop."""
    if sum(map(len, bodies)) < THREAD_BYTES_MIN:
        return [digest(body) for body in bodies]
    return await asyncio.to_thread(lambda: [digest(body) for body in bodies])


def unsettled_max(work: OwnedTransaction) -> int:
    """How many messages may be here: those that are uploaded, and as many that wait for their turn."""
    return 2 * work.context.limits.uploads_max
