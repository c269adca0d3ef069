"""A confirm that comes at the same moment as the letter itself, which a lost connection had taken from us."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.core.message import Outcome
from holdfast.core.recovery import RunLetter, StoppedBy
from holdfast.proof.proxy import Proxy
from holdfast.services.recover.source import DeadQueueSource, OnOutcome
from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.recover.inside import Inside

pytestmark = pytest.mark.rabbitmq

COUNT = 20


class LateAnswers(DeadQueueSource):
    """The connections are lost when all confirms are there; they are told just before letters that come again."""

    proxy: Proxy
    answers: list[tuple[OnOutcome, Sequence[RunLetter], Outcome]]
    is_cut = False

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        super().send(letters, lambda *what: self.answers.append((on_outcome, *what)), timeout_s=timeout_s)

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter]:
        if not self.is_cut and sum(len(letters) for _, letters, _ in self.answers) == COUNT:
            self.is_cut = True
            await self.proxy.cut()
        batch = await super().take(count_max=count_max, timeout_s=timeout_s)
        if any(one.redelivered for one in batch):
            answers, self.answers = self.answers, []
            for on_outcome, letters, outcome in answers:
                on_outcome(letters, outcome)
        return batch


async def test_a_letter_that_comes_again_with_its_confirm_counts_once(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(COUNT))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        LateAnswers.proxy, LateAnswers.answers = proxy, []
        told = await Inside(LateAnswers, dlq, port=proxy.port).run()
    assert (told.interruptions, told.recovered, told.recognised) == (1, COUNT, COUNT)
    assert (told.stopped_by, told.possible_duplicates) == (StoppedBy.EMPTY, 0)
    await dlq.check()
