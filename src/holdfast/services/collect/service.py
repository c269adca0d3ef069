"""The collector itself: starts transactions, resumes those that were left, keeps its leases, gives up on the dead.

Several collectors may share one store: each owns what it works on by a lease with a heartbeat; what a dead one owned
is taken over when its lease has run out. Every face asks by `call`: requests in, views out.

The states of a transaction are made fresh each time and may be run from their beginning: whatever they repeat after a
crash is the same request, the same rows, the same notice.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar, cast

from holdfast.core.collect import (
    REQUEST_BYTES_MAX,
    SERIES_COUNT_MAX,
    SeriesState,
    Transaction,
    check_move,
    check_name,
    check_series,
)
from holdfast.core.moments import format_duration
from holdfast.core.requests import results as requests
from holdfast.core.requests.declare import HANDLERS, Caller, Request, Role, Stream, handles
from holdfast.core.states import TransactionState
from holdfast.errors import (
    ConsumerLost,
    HoldfastError,
    Invalid,
    LeaseLost,
    MessageRefused,
    QueueMissing,
    StorageFailed,
    TryAgain,
)
from holdfast.proof import crash_point
from holdfast.services.collect.awaiting import await_results, request_missing
from holdfast.services.collect.completion import (
    StoredPart,
    clear,
    gaps_of,
    parts_in_order,
    remove_left,
    send_completion,
)
from holdfast.services.collect.transaction import BACKOFF, FOR_NOW, CollectContext, OwnedTransaction, address_of
from holdfast.stores.collect import LedgerLine
from holdfast.telemetry.events import emit

REASON_CHARACTERS_MAX = 500
LOOK_S = 0.5
#: Who asks in the collector's own process.
OWNER = Caller(name="owner", role=Role.ADMIN)

R = TypeVar("R")


class CollectService:
    """The verbs of the collector. Made by the wiring; `running` is its life."""

    def __init__(self, context: CollectContext) -> None:
        self._context = context
        self._store = context.store
        self._owner = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._working: dict[str, tuple[OwnedTransaction, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CollectService]:
        """Resume what was left, and look after everything until the end of the block."""
        emit("collect.starting")
        found = await self._take()
        emit("collect.found", count=found)
        emit("collect.ready")
        keepers = [
            asyncio.create_task(self._keep(), name="collector's leases"),
            asyncio.create_task(self._clean_up(), name="collector's abandonment"),
            asyncio.create_task(self._remove_left(), name="collector's search for queues that were left"),
        ]
        try:
            yield self
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._let_go()

    async def call(self, request: Request[R], caller: Caller = OWNER) -> R:
        """Answer a request. A result belongs to the queues that it names. Raises HoldfastError."""
        request.declared.check_queues(request, caller)
        if caller.queues and (name := getattr(request, "id", "")):
            found = await self.find(name)
            caller.check_places(requests.places(found.producer, found.notify))
        return cast(R, await HANDLERS[type(request)](self, request, caller))

    # --- verbs ------------------------------------------------------------------------------------------------

    async def start(
        self,
        request: bytes,
        *,
        producer: str,
        notify: str = "",
        transaction_id: str | None = None,
        series: Sequence[str] | None = None,
    ) -> Transaction:
        """Begin to collect, durably when it returns. An id that is known already is that transaction, as it stands."""
        name = check_name(transaction_id or secrets.token_hex(16), what="transaction id")
        names = None if series is None else tuple(check_series(each) for each in series)
        if names is not None and (len(set(names)) < len(names) or len(names) > SERIES_COUNT_MAX):
            raise Invalid(f"series is invalid; each is named once, and there are {SERIES_COUNT_MAX} at the most")
        if len(request) > REQUEST_BYTES_MAX:
            raise Invalid(f"request is too large; {len(request)} bytes, {REQUEST_BYTES_MAX} is the maximum")
        if (known := await self._store.find(name)) is not None:
            self._begin_ours(known)  # its creation may have been answered with an error
            return known
        await self._check(producer, *([notify] if notify else []))
        wanted = Transaction(
            id=name,
            state=TransactionState.FORWARDING,
            producer=producer,
            notify=notify,
            series=names,
            owner=self._owner,
        )
        crash_point("collect.before_create")
        made = await self._store.create(wanted, request, lease_us=self._context.limits.lease_us)
        crash_point("collect.after_create")
        emit("collect.started", transaction=made.id)
        self._begin_ours(made)
        return made

    async def find(self, transaction: str) -> Transaction:
        """One transaction. Raises Invalid when there is none."""
        found = await self._store.find(check_name(transaction, what="transaction id"))
        if found is None:
            raise Invalid(f"transaction does not exist; there is no '{transaction}'")
        return found

    async def page(
        self, *, after: str = "", unfinished: bool = False, count_max: int = requests.PAGE_COUNT_MAX
    ) -> Sequence[Transaction]:
        """Transactions by id, after the given one."""
        if not 1 <= count_max <= requests.PAGE_COUNT_MAX:
            raise Invalid(f"limit is invalid; {count_max} is not from 1 to {requests.PAGE_COUNT_MAX}")
        return await self._store.page(after=after, unfinished=unfinished, count_max=count_max)

    async def stand(self, transaction: str) -> Sequence[SeriesState]:
        """How the series of a transaction stand, by name."""
        await self.find(transaction)
        return [series for _, series in sorted((await self._store.stand(transaction)).items())]

    async def gaps(
        self, transaction: str, *, after: str = "", count_max: int = SERIES_COUNT_MAX
    ) -> Sequence[requests.GapView]:
        """What is missing, series by series."""
        return await gaps_of(self._store, await self.find(transaction), after=after, count_max=count_max)

    async def parts(self, transaction: str, series: str) -> AsyncIterator[StoredPart]:
        """The series in order, digests verified, up to the first gap. Raises Invalid, StorageFailed."""
        await self.find(transaction)
        async for part in parts_in_order(self._store, self._context.blobs, transaction, check_series(series)):
            yield part

    async def wait(self, transaction: str, *, timeout_s: float | None = None) -> Transaction:
        """Wait for the end. Raises TryAgain when it has not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := await self.find(transaction)).state.is_end:
                    await self._pause()
        except TimeoutError as error:
            raise TryAgain(f"transaction is not complete; '{transaction}' after {timeout_s:g} s, wait on") from error
        return found

    async def request_missing(self, transaction: str) -> int:
        """Ask the producer for what is missing; returns how many ranges were asked for."""
        found = await self.find(transaction)
        if found.state is not TransactionState.AWAITING:
            raise Invalid(f"transaction is not awaiting; '{transaction}' is {found.state.value}")
        return await request_missing(OwnedTransaction(self._context, found))

    async def abandon(self, transaction: str, *, reason: str = "by hand") -> Transaction:
        """Give it up: whoever works on it is fenced out, then its queues and index rows go. Raises Invalid."""
        found = await self.find(transaction)
        if found.state is TransactionState.ABANDONED:
            return found
        check_move(found.state, TransactionState.ABANDONED)
        return await self._end(transaction, TransactionState.ABANDONED, reason)

    async def ledger(self, *, after: int = 0, count_max: int = requests.PAGE_COUNT_MAX) -> Sequence[LedgerLine]:
        """What ended, when and why."""
        return await self._store.ledger(after=after, count_max=count_max)

    # --- inside -----------------------------------------------------------------------------------------------

    async def _check(self, *addresses: str) -> None:
        """Raises Invalid when nothing can be sent to one of them as things are."""
        broker = self._context.broker
        for address in addresses:
            to = address_of(address, broker)
            if why := (await broker.inspector.reach([to]))[to].why:
                raise Invalid(f"address does not exist; there is no '{address}' on the broker, declare it ({why})")

    async def _end(self, transaction: str, target: TransactionState, reason: str) -> Transaction:
        await self._stop_working(transaction)
        ours = await self._store.seize(transaction, owner=self._owner, lease_us=self._context.limits.lease_us)
        if ours is None:
            raise Invalid(f"transaction does not exist; there is no '{transaction}'")
        try:
            check_move(ours.state, target)
            ended = await self._store.move(
                transaction,
                fence=ours.fence,
                source=ours.state,
                target=target,
                reason=reason[:REASON_CHARACTERS_MAX],
            )
        except HoldfastError:
            self._begin(ours)  # it is ours now, and goes on
            raise
        emit("collect.moved", transaction=transaction, state=target.value, reason=reason)
        self._begin(ended)
        return ended

    def _begin_ours(self, transaction: Transaction) -> None:
        is_idle = transaction.id not in self._working and not transaction.is_clean
        if transaction.owner == self._owner and is_idle:
            self._begin(transaction)

    def _begin(self, transaction: Transaction) -> None:
        work = OwnedTransaction(self._context, transaction, on_move=self._tell)
        task = asyncio.create_task(self._run(work), name=f"transaction {transaction.id}")
        self._working[transaction.id] = (work, task)

    async def _run(self, work: OwnedTransaction) -> None:
        try:
            await run(work)
        finally:
            if (known := self._working.get(work.id)) is not None and known[0] is work:
                del self._working[work.id]
            self._tell()

    async def _stop_working(self, transaction: str) -> None:
        known = self._working.pop(transaction, None)
        if known is not None:
            known[1].cancel()
            await asyncio.gather(known[1], return_exceptions=True)

    async def _take(self) -> int:
        room = self._context.limits.transactions_max - len(self._working)
        if room < 1:
            return 0
        taken = await self._store.take(owner=self._owner, lease_us=self._context.limits.lease_us, count_max=room)
        for transaction in taken:
            emit("collect.recovering", transaction=transaction.id)
            emit("collect.recovered", transaction=transaction.id, state=transaction.state.value)
            self._begin(transaction)
        return len(taken)

    async def _keep(self) -> None:
        """The heartbeat: renew our leases, let go of what is lost, take over what nobody owns."""
        every_s = self._context.limits.lease_us / 3_000_000
        while True:
            await asyncio.sleep(every_s)
            try:
                fences = {name: work.fence for name, (work, _) in self._working.items()}
                kept = (
                    set(await self._store.extend(fences, lease_us=self._context.limits.lease_us)) if fences else set()
                )
                for name in fences.keys() - kept:
                    known = self._working.get(name)
                    if known is not None and known[0].fence == fences[name] and not known[1].done():
                        emit("collect.lost", transaction=name, error="its lease has run out or was taken")
                        await self._stop_working(name)
                await self._take()
            except StorageFailed as error:
                emit("collect.troubled", error=error.message)

    async def _clean_up(self) -> None:
        """Transactions without progress for too long are failed, with the reason."""
        limits = self._context.limits
        reason = f"abandoned; no progress for {format_duration(limits.abandon_after_us)}"
        while True:
            try:
                for name in await self._store.idle(for_us=limits.abandon_after_us, count_max=requests.PAGE_COUNT_MAX):
                    await self._end(name, TransactionState.FAILED, reason)
            except (StorageFailed, LeaseLost, Invalid) as error:
                emit("collect.troubled", error=error.message)
            await asyncio.sleep(limits.abandon_check_us / 1_000_000)

    async def _remove_left(self) -> None:
        """Queues of transactions that are done with: whoever lost his lease in his sleep may have made them anew."""
        after = ""
        try:
            while page := await self._store.page(after=after, count_max=requests.PAGE_COUNT_MAX):
                for ended in page:
                    if ended.is_clean:
                        await remove_left(OwnedTransaction(self._context, ended))
                after = page[-1].id
        except HoldfastError as error:
            emit("collect.troubled", error=error.message)

    async def _let_go(self) -> None:
        owned = list(self._working.values())
        for _, task in owned:
            task.cancel()
        await asyncio.gather(*(task for _, task in owned), return_exceptions=True)
        for work, _ in owned:
            try:
                await self._store.give_back(work.id, fence=work.fence)
            except StorageFailed as error:
                emit("collect.troubled", error=error.message)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._news.wait()
        except TimeoutError:
            return


async def run(work: OwnedTransaction) -> None:
    """Run the states of a transaction to the end, through every failure that is for now. Returns early when it is not
    ours."""
    failures = 0
    while True:
        before = work.transaction.state
        try:
            if await _step(work):
                return
            failures = 0
        except LeaseLost as error:
            if not await _is_ours_still(work):
                emit("collect.lost", transaction=work.id, error=error.message)
                return
        except MessageRefused as error:
            await _fail(work, error)
        except (*FOR_NOW, QueueMissing, ConsumerLost) as error:
            failures += 1
            await work.wait(error, failures)
            if isinstance(error, QueueMissing) and before is TransactionState.AWAITING:
                await work.declare()
        except Exception as error:  # noqa: BLE001 - told with its traceback, and tried again
            # A bug must neither end the collector nor spin; the transaction stays where it is.
            failures += 1
            emit("collect.bug", transaction=work.id, error=repr(error), traceback=error)
            await asyncio.sleep(BACKOFF.delay_s_max)


async def _is_ours_still(work: OwnedTransaction) -> bool:
    """A move whose answer was lost may have happened: then the state is another, and the fence is ours."""
    found = await work.ask(work.context.store.find)
    if found is None or found.fence != work.fence or found.is_clean:
        return False
    work.transaction = found
    return True


async def _step(work: OwnedTransaction) -> bool:
    match work.transaction.state:
        case TransactionState.FORWARDING:
            await _forward(work)
            crash_point("collect.before_persist_awaiting")
            await _move(work, TransactionState.AWAITING)
            crash_point("collect.after_persist_awaiting")
        case TransactionState.AWAITING:
            await work.declare()
            await await_results(work)
            crash_point("collect.before_persist_sending")
            await _move(work, TransactionState.SENDING)
            crash_point("collect.after_persist_sending")
        case TransactionState.SENDING:
            await send_completion(work)
            crash_point("collect.before_complete")
            await _move(work, TransactionState.COMPLETED)
            crash_point("collect.after_complete")
        case _:
            await clear(work)
            return True
    return False


async def _forward(work: OwnedTransaction) -> None:
    """The request, with the transaction's id as message id: the producer knows a repetition by it."""
    await work.declare()
    body = await work.ask(work.context.store.request)
    crash_point("collect.before_forward")
    await work.ask_producer("request", body, message_id=work.id)
    crash_point("collect.after_forward")


async def _move(work: OwnedTransaction, target: TransactionState, reason: str = "") -> None:
    source = work.transaction.state
    check_move(source, target)
    work.transaction = await work.ask(
        work.context.store.move, fence=work.fence, source=source, target=target, reason=reason
    )
    emit("collect.moved", transaction=work.id, state=target.value, reason=reason or source.value)
    work.on_move()


async def _fail(work: OwnedTransaction, error: HoldfastError) -> None:
    with suppress(LeaseLost):  # the next step finds out whose it is
        await _move(work, TransactionState.FAILED, error.message[:REASON_CHARACTERS_MAX])


@handles(requests.StartResultRequest)
async def _start(service: CollectService, request: requests.StartResultRequest, caller: Caller) -> requests.ResultView:
    if request.request and request.utf8:
        raise Invalid("request is invalid; give 'bytes' or 'utf8', not both")
    begun = await service.start(
        request.request or request.utf8.encode(),
        producer=request.producer,
        notify=request.notify,
        transaction_id=request.transaction_id or None,
        series=request.series,
    )
    caller.check_places(requests.places(begun.producer, begun.notify))  # an id that is known may be somebody else's
    return requests.result_view(begun)


@handles(requests.ListResults)
async def _page(service: CollectService, request: requests.ListResults, caller: Caller) -> requests.ResultsReply:
    found: list[Transaction] = []
    after, count_max = request.after, requests.PAGE_COUNT_MAX if caller.queues else request.limit
    while True:
        page = await service.page(after=after, unfinished=request.unfinished, count_max=count_max)
        found += [one for one in page if all(map(caller.may_send, requests.places(one.producer, one.notify)))]
        if len(found) >= request.limit or len(page) < count_max:
            return requests.ResultsReply(items=[requests.result_view(each) for each in found[: request.limit]])
        after = page[-1].id


@handles(requests.ReadResult)
async def _show(service: CollectService, request: requests.ReadResult, caller: Caller) -> requests.ResultView:
    found = await service.find(request.id)
    return requests.result_view(found, await service.stand(request.id))


@handles(requests.ReadGaps)
async def _gaps(service: CollectService, request: requests.ReadGaps, caller: Caller) -> requests.GapsReply:
    return requests.GapsReply(items=await service.gaps(request.id, after=request.after, count_max=request.limit))


@handles(requests.ReadSeries)
async def _read(service: CollectService, request: requests.ReadSeries, caller: Caller) -> Stream:
    return (part.body async for part in service.parts(request.id, request.series))


@handles(requests.RequestMissing)
async def _request_missing(
    service: CollectService, request: requests.RequestMissing, caller: Caller
) -> requests.MissingReply:
    return requests.MissingReply(await service.request_missing(request.id))


@handles(requests.AbandonResult)
async def _abandon(service: CollectService, request: requests.AbandonResult, caller: Caller) -> requests.ResultView:
    return requests.result_view(await service.abandon(request.id, reason=request.reason))
