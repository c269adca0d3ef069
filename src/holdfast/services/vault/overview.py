"""The overview of dead-letter queues: what the vault has of each, and beside it what the brokers said of them last.

A broker is asked in the background, at most once in a few seconds, and only while somebody looks. Whoever looks waits a
moment for a fresh answer and no longer: a broker that is away is said to be, and holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from holdfast.core.moments import moment_or_none
from holdfast.core.requests.declare import Caller
from holdfast.core.requests.vault import BrokerView, DeadQueueView, OverviewReply
from holdfast.core.states import LetterState
from holdfast.errors import HoldfastError
from holdfast.ports.broker import Broker, QueueFacts
from holdfast.ports.clock import Clock
from holdfast.services.vault.custody import Custody
from holdfast.telemetry.events import emit

#: What a broker said is so long good enough.
FRESH_S = 2.0
#: So long a question is waited for by those who look,
PATIENCE_S = 0.25
#: and after so long without an answer the broker is said to be away.
SILENT_S = 2.0
ASK_TIMEOUT_S = 15.0


class BrokerWatch:
    """What one broker said last of its dead-letter queues."""

    def __init__(self, broker: Broker, *, clock: Clock) -> None:
        self.broker = broker
        self.queues: Mapping[str, QueueFacts] = {}
        self.reachable: bool | None = None
        self.why = ""
        self.asked_at_us = 0
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._ended_s = float("-inf")

    async def look(self) -> None:
        """See that what is known is fresh, as far as a moment allows."""
        loop = asyncio.get_running_loop()
        if self._asking is None and loop.time() - self._ended_s >= FRESH_S:
            self._began_s = loop.time()
            self._asking = asyncio.create_task(self._ask(), name=f"dead-letter queues of {self.broker.origin}")
        if self._asking is not None:
            # Counted from the question on: whoever comes later to one that hangs does not wait for it as well.
            await asyncio.wait([self._asking], timeout=max(0.0, self._began_s + PATIENCE_S - loop.time()))
        if self._asking is not None and (silent_s := loop.time() - self._began_s) >= SILENT_S:
            self.reachable, self.why = False, f"it has not answered for {silent_s:.0f} s"

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                found = await self.broker.inspector.queues()
            self.queues = {one.queue: one for one in found}
            self._answered("")
        except TimeoutError:
            self._answered(f"it has not answered for {ASK_TIMEOUT_S:.0f} s")
        except HoldfastError as error:
            self._answered(error.message)
        except Exception as bug:  # noqa: BLE001 - those who look are told that nothing is known
            emit("server.bug", method="overview", error=repr(bug), traceback=bug)
            self._answered("it could not be asked; the server's log has the details")
        finally:
            self._asking = None
            self._ended_s = asyncio.get_running_loop().time()

    def _answered(self, why: str) -> None:
        self.reachable, self.why, self.asked_at_us = not why, why, self._clock.now_us()

    def view(self, caller: Caller) -> BrokerView:
        """Whether it answers; a reason may have names of queues in it."""
        trouble = self.broker.publisher.trouble
        return BrokerView(
            broker=self.broker.origin,
            reachable=self.reachable,
            why="" if caller.queues else self.why,
            redrives_wait=bool(trouble),
            redrives_why="" if caller.queues else trouble,
            asked_at=moment_or_none(self.asked_at_us),
        )

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError):
                await self._asking


class QueueOverview:
    """Every dead-letter queue at a glance. Of the vault it reads tallies, and counts no letters."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody
        self.brokers = [BrokerWatch(broker, clock=custody.clock) for broker in custody.brokers]

    async def read(self, caller: Caller) -> OverviewReply:
        """As a caller may see it."""
        await asyncio.gather(*(broker.look() for broker in self.brokers))
        told: dict[str, tuple[BrokerWatch, QueueFacts]] = {}
        for broker in self.brokers:
            for name, facts in broker.queues.items():
                told.setdefault(name, (broker, facts))
        vault = self._custody.vault
        states: dict[str, dict[str, int]] = {}
        for tally in await vault.ledger.tallies():
            states.setdefault(tally.queue, {})[tally.state] = tally.count
        captures = {one.queue: one for one in self._custody.captures()}
        names = [name for name in sorted({*told, *states, *captures}) if caller.may_touch(name)]
        with_captured = [name for name in names if states.get(name, {}).get(LetterState.CAPTURED.value)]
        died_at = await vault.letters.oldest_deaths(with_captured)
        queues = []
        for name in names:
            its_broker, facts = told.get(name) or (None, QueueFacts(queue=name))
            says = its_broker is not None and its_broker.reachable
            source = facts.source_queue if caller.may_touch(facts.source_queue) else ""
            queues.append(
                DeadQueueView(
                    queue=name,
                    source_queue=source or None,
                    broker=its_broker.broker.origin if its_broker else None,
                    ready=facts.ready if says else None,
                    consumers=facts.consumers if says else None,
                    states=states.get(name, {}),
                    oldest_at=died_at.get(name),
                    capture=captures.get(name),
                )
            )
        return OverviewReply(queues=queues, brokers=[broker.view(caller) for broker in self.brokers])

    async def close(self) -> None:
        """Ask the brokers no more."""
        for broker in self.brokers:
            await broker.close()
