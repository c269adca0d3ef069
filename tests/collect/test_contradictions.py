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


class Stand(NamedTuple):
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
            stand = {each.series: each for each in await self.collector.progress(ID)}
            return series in stand and stand[series].stored_count >= count

        await eventually(reached)

    async def completed(self) -> dict[str, list[bytes]]:
        ended = await self.collector.service.wait_clean(ID, timeout_s=60)
        assert ended.state is TransactionState.COMPLETED, ended.reason
        return {
            each.series: [part.body async for part in self.collector.parts(ID, each.series)]
            for each in await self.collector.progress(ID)
        }


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with holdfast.open("memory://") as queues:
        await make_queues(queues)
        async with holdfast.Collector("memory://", blobs=str(tmp_path / "blobs"), queues=queues) as collector:
            yield Stand(collector, queues, tmp_path / "blobs")


def whole(series: str, count: int) -> list[bytes]:
    return [body_of(series, ordinal) for ordinal in range(count)]


async def test_other_bytes_for_a_stored_ordinal_are_parked_and_their_blob_is_gone(stand: Stand) -> None:
    await stand.begin(["a"])
    await stand.payloads(payload(ID, "a", 0))
    await stand.stored("a", 1)
    await stand.payloads(payload(ID, "a", 0, b"other"), payload(ID, "a", 0), payload(ID, "a", 1))
    assert "came with other bytes" in (await stand.reasons(1))[0]
    await stand.headers(header(ID, "a", 2))
    assert await stand.completed() == {"a": whole("a", 2)}
    files = [file.name for file in stand.blobs.rglob("*") if file.is_file() and ".partial" not in file.parts]
    assert len(files) == 3, "two parts and the manifest"


async def test_an_ordinal_beyond_the_count_is_parked_before_or_after_its_header(stand: Stand) -> None:
    await stand.begin(["a"])
    await stand.payloads(payload(ID, "a", 7), payload(ID, "a", 0))
    await stand.stored("a", 2)
    await stand.headers(header(ID, "a", 2))
    assert "beyond the count" in (await stand.reasons(1))[0]
    await stand.payloads(payload(ID, "a", 2))
    assert len(await stand.reasons(2)) == 2
    assert (await stand.collector.find(ID)).state is TransactionState.AWAITING, "two were stored, but not the two"
    await stand.payloads(payload(ID, "a", 1))
    assert await stand.completed() == {"a": whole("a", 2)}
    letters = await stand.queues.storage_items_list("collector.dlq")
    assert sorted(letter.payload for letter in letters) == sorted([body_of("a", 7), body_of("a", 2)])


async def test_a_second_count_for_a_series_is_parked(stand: Stand) -> None:
    await stand.begin(["a"])
    await stand.headers(header(ID, "a", 2), header(ID, "a", 3), header(ID, "a", 2))
    assert "another count" in (await stand.reasons(1))[0]
    await answer(stand.queues, ID, {"a": 2})
    assert await stand.completed() == {"a": whole("a", 2)}
    assert len(await parked(stand.queues)) == 1


async def test_a_series_outside_the_set_is_parked_at_completion(stand: Stand) -> None:
    await stand.begin(["a"])
    await stand.payloads(payload(ID, "x", 0), payload(ID, "x", 1))
    await stand.headers(header(ID, "x", 2))
    await stand.stored("x", 2)
    await answer(stand.queues, ID, {"a": 1})
    assert await stand.completed() == {"a": whole("a", 1)}
    reasons = await stand.reasons(3)
    assert len(reasons) == 3
    assert all("outside the known set" in reason for reason in reasons)


async def test_the_set_is_known_from_the_headers_series_count_and_never_before(stand: Stand) -> None:
    await stand.begin(None)
    await stand.payloads(*(payload(ID, "a", number) for number in range(3)))
    await stand.headers(header(ID, "a", 3))
    await stand.stored("a", 3)
    assert (await stand.collector.find(ID)).state is TransactionState.AWAITING, "nobody said that a is all"
    await stand.headers(header(ID, "b", 0, series_count=2), header(ID, "c", 1, series_count=2))
    assert "outside the known set" in (await stand.reasons(1))[0]
    assert await stand.completed() == {"a": whole("a", 3), "b": []}


async def test_an_empty_set_is_complete_at_once(stand: Stand) -> None:
    await stand.begin([])
    assert await stand.completed() == {}
    assert b'"parts_count":0' in (await notices(stand.queues))[0]


async def test_strangers_are_parked_byte_for_byte(stand: Stand) -> None:
    await stand.begin(["a"])
    strange = [
        payload("other", "a", 0),
        NewItem(payload=b"\x00\xff", reference="not json"),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="a")),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="a", ordinal=-1)),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="../a", ordinal=0)),
        NewItem(payload=b"x", reference=reference(transaction_id=ID, series="a", ordinal=True)),
    ]
    await stand.payloads(*strange)
    await stand.headers(header("other", "a", 1), NewItem(reference=reference(transaction_id=ID, series="a", count="x")))
    reasons = await stand.reasons(8)
    assert sum("another transaction" in reason for reason in reasons) == 2
    assert b"\x00\xff" in [item.payload for item in await stand.queues.storage_items_list("collector.dlq")]
    await answer(stand.queues, ID, {"a": 1})
    assert await stand.completed() == {"a": whole("a", 1)}


async def test_a_late_leftover_is_a_duplicate_or_parked(stand: Stand) -> None:
    await stand.begin(["a"])
    # Enough duplicates that some are still there when the last ordinal is stored.
    await stand.payloads(*(payload(ID, "a", number % 3) for number in range(90)), payload(ID, "a", 3))
    await stand.headers(header(ID, "a", 4), header(ID, "a", 4))
    assert await stand.completed() == {"a": whole("a", 4)}
    assert await parked(stand.queues) == []
    names = {queue.queue_name for queue in await stand.queues.queues_list()}
    assert names == {"collector.dlq", PRODUCER, NOTIFY}


async def test_a_request_that_cannot_be_forwarded_is_refused_at_the_start(stand: Stand) -> None:
    with pytest.raises(Invalid, match="queue does not exist"):
        await stand.collector.start(b"x", producer="nobody")
    with pytest.raises(Invalid, match="request is too large"):
        await stand.collector.start(bytes(5_000_000), producer=PRODUCER)


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
    stand = {"a": SeriesState(series="a", count=1, stored_count=1)}
    assert known_set(None, stand) is None
    assert known_set(["b"], stand) == frozenset({"b"})
    assert known_set(None, {"a": SeriesState(series="a", count=1, series_count=1)}) == frozenset({"a"})


def test_a_header_that_disagrees_about_the_number_of_series_contradicts() -> None:
    stand = {"a": SeriesState(series="a", count=1, series_count=2)}
    assert "another size" in header_contradiction(Header(series="b", count=1, series_count=3), None, stand)
    assert "another size" in header_contradiction(Header(series="b", count=1, series_count=3), ["a", "b"], {})
    assert header_contradiction(Header(series="b", count=1, series_count=2), None, stand) == ""
