"""What the topology service needs of a broker: read what stands there, add, delete, and send a probe through it.

Whatever raises BrokerError has changed nothing, or has made exactly the one thing that it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from holdfast.core.topology.model import Binding, Exchange, Queue, Topology, Version

Thing: TypeAlias = Exchange | Queue | Binding


class QueueState(Struct, frozen=True, kw_only=True):
    """How a queue stood a few seconds ago; None is "not known yet"."""

    messages_count: int | None = None  #: ready, unacknowledged, and dead letters that have not arrived yet
    consumers_count: int | None = None
    policy: str | None = None  #: the policy that holds for it

    @property
    def is_idle(self) -> bool:
        """It had no messages and no consumers."""
        return self.messages_count == 0 and self.consumers_count == 0


class LiveTopology(Struct, frozen=True, kw_only=True):
    """A virtual host as it is; the broker's own exchanges and other people's exclusive queues are left out."""

    vhost: str
    version: Version
    declared: Topology  #: as it was declared, with its policies
    effective: Topology  #: what holds: arguments and policies merged
    states: dict[str, QueueState] = {}


class Probe(Struct, frozen=True, kw_only=True):
    """A message of ours and the way that it has to take."""

    name: str
    exchange: str
    key: str
    arrives_in: str
    rejected_in: str | None = None  #: taken there first, and rejected: the broker moves it on
    waits_in: str | None = None  #: sits there; its delay is cut short
    expires: bool = False

    @property
    def queues(self) -> tuple[str, ...]:
        """Every queue that it is in on its way."""
        return tuple(name for name in (self.rejected_in, self.waits_in, self.arrives_in) if name is not None)


class ProbeResult(Struct, frozen=True, kw_only=True):
    """What became of a probe."""

    name: str
    outcome: Literal["arrived", "lost", "skipped"]
    reason: str = ""


class TopologyBroker(Protocol):
    """A virtual host of a broker."""

    @property
    def vhost(self) -> str: ...

    async def read(self) -> LiveTopology:
        """What stands there now. Raises BrokerError: without the management API nobody can say."""

    async def create(self, thing: Thing) -> None:
        """Make it. Nothing happens when it is there already, as it is."""

    async def delete(self, thing: Thing) -> None:
        """Take it away. A queue is only deleted by whoever has asked `not_empty` before."""

    async def not_empty(self, queues: Sequence[str]) -> dict[str, str]:
        """Queue → why it may not be deleted: messages (unacknowledged and pending included), consumers, no numbers."""

    async def import_topology(self, topology: Topology) -> None:
        """Hand definitions to the broker, which adds what is missing and ignores, in silence, what differs."""

    async def probe(self, probe: Probe, *, anyway: bool) -> ProbeResult:
        """Send a probe. With messages or consumers on its way it is skipped, unless `anyway`; it settles no other."""
