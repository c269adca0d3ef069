"""What the faces show of collected results, and what they are asked: the JSON shapes, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct, field

from holdfast.core.collect import Range, SeriesState, Transaction
from holdfast.core.moments import moment


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


class GapsReply(Struct, frozen=True, kw_only=True):
    """The gap map of a transaction."""

    items: Sequence[GapView]


class StartResultRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a result is asked for with. `bytes` is base64; `utf8` stands instead of it."""

    producer: str
    notify: str = ""
    transaction_id: str = ""
    series: Sequence[str] | None = None
    request: bytes = field(name="bytes", default=b"")
    utf8: str = ""


class AbandonResultRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a result is given up."""

    reason: str = "by hand"


def result_view(transaction: Transaction, series: Sequence[SeriesState] = ()) -> ResultView:
    """A transaction for people and programs."""
    return ResultView(
        id=transaction.id,
        state=transaction.state.value,
        reason=transaction.reason,
        producer=transaction.producer,
        notify=transaction.notify,
        created_at=moment(transaction.created_at_us),
        updated_at=moment(transaction.updated_at_us),
        progress_at=moment(transaction.progress_at_us),
        series=[
            SeriesView(
                series=each.series,
                count=each.count,
                stored_count=each.stored_count,
                stored_bytes=each.stored_bytes,
            )
            for each in series
        ],
    )
