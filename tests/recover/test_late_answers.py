"""A confirm that comes at the same moment as the letter itself, which a lost connection had taken from us."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.core.message import Delivery, Outcome, Outgoing
from holdfast.core.recovery import StoppedBy
from holdfast.ports.broker import OnOutcome, RecoveryBroker
from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.recover.inside import DrainAround, Inside

pytestmark = pytest.mark.rabbitmq

COUNT = 20


class LateAnswers(DrainAround):
    """The connections are lost when all confirms are there; they are told just before letters that come again."""

    proxy: Proxy
    is_cut = False

    def __init__(self, broker: RecoveryBroker) -> None:
        super().__init__(broker)
        self.answers: list[tuple[OnOutcome, Sequence[Outgoing], Outcome]] = []
        send = broker.publisher.send

        def send_and_wait(messages: Sequence[Outgoing], on_outcome: OnOutcome, *, timeout_s: float) -> None:
            send(messages, lambda *what: self.answers.append((on_outcome, *what)), timeout_s=timeout_s)

        broker.publisher.send = send_and_wait  # type: ignore[method-assign]

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery] | None:
        if not self.is_cut and sum(len(messages) for _, messages, _ in self.answers) == COUNT:
            self.is_cut = True
            await self.proxy.cut()
        batch = await self.real.take(count_max=count_max, timeout_s=timeout_s)
        if any(one.redelivered for one in batch or ()):
            answers, self.answers = self.answers, []
            for on_outcome, messages, outcome in answers:
                on_outcome(messages, outcome)
        return batch


async def test_a_letter_that_comes_again_with_its_confirm_counts_once(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(COUNT))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        LateAnswers.proxy = proxy
        summary = await Inside(LateAnswers, dlq, port=proxy.port).run()
    assert (summary.interruptions, summary.recovered, summary.recognised) == (1, COUNT, COUNT)
    assert (summary.stopped_by, summary.possible_duplicates) == (StoppedBy.EMPTY, 0)
    await dlq.check()
