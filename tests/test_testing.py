"""`holdfast.testing`, as a user's test uses it: the clock moves, and what follows has happened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast import testing
from holdfast.testing import FrozenClock, assert_dead, memory_queues

PAGE = Path(__file__).parents[1] / "docs" / "queue.md"


async def test_the_example_of_the_page_runs_as_it_stands() -> None:
    text = PAGE.read_text("utf-8")
    (example,) = re.findall(r"## In your tests\n\n```python\n(.+?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(example, namespace)  # noqa: S102 - our own page
    await namespace["test_an_order_dies_after_three_attempts"]()


async def test_after_an_advance_the_consequences_have_happened() -> None:
    clock = FrozenClock()
    async with memory_queues(clock) as queues:
        await queues.queues_create("dead")
        await queues.queues_create("work", lease_timeout="1m", max_attempts=1, dead_queue="dead")
        await queues.queue_produce("work", [b"%d" % number for number in range(500)])
        await queues.queue_lease("work", batch_size=500)
        await clock.advance(61)
        (partition,) = (await queues.queue_stats("dead")).logical_queues[0].partitions
        assert partition.total == 500


async def test_assert_dead_says_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "ARRIVE_TIMEOUT_S", 0.05)
    async with memory_queues() as queues:
        await queues.queues_create("dead")
        with pytest.raises(AssertionError, match="no item of 'work' died into 'dead' of rejected"):
            await assert_dead(queues, "dead", source_queue="work", reason="rejected")
