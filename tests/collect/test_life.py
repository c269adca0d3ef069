"""Gaps, asking again, abandonment, streams, and leases between two collectors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.core.states import TransactionState
from holdfast.errors import Invalid, StorageFailed, TryAgain
from holdfast.services.collect import completion
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
    take_request,
)
from tests.support.eventually import eventually


@pytest.fixture
async def queues() -> AsyncIterator[holdfast.Queues]:
    async with holdfast.open("memory://") as opened:
        await make_queues(opened)
        yield opened


async def test_what_is_missing_is_asked_for_again_after_a_while_without_progress(
    queues: holdfast.Queues, tmp_path: Path
) -> None:
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues, gap_after="300ms") as collector:
        await collector.start(b"all", producer=PRODUCER, transaction_id="t", series=["a", "b"])
        await take_request(queues)
        await produce(queues, "t", "payload", [payload("t", "a", number) for number in (0, 3)])
        await produce(queues, "t", "header", [header("t", "a", 5)])
        body, attributes = await take_request(queues)
        assert attributes["kind"] == "missing"
        assert attributes["message-id"] != "t", "by that the producer would take it for a repeated request"
        asked = msgspec.json.decode(body)
        assert asked["missing"] == {"a": [[1, 2], [4, 4]], "b": []}
        assert [part.body async for part in collector.parts("t", "a")] == [body_of("a", 0)], "up to the first gap"
        gaps = {gap.series: gap for gap in await collector.gaps("t")}
        assert (list(gaps["a"].missing), gaps["b"].is_open) == ([(1, 2), (4, 4)], True)
        assert await collector.request_missing("t") == 2
        for series, found in asked["missing"].items():
            again = [payload("t", series, number) for first, last in found for number in range(first, last + 1)]
            await produce(queues, "t", "payload", again)
        await produce(queues, "t", "header", [header("t", "b", 0)])
        assert (await collector.wait("t", timeout_s=60)).state is TransactionState.COMPLETED
        with pytest.raises(Invalid, match="is not awaiting"):
            await collector.request_missing("t")


async def is_clean(collector: holdfast.Collector) -> bool:
    return (await collector.find("t")).is_clean


@pytest.mark.parametrize("keep_blobs", [False, True])
async def test_without_progress_a_transaction_is_failed_with_the_reason(
    queues: holdfast.Queues, tmp_path: Path, keep_blobs: bool
) -> None:
    async with holdfast.Collector(
        "memory://", blobs=str(tmp_path), queues=queues, abandon_after="400ms", keep_blobs=keep_blobs
    ) as collector:
        await collector.start(b"all", producer=PRODUCER, transaction_id="t", series=["a"])
        await take_request(queues)
        await produce(queues, "t", "payload", [payload("t", "a", 0)])
        ended = await collector.wait("t", timeout_s=60)
        assert (ended.state, ended.reason) == (TransactionState.FAILED, "abandoned; no progress for 400ms")
        await eventually(lambda: is_clean(collector))
        names = {queue.queue_name for queue in await queues.queues_list()}
        assert names == {"collector.dlq", PRODUCER, NOTIFY}
        assert await collector.progress("t") == []
        assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == (1 if keep_blobs else 0)
        (line,) = await collector.service.ledger()
        assert (line.action, line.transaction, line.detail) == ("failed", "t", "awaiting")


async def test_a_result_that_will_not_come_is_announced(queues: holdfast.Queues, tmp_path: Path) -> None:
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues, abandon_after="400ms") as collector:
        for name in ("f", "a"):
            await collector.start(b"r", producer=PRODUCER, notify=NOTIFY, transaction_id=name)
        await collector.abandon("a", reason="a mistake")
        for name in ("f", "a"):
            await cleaned(collector, name)
    told = await queues.storage_items_list(NOTIFY)
    assert {item.payload for item in told} == {
        b'{"reason":"abandoned; no progress for 400ms","state":"failed","transaction-id":"f"}',
        b'{"reason":"a mistake","state":"abandoned","transaction-id":"a"}',
    }
    attributes = [msgspec.json.decode(item.reference) for item in told]
    assert {each["transaction-id"]: each["kind"] for each in attributes} == {"f": "failed", "a": "abandoned"}


async def test_an_end_that_nobody_hears_of_is_an_end_all_the_same(
    queues: holdfast.Queues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(completion, "NOTICE_TRIES_MAX", 2)
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues) as collector:
        await collector.start(b"r", producer=PRODUCER, notify=NOTIFY, transaction_id="t")
        await queues.queues_delete(NOTIFY, force=True)
        await collector.abandon("t")
        await cleaned(collector, "t")
    assert "that 't' is abandoned was told to nobody" in caplog.text


async def test_messages_of_an_abandoned_transaction_are_parked_not_dropped(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await make_queues(queues)
        async with holdfast.Collector(url, queues=queues) as collector:
            await collector.start(b"all", producer=PRODUCER, transaction_id="t", series=["a"])
            await take_request(queues)
        # No collector runs: what comes now is found by the one that is told to give up.
        await queues.queue_pause("transaction-t-payload")
        await produce(queues, "t", "payload", [payload("t", "a", number) for number in range(3)])
        async with holdfast.Collector(url, queues=queues) as collector:
            ended = await collector.abandon("t", reason="a mistake")
            assert (ended.state, ended.reason) == (TransactionState.ABANDONED, "a mistake")
            await queues.queue_resume("transaction-t-payload")
            await eventually(lambda: is_clean(collector))
            reasons = await parked(queues)
            assert len(reasons) == 3
            assert all("after the end" in reason for reason in reasons)
            with pytest.raises(Invalid, match="does not exist"):
                await collector.abandon("other")


async def test_waiting_has_a_limit(queues: holdfast.Queues, tmp_path: Path) -> None:
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues) as collector:
        await collector.start(b"all", producer=PRODUCER, transaction_id="t", series=["a"])
        with pytest.raises(TryAgain, match="is not complete"):
            await collector.wait("t", timeout_s=0.05)


async def test_a_damaged_blob_is_never_given_out(queues: holdfast.Queues, tmp_path: Path) -> None:
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues) as collector:
        await collector.start(b"all", producer=PRODUCER, transaction_id="t", series=["a"])
        await take_request(queues)
        await answer(queues, "t", {"a": 2})
        await collector.wait("t", timeout_s=60)
        (file,) = tmp_path.glob("t/a/1-*")
        file.write_bytes(b"damaged")
        parts = collector.parts("t", "a")
        assert (await anext(parts)).ordinal == 0
        with pytest.raises(StorageFailed, match="blob is damaged"):
            await anext(parts)


async def test_a_blob_store_that_refuses_for_a_while_delays_and_loses_nothing(
    queues: holdfast.Queues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.engines import folder as tree

    refused = asyncio.Event()
    is_down = True
    real = tree.BlobFolder.sync

    def sync(self: tree.BlobFolder, segments: tuple[str, ...], descriptor: int) -> None:
        if is_down:
            loop.call_soon_threadsafe(refused.set)
            raise OSError(28, "No space left on device")
        real(self, segments, descriptor)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(tree.BlobFolder, "sync", sync)
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues) as collector:
        await collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id="t", series=["a"])
        await take_request(queues)
        await answer(queues, "t", {"a": 20})
        await asyncio.wait_for(refused.wait(), 60.0)
        assert (await collector.find("t")).state is TransactionState.AWAITING
        assert [each.stored_count for each in await collector.progress("t") if each.series == "a"] in ([], [0])
        is_down = False
        await collector.wait("t", timeout_s=60)
        assert [part.body async for part in collector.parts("t", "a")] == [body_of("a", n) for n in range(20)]


async def test_one_failing_transaction_does_not_hold_up_the_others(queues: holdfast.Queues, tmp_path: Path) -> None:
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues) as collector:
        await collector.start(b"bad", producer=PRODUCER, notify=NOTIFY, transaction_id="bad", series=["a"])
        await take_request(queues)
        await queues.queues_delete("transaction-bad-payload", force=True)
        await collector.start(b"good", producer=PRODUCER, notify=NOTIFY, transaction_id="good", series=["a"])
        await take_request(queues)
        await answer(queues, "good", {"a": 3})
        assert (await collector.wait("good", timeout_s=60)).state is TransactionState.COMPLETED

        # The queue that somebody deleted is made again, and the producer may send again.
        async def is_back() -> bool:
            return "transaction-bad-payload" in {queue.queue_name for queue in await queues.queues_list()}

        await eventually(is_back)
        await answer(queues, "bad", {"a": 3})
        assert (await collector.wait("bad", timeout_s=60)).state is TransactionState.COMPLETED


async def test_the_next_collector_resumes_what_was_left_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await make_queues(queues)
        async with holdfast.Collector(url, queues=queues) as collector:
            await collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id="t", series=["a"])
            await take_request(queues)
            await produce(queues, "t", "payload", [payload("t", "a", 0)])
            await eventually(lambda: has_stored(collector, 1))
        await produce(queues, "t", "payload", [payload("t", "a", 0), payload("t", "a", 1)])
        await produce(queues, "t", "header", [header("t", "a", 2)])
        with caplog.at_level("INFO", logger="holdfast"):
            async with holdfast.Collector(url, queues=queues) as collector:
                assert (await collector.wait("t", timeout_s=60)).state is TransactionState.COMPLETED
    said = caplog.messages
    for line in (
        "Service starting - checking for recoverable transactions",
        "Found 1 transactions to recover",
        "Recovering transaction t",
        "Recovered transaction t in state awaiting",
        "Recovery complete - service ready for new requests",
        "Ordinal 0 already processed - skipping upload",
    ):
        assert line in said


async def has_stored(collector: holdfast.Collector, count: int) -> bool:
    return [each.stored_count for each in await collector.progress("t")] == [count]


@pytest.mark.parametrize("method", ["create", "move", "put_parts", "put_header", "set_clean"])
async def test_a_commit_whose_answer_was_lost_is_not_the_end(
    queues: holdfast.Queues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from holdfast.stores.collect import CollectStore

    real = getattr(CollectStore, method)
    calls = 0

    async def answer_lost(*arguments: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        done = await real(*arguments, **more)
        if calls % 2:
            raise StorageFailed("storage failed; it took effect, and the answer was lost")
        return done

    monkeypatch.setattr(CollectStore, method, answer_lost)
    async with holdfast.Collector("memory://", blobs=str(tmp_path), queues=queues) as collector:
        for _ in range(2):
            try:
                await collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id="t", series=["a"])
            except StorageFailed:
                assert method == "create"
        await take_request(queues)
        await answer(queues, "t", {"a": 3})
        ended = await cleaned(collector, "t")
        assert ended.state is TransactionState.COMPLETED
        assert [part.body async for part in collector.parts("t", "a")] == [body_of("a", n) for n in range(3)]
        assert len(set(await notices(queues))) == 1
