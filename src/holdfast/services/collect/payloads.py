"""Payload messages: each is stored as a blob, written to the index, and acked, in this order.

They go in small groups, several at a time: a group shares its fsyncs, its commit and its ack, and what fails of it goes
on alone. Index writes that wait at the same time go into one commit. Memory is bounded by what is taken: at most twice
`uploads_max` messages of a transaction are here at a time, and fewer when they are large. Whatever fails for now is
tried again with the message still held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from holdfast.core.collect import Part, Payload, blob_path, digest, read_payload
from holdfast.core.message import Delivery
from holdfast.core.policy import Failure, Park
from holdfast.errors import HoldfastError, NotOurs
from holdfast.ports.blobs import BlobContent
from holdfast.ports.broker import Consumer
from holdfast.proof import crash_point
from holdfast.services.collect.transaction import ERROR_TYPE, FOR_NOW, REASON, OwnedTransaction
from holdfast.stores.collect import CollectStore, PartsStored
from holdfast.telemetry.events import emit

BATCH_COUNT_MAX = 256
#: Less is hashed sooner than a thread is woken.
THREAD_BYTES_MIN = 64 * 1024
#: How many are taken before it is known how large they are.
FIRST_COUNT_MAX = 4
#: How many groups are on their way when there is enough to do.
GROUPS_COUNT = 4


class NewPart(Struct, frozen=True):
    """A payload that is not in the index yet."""

    delivery: Delivery
    payload: Payload
    part: Part


class Payloads:
    """Takes the payload messages of a transaction until it is stopped."""

    def __init__(self, work: OwnedTransaction, consumer: Consumer, *, on_change: Callable[[], None]) -> None:
        self._work = work
        self._consumer = consumer
        self._on_change = on_change
        self._writer = IndexWriter(work.context.store, work.id, fence=work.fence)
        self._held_count = 0
        self._held_bytes = 0
        self._largest_bytes = 0  # nobody has seen one yet
        self._freed = asyncio.Event()
        self._held_max = held_max(work)
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
                    self._held_bytes += size
                self._held_count += len(batch)
                self._tasks.create_task(self._sort(batch))

    @property
    def _worth(self) -> int:
        """How many messages are worth a round trip: half of what may be here, or whatever fits when it is idle."""
        return 1 if self._held_count < self._work.context.limits.uploads_max // 2 else self._held_max // 2

    def _room(self) -> int:
        limits = self._work.context.limits
        if not self._largest_bytes:
            return min(FIRST_COUNT_MAX, self._held_max) - self._held_count
        if not self._held_count:
            room_bytes = limits.uploads_bytes_max
        else:
            room_bytes = limits.uploads_bytes_max - self._held_bytes
            if room_bytes < self._largest_bytes:
                return 0
        by_size = max(1, room_bytes // self._largest_bytes)
        return min(self._held_max - self._held_count, by_size)

    def _let_go(self, delivery: Delivery) -> None:
        self._held_count -= 1
        self._held_bytes -= len(delivery.body)
        self._freed.set()

    async def _sort(self, batch: Sequence[Delivery]) -> None:
        """What is new goes on in groups, everything else by itself."""
        work = self._work
        read = [read_payload(self._consumer.message(delivery), work.id) for delivery in batch]
        keys = [(payload.series, payload.ordinal) for payload in read if isinstance(payload, Payload)]
        known: Mapping[tuple[str, int], Part] = {}
        if keys:
            known = await work.retrier.until_done(lambda: work.context.store.find_parts(work.id, keys))
        digests = await digests_of([delivery.body for delivery in batch])
        fresh: list[NewPart] = []
        for delivery, payload, sha256 in zip(batch, read, digests, strict=True):
            if isinstance(payload, str):
                self._tasks.create_task(self._park(delivery, payload))
                continue
            existing = known.get((payload.series, payload.ordinal))
            if existing is None and not self._is_beyond(payload):
                fresh.append(NewPart(delivery, payload, self._part(delivery, payload, sha256)))
                continue
            if existing is not None:
                emit("collect.skipped", ordinal=payload.ordinal, transaction=work.id)
            self._tasks.create_task(self._judge(delivery, payload, existing, sha256))
        for start in range(0, len(fresh), self._group_max):
            self._tasks.create_task(self._store(fresh[start : start + self._group_max]))

    def _part(self, delivery: Delivery, payload: Payload, sha256: str) -> Part:
        path = blob_path(self._work.id, payload.series, payload.ordinal, sha256)
        size_bytes = len(delivery.body)
        return Part(series=payload.series, ordinal=payload.ordinal, path=path, size_bytes=size_bytes, sha256=sha256)

    async def _store(self, group: Sequence[NewPart], *, failures: int = 0) -> None:
        """Upload, index and ack; one whose upload fails for now is tried again by itself."""
        work = self._work
        async with work.context.uploads.hold(len(group)):
            crash_point("collect.before_upload")
            stored = await self._upload(group, failures)
            if not stored:
                return
            crash_point("collect.after_upload")
            # Still counted as uploads: what a kill makes us upload again is what is not in the index yet.
            crash_point("collect.before_index")
            parts = [fresh.part for fresh in stored]
            winners, put = await work.retrier.until_done(lambda: self._writer.put_all(parts))
            crash_point("collect.after_index")
        work.learn(put.stand)
        won = []
        for fresh, winner in zip(stored, winners, strict=True):
            if winner.path == fresh.part.path and not self._is_beyond(fresh.payload):
                won.append(fresh.delivery)
            else:
                self._tasks.create_task(self._judge(fresh.delivery, fresh.payload, winner, fresh.part.sha256))
        await self._ack(won)

    async def _upload(self, group: Sequence[NewPart], failures: int) -> list[NewPart]:
        """Those whose bytes are stored now. Raises what no other attempt can cure."""
        wanted = [
            BlobContent(path=fresh.part.path, content=fresh.delivery.body, sha256=fresh.part.sha256) for fresh in group
        ]
        stored = []
        for fresh, outcome in zip(group, await self._work.context.blobs.put_all(wanted), strict=True):
            if not isinstance(outcome, HoldfastError):
                emit("collect.uploaded", ordinal=fresh.payload.ordinal, path=fresh.part.path)
                stored.append(fresh)
            elif isinstance(outcome, FOR_NOW):
                self._tasks.create_task(self._again(fresh, outcome, failures + 1))
            else:
                raise outcome
        return stored

    async def _again(self, fresh: NewPart, error: HoldfastError, failures: int) -> None:
        await self._work.retrier.wait(error, failures)
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

    def _is_beyond(self, payload: Payload) -> bool:
        count = self._work.count_of(payload.series)
        return count is not None and payload.ordinal >= count

    async def _park(self, delivery: Delivery, reason: str) -> None:
        await park(self._work, self._consumer, delivery, reason)
        self._let_go(delivery)

    async def _judge(self, delivery: Delivery, payload: Payload, existing: Part | None, sha256: str) -> None:
        """A message whose ordinal is taken or cannot be."""
        work, store = self._work, self._work.context.store
        if self._is_beyond(payload):
            count = work.count_of(payload.series)
            if existing is not None:
                excess = existing
                await work.retrier.until_done(lambda: store.remove(work.id, [excess], fence=work.fence))
                self._on_change()
            reason = f"ordinal is beyond the count; {payload.ordinal} of series '{payload.series}', which has {count}"
            await self._park(delivery, reason)
        elif existing is not None and existing.sha256 == sha256:
            await self._ack([delivery])
        else:
            path = blob_path(work.id, payload.series, payload.ordinal, sha256)
            await work.retrier.until_done(lambda: store.note_stray(work.id, [path], fence=work.fence))
            reason = f"ordinal came with other bytes; {payload.ordinal} of series '{payload.series}' is stored already"
            await self._park(delivery, reason)


class IndexWriter:
    """Writes the parts of one transaction. The first waiter commits for all who came in the meantime."""

    def __init__(self, index: CollectStore, transaction: str, *, fence: int) -> None:
        self._index = index
        self._transaction = transaction
        self._fence = fence
        self._waiting: deque[_Group] = deque()
        self._busy = asyncio.Lock()

    async def put_all(self, parts: Sequence[Part]) -> tuple[Sequence[Part], PartsStored]:
        """For each the part that counts for its ordinal, and how everything stands. Raises LeaseLost, StorageFailed."""
        group = _Group(parts)
        self._waiting.append(group)
        async with self._busy:
            while not group.future.done():
                await self._commit()
        return group.future.result()

    async def _commit(self) -> None:
        groups = [self._waiting.popleft()]
        count = len(groups[0].parts)
        while self._waiting and count + len(self._waiting[0].parts) <= BATCH_COUNT_MAX:
            groups.append(self._waiting.popleft())
            count += len(groups[-1].parts)
        batch = [part for group in groups for part in group.parts]
        try:
            put = await self._index.put_parts(self._transaction, batch, fence=self._fence)
        except HoldfastError as error:
            for group in groups:
                if not group.future.done():
                    group.future.set_exception(error)
                    group.future.exception()  # seen: whoever waits for it raises it, unless he was cancelled
            return
        except BaseException:
            for group in groups:
                group.future.cancel()
            raise
        winners = iter(put.winners)
        for group in groups:
            own = [next(winners) for _ in group.parts]
            if not group.future.done():
                group.future.set_result((own, put))


class _Group:
    """Parts of one caller, until they are committed."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.future: asyncio.Future[tuple[Sequence[Part], PartsStored]] = asyncio.get_running_loop().create_future()


async def park(work: OwnedTransaction, consumer: Consumer, delivery: Delivery, reason: str) -> None:
    """Put the offending message into the dead queue, with the reason."""
    failure = Failure(type=ERROR_TYPE, message=reason)
    await work.retrier.settle(lambda: consumer.park(delivery, Park(reason=REASON, failure=failure)))
    work.parked(reason)


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


def held_max(work: OwnedTransaction) -> int:
    """How many messages may be here: those that are uploaded, and as many that wait for their turn."""
    return 2 * work.context.limits.uploads_max
