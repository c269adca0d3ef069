"""A run that finds a contradiction in itself: it ends with it, and no letter is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.core.message import Delivery, Outcome, Outgoing
from holdfast.ports.broker import OnOutcome, RecoveryBroker
from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.recover.inside import DrainAround, Inside
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

COUNT = 20


class NoAcks(DrainAround):
    """What is confirmed cannot be acked."""

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        raise RuntimeError("there is a bug")


class WrongAnswers(DrainAround):
    """What is told of a publish cannot be understood."""

    def __init__(self, broker: RecoveryBroker) -> None:
        super().__init__(broker)
        send = broker.publisher.send

        def send_wrong(messages: Sequence[Outgoing], on_outcome: OnOutcome, *, timeout_s: float) -> None:
            def tell(copies: Sequence[Outgoing], outcome: Outcome) -> None:
                on_outcome(NoCopies(), outcome)

            send(messages, tell, timeout_s=timeout_s)

        broker.publisher.send = send_wrong  # type: ignore[method-assign]


class NoCopies(list[Outgoing]):
    """Cannot be read."""

    def __iter__(self) -> None:  # type: ignore[override]
        raise RuntimeError("there is a bug")


@pytest.mark.parametrize("kind", [NoAcks, WrongAnswers])
async def test_a_contradiction_ends_the_run_and_no_letter_is_lost(
    any_dlq: DeadLetterQueue, kind: type[DrainAround]
) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(COUNT))
    with pytest.raises(RuntimeError, match="there is a bug"):
        await Inside(kind, dlq).run()

    async def is_given_back() -> bool:
        return await dlq.admin.count(dlq.name) == COUNT

    await eventually(is_given_back)
    await dlq.check(duplicates_max=COUNT)
