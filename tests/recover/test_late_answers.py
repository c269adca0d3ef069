"""A confirm that comes at the same moment as the letter itself, which a lost connection had taken from us."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.core.recovery import Limits, StoppedBy
from holdfast.core.redrive import Redrive
from holdfast.core.routes import RouteTable, parse_routes
from holdfast.engines.rabbitmq.dead_letters import RabbitDeadLetters
from holdfast.engines.rabbitmq.redriver import Redriver
from holdfast.ports.recovery import Depth, Findings, OnOutcome, Taken
from holdfast.proof.proxy import Proxy
from holdfast.services.recover.service import Order, recover
from holdfast.wiring import SystemClock
from tests.recover.world import ROUTES, World, letter

pytestmark = pytest.mark.rabbitmq

COUNT = 20


class LateAnswers(RabbitDeadLetters):
    """The connections are lost when all confirms are there; they are told just before letters that come again.

    One letter more is found than there is: until the end another one is waited for.
    """

    proxy: Proxy
    answers: list[tuple[OnOutcome, tuple[Any, ...]]]
    is_cut = False

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Findings:
        found = await super().inspect(table, targets_only=targets_only)
        found.depth = Depth(ready=found.depth.ready + 1)
        return found

    def send(self, letters: Sequence[Taken], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        super().send(letters, lambda *what: self.answers.append((on_outcome, what)), timeout_s=timeout_s)

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Taken]:
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
    table = parse_routes(ROUTES.encode(), source="routes")
    redriver = Redriver(Redrive(run="r", by="me", dead_queue=world.dlq), table, now=lambda: datetime.now(UTC))
    async with Proxy("127.0.0.1", world.admin.node.port) as proxy:
        address = world.admin.address(port=proxy.port)
        letters = LateAnswers(address, world.dlq, redriver, management=None, window_bytes_max=2**20)
        letters.proxy, letters.answers = proxy, []
        await letters.connect()
        try:
            order = Order(dead_queue=world.dlq, table=table, limits=Limits(empty_timeout_s=0.5, idle_timeout_s=2.0))
            told = await recover(letters, order, clock=SystemClock())
        finally:
            await letters.close()
    assert (told.interruptions, told.recovered, told.recognised) == (1, COUNT, COUNT)
    assert (told.stopped_by, told.possible_duplicates) == (StoppedBy.EMPTY, 0)
    await world.check()
