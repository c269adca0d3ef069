"""A recovery in the process of the test, for what has to happen at a moment that nobody sees from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from holdfast.core.recovery import Depth, RecoveryOrder, RunLimits, Summary
from holdfast.core.routes import parse_routes
from holdfast.ports.broker import DrainConsumer, RecoveryBroker
from holdfast.services.recover.run import RecoveryRun
from holdfast.wiring import SystemClock, open_recovery
from tests.recover.dead_letter_queue import ROUTES, DeadLetterQueue

LIMITS = RunLimits(empty_timeout_s=0.5, idle_timeout_s=2.0, total_timeout_s=10.0, window_bytes_max=2**20)


class DrainAround:
    """The drain of a broker, of which a test does something else."""

    def __init__(self, broker: RecoveryBroker) -> None:
        self.real: DrainConsumer = broker.drain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


D = TypeVar("D", bound=DrainAround)


class Inside(Generic[D]):
    """`await Inside(MyDrain, dlq).run()`: from the first connection to the last. One letter more is found than there
    is, as when somebody else takes it: until the end it is waited for."""

    broker: RecoveryBroker
    drain: D

    def __init__(self, kind: type[D], dlq: DeadLetterQueue, *, port: int | None = None) -> None:
        self._kind = kind
        self._dlq = dlq
        self._url = dlq.admin.node.url(dlq.admin.vhost, port=port)

    async def run(
        self,
        limits: RunLimits = LIMITS,
        on_open: Callable[[D], None] = lambda drain: None,
        on_begin: Callable[[RecoveryRun], None] = lambda run: None,
    ) -> Summary:
        table = parse_routes(ROUTES.encode(), source="routes")
        order = RecoveryOrder(dead_queue=self._dlq.name, table=table, limits=limits, run="r", by="me")
        management = self._dlq.admin.node.management_url
        async with open_recovery(self._url, order, management=management) as self.broker:
            preflight = await self.broker.inspector.preflight(table)
            preflight.depth = Depth(ready=preflight.depth.ready + 1)
            self.drain = self._kind(self.broker)
            on_open(self.drain)
            run = RecoveryRun(replace(self.broker, drain=self.drain), order, preflight, clock=SystemClock())
            on_begin(run)
            return await run.run()
