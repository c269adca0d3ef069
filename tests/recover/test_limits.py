"""`--limit` together with `--where`: letters that do not fit are looked through, not counted."""

from __future__ import annotations

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue, letter, summary

pytestmark = pytest.mark.rabbitmq

REST = 300
WANTED = 50


async def filled(dlq: DeadLetterQueue) -> None:
    """The letters that fit are behind many that do not."""
    await dlq.fill(letter(n, kind="CacheGeneration") for n in range(REST))
    await dlq.fill(letter(REST + n) for n in range(WANTED))
    await dlq.fill(letter(1_000 + n, kind="CacheGeneration") for n in range(REST))


@pytest.mark.parametrize(("limit", "window"), [(20, 4_000), (20, 15), (1, 4_000)])
async def test_the_limit_counts_what_fits(any_dlq: DeadLetterQueue, limit: int, window: int) -> None:
    dlq = any_dlq
    await filled(dlq)
    ended = await dlq.recover("--where", "type=CollectionScan", "--limit", str(limit), "--window", str(window))
    told = summary(ended)
    assert ended.code == 3
    assert (told["recovered"], told["stopped_by"]) == (limit, "all_taken")
    assert told["filtered"] == REST
    assert told["unseen"] == WANTED - limit + REST
    assert told["remaining"] == 2 * REST + WANTED - limit
    await dlq.check()


async def test_fewer_fit_than_the_limit(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await filled(dlq)
    told = summary(await dlq.recover("--where", "type=CollectionScan", "--limit", "70"))
    assert told["stopped_by"] == "all_taken", told
    assert (told["recovered"], told["filtered"], told["unseen"]) == (WANTED, 2 * REST, 0)
    await dlq.check()


async def test_run_again_and_again_all_that_fit_go(dlq: DeadLetterQueue) -> None:
    await filled(dlq)
    for _ in range(3):
        await dlq.recover("--where", "type=CollectionScan", "--limit", "20")
    assert await dlq.admin.count("collection.scan") == WANTED
    await dlq.check()


async def test_the_summary_says_what_was_not_looked_at(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(30))
    told = summary(await dlq.recover("--limit", "10"))
    assert (told["recovered"], told["unseen"], told["remaining"]) == (10, 20, 20)
    await dlq.check()
