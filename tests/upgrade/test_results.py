"""Results that an older program was collecting when it was killed: what is stored stays, the rest is collected."""

from __future__ import annotations

import json

import holdfast
from holdfast import NewItem
from tests.collect.producing import reference
from tests.upgrade import story
from tests.upgrade.conftest import OldInstallation


def open_collector(installation: OldInstallation, queues: holdfast.Queues) -> holdfast.Collector:
    return holdfast.Collector(
        installation.url, blobs=installation.blobs, queues=queues, lease_timeout="5s", abandon_after=story.LONG
    )


async def bodies(collector: holdfast.Collector, transaction: str, series: str) -> list[bytes]:
    return [part.body async for part in collector.parts(transaction, series)]


def wanted(series: str) -> list[bytes]:
    return [story.part(series, ordinal) for ordinal in range(story.SERIES[series])]


async def test_what_was_ended_is_ended(installation: OldInstallation) -> None:
    async with holdfast.open(installation.url) as queues, open_collector(installation, queues) as collector:
        done, dropped = await collector.find(story.DONE), await collector.find(story.DROPPED)
        assert (done.state.value, dropped.state.value, dropped.reason) == ("completed", "abandoned", "nobody wants it")
        assert await bodies(collector, story.DONE, "rows") == wanted("rows")
        assert await bodies(collector, story.DROPPED, "rows") == []
        again = await collector.start(b"everything", producer=story.PRODUCER, transaction_id=story.DONE)
        assert again.state.value == "completed"
        (parked,) = await queues.storage_items_list("collector.dlq")
        assert parked.payload == b"other bytes"


async def test_what_was_under_way_is_completed(installation: OldInstallation) -> None:
    async with holdfast.open(installation.url) as queues, open_collector(installation, queues) as collector:
        assert (await collector.find(story.OPEN)).state.value == "awaiting"
        for series, count in story.SERIES.items():
            items = [
                NewItem(
                    payload=story.part(series, ordinal),
                    reference=reference(transaction_id=story.OPEN, series=series, ordinal=ordinal),
                )
                for ordinal in range(story.SENT[series], count)
            ]
            await queues.queue_produce(f"transaction-{story.OPEN}-payload", items)
        header = NewItem(reference=reference(transaction_id=story.OPEN, series="lines", count=story.SERIES["lines"]))
        await queues.queue_produce(f"transaction-{story.OPEN}-header", [header])
        ended = await collector.wait(story.OPEN, timeout_s=20)
        assert ended.state.value == "completed"
        for series in story.SERIES:
            assert await bodies(collector, story.OPEN, series) == wanted(series)
        notices = [json.loads(item.payload) for item in await queues.storage_items_list(story.NOTIFY)]
        assert [notice["transaction-id"] for notice in notices] == [story.DONE, story.OPEN]
        assert notices[1]["parts_count"] == sum(story.SERIES.values())
        assert len(await queues.storage_items_list("collector.dlq")) == 1, "nothing more was parked"
