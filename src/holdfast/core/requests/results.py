"""`/v1/results`: what can be asked of collected results, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct, field

from holdfast.core.collect import SERIES_COUNT_MAX, Range, SeriesState, Transaction
from holdfast.core.moments import moment
from holdfast.core.plan import Place
from holdfast.core.requests.declare import BYTES, Access, Request, Role, Stream, declare, view

PAGE_COUNT_MAX = 1_000

TransactionId = Annotated[str, Meta(description="The transaction's id.")]


class SeriesView(Struct, frozen=True, kw_only=True):
    """A series: `count` is null until its header has come."""

    series: str
    count: int | None
    stored_count: int
    stored_bytes: int


class ResultView(Struct, frozen=True, kw_only=True):
    """A transaction."""

    id: str
    state: str
    reason: str
    producer: str
    notify: str
    created_at: datetime
    updated_at: datetime
    progress_at: datetime
    series: Sequence[SeriesView] = ()


class ResultsReply(Struct, frozen=True, kw_only=True):
    """A page of transactions, without their series."""

    items: Sequence[ResultView]


class GapView(Struct, frozen=True, kw_only=True):
    """What a series lacks, as ranges with both ends included; `is_open` while its count is not known."""

    series: str
    count: int | None
    stored_count: int
    missing: Sequence[Range]
    is_open: bool


class MissingReply(Struct, frozen=True):
    """How many ranges of ordinals the producer was asked for."""

    ranges: int


class GapsReply(Struct, frozen=True, kw_only=True):
    """The gap map of a transaction."""

    items: Sequence[GapView]


@declare("results.list", "GET /v1/results", role=Role.VIEWER, about=Access.EACH)
class ListResults(Request[ResultsReply], frozen=True, kw_only=True):
    """Transactions by id, a page at a time."""

    after: Annotated[str, Meta(description="Begin after this id.")] = ""
    unfinished: Annotated[bool, Meta(description="Only those that are still worked on.")] = False
    limit: Annotated[int, Meta(ge=1, le=PAGE_COUNT_MAX, description="How many.")] = PAGE_COUNT_MAX


@declare(
    "results.start",
    "POST /v1/results",
    role=Role.OPERATOR,
    about="producer",
    names=("notify", "places"),
    limit="result",
)
class StartResultRequest(Request[ResultView], frozen=True, kw_only=True):
    """Ask for a result, or find the one that has this id.

    `bytes` is base64; `utf8` stands instead of it.
    """

    producer: Annotated[str, Meta(description="Where the request goes: a queue, or EXCHANGE/KEY.")]
    notify: Annotated[str, Meta(description="Where the completion notice goes.")] = ""
    series: Annotated[
        Sequence[str] | None,
        Meta(description="A series of the result, several times for several; else headers say how many there are."),
    ] = None
    transaction_id: Annotated[
        str, Meta(description="Its id; the same again is the same result. Made when left out.")
    ] = ""
    request: Annotated[bytes, Meta(description="The request's body.")] = field(name="bytes", default=b"")
    utf8: Annotated[str, Meta(description="The request's body, as text.")] = ""

    @property
    def places(self) -> list[Place]:
        """Where it makes something go."""
        return places(self.producer, self.notify)


# The more specific path stands first.
@declare("results.gaps", "GET /v1/results/{id}/gaps", role=Role.VIEWER, about=Access.FOUND)
class ReadGaps(Request[GapsReply], frozen=True, kw_only=True):
    """Which ordinals are missing, as ranges with both ends, series by series."""

    id: TransactionId
    after: Annotated[str, Meta(description="Begin after this series.")] = ""
    limit: Annotated[int, Meta(ge=1, le=SERIES_COUNT_MAX, description="At most so many series.")] = SERIES_COUNT_MAX


@declare("results.missing", "POST /v1/results/{id}/missing", role=Role.OPERATOR, about=Access.FOUND)
class RequestMissing(Request[MissingReply], frozen=True, kw_only=True):
    """Ask the producer once more for what is missing."""

    id: TransactionId


@declare(
    "results.abandon",
    "POST /v1/results/{id}/abandon",
    role=Role.OPERATOR,
    about=Access.FOUND,
    schema="AbandonResultRequest",
)
class AbandonResult(Request[ResultView], frozen=True, kw_only=True):
    """Give a result up."""

    id: TransactionId
    reason: Annotated[str, Meta(description="Why, for the ledger.")] = "by hand"


@declare("results.read", "GET /v1/results/{id}/{series}", role=Role.OPERATOR, about=Access.FOUND, media=BYTES)
class ReadSeries(Request[Stream], frozen=True, kw_only=True):
    """The bytes of a series in order, verified, up to the first gap."""

    id: TransactionId
    series: Annotated[str, Meta(description="The series.")]


@declare("results.show", "GET /v1/results/{id}", role=Role.VIEWER, about=Access.FOUND)
class ReadResult(Request[ResultView], frozen=True, kw_only=True):
    """One transaction with its series."""

    id: TransactionId


def places(*addresses: str) -> list[Place]:
    """Addresses as places: what may be EXCHANGE/KEY is taken for it."""
    parts = [(text, *text.partition("/")) for text in addresses if text]
    return [
        Place(exchange=exchange, routing_key=key) if slash else Place(routing_key=text)
        for text, exchange, slash, key in parts
    ]


def result_view(transaction: Transaction, series: Sequence[SeriesState] = ()) -> ResultView:
    """A transaction for people and programs."""
    return view(
        ResultView,
        transaction,
        state=transaction.state.value,
        created_at=moment(transaction.created_at_us),
        updated_at=moment(transaction.updated_at_us),
        progress_at=moment(transaction.progress_at_us),
        series=[view(SeriesView, each) for each in series],
    )
