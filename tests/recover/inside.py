"""A recovery in the process of the test, for what has to happen at a moment that nobody sees from outside."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from holdfast.core.death import RedriveStamp
from holdfast.core.recovery import RunLimits, Summary
from holdfast.core.routes import RouteTable, parse_routes
from holdfast.engines.rabbitmq.dead_letters import RabbitDeadLetters
from holdfast.engines.rabbitmq.redriver import Redriver
from holdfast.ports.recovery import Depth, Preflight
from holdfast.services.recover.run import Recovery
from holdfast.services.recover.service import RecoveryOrder, recover
from holdfast.wiring import SystemClock
from tests.recover.world import ROUTES, World

LIMITS = RunLimits(empty_timeout_s=0.5, idle_timeout_s=2.0, total_timeout_s=10.0)


class OneMoreFound(RabbitDeadLetters):
    """One letter more is found than there is, as when somebody else takes it: until the end it is waited for."""

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Preflight:
        found = await super().inspect(table, targets_only=targets_only)
        found.depth = Depth(ready=found.depth.ready + 1)
        return found


L = TypeVar("L", bound=RabbitDeadLetters)


def letters_of(kind: type[L], world: World, *, port: int | None = None) -> L:
    """To be given to `run`."""
    table = parse_routes(ROUTES.encode(), source="routes")
    redriver = Redriver(RedriveStamp(run="r", by="me", dead_queue=world.dlq), table, now=lambda: datetime.now(UTC))
    address, management = world.admin.address(port=port), world.admin.node.management_url
    return kind(address, world.dlq, redriver, management=management, window_bytes_max=2**20)


async def run(
    letters: RabbitDeadLetters,
    limits: RunLimits = LIMITS,
    on_begin: Callable[[Recovery], None] = lambda recovery: None,
) -> Summary:
    """From the first connection to the last."""
    order = RecoveryOrder(dead_queue=letters.queue, table=parse_routes(ROUTES.encode(), source="routes"), limits=limits)
    await letters.connect()
    try:
        return await recover(letters, order, clock=SystemClock(), on_begin=on_begin)
    finally:
        await letters.close()
