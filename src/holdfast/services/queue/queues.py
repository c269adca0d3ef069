"""The verbs as Python methods, the same in process (`holdfast.open`) and over HTTP (`holdfast.Client`), and leases:
taken one after the other, kept alive while they are worked on, settled.

A lease that is not settled is extended until `extend_for_s` has passed, then it runs out by itself and its items go to
somebody else. Nothing is completed that the handler did not complete.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Protocol, TypeVar

from msgspec import UNSET, UnsetType

from holdfast.core.item import Item, LeasedItem, NewItem, QueueInfo, RetryItem
from holdfast.core.moments import SECOND_US, Backoff, parse_duration
from holdfast.core.requests import queue as requests
from holdfast.errors import BadIds, HoldfastError, NothingToLease, ShuttingDown, TryAgain, Unreachable
from holdfast.telemetry.events import emit

REQUEST_TIMEOUT = "30s"
BACKOFF = Backoff(first_s=0.1, delay_s_max=10.0)
REQUEST_MS_MIN = 10

R = TypeVar("R")


class VerbCaller(Protocol):
    """Carries out a verb, here or far away."""

    async def call(self, request: requests.QueueRequest[R]) -> R:
        """Raises HoldfastError with the texts of the contract."""


class Queues:
    """The verbs as methods. Errors are HoldfastError; `Invalid` is the caller's mistake, `TryAgain` may be repeated."""

    #: Whether a consumer goes on when the queues are shut down: in process that is the end, a server comes back.
    outlives_its_server = False

    def __init__(self, caller: VerbCaller) -> None:
        self._caller = caller
        # Unique per process and per object, so that two consumers never seem to be one.
        self._client_id = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._leases = 0

    # --- items ------------------------------------------------------------------------------------------------

    async def queue_produce(
        self, queue_name: str, items: Sequence[NewItem | bytes | str], *, request_timeout: str = REQUEST_TIMEOUT
    ) -> requests.ProduceReply:
        """Store items; when this returns they are committed."""
        request = requests.ProduceRequest(
            queue_name=queue_name, request_timeout=request_timeout, items=[_new_item(item) for item in items]
        )
        return await self._caller.call(request)

    async def queue_lease(
        self,
        queue_name: str,
        *,
        batch_size: int = 1,
        request_timeout: str = REQUEST_TIMEOUT,
        client_id: str | None = None,
    ) -> requests.LeaseReply:
        """Wait for items; raises NothingToLease when the time is up."""
        if client_id is None:
            self._leases += 1
            client_id = f"{self._client_id}-{self._leases}"
        request = requests.LeaseRequest(
            queue_name=queue_name, client_id=client_id, batch_size=batch_size, request_timeout=request_timeout
        )
        return await self._caller.call(request)

    async def queue_complete(
        self, queue_name: str, ids: Sequence[str], *, partition: int = 0, request_timeout: str = REQUEST_TIMEOUT
    ) -> None:
        """Finish leased items: all, or none with BadIds that names each bad id."""
        request = requests.CompleteRequest(
            queue_name=queue_name, partition=partition, request_timeout=request_timeout, ids=list(ids)
        )
        await self._caller.call(request)

    async def queue_retry(self, queue_name: str, items: Sequence[RetryItem | str], *, partition: int = 0) -> None:
        """Give leased items back: at once, at `retry_at`, or to the dead queue."""
        retried = [RetryItem(id=item) if isinstance(item, str) else item for item in items]
        request = requests.RetryRequest(queue_name=queue_name, partition=partition, items=retried)
        await self._caller.call(request)

    async def queue_extend(
        self, queue_name: str, ids: Sequence[str], *, partition: int = 0, lease_timeout: str = ""
    ) -> requests.ExtendReply:
        """Let leases run for another `lease_timeout` from now, or for the queue's own."""
        request = requests.ExtendRequest(
            queue_name=queue_name, partition=partition, ids=list(ids), lease_timeout=lease_timeout
        )
        return await self._caller.call(request)

    async def consume(self, queue_name: str, *, batch: int = 1, extend_for_s: float = 3600.0) -> AsyncIterator[Lease]:
        """Lease after lease, without end. Each is kept alive until it is settled, for at most `extend_for_s`."""
        every_s = await lease_s(self, queue_name) / 3
        leases = Leaser(self, queue_name)
        keepers: set[asyncio.Task[None]] = set()
        try:
            while (reply := await leases.next(batch)) is not None:
                lease = Lease(self, queue_name, reply.partition, reply.items)
                keeper = asyncio.create_task(_keep(lease, every_s, extend_for_s))
                keepers.add(keeper)
                keeper.add_done_callback(keepers.discard)
                yield lease
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    # --- one queue --------------------------------------------------------------------------------------------

    async def queue_stats(self, queue_name: str) -> requests.StatsReply:
        """What waits, is leased, scheduled, dying and overdue, by partition."""
        return await self._caller.call(requests.StatsRequest(queue_name=queue_name))

    async def queue_clear(
        self, queue_name: str, *, queue: bool = False, scheduled: bool = False, destructive: bool = False
    ) -> None:
        """Delete queued items, scheduled ones, and with `destructive` leased ones too."""
        request = requests.ClearRequest(
            queue_name=queue_name, queue=queue, scheduled=scheduled, destructive=destructive
        )
        await self._caller.call(request)

    async def queue_pause(self, queue_name: str) -> None:
        """Take items in and give none out, across restarts."""
        await self._caller.call(requests.PauseRequest(queue_name=queue_name))

    async def queue_resume(self, queue_name: str) -> None:
        """Give items out again."""
        await self._caller.call(requests.ResumeRequest(queue_name=queue_name))

    async def queue_redrive(
        self, queue_name: str, ids: Sequence[str], *, source_queue: str, partition: int = 0
    ) -> list[str]:
        """Move items back to the queue that they died in; returns those that go. Left alone is what is leased, is not
        there, or died elsewhere. Raises QueueMissing when a queue is gone."""
        request = requests.RedriveItemsRequest(
            queue_name=queue_name, partition=partition, source_queue=source_queue, ids=list(ids)
        )
        return (await self._caller.call(request)).ids

    async def queue_reload(self, queue_name: str) -> None:
        """Read the queue's state from its store again."""
        await self._caller.call(requests.ReloadRequest(queue_name=queue_name))

    # --- queues -----------------------------------------------------------------------------------------------

    async def queues_create(
        self,
        queue_name: str,
        *,
        lease_timeout: str = "1m",
        expire_timeout: str = "24h",
        max_attempts: int = 0,
        dead_queue: str = "",
        reference: str = "",
        requested_partitions: int = 1,
        dead_retention: str = "",
    ) -> None:
        """Make a queue."""
        request = requests.CreateQueueRequest(
            queue_name=queue_name,
            lease_timeout=lease_timeout,
            expire_timeout=expire_timeout,
            max_attempts=max_attempts,
            dead_queue=dead_queue,
            reference=reference,
            requested_partitions=requested_partitions,
            dead_retention=dead_retention,
        )
        await self._caller.call(request)

    async def queues_update(
        self,
        queue_name: str,
        *,
        lease_timeout: str | UnsetType = UNSET,
        expire_timeout: str | UnsetType = UNSET,
        max_attempts: int | UnsetType = UNSET,
        dead_queue: str | UnsetType = UNSET,
        reference: str | UnsetType = UNSET,
        requested_partitions: int | UnsetType = UNSET,
        dead_retention: str | UnsetType = UNSET,
    ) -> None:
        """Change a queue; what is left out stays as it is."""
        request = requests.UpdateQueueRequest(
            queue_name=queue_name,
            lease_timeout=lease_timeout,
            expire_timeout=expire_timeout,
            max_attempts=max_attempts,
            dead_queue=dead_queue,
            reference=reference,
            requested_partitions=requested_partitions,
            dead_retention=dead_retention,
        )
        await self._caller.call(request)

    async def queues_list(self, *, pivot: str = "", limit: int = 0) -> list[QueueInfo]:
        """Queues by name, from the pivot on."""
        return (await self._caller.call(requests.ListRequest(pivot=pivot, limit=limit))).items

    async def queues_info(self, queue_name: str) -> QueueInfo:
        """One queue."""
        return await self._caller.call(requests.InfoRequest(queue_name=queue_name))

    async def queues_delete(self, queue_name: str, *, force: bool = False) -> None:
        """Delete a queue; with items in it only by force."""
        await self._caller.call(requests.DeleteQueueRequest(queue_name=queue_name, force=force))

    # --- storage ----------------------------------------------------------------------------------------------

    async def storage_items_list(
        self, queue_name: str, *, partition: int = 0, pivot: str = "", limit: int = 0
    ) -> list[Item]:
        """Queued and leased items by id, from the pivot on."""
        request = requests.ListItemsRequest(queue_name=queue_name, partition=partition, pivot=pivot, limit=limit)
        return (await self._caller.call(request)).items

    async def storage_scheduled_list(
        self, queue_name: str, *, partition: int = 0, pivot: str = "", limit: int = 0
    ) -> list[Item]:
        """Scheduled items by id, from the pivot on."""
        request = requests.ListScheduledRequest(queue_name=queue_name, partition=partition, pivot=pivot, limit=limit)
        return (await self._caller.call(request)).items

    async def storage_items_import(
        self, queue_name: str, items: Sequence[requests.ImportedItem], *, partition: int = 0
    ) -> list[Item]:
        """Store items with their story; returns those that were stored, with their new ids."""
        request = requests.ImportItemsRequest(queue_name=queue_name, partition=partition, items=list(items))
        return (await self._caller.call(request)).items

    async def storage_items_delete(self, queue_name: str, ids: Sequence[str], *, partition: int = 0) -> None:
        """Delete items by id, leased ones too; unknown ids are skipped."""
        request = requests.DeleteItemsRequest(queue_name=queue_name, partition=partition, ids=list(ids))
        await self._caller.call(request)


class Lease(AbstractAsyncContextManager["Lease"]):
    """Items that are ours for a while. `async with lease:` completes them, or gives them back on an error."""

    def __init__(self, queues: Queues, queue_name: str, partition: int, items: Sequence[LeasedItem]) -> None:
        self.queue_name = queue_name
        self.partition = partition
        self.items = tuple(items)
        self._queues = queues
        self._open = {item.id: item for item in items}

    @property
    def open_items(self) -> list[LeasedItem]:
        """Items that are not settled yet."""
        return list(self._open.values())

    async def complete(self, items: Sequence[LeasedItem] | None = None) -> list[str]:
        """Finish items, or all that are open. Ids whose lease was lost are left out, and returned."""
        ids = list(self._open) if items is None else [item.id for item in items]
        lost: list[str] = []
        while ids:
            settled = set(ids)
            try:
                await self._queues.queue_complete(self.queue_name, ids, partition=self.partition)
            except BadIds as error:
                # Their lease ran out: somebody else has them or will. The rest is completed at once.
                settled = set(error.ids)
                lost.extend(error.ids)
            for item_id in settled:
                self._open.pop(item_id, None)
            ids = [item_id for item_id in ids if item_id not in settled]
        return lost

    async def retry(self, items: Sequence[RetryItem | LeasedItem] | None = None) -> None:
        """Give items back, or all that are open; raises BadIds when the lease of one was lost."""
        chosen = self.open_items if items is None else items
        retried = [item if isinstance(item, RetryItem) else RetryItem(id=item.id) for item in chosen]
        if retried:
            await self._queues.queue_retry(self.queue_name, retried, partition=self.partition)
            for item in retried:
                self._open.pop(item.id, None)

    async def extend(self) -> None:
        """Let the open items run longer; those whose lease was lost are dropped from it."""
        ids = list(self._open)
        if not ids:
            return
        try:
            await self._queues.queue_extend(self.queue_name, ids, partition=self.partition)
        except BadIds as error:
            for item_id in error.ids:
                self._open.pop(item_id, None)
            await self.extend()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.complete()
        elif isinstance(error, Exception):
            await self.retry()


class Leaser:
    """Leases of one queue, one after the other; an empty queue is asked again and a failing server waited for, until
    `stopped`, if that is given, is set."""

    def __init__(self, queues: Queues, queue_name: str, *, stopped: asyncio.Event | None = None) -> None:
        self.trouble = ""  # why nothing comes at present
        self._queues = queues
        self._queue_name = queue_name
        self._stopped = stopped
        self._failures = 0

    async def next(self, count_max: int, *, timeout_s: float | None = None) -> requests.LeaseReply | None:
        """The next lease, or none when stopped first, or when nothing came in time. Raises QueueMissing when the queue
        is gone, ShuttingDown when the service ends in this process; with a time limit whatever fails."""
        while self._stopped is None or not self._stopped.is_set():
            try:
                reply = await self._lease(count_max, timeout_s)
            except NothingToLease:
                self._worked()
                if timeout_s is not None:
                    return None
            except (TryAgain, Unreachable, ShuttingDown) as error:
                is_over = isinstance(error, ShuttingDown) and not self._queues.outlives_its_server
                if is_over or timeout_s is not None:
                    raise
                self._failures += 1
                self.trouble = error.message
                emit("consumer.waits", queue=self._queue_name, error=error.message)
                await self._pause(BACKOFF.delay_s(self._failures, spread=1.0))
            else:
                self._worked()
                return reply
        return None

    def _worked(self) -> None:
        self.trouble, self._failures = "", 0

    async def _lease(self, count_max: int, timeout_s: float | None) -> requests.LeaseReply | None:
        """Lease, or none when stopped first. A lease that is called off is undone by the queue."""
        limit = REQUEST_TIMEOUT if timeout_s is None else f"{max(REQUEST_MS_MIN, round(timeout_s * 1000))}ms"
        leasing = self._queues.queue_lease(self._queue_name, batch_size=count_max, request_timeout=limit)
        if self._stopped is None:
            return await leasing
        lease = asyncio.ensure_future(leasing)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((lease, stopped), return_when=asyncio.FIRST_COMPLETED)
            return lease.result() if lease.done() else None
        finally:
            for waiting in (lease, stopped):
                waiting.cancel()
            await asyncio.gather(lease, stopped, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        if self._stopped is None:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)


async def lease_s(queues: Queues, queue_name: str) -> float:
    """How long a lease of a queue runs unless it is extended. Raises QueueMissing."""
    info = await queues.queues_info(queue_name)
    return parse_duration(info.lease_timeout, what="lease timeout") / SECOND_US


async def _keep(lease: Lease, every_s: float, for_s: float) -> None:
    ends_at = asyncio.get_running_loop().time() + for_s
    while lease.open_items and asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(every_s)
        try:
            await lease.extend()
        except HoldfastError as error:
            emit("consumer.waits", queue=lease.queue_name, error=error.message)


def _new_item(item: NewItem | bytes | str) -> NewItem:
    if isinstance(item, NewItem):
        return item
    return NewItem(payload=item) if isinstance(item, bytes) else NewItem(payload=item.encode())
