"""Payload messages: each is stored as a blob, written to the index, and acked, in this order.

Memory is bounded by what is taken: at most twice `uploads_max` messages of a transaction are here at a time, and fewer
when they are large. Whatever fails for now is tried again with the message still held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from holdfast.core.collect import Part, Payload, blob_path, digest, read_payload
from holdfast.core.outcome import Failure
from holdfast.core.policy import Park
from holdfast.ports.broker import Incoming, Intake
from holdfast.proof import crash_point
from holdfast.services.collect.work import Work
from holdfast.services.collect.writer import IndexWriter
from holdfast.telemetry.events import emit

REASON = "contradiction"
#: Less is hashed sooner than a thread is woken.
THREAD_BYTES_MIN = 64 * 1024
#: How many are taken before it is known how large they are.
FIRST_COUNT_MAX = 4


def held_max(work: Work) -> int:
    """How many messages may be here: those that are uploaded, and as many that wait for their turn."""
    return 2 * work.tools.limits.uploads_max


async def digests_of(bodies: Sequence[bytes]) -> list[str]:
    """Of a whole batch; large ones in a thread, beside the loop."""
    if sum(map(len, bodies)) < THREAD_BYTES_MIN:
        return [digest(body) for body in bodies]
    return await asyncio.to_thread(lambda: [digest(body) for body in bodies])


async def park(work: Work, intake: Intake, incoming: Incoming, reason: str) -> None:
    """Put the offending message into the dead queue, with the reason."""
    failure = Failure(type="Contradiction", message=reason)
    await work.patience.settle(lambda: intake.park(incoming, Park(reason=REASON, failure=failure)))
    work.parked(reason)


async def ack(work: Work, intake: Intake, incoming: Incoming) -> None:
    """It is stored: the message may go."""
    crash_point("collect.before_ack")
    await work.patience.settle(lambda: intake.ack(incoming))
    crash_point("collect.after_ack")


class Payloads:
    """Takes the payload messages of a transaction until it is stopped."""

    def __init__(self, work: Work, intake: Intake, *, on_change: Callable[[], None]) -> None:
        self._work = work
        self._intake = intake
        self._on_change = on_change
        self._writer = IndexWriter(work.tools.store, work.id, fence=work.fence)
        self._running: set[asyncio.Task[None]] = set()
        self._running_bytes = 0
        self._largest_bytes = 0  # nobody has seen one yet
        self._freed = asyncio.Event()
        self._held_max = held_max(work)

    async def run(self) -> None:
        """Work until the intake is stopped and everything taken is settled. Raises what ended it."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                while (room := self._room()) < self._worth:
                    self._freed.clear()
                    await self._freed.wait()
                batch = await self._intake.take(room)
                if not batch:
                    return
                await self._begin(batch, tasks)

    @property
    def _worth(self) -> int:
        """How many messages are worth a round trip: half of what may be here, or whatever fits when it is idle."""
        return 1 if len(self._running) < self._work.tools.limits.uploads_max // 2 else self._held_max // 2

    def _room(self) -> int:
        limits = self._work.tools.limits
        if not self._largest_bytes:
            return min(FIRST_COUNT_MAX, self._held_max) - len(self._running)
        if not self._running:
            room_bytes = limits.uploads_bytes_max
        else:
            room_bytes = limits.uploads_bytes_max - self._running_bytes
            if room_bytes < self._largest_bytes:
                return 0
        by_size = max(1, room_bytes // self._largest_bytes)
        return min(self._held_max - len(self._running), by_size)

    async def _begin(self, batch: Sequence[Incoming], tasks: asyncio.TaskGroup) -> None:
        read = [read_payload(incoming.message, self._work.id) for incoming in batch]
        keys = [(payload.series, payload.ordinal) for payload in read if isinstance(payload, Payload)]
        known: Mapping[tuple[str, int], Part] = {}
        if keys:
            find = self._work.tools.store.find_parts
            known = await self._work.patience.until_done(lambda: find(self._work.id, keys))
        digests = await digests_of([incoming.message.body for incoming in batch])
        for incoming, payload, sha256 in zip(batch, read, digests, strict=True):
            size = len(incoming.message.body)
            self._largest_bytes = max(self._largest_bytes, size, 1)
            self._running_bytes += size
            task = tasks.create_task(self._one(incoming, payload, known, sha256))
            self._running.add(task)
            task.add_done_callback(lambda done, size=size: self._ended(done, size))  # type: ignore[misc]

    def _ended(self, task: asyncio.Task[None], size: int) -> None:
        self._running.discard(task)
        self._running_bytes -= size
        self._freed.set()

    async def _one(
        self, incoming: Incoming, payload: Payload | str, known: Mapping[tuple[str, int], Part], sha256: str
    ) -> None:
        work = self._work
        if isinstance(payload, str):
            await park(work, self._intake, incoming, payload)
            return
        existing = known.get((payload.series, payload.ordinal))
        if existing is None and not self._is_beyond(payload):
            existing = await self._store(incoming, payload, sha256)
            if existing is None:
                await ack(work, self._intake, incoming)
                self._on_change()
                return
        elif existing is not None:
            emit("collect.skipped", ordinal=payload.ordinal, transaction=work.id)
        await self._judge(incoming, payload, existing, sha256)

    async def _store(self, incoming: Incoming, payload: Payload, sha256: str) -> Part | None:
        """Upload and index; None when these bytes count now, else the part that stands in the way."""
        work, body = self._work, incoming.message.body
        path = blob_path(work.id, payload.series, payload.ordinal, sha256)
        part = Part(series=payload.series, ordinal=payload.ordinal, path=path, size_bytes=len(body), sha256=sha256)
        async with work.tools.uploads:
            crash_point("collect.before_upload")
            await work.patience.until_done(lambda: work.tools.blobs.put(path, body, sha256=sha256))
            crash_point("collect.after_upload")
            emit("collect.uploaded", ordinal=payload.ordinal, path=path)
            # Still counted as an upload: what a kill makes us upload again is what is not in the index yet.
            crash_point("collect.before_index")
            winner, put = await work.patience.until_done(lambda: self._writer.put(part))
            crash_point("collect.after_index")
        work.learn(put.stand)
        return None if winner.path == path and not self._is_beyond(payload) else winner

    def _is_beyond(self, payload: Payload) -> bool:
        count = self._work.count_of(payload.series)
        return count is not None and payload.ordinal >= count

    async def _judge(self, incoming: Incoming, payload: Payload, existing: Part | None, sha256: str) -> None:
        """A message whose ordinal is taken or cannot be."""
        work, store = self._work, self._work.tools.store
        if self._is_beyond(payload):
            count = work.count_of(payload.series)
            if existing is not None:
                excess = existing
                await work.patience.until_done(lambda: store.remove(work.id, [excess], fence=work.fence))
                self._on_change()
            reason = f"ordinal is beyond the count; {payload.ordinal} of series '{payload.series}', which has {count}"
            await park(work, self._intake, incoming, reason)
        elif existing is not None and existing.sha256 == sha256:
            await ack(work, self._intake, incoming)
            self._on_change()
        else:
            path = blob_path(work.id, payload.series, payload.ordinal, sha256)
            await work.patience.until_done(lambda: store.note_stray(work.id, [path], fence=work.fence))
            reason = f"ordinal came with other bytes; {payload.ordinal} of series '{payload.series}' is stored already"
            await park(work, self._intake, incoming, reason)
