"""A marked message that is sent along a path and has to arrive. Whatever else is in the queues is given back as it was.

The probe has the type `holdfast.probe` and a header of its own, so that a consumer that meets one can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from uuid import uuid4

from holdfast.engines.rabbitmq.address import BrokerUrl
from holdfast.engines.rabbitmq.consumer import Consumer
from holdfast.engines.rabbitmq.lane import Outgoing
from holdfast.engines.rabbitmq.publisher import Publisher
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire.events import Delivery
from holdfast.errors import BrokerError
from holdfast.ports.topology import Probe, ProbeResult

PROBE_TIMEOUT_S = 10.0
MARK = "x-holdfast-probe"
TYPE = "holdfast.probe"
#: So many messages of others are held, at the most, while the probe is looked for behind them.
HELD_COUNT_MAX = 10_000
ROOM_COUNT = 100
LEFT_OVER_MS_MAX = 60_000


class Prober:
    """Sends probes; one publisher for all of them, opened with the first."""

    def __init__(self, address: BrokerUrl, *, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        """End the connection."""
        if self._publisher is not None:
            await self._publisher.close()

    async def send(self, probe: Probe, depths: Mapping[str, int]) -> ProbeResult:
        """Send it and take it out where it has to arrive. `depths` says how many messages are in its queues."""
        deep = [name for name, depth in depths.items() if depth + ROOM_COUNT > HELD_COUNT_MAX]
        if deep:
            reason = f"'{deep[0]}' has {depths[deep[0]]} messages, and a probe is not looked for behind so many"
            return ProbeResult(name=probe.name, outcome="skipped", reason=reason)
        if probe.waits_in is not None and depths[probe.waits_in]:
            reason = f"'{probe.waits_in}' has messages, and a delay cannot be cut short behind others"
            return ProbeResult(name=probe.name, outcome="skipped", reason=reason)
        mark = uuid4().hex
        try:
            reason = await self.carry(probe, mark, depths)
        except BrokerError as error:
            reason = str(error)
        if not reason:
            return ProbeResult(name=probe.name, outcome="arrived")
        return ProbeResult(name=probe.name, outcome="lost", reason=f"{reason} (message id {_message_id(mark)})")

    async def carry(self, probe: Probe, mark: str, depths: Mapping[str, int]) -> str:
        """Why it did not arrive; empty when it did. Raises BrokerError: then nobody knows."""
        async with AsyncExitStack() as stack:
            consumers = {
                name: await stack.enter_async_context(
                    Consumer(self._address, name, prefetch=depths.get(name, 0) + ROOM_COUNT, on_loss="raise")
                )
                for name in (probe.rejected_in, probe.arrives_in)
                if name is not None
            }
            outcome = await (await self._open()).publish(_message(probe, mark), timeout_s=self._timeout_s)
            if not outcome.stored:
                return f"the broker did not take it: {outcome.kind.value} {outcome.text}".strip()
            if probe.rejected_in is not None:
                found = await self._find(consumers[probe.rejected_in], mark)
                if found is None:
                    return f"it did not arrive in '{probe.rejected_in}' within {self._timeout_s:g} s"
                consumers[probe.rejected_in].dead_letter([found])
            found = await self._find(consumers[probe.arrives_in], mark)
            if found is None:
                return f"it did not arrive in '{probe.arrives_in}' within {self._timeout_s:g} s"
            consumers[probe.arrives_in].ack([found])
        return ""

    async def _find(self, consumer: Consumer, mark: str) -> Delivery | None:
        """The probe among what comes. The others stay unsettled: closing the consumer gives them back, in order."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    for delivery in await consumer.batch():
                        if mark.encode() in delivery.properties and _marked(delivery) == mark:
                            return delivery
        except TimeoutError:
            return None

    async def _open(self) -> Publisher:
        async with self._opening:
            if self._publisher is None:
                self._publisher = await Publisher(self._address).__aenter__()
            return self._publisher


def _message(probe: Probe, mark: str) -> Outgoing:
    values: dict[str, str | dict[str, str]] = {"message_id": _message_id(mark), "type": TYPE, "headers": {MARK: mark}}
    # In milliseconds. The delay of a wait queue is not what is being proved; elsewhere a probe that comes again, since
    # a crash of the broker has undone its ack, goes away by itself.
    values["expiration"] = "1" if probe.expires else str(LEFT_OVER_MS_MAX)
    body = b"A probe of 'holdfast topology'. It may be deleted."
    return Outgoing(probe.exchange, probe.key, properties.encode(values), body)


def _message_id(mark: str) -> str:
    return f"holdfast-probe-{mark}"


def _marked(delivery: Delivery) -> object:
    headers = delivery.decoded().get("headers")
    return headers.get(MARK) if isinstance(headers, dict) else None
