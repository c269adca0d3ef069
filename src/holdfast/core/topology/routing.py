"""Where a message can go by itself: which queues a publish reaches, and where a queue's dead letters end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property, lru_cache

from msgspec import structs

from holdfast.core.topology import model as t
from holdfast.core.topology.model import Binding, Queue, Topology


class Graph:
    """The paths of a topology. What depends on a message (an unknown key, headers) counts as possible."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._queues = {queue.name: queue for queue in topology.queues}
        self._exchanges = {exchange.name: exchange for exchange in topology.exchanges}
        self._bindings: dict[str, list[Binding]] = {}
        for binding in topology.bindings:
            self._bindings.setdefault(binding.source, []).append(binding)

    @cached_property
    def targets(self) -> dict[str, frozenset[str]]:
        """Queue → the queues that its dead letters can reach."""
        return {name: self._dead_targets(queue) for name, queue in self._queues.items()}

    @cached_property
    def cyclic(self) -> frozenset[str]:
        """Queues whose dead letters can come back to them."""
        return frozenset(name for name in self._queues if name in self._reach(self.targets[name]))

    @cached_property
    def expiring_cycle(self) -> frozenset[str]:
        """Queues on a cycle that a message goes round by expiring alone."""
        expiring = {name for name, queue in self._queues.items() if t.TTL in queue.arguments}
        inside = {name: self.targets[name] & expiring for name in expiring}
        return frozenset(name for name in expiring if name in self._reach(inside[name], inside))

    @cached_property
    def terminal(self) -> frozenset[str]:
        """Queues that dead letters reach and do not leave."""
        reached = {name for targets in self.targets.values() for name in targets}
        return frozenset(name for name in reached if not self.targets[name])

    def publish(self, exchange: str, key: str | None) -> frozenset[str]:
        """The queues that a publish with that key reaches; None is a key that is not known."""
        if not exchange:
            if key is None:
                return frozenset()  # the key that it came with, which names no queue but by chance
            return frozenset({key} & self._queues.keys())
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [exchange]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            taken = [binding for binding in self._bindings.get(name, []) if self._takes(binding, key)]
            found |= {binding.destination for binding in taken if binding.destination_type == "queue"}
            waiting += [binding.destination for binding in taken if binding.destination_type == "exchange"]
            alternate = self._exchanges[name].alternate if name in self._exchanges else None
            if alternate and (not taken or key is None):
                waiting.append(alternate)
        return frozenset(found & self._queues.keys())

    def _dead_targets(self, queue: Queue) -> frozenset[str]:
        if queue.dead_exchange is None:
            return frozenset()
        return self.publish(queue.dead_exchange, queue.arguments.get(t.DEAD_KEY))

    def _takes(self, binding: Binding, key: str | None) -> bool:
        exchange = self._exchanges.get(binding.source)
        kind = exchange.type if exchange else "direct"
        if key is None or kind == "fanout":
            return True
        if kind == "direct":
            return binding.key == key
        if kind == "topic":
            return matches(binding.key, key)
        return True

    def _reach(self, start: Iterable[str], edges: dict[str, frozenset[str]] | None = None) -> set[str]:
        steps = self.targets if edges is None else edges
        found: set[str] = set()
        waiting = list(start)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += steps.get(name, ())
        return found


def without(topology: Topology, binding: Binding) -> Topology:
    """The same topology, one binding less."""
    return structs.replace(topology, bindings=tuple(each for each in topology.bindings if each != binding))


def cut_off(before: Topology, after: Topology) -> str:
    """Whose dead letters or unroutable messages lead nowhere after, and led somewhere before; empty: nobody's."""
    old, new = Graph(before), Graph(after)
    for name, targets in old.targets.items():
        if targets and not new.targets.get(name):
            return f"the dead letters of queue '{name}'"
    for exchange in before.exchanges:
        net = exchange.alternate
        if net and old.publish(net, None) and not new.publish(net, None):
            return f"what exchange '{exchange.name}' cannot route"
    return ""


def matches(pattern: str, key: str) -> bool:
    """Whether a topic binding takes a key: `*` is one word, `#` any number of them."""
    return _compiled(pattern).fullmatch("." + key) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    wild = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    return re.compile("".join(wild.get(word, r"\." + re.escape(word)) for word in pattern.split(".")), re.DOTALL)
