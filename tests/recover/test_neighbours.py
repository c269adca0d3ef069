"""Letters that cannot go, or that nobody answers for, harm none that come after them."""

from __future__ import annotations

import pytest

from tests.recover.world import World, letter, summary

pytestmark = pytest.mark.rabbitmq


@pytest.mark.parametrize("window", [("--one-at-a-time",), ("--window", "10")])
async def test_a_window_full_of_refused_letters_holds_nobody_up(any_world: World, window: tuple[str, ...]) -> None:
    """They are refused when no further letter comes: then it is for nobody but the run to make room."""
    world = any_world
    await world.fill(letter(n, kind="Refused" if n < 31 else "CollectionScan") for n in range(50))
    told = summary(await world.recover(*window))
    assert (told["recovered"], told["failed"], told["stopped_by"]) == (20, 30, "all_taken")
    kept = [str(one.decoded()["message_id"]) for one in (await world.found())[world.dlq]]
    assert kept == sorted(kept)
    world.books.check()
