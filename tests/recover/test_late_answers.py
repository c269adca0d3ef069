"""A confirm that comes at the same moment as the letter itself, which a lost connection had taken from us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.recovery import StoppedBy
from holdfast.ports.recovery import OnOutcome, RunLetter
from holdfast.proof.proxy import Proxy
from tests.recover.inside import OneMoreFound, letters_of, run
from tests.recover.world import World, letter

pytestmark = pytest.mark.rabbitmq

COUNT = 20


class LateAnswers(OneMoreFound):
    """The connections are lost when all confirms are there; they are told just before letters that come again."""

    proxy: Proxy
    answers: list[tuple[OnOutcome, tuple[Any, ...]]]
    is_cut = False

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        super().send(letters, lambda *what: self.answers.append((on_outcome, what)), timeout_s=timeout_s)

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter]:
        if not self.is_cut and sum(len(what[0]) for _, what in self.answers) == COUNT:
            self.is_cut = True
            await self.proxy.cut()
        batch = await super().take(count_max=count_max, timeout_s=timeout_s)
        if any(one.redelivered for one in batch):
            answers, self.answers = self.answers, []
            for on_outcome, what in answers:
                on_outcome(*what)
        return batch


async def test_a_letter_that_comes_again_with_its_confirm_counts_once(any_world: World) -> None:
    world = any_world
    await world.fill(letter(n) for n in range(COUNT))
    async with Proxy("127.0.0.1", world.admin.node.port) as proxy:
        letters = letters_of(LateAnswers, world, port=proxy.port)
        letters.proxy, letters.answers = proxy, []
        told = await run(letters)
    assert (told.interruptions, told.recovered, told.recognised) == (1, COUNT, COUNT)
    assert (told.stopped_by, told.possible_duplicates) == (StoppedBy.EMPTY, 0)
    await world.check()
