"""Results that are collected: how far each series is, what of it is missing, and what may be done about it.

Collecting may not be configured, or its broker away: the list says so, and what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from markupsafe import Markup
from starlette.responses import Response

from holdfast.core.collect import check_name
from holdfast.core.requests.declare import Request
from holdfast.core.requests.results import (
    AbandonResult,
    GapView,
    ListResults,
    ReadGaps,
    ReadResult,
    ReadSeries,
    RequestMissing,
    ResultView,
)
from holdfast.core.states import TransactionState
from holdfast.errors import BrokerError, CannotStart, Forbidden, HoldfastError, Invalid, NotFound, TryAgain
from holdfast.faces.web.console import Visit, page

PAGE_COUNT = 20
#: So many series of each are shown in the list, and on the page of one.
BARS_COUNT_MAX, SERIES_COUNT = 5, 50
#: The list does not wait for a broker that does not answer.
ANSWER_S = 5.0
#: A map has so many cells, and so many ranges are told in words.
CELLS_COUNT, WORDS_COUNT_MAX = 240, 8
MAP_WIDTH, MAP_HEIGHT = 480, 14
REASON_CHARACTERS_MAX = 500

R = TypeVar("R")


class SeriesLine(NamedTuple):
    """A series on its page: how far it is, and the map of what it lacks."""

    gap: GapView
    stored_bytes: int
    picture: Markup
    words: str


async def _ask(visit: Visit, request: Request[R]) -> R:
    """What only reads; nothing that changes is broken off. Raises HoldfastError, also when no answer comes in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await visit.ask(request)
    except TimeoutError as error:
        raise TryAgain(f"collector does not answer; nothing came in {ANSWER_S:g} s, try again") from error


@page("GET /results", bar="Results", needs=ListResults)
async def results(visit: Visit) -> Response:
    """Transactions by id, with a bar for each series."""
    after, unfinished = visit.query.get("after", ""), "unfinished" in visit.query
    trouble: HoldfastError | None = None
    found: Sequence[ResultView] = ()
    try:
        asked = ListResults(after=after, unfinished=unfinished, limit=PAGE_COUNT + 1)
        listed = (await _ask(visit, asked)).items
        found = [await _ask(visit, ReadResult(id=one.id)) for one in listed[:PAGE_COUNT]]
    except Forbidden:
        raise
    except HoldfastError as error:
        trouble, listed = error, ()
    return visit.page(
        "results.html",
        title="Results",
        found=found,
        next=found[-1].id if len(listed) > PAGE_COUNT else "",
        after=after,
        unfinished=unfinished,
        bars_max=BARS_COUNT_MAX,
        trouble=trouble.message if trouble else "",
        is_away=isinstance(trouble, BrokerError | TryAgain),
        # Without one nothing is collected here: that is no failure, and the page says how to have it.
        has_collector=not isinstance(trouble, CannotStart) and visit.console.collector is not None,
    )


@page("GET /results/{id}", needs=ReadResult)
async def result_page(visit: Visit) -> Response:
    """One transaction, with the maps of its series."""
    return await _result_page(visit)


async def _result_page(visit: Visit) -> Response:
    name, after = visit.name("id"), visit.query.get("after", "")
    try:
        result = await _ask(visit, ReadResult(id=check_name(name, what="transaction id")))
    except Invalid as error:
        raise NotFound(error.message) from error
    gaps = (await _ask(visit, ReadGaps(id=name, after=after, limit=SERIES_COUNT + 1))).items
    sizes = {one.series: one.stored_bytes for one in result.series}
    is_awaiting = result.state == TransactionState.AWAITING.value
    return visit.page(
        "result.html",
        title=f"Result {name}",
        result=result,
        lines=[_line(one, sizes.get(one.series, 0)) for one in gaps[:SERIES_COUNT]],
        after=after,
        next=gaps[SERIES_COUNT - 1].series if len(gaps) > SERIES_COUNT else "",
        total_bytes=sum(sizes.values()),
        may_read=visit.may(ReadSeries),
        may_ask=is_awaiting and visit.may(RequestMissing),
        may_abandon=not TransactionState(result.state).is_end and visit.may(AbandonResult),
    )


@page("POST /results/{id}")
async def change_result(visit: Visit) -> Response:
    """Ask the producer again, or give the result up."""
    name = visit.name("id")
    try:
        match visit.form.get("do", ""):
            case "ask":
                count = (await visit.ask(RequestMissing(id=name))).ranges
                ranges = "1 range" if count == 1 else f"{count} ranges"
                notice = f"The producer was asked again: {ranges} are missing, and whatever is not known yet."
            case "abandon":
                reason = visit.form.get("reason", "").strip()
                if not reason:
                    raise Invalid("reason is missing; say why it is given up")
                await visit.ask(AbandonResult(id=name, reason=reason[:REASON_CHARACTERS_MAX]))
                notice = "The result is given up; its queues are deleted."
            case _:
                raise Invalid("form is invalid; it does not say what is to be done")
    except HoldfastError as error:
        visit.refuse(error)
        return await _result_page(visit)
    return visit.redirect(f"/results/{name}", notice)


# --- the map of what a series lacks ---------------------------------------------------------------------------


def _line(gap: GapView, stored_bytes: int) -> SeriesLine:
    return SeriesLine(gap, stored_bytes, gap_map(gap), _words(gap))


def _words(gap: GapView) -> str:
    """What is missing, as people write it."""
    parts = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in gap.missing]
    text = ", ".join(parts[:WORDS_COUNT_MAX])
    more = len(parts) - WORDS_COUNT_MAX
    if more > 0:
        text += f" and {more:,} more {'range' if more == 1 else 'ranges'}"
    if gap.is_open:
        return f"{text}, and whatever follows" if text else "how many there are is not known yet"
    return text or "nothing"


def gap_map(gap: GapView) -> Markup:
    """A strip from the first ordinal to the last: what is stored, what is missing, what is stored in part, and what
    nobody knows yet."""
    told = max((last + 1 for _, last in gap.missing), default=0)
    there = gap.stored_count + sum(last - first + 1 for first, last in gap.missing)
    if gap.count is None:
        seen = max(told, there)
        end = seen + max(1, seen // 8)
    else:
        end = max(gap.count, 1)
        # Where there are more ranges than were looked at, what lies behind them is told by nobody.
        seen = end if there >= gap.count else told
    cells = _cells(gap, end)
    words = [_word(lacks, index * end / CELLS_COUNT >= seen) for index, lacks in enumerate(cells)]
    shapes, start = [], 0
    for index in range(1, CELLS_COUNT + 1):
        if index < CELLS_COUNT and words[index] == words[start]:
            continue
        width = MAP_WIDTH / CELLS_COUNT
        shapes.append(
            Markup('<rect class="{}" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>').format(
                words[start], start * width, (index - start) * width, MAP_HEIGHT
            )
        )
        start = index
    label = f"{gap.series}: missing {_words(gap)}"
    return Markup(
        '<svg class="gapmap" role="img" aria-label="{}" viewBox="0 0 {} {}" preserveAspectRatio="none">'
        "<title>{}</title>{}</svg>"
    ).format(label, MAP_WIDTH, MAP_HEIGHT, label, Markup("").join(shapes))


def _cells(gap: GapView, end: int) -> list[float]:
    """How much of each cell is missing, from 0 to 1."""
    cells = [0.0] * CELLS_COUNT
    size = end / CELLS_COUNT
    for first, last in gap.missing:
        for index in range(int(first / size), min(CELLS_COUNT - 1, int((last + 1) / size)) + 1):
            lacks = min(last + 1, (index + 1) * size) - max(first, index * size)
            cells[index] += max(0.0, lacks / size)
    return cells


def _word(lacks: float, is_unknown: bool) -> str:
    if is_unknown:
        return "unknown"
    return "stored" if lacks <= 0 else "missing" if lacks > 1 - 1e-9 else "part"
