"""What a program wrote to a terminal, and a dead queue to run one on."""

from __future__ import annotations

import os

import holdfast
from holdfast.testing import assert_dead


def all_of(terminal: int) -> str:
    """Everything until the other side is closed."""
    parts = []
    try:
        while part := os.read(terminal, 65_536):
            parts.append(part)
    except OSError:  # the other side is closed
        pass
    return b"".join(parts).decode()


async def fill_dead_queue(url: str, count: int) -> None:
    """So many items of `orders` have died, and are in `dead`."""
    async with holdfast.open(url) as queues:
        await queues.queues_create("dead")
        await queues.queues_create("orders", dead_queue="dead")
        await queues.queue_produce("orders", [b"x"] * count)
        leased = await queues.queue_lease("orders", batch_size=count)
        await queues.queue_retry("orders", [holdfast.RetryItem(id=item.id, dead=True) for item in leased.items])
        assert await assert_dead(queues, "dead", source_queue="orders")
