"""Contradictions are parked with their reason, and the transaction goes on; the table of states is the only one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

import holdfast
from holdfast.core.collect import Header, SeriesState, check_move, check_series, header_contradiction, known_set, ranges
from holdfast.core.item import NewItem
from holdfast.core.states import TRANSACTION_ENDS, TRANSACTION_MOVES, TransactionState
from holdfast.errors import Invalid
from tests.collect.producing import (
    NOTIFY,
    PRODUCER,
    answer,
    body_of,
    cleaned,
    header,
    make_queues,
    notices,
    parked,
    payload,
    produce,
    reference,
    take_request,
)
from tests.support.eventually import eventually

ID = "t"


class CollectorUnderTest(NamedTuple):
    collector: holdfast.Collector
    queues: holdfast.Queues
    blobs: Path

    async def begin(self, series: list[str] | None) -> None:
        await self.collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id=ID, series=series)
        await take_request(self.queues)

    async def payloads(self, *items: NewItem) -> None:
        await produce(self.queues, ID, "payload", items)

    async def headers(self, *items: NewItem) -> None:
        await produce(self.queues, ID, "header", items)

    async def reasons(self, count: int) -> list[str]:
        async def arrived() -> bool:
            return len(await parked(self.queues)) >= count

        await eventually(arrived)
        return await parked(self.queues)

    async def stored(self, series: str, count: int) -> None:
        """Wait until so many ordinals of a series are in the index."""

        async def reached() -> bool:
            states = {each.series: each for each in await self.collector.progress(ID)}
            return series in states and states[series].stored_count >= count

        await eventually(reached)

    async def completed(self) -> dict[str, list[bytes]]:
        ended = await cleaned(self.collector, ID)
        assert ended.state is TransactionState.COMPLETED, ended.reason
        return {
            each.series: [part.body async for part in self.collector.parts(ID, each.series)]
            for each in await self.collector.progress(ID)
        }


@pytest.fixture
async def under_test(tmp_path: Path) -> AsyncIterator[CollectorUnderTest]:
    async with holdfast.open("memory://") as queues:
        await make_queues(queues)
        async with holdfast.Collector("memory://", blobs=str(tmp_path / "blobs"), queues=queues) as collector:
            yield CollectorUnderTest(collector, queues, tmp_path / "blobs")


def whole(series: str, count: int) -> list[bytes]:
    return [body_of(series, ordinal) for ordinal in range(count)]


async def test_other_bytes_for_a_stored_ordinal_are_parked_and_their_blob_is_gone(
    under_test: CollectorUnderTest,
) -> None:
    await under_test.begin(["a"])
    await under_test.payloads(payload(ID, "a", 0))
    await under_test.stored("a", 1)
    await under_test.payloads(payload(ID, "a", 0, b"other"), payload(ID, "a", 0), payload(ID, "a", 1))
    assert "came with other bytes" in (await under_test.reasons(1))[0]
    await under_test.headers(header(ID, "a", 2))
    assert await under_test.completed() == {"a": whole("a", 2)}
    files = [file.name for file in under_test.blobs.rglob("*") if file.is_file() and ".partial" not in file.parts]
    assert len(files) == 3, "two parts and the manifest"


async def test_an_ordinal_beyond_the_count_is_parked_before_or_after_its_header(under_test: CollectorUnderTest) -> None:
    await under_test.begin(["a"])
    await under_test.payloads(payload(ID, "a", 7), payload(ID, "a", 0))
    await under_test.stored("a", 2)
    await under_test.headers(header(ID, "a", 2))
    assert "beyond the count" in (await under_test.reasons(1))[0]
    await under_test.payloads(payload(ID, "a", 2))
    assert len(await under_test.reasons(2)) == 2
    assert (await under_test.collector.find(ID)).state is TransactionState.AWAITING, "two were stored, but not the two"
    await under_test.payloads(payload(ID, "a", 1))
    assert await under_test.completed() == {"a": whole("a", 2)}
    letters = await under_test.queues.storage_items_list("collector.dlq")
    assert sorted(letter.payload for letter in letters) == sorted([body_of("a", 7), body_of("a", 2)])


async def test_a_second_count_for_a_series_is_parked(under_test: CollectorUnderTest) -> None:
    await under_test.begin(["a"])
    await under_test.headers(header(ID, "a", 2), header(ID, "a", 3), header(ID, "a", 2))
    assert "another count" in (await under_test.reasons(1))[0]
    await answer(under_test.queues, ID, {"a": 2})
    assert await under_test.completed() == {"a": whole("a", 2)}
    assert len(await parked(under_test.queues)) == 1


async def test_a_series_outside_the_set_is_parked_at_completion(under_test: CollectorUnderTest) -> None:
    await under_test.begin(["a"])
    await under_test.payloads(payload(ID, "x", 0), payload(ID, "x", 1))
    await under_test.headers(header(ID, "x", 2))
    await under_test.stored("x", 2)
    await answer(under_test.queues, ID, {"a": 1})
    assert await under_test.completed() == {"a": whole("a", 1)}
    reasons = await under_test.reasons(3)
    assert len(reasons) == 3
    assert all("outside the known set" in reason for reason in reasons)


async def test_the_set_is_known_from_the_headers_series_count_and_never_before(under_test: CollectorUnderTest) -> None:
    await under_test.begin(None)
    await under_test.payloads(*(payload(ID, "a", number) for number in range(3)))
    await under_test.headers(header(ID, "a", 3))
    await under_test.stored("a", 3)
    assert (await under_test.collector.find(ID)).state is TransactionState.AWAITING, "nobody said that a is all"
    await under_test.headers(header(ID, "b", 0, series_count=2), header(ID, "c", 1, series_count=2))
    assert "outside the known set" in (await under_test.reasons(1))[0]
    assert await under_test.completed() == {"a": whole("a", 3), "b": []}


async def test_an_empty_set_is_complete_at_once(under_test: CollectorUnderTest) -> None:
    await under_test.begin([])
    assert await under_test.completed() == {}
    assert b'"parts_count":0' in (await notices(under_test.queues))[0]


async def test_strangers_are_parked_byte_for_byte(under_test: CollectorUnderTest) -> None:
    await under_test.begin(["a"])
    strange = [
        payload("other", "a", 0),
        NewItem(payload=b"\x00\xff", reference="not json"),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="a")),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="a", ordinal=-1)),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="../a", ordinal=0)),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="a", ordinal=True)),
    ]
    await under_test.payloads(*strange)
    await under_test.headers(
        header("other", "a", 1), NewItem(reference=reference(transaction_id=ID, series="a", count="x"))
    )
    reasons = await under_test.reasons(8)
    assert sum("another transaction" in reason for reason in reasons) == 2
    assert b"\x00\xff" in [item.payload for item in await under_test.queues.storage_items_list("collector.dlq")]
    await answer(under_test.queues, ID, {"a": 1})
    assert await under_test.completed() == {"a": whole("a", 1)}


async def test_a_late_leftover_is_a_duplicate_or_parked(under_test: CollectorUnderTest) -> None:
    await under_test.begin(["a"])
    # Enough duplicates that some are still there when the last ordinal is stored.
    await under_test.payloads(*(payload(ID, "a", number % 3) for number in range(90)), payload(ID, "a", 3))
    await under_test.headers(header(ID, "a", 4), header(ID, "a", 4))
    assert await under_test.completed() == {"a": whole("a", 4)}
    assert await parked(under_test.queues) == []
    names = {queue.queue_name for queue in await under_test.queues.queues_list()}
    assert names == {"collector.dlq", PRODUCER, NOTIFY}


async def test_a_request_that_cannot_be_forwarded_is_refused_at_the_start(under_test: CollectorUnderTest) -> None:
    with pytest.raises(Invalid, match="queue does not exist"):
        await under_test.collector.start(b"x", producer="nobody")
    with pytest.raises(Invalid, match="request is too large"):
        await under_test.collector.start(bytes(5_000_000), producer=PRODUCER)


# The pure rules.


def test_the_table_has_every_state_and_no_way_out_of_an_end_but_clearing_up() -> None:
    for state in TransactionState:
        assert any(source is state for source, _ in TRANSACTION_MOVES)
        assert any(target is state for _, target in TRANSACTION_MOVES)
    for source, target in TRANSACTION_MOVES:
        assert source not in TRANSACTION_ENDS or target is TransactionState.OUTSIDE


@pytest.mark.parametrize("source", list(TransactionState))
@pytest.mark.parametrize("target", list(TransactionState))
def test_a_move_outside_of_the_table_is_refused(source: TransactionState, target: TransactionState) -> None:
    if (source, target) in TRANSACTION_MOVES:
        check_move(source, target)
    else:
        with pytest.raises(Invalid):
            check_move(source, target)


@pytest.mark.parametrize("name", ["", ".x", "a/b", "gaps", "abandon", "manifest-1", "a b", "x" * 101, "é"])
def test_a_series_that_cannot_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(Invalid):
        check_series(name)


def test_gaps_are_ranges() -> None:
    assert ranges([], count=3) == [(0, 2)]
    assert ranges([(0, 2)], count=3) == []
    assert ranges([(1, 1), (4, 5)], count=8) == [(0, 0), (2, 3), (6, 7)]
    assert ranges([(1, 9)], count=5) == [(0, 0)]
    assert ranges([], count=0) == []


def test_the_set_of_series_is_never_inferred() -> None:
    states = {"a": SeriesState(series="a", count=1, stored_count=1)}
    assert known_set(None, states) is None
    assert known_set(["b"], states) == frozenset({"b"})
    assert known_set(None, {"a": SeriesState(series="a", count=1, series_count=1)}) == frozenset({"a"})


def test_a_header_that_disagrees_about_the_number_of_series_contradicts() -> None:
    states = {"a": SeriesState(series="a", count=1, series_count=2)}
    assert "another size" in header_contradiction(Header(series="b", count=1, series_count=3), None, states)
    assert "another size" in header_contradiction(Header(series="b", count=1, series_count=3), ["a", "b"], {})
    assert header_contradiction(Header(series="b", count=1, series_count=2), None, states) == ""
