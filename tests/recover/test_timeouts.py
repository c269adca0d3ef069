"""Every loop ends: a run waits for letters, for confirms, and with letters in hand, for so long and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue, letter, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

#: Whatever else would end a run comes later than what is tested.
LATER = ("--total-timeout", "20s", "--empty-timeout", "1h", "--idle-timeout", "1h", "--stall-timeout", "1h")


@contextmanager
def dumb(dlq: DeadLetterQueue, queue: str) -> Iterator[None]:
    """The queue does nothing: what is published to it is neither confirmed nor refused, until the end of the block."""
    node = dlq.admin.node

    def tell(what: str) -> None:
        name = f'rabbit_misc:r(<<"{dlq.admin.vhost}">>, queue, <<"{queue}">>)'
        node.ctl("eval", f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), sys:{what}(amqqueue:get_pid(Q)).")

    tell("suspend")
    try:
        yield
    finally:
        tell("resume")


@pytest.mark.parametrize(("kind", "window"), [("Strange", "5"), ("CollectionScan", "1000")], ids=["held", "waiting"])
async def test_a_letter_is_not_in_hand_for_longer_than_the_hold_timeout(
    dlq: DeadLetterQueue, kind: str, window: str
) -> None:
    """The broker would end a consumer that has one for too long. A small window keeps those that wait young."""
    await dlq.fill([letter(0, kind=kind), *(letter(n) for n in range(1, 400))])
    told = summary(await dlq.recover(*LATER, "--hold-timeout", "1s", "--rate", "20/s", "--window", window))
    assert told["stopped_by"] == "hold"
    assert told["recovered"] + told["remaining"] == 400
    assert (told["failed"], told["possible_duplicates"]) == (0, 0)
    await dlq.check()


async def test_letters_that_do_not_come_are_waited_for_until_the_idle_timeout(dlq: DeadLetterQueue) -> None:
    told = summary(await dlq.recover(*LATER, "--idle-timeout", "300ms"))
    assert (told["stopped_by"], told["recovered"], told["remaining"]) == ("idle", 0, 0)


async def test_confirms_that_do_not_come_are_waited_for_until_the_stall_timeout(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n, kind=("CollectionScan", "CacheGeneration")[n % 2]) for n in range(20))
    with dumb(dlq, "cache.generation"):
        told = summary(await dlq.recover(*LATER, "--stall-timeout", "3s", "--stop-timeout", "300ms"))
    assert (told["stopped_by"], told["recovered"], told["remaining"]) == ("stall", 10, 10)
    assert (told["failed"], told["unknown"], told["possible_duplicates"]) == (10, 10, 10)
    await eventually(lambda: _has(dlq, "cache.generation", 10))
    report = await dlq.check(duplicates_max=10)
    assert report.duplicates_count == 10, "each is in both places"


async def _has(dlq: DeadLetterQueue, queue: str, count: int) -> bool:
    return await asyncio.wait_for(dlq.admin.count(queue), 60.0) == count
