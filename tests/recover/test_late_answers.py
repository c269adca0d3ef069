"""A confirm that comes at the same moment as the letter itself, which a lost connection had taken from us."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.core.message import Delivery, Outcome, Outgoing
from holdfast.core.recovery import StoppedBy
from holdfast.ports.broker import RecoveryBroker, Told
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
        self.answers: list[tuple[Told, Sequence[Outgoing], Outcome]] = []
        send = broker.publisher.send

        def send_and_wait(messages: Sequence[Outgoing], told: Told, *, timeout_s: float) -> None:
            send(messages, lambda *what: self.answers.append((told, *what)), timeout_s=timeout_s)

        broker.publisher.send = send_and_wait  # type: ignore[method-assign]

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery] | None:
        if not self.is_cut and sum(len(messages) for _, messages, _ in self.answers) == COUNT:
            self.is_cut = True
            await self.proxy.cut()
        batch = await self.real.take(count_max=count_max, timeout_s=timeout_s)
        if any(one.redelivered for one in batch or ()):
            answers, self.answers = self.answers, []
            for told, messages, outcome in answers:
                told(messages, outcome)
        return batch


async def test_a_letter_that_comes_again_with_its_confirm_counts_once(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(COUNT))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        LateAnswers.proxy = proxy
        told = await Inside(LateAnswers, dlq, port=proxy.port).run()
    assert (told.interruptions, told.recovered, told.recognised) == (1, COUNT, COUNT)
    assert (told.stopped_by, told.possible_duplicates) == (StoppedBy.EMPTY, 0)
    await dlq.check()
