"""Header messages: each is kept in the index before it is acked, and contradictions are parked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from holdfast.core.collect import Header, Part, SeriesState, header_contradiction, read_header
from holdfast.ports.broker import Incoming, Intake
from holdfast.proof import crash_point
from holdfast.services.collect.payloads import ack, park
from holdfast.services.collect.reading import read_part
from holdfast.services.collect.work import OwnedTransaction

BATCH_COUNT_MAX = 16
EXCESS_COUNT_MAX = 100


class Headers:
    """Takes the header messages of a transaction until it is stopped."""

    def __init__(self, work: OwnedTransaction, intake: Intake, *, on_change: Callable[[], None]) -> None:
        self._work = work
        self._intake = intake
        self._on_change = on_change

    async def run(self) -> None:
        """Work until the intake is stopped."""
        while batch := await self._intake.take(BATCH_COUNT_MAX):
            for incoming in batch:
                await self._one(incoming)

    async def _one(self, incoming: Incoming) -> None:
        work = self._work
        header = read_header(incoming.message, work.id)
        if isinstance(header, str):
            await park(work, self._intake, incoming, header)
            return
        stand = await work.patience.until_done(lambda: work.tools.store.stand(work.id))
        if wrong := header_contradiction(header, work.transaction.series, stand):
            await park(work, self._intake, incoming, wrong)
            return
        crash_point("collect.before_header")
        work.learn(await work.patience.until_done(lambda: self._put(header)))
        crash_point("collect.after_header")
        await park_excess(work, header.series, header.count)
        await ack(work, self._intake, incoming)
        self._on_change()

    async def _put(self, header: Header) -> Mapping[str, SeriesState]:
        return await self._work.tools.store.put_header(self._work.id, header, fence=self._work.fence)


async def park_excess(work: OwnedTransaction, series: str, first: int, *, reason: str = "") -> None:
    """Parts from an ordinal on that cannot belong to the result: into the dead queue first, out of the index then."""
    store = work.tools.store
    while True:
        parts = await work.patience.until_done(
            lambda: store.parts(work.id, series, first=first, count_max=EXCESS_COUNT_MAX)
        )
        if not parts:
            return
        for part in parts:
            await park_part(
                work, part, reason or f"ordinal is beyond the count; {part.ordinal} of '{series}', which has {first}"
            )
        await work.patience.until_done(partial(store.remove, work.id, parts, fence=work.fence))


async def park_part(work: OwnedTransaction, part: Part, reason: str) -> None:
    """Send a stored part to the dead queue as the message that it was."""
    body = await work.patience.until_done(lambda: read_part(work.tools.blobs, part))
    attributes = {
        "transaction-id": work.id,
        "series": part.series,
        "ordinal": part.ordinal,
        "source-queue": work.payload_queue,
    }
    await work.patience.until_done(lambda: work.tools.transport.park(body, attributes=attributes, reason=reason))
    work.parked(reason)
