"""Which queues a publish reaches, by the exchanges and bindings that the management API shows."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.routes import topic_matches
from holdfast.engines.rabbitmq.management import ManagedBinding, ManagedExchange

EXCHANGE_HOPS_MAX = 10


class Bindings:
    """All bindings of a virtual host."""

    def __init__(self, exchanges: Sequence[ManagedExchange], bindings: Sequence[ManagedBinding]) -> None:
        self._exchanges = {exchange.name: exchange for exchange in exchanges}
        self._bindings: dict[str, list[ManagedBinding]] = {}
        for binding in bindings:
            self._bindings.setdefault(binding.source, []).append(binding)

    def only_alternate(self, exchange: str, key: str) -> str:
        """The alternate exchange that takes a message because no binding does; empty when a binding does, or headers
        decide, or nothing takes it."""
        if self.reached(exchange, key, alternates=False) != set() or not self.reached(exchange, key):
            return ""
        info = self._exchanges[exchange]
        return str(info.arguments.get("alternate-exchange", "of another exchange behind it"))

    def reached(self, exchange: str, key: str, *, alternates: bool = True, hops: int = 0) -> set[str] | None:
        """Queues that get a message with this key; None where headers decide."""
        info = self._exchanges.get(exchange)
        if info is None or hops > EXCHANGE_HOPS_MAX:
            return set()
        if info.type not in ("direct", "fanout", "topic"):
            return None
        queues: set[str] = set()
        for binding in self._bindings.get(exchange, ()):
            if not _binds(info.type, binding.routing_key, key):
                continue
            if binding.destination_type == "queue":
                queues.add(binding.destination)
                continue
            further = self.reached(binding.destination, key, alternates=alternates, hops=hops + 1)
            if further is None:
                return None
            queues |= further
        if alternates and not queues and isinstance(other := info.arguments.get("alternate-exchange"), str):
            return self.reached(other, key, hops=hops + 1)
        return queues


def _binds(kind: str, binding_key: str, key: str) -> bool:
    if kind == "fanout":
        return True
    return binding_key == key if kind == "direct" else topic_matches(binding_key, key)
