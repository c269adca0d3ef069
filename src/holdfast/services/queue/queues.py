"""The verbs as Python methods, the same in process (`holdfast.open`) and over HTTP (`holdfast.Client`), and leases:
taken one after the other, kept alive while they are worked on, settled.

A lease that is not settled is extended until `extend_for_s` has passed, then it runs out by itself and its items go to
somebody else. Nothing is completed that the handler did not complete.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from msgspec import UNSET, UnsetType

from holdfast.core.checks import BATCH_COUNT_MAX, LIST_COUNT_DEFAULT
from holdfast.core.item import Item, LeasedItem, NewItem, QueueInfo, RetryItem
from holdfast.core.moments import SECOND_US, Backoff, written_duration
from holdfast.core.requests import queue as requests
from holdfast.errors import BadIds, HoldfastError, Invalid, NothingToLease, ShuttingDown, TryAgain, Unreachable
from holdfast.telemetry.events import emit

REQUEST_TIMEOUT = "30s"
BACKOFF = Backoff(first_s=0.1, delay_s_max=10.0)
REQUEST_MS_MIN = 10
#: What can be produced.
ITEM_KINDS = (NewItem, str, bytes, bytearray, memoryview)

R = TypeVar("R")


class VerbCaller(Protocol):
    """Carries out a verb, here or far away."""

    async def call(self, request: requests.QueueRequest[R]) -> R:
        """Raises HoldfastError with the texts of the contract."""


class IdsVerb(Protocol):
    """A verb over leased items of a partition: all or none with BadIds."""

    async def __call__(self, queue_name: str, ids: Sequence[str], *, partition: int) -> object: ...


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
        self,
        queue_name: str,
        items: Iterable[NewItem | bytes | str] | NewItem | bytes | str,
        *,
        request_timeout: str = REQUEST_TIMEOUT,
    ) -> requests.ProduceReply:
        """Store items, or one; when this returns they are committed."""
        request = requests.ProduceRequest(
            queue_name=queue_name,
            request_timeout=request_timeout,
            items=[_new_item(item) for item in _each(items, ITEM_KINDS)],
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
            queue_name=queue_name, partition=partition, request_timeout=request_timeout, ids=_each(ids, (str,))
        )
        await self._caller.call(request)

    async def queue_retry(
        self, queue_name: str, items: Iterable[RetryItem | str] | RetryItem | str, *, partition: int = 0
    ) -> None:
        """Give leased items back: at once, at `retry_at`, or to the dead queue."""
        retried = [RetryItem(id=item) if isinstance(item, str) else item for item in _each(items, (RetryItem, str))]
        request = requests.RetryRequest(queue_name=queue_name, partition=partition, items=retried)
        await self._caller.call(request)

    async def queue_extend(
        self, queue_name: str, ids: Sequence[str], *, partition: int = 0, lease_timeout: str = ""
    ) -> requests.ExtendReply:
        """Let leases run for another `lease_timeout` from now, or for the queue's own."""
        request = requests.ExtendRequest(
            queue_name=queue_name, partition=partition, ids=_each(ids, (str,)), lease_timeout=lease_timeout
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
                keeper = asyncio.create_task(lease.unsettled.keep_alive(every_s, for_s=extend_for_s))
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
            queue_name=queue_name, partition=partition, source_queue=source_queue, ids=_each(ids, (str,))
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

    async def queues_depths(
        self, *, search: str = "", sort: Literal["name", "depth"] = "name", cursor: str = "", limit: int = 0
    ) -> requests.DepthsReply:
        """Queues with how many items each has, by name or the fullest first; `next` of a reply is the next cursor."""
        request = requests.DepthsRequest(search=search, sort=sort, cursor=cursor, limit=limit)
        return await self._caller.call(request)

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
        self, queue_name: str, items: Iterable[requests.ImportedItem] | requests.ImportedItem, *, partition: int = 0
    ) -> list[Item]:
        """Store items with their story; returns those that were stored, with their new ids."""
        request = requests.ImportItemsRequest(queue_name=queue_name, partition=partition, items=_each(items, (Item,)))
        return (await self._caller.call(request)).items

    async def storage_items_delete(self, queue_name: str, ids: Sequence[str], *, partition: int = 0) -> None:
        """Delete items by id, leased ones too; unknown ids are skipped."""
        request = requests.DeleteItemsRequest(queue_name=queue_name, partition=partition, ids=_each(ids, (str,)))
        await self._caller.call(request)


class UnsettledItems:
    """Items of one queue that are leased to us and not settled yet, each with its partition.

    The queue settles and extends all of a request or none: ids whose lease was lost are left out the next time. They
    are somebody else's, or will be.
    """

    def __init__(self, queues: Queues, queue_name: str) -> None:
        self._queues = queues
        self._queue_name = queue_name
        self._partitions: dict[str, int] = {}

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._partitions

    def add(self, items: Sequence[LeasedItem], partition: int) -> None:
        """They were leased."""
        self._partitions.update((item.id, partition) for item in items)

    async def complete(self, ids: Sequence[str], *, partition: int) -> list[str]:
        """Finish items; those whose lease was lost are returned."""
        lost = await self._without_lost(self._queues.queue_complete, ids, partition)
        self.let_go(ids)
        return lost

    async def retry(self, items: Sequence[RetryItem], *, partition: int) -> None:
        """Give items back; raises BadIds when the lease of one was lost."""
        await self._queues.queue_retry(self._queue_name, items, partition=partition)
        self.let_go([item.id for item in items])

    async def extend(self, partition: int) -> None:
        """Let all of a partition run longer; those whose lease was lost are let go of."""
        ids = [item_id for item_id, its_partition in self._partitions.items() if its_partition == partition]
        for first in range(0, len(ids), BATCH_COUNT_MAX):
            await self._without_lost(self._queues.queue_extend, ids[first : first + BATCH_COUNT_MAX], partition)

    async def keep_alive(self, every_s: float, *, for_s: float | None = None) -> None:
        """Extend again and again, for so long and while there are any; without end when no time is given."""
        ends_at = asyncio.get_running_loop().time() + (for_s or 0)
        while for_s is None or (self._partitions and asyncio.get_running_loop().time() < ends_at):
            await asyncio.sleep(every_s)
            for partition in set(self._partitions.values()):
                try:
                    await self.extend(partition)
                except HoldfastError as error:
                    emit("consumer.waits", queue=self._queue_name, error=error.message)

    async def _without_lost(self, verb: IdsVerb, ids: Sequence[str], partition: int) -> list[str]:
        lost: list[str] = []
        while ids:
            try:
                await verb(self._queue_name, ids, partition=partition)
                break
            except BadIds as error:
                bad = set(error.ids).intersection(ids)
                if not bad:
                    raise
                self.let_go(bad)
                lost += bad
                ids = [item_id for item_id in ids if item_id not in bad]
        return lost

    def let_go(self, ids: Iterable[str]) -> None:
        """They are settled, or ours no more."""
        for item_id in ids:
            self._partitions.pop(item_id, None)


class Lease(AbstractAsyncContextManager["Lease"]):
    """Items that are ours for a while. `async with lease:` completes them, or gives them back on an error."""

    def __init__(self, queues: Queues, queue_name: str, partition: int, items: Sequence[LeasedItem]) -> None:
        self.queue_name = queue_name
        self.partition = partition
        self.items = tuple(items)
        self.unsettled = UnsettledItems(queues, queue_name)
        self.unsettled.add(items, partition)

    @property
    def open_items(self) -> list[LeasedItem]:
        """Items that are not settled yet."""
        return [item for item in self.items if item.id in self.unsettled]

    async def complete(self, items: Sequence[LeasedItem] | None = None) -> list[str]:
        """Finish items, or all that are open. Ids whose lease was lost are left out, and returned."""
        chosen = self.open_items if items is None else items
        return await self.unsettled.complete([item.id for item in chosen], partition=self.partition)

    async def retry(self, items: Sequence[RetryItem | LeasedItem] | None = None) -> None:
        """Give items back, or all that are open; raises BadIds when the lease of one was lost."""
        chosen = self.open_items if items is None else items
        retried = [item if isinstance(item, RetryItem) else RetryItem(id=item.id) for item in chosen]
        if retried:
            await self.unsettled.retry(retried, partition=self.partition)

    async def extend(self) -> None:
        """Let the open items run longer; those whose lease was lost are dropped from it."""
        await self.unsettled.extend(self.partition)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.complete()
        elif isinstance(error, Exception):
            await self.retry()


class Leaser:
    """Leases of one queue, one after the other; an empty queue is asked again and a failing server waited for."""

    def __init__(self, queues: Queues, queue_name: str) -> None:
        self.trouble = ""  # why nothing comes at present
        self._queues = queues
        self._queue_name = queue_name
        self._failures = 0

    async def next(self, count_max: int, *, timeout_s: float | None = None) -> requests.LeaseReply | None:
        """The next lease, or none when nothing came in time. Raises QueueMissing when the queue is gone, ShuttingDown
        when the service ends in this process; with a time limit whatever fails. A lease that is called off is undone by
        the queue."""
        limit = REQUEST_TIMEOUT if timeout_s is None else f"{max(REQUEST_MS_MIN, round(timeout_s * 1000))}ms"
        while True:
            try:
                reply = await self._queues.queue_lease(self._queue_name, batch_size=count_max, request_timeout=limit)
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
                await asyncio.sleep(BACKOFF.delay_s(self._failures, spread=1.0))
            else:
                self._worked()
                return reply

    def _worked(self) -> None:
        self.trouble, self._failures = "", 0


async def all_queues(queues: Queues, *, pivot: str = "", limit: int = 0) -> AsyncIterator[QueueInfo]:
    """Queues by name from the pivot on, page by page. The pivot is included, so each page repeats the last name."""
    last: str | None = None
    count = 0
    while True:
        page = await queues.queues_list(pivot=pivot, limit=LIST_COUNT_DEFAULT)
        for found in page:
            if found.queue_name == last:
                continue
            yield found
            count += 1
            if count == limit:
                return
        if len(page) < LIST_COUNT_DEFAULT:
            return
        last = pivot = page[-1].queue_name


async def lease_s(queues: Queues, queue_name: str) -> float:
    """How long a lease of a queue runs unless it is extended. Raises QueueMissing."""
    info = await queues.queues_info(queue_name)
    return written_duration(info.lease_timeout) / SECOND_US


def _new_item(item: NewItem | bytes | str) -> NewItem:
    if isinstance(item, NewItem):
        return item
    return NewItem(payload=item.encode() if isinstance(item, str) else bytes(item))


def _each(given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """What was given, one by one; a single thing is a list of one. Raises Invalid for what is of no such kind."""
    is_one = isinstance(given, str | bytes | bytearray | memoryview | Mapping) or not isinstance(given, Iterable)
    things = [given] if is_one else list(given)
    for thing in things:
        if not isinstance(thing, kinds):
            known = ", ".join(kind.__name__ for kind in kinds)
            raise Invalid(f"argument is invalid; it holds a {type(thing).__name__}, use {known}")
    return things
