"""One transaction, from the state in which it was found to its end.

The handlers are made fresh each time and may be run from their beginning: whatever they repeat after a crash is the
same request, the same rows, the same notice.
"""

from __future__ import annotations

import asyncio

from holdfast.core.collect import DEAD_QUEUE, check_move
from holdfast.core.states import TransactionState
from holdfast.errors import ConsumerLost, HoldfastError, LeaseLost, MessageRefused, QueueMissing
from holdfast.proof import crash_point
from holdfast.services.collect.awaiting import await_results
from holdfast.services.collect.completion import clear, send_completion
from holdfast.services.collect.transaction import FOR_NOW, OwnedTransaction
from holdfast.telemetry.events import emit

REASON_CHARACTERS_MAX = 500


class TransactionRunner:
    """Runs the states of a transaction that is ours."""

    def __init__(self, work: OwnedTransaction) -> None:
        self.work = work

    async def run(self) -> None:
        """To the end, through every failure that is for now. Returns early when the transaction is not ours."""
        failures = 0
        while True:
            before = self.work.transaction.state
            try:
                if await self._step():
                    return
                failures = 0
            except LeaseLost as error:
                if not await self._is_ours_still():
                    emit("collect.lost", transaction=self.work.id, error=error.message)
                    return
            except MessageRefused as error:
                await self._fail(error)
            except (*FOR_NOW, QueueMissing, ConsumerLost) as error:
                failures += 1
                await self.work.patience.wait(error, failures)
                if isinstance(error, QueueMissing) and before is TransactionState.AWAITING:
                    await self._declare()
            except Exception as error:  # noqa: BLE001 - told with its traceback, and tried again
                # A bug must neither end the collector nor spin; the transaction stays where it is.
                failures += 1
                emit("collect.bug", transaction=self.work.id, error=repr(error), traceback=error)
                await asyncio.sleep(self.work.tools.limits.backoff_s_max)

    async def _is_ours_still(self) -> bool:
        """A move whose answer was lost may have happened: then the state is another, and the fence is ours."""
        work = self.work
        found = await work.patience.until_done(lambda: work.tools.store.find(work.id))
        if found is None or found.fence != work.fence or found.is_clean:
            return False
        work.transaction = found
        return True

    async def _step(self) -> bool:
        match self.work.transaction.state:
            case TransactionState.FORWARDING:
                await self._forward()
                crash_point("collect.before_persist_awaiting")
                await self._move(TransactionState.AWAITING)
                crash_point("collect.after_persist_awaiting")
            case TransactionState.AWAITING:
                await self._declare()
                await await_results(self.work)
                crash_point("collect.before_persist_sending")
                await self._move(TransactionState.SENDING)
                crash_point("collect.after_persist_sending")
            case TransactionState.SENDING:
                await send_completion(self.work)
                crash_point("collect.before_complete")
                await self._move(TransactionState.COMPLETED)
                crash_point("collect.after_complete")
            case _:
                await clear(self.work)
                return True
        return False

    async def _declare(self) -> None:
        queues = (self.work.header_queue, self.work.payload_queue)
        await self.work.patience.until_done(lambda: self.work.tools.transport.declare(queues))

    async def _forward(self) -> None:
        """The request, with the transaction's id as message id: the producer knows a repetition by it."""
        work = self.work
        await self._declare()
        body = await work.patience.until_done(lambda: work.tools.store.request(work.id))
        attributes = {
            "transaction-id": work.id,
            "kind": "request",
            "header-queue": work.header_queue,
            "payload-queue": work.payload_queue,
            "dead-queue": DEAD_QUEUE,
        }
        crash_point("collect.before_forward")
        await work.patience.until_done(
            lambda: work.tools.transport.send(
                work.transaction.producer, body, message_id=work.id, attributes=attributes
            )
        )
        crash_point("collect.after_forward")

    async def _move(self, target: TransactionState, reason: str = "") -> None:
        work = self.work
        source = work.transaction.state
        check_move(source, target)
        work.transaction = await work.patience.until_done(
            lambda: work.tools.store.move(work.id, fence=work.fence, source=source, target=target, reason=reason)
        )
        emit("collect.moved", transaction=work.id, state=target.value, reason=reason or source.value)
        work.on_move()

    async def _fail(self, error: HoldfastError) -> None:
        try:
            await self._move(TransactionState.FAILED, error.message[:REASON_CHARACTERS_MAX])
        except LeaseLost:
            return  # the next step finds out whose it is
