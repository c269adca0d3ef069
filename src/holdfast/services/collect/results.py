"""The collector as every face uses it: requests in, views out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from holdfast.core.collect_views import (
    GapsReply,
    GapView,
    ResultsReply,
    ResultView,
    StartResultRequest,
    result_view,
)
from holdfast.core.states import TransactionState
from holdfast.errors import Invalid
from holdfast.services.collect.service import PAGE_COUNT_MAX, CollectService

ENDS = frozenset(state.value for state in TransactionState if state.is_end)


class Results(Protocol):
    """Results, here or of a server. Every method raises HoldfastError."""

    async def start(self, request: StartResultRequest) -> ResultView:
        """Ask for a result, or find the one that has this id."""

    async def page(self, *, after: str = "", limit: int = PAGE_COUNT_MAX) -> ResultsReply:
        """Transactions by id."""

    async def show(self, transaction: str) -> ResultView:
        """One, with its series."""

    async def gaps(self, transaction: str) -> GapsReply:
        """What is missing."""

    def stream(self, transaction: str, series: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a series in order, up to the first gap."""

    async def abandon(self, transaction: str, *, reason: str) -> ResultView:
        """Give it up."""


class LocalResults:
    """The collector of this process."""

    def __init__(self, service: CollectService) -> None:
        self._service = service

    async def start(self, request: StartResultRequest) -> ResultView:
        if request.request and request.utf8:
            raise Invalid("request is invalid; give 'bytes' or 'utf8', not both")
        body = request.request or request.utf8.encode()
        begun = await self._service.start(
            body,
            producer=request.producer,
            notify=request.notify,
            transaction_id=request.transaction_id or None,
            series=request.series,
        )
        return result_view(begun)

    async def page(self, *, after: str = "", limit: int = PAGE_COUNT_MAX) -> ResultsReply:
        found = await self._service.page(after=after, count_max=limit)
        return ResultsReply(items=[result_view(each) for each in found])

    async def show(self, transaction: str) -> ResultView:
        found = await self._service.find(transaction)
        return result_view(found, await self._service.stand(transaction))

    async def gaps(self, transaction: str) -> GapsReply:
        return GapsReply(
            items=[
                GapView(
                    series=gap.series,
                    count=gap.count,
                    stored_count=gap.stored_count,
                    missing=gap.missing,
                    is_open=gap.is_open,
                )
                for gap in await self._service.gaps(transaction)
            ]
        )

    async def stream(self, transaction: str, series: str) -> AsyncGenerator[bytes, None]:
        async for part in self._service.parts(transaction, series):
            yield part.body

    async def abandon(self, transaction: str, *, reason: str) -> ResultView:
        return result_view(await self._service.abandon(transaction, reason=reason))
