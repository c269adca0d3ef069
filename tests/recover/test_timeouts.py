"""Every loop ends: a run waits for letters, for confirms, and with letters in hand, for so long and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.recover.world import World, letter, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

#: Whatever else would end a run comes later than what is tested.
LATER = ("--total-timeout", "20s", "--empty-timeout", "1h", "--idle-timeout", "1h", "--stall-timeout", "1h")


@contextmanager
def dumb(world: World, queue: str) -> Iterator[None]:
    """The queue does nothing: what is published to it is neither confirmed nor refused, until the end of the block."""
    node = world.admin.node

    def tell(what: str) -> None:
        name = f'rabbit_misc:r(<<"{world.admin.vhost}">>, queue, <<"{queue}">>)'
        node.ctl("eval", f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), sys:{what}(amqqueue:get_pid(Q)).")

    tell("suspend")
    try:
        yield
    finally:
        tell("resume")


@pytest.mark.parametrize(("kind", "window"), [("Strange", "5"), ("CollectionScan", "1000")], ids=["held", "waiting"])
async def test_a_letter_is_not_in_hand_for_longer_than_the_hold_timeout(world: World, kind: str, window: str) -> None:
    """The broker would end a consumer that has one for too long. A small window keeps those that wait young."""
    await world.fill([letter(0, kind=kind), *(letter(n) for n in range(1, 400))])
    told = summary(await world.recover(*LATER, "--hold-timeout", "1s", "--rate", "20/s", "--window", window))
    assert told["stopped_by"] == "hold"
    assert told["recovered"] + told["remaining"] == 400
    assert (told["failed"], told["possible_duplicates"]) == (0, 0)
    await world.check()


async def test_letters_that_do_not_come_are_waited_for_until_the_idle_timeout(world: World) -> None:
    told = summary(await world.recover(*LATER, "--idle-timeout", "300ms"))
    assert (told["stopped_by"], told["recovered"], told["remaining"]) == ("idle", 0, 0)


async def test_confirms_that_do_not_come_are_waited_for_until_the_stall_timeout(world: World) -> None:
    await world.fill(letter(n, kind=("CollectionScan", "CacheGeneration")[n % 2]) for n in range(20))
    with dumb(world, "cache.generation"):
        told = summary(await world.recover(*LATER, "--stall-timeout", "3s", "--stop-timeout", "300ms"))
    assert (told["stopped_by"], told["recovered"], told["remaining"]) == ("stall", 10, 10)
    assert (told["failed"], told["unknown"], told["possible_duplicates"]) == (10, 10, 10)
    await eventually(lambda: _has(world, "cache.generation", 10))
    report = await world.check(duplicates_max=10)
    assert report.duplicates_count == 10, "each is in both places"


async def _has(world: World, queue: str, count: int) -> bool:
    return await asyncio.wait_for(world.admin.count(queue), 60.0) == count
