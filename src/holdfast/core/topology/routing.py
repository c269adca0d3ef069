"""Where a message can go by itself: which queues a publish reaches, and where a queue's dead letters end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Literal

from msgspec import structs

from holdfast.core.topology import model as t
from holdfast.core.topology.model import Binding, Design, Queue, Topology

#: Exchanges that look at the key alone, or at nothing.
_BY_KEY = ("direct", "fanout", "topic")


class Graph:
    """The paths of a topology."""

    def __init__(self, topology: Topology) -> None:
        self._queues = {queue.name: queue for queue in topology.queues}
        self._exchanges = {exchange.name: exchange for exchange in topology.exchanges}
        self._bindings: dict[str, list[Binding]] = {}
        for binding in topology.bindings:
            self._bindings.setdefault(binding.source, []).append(binding)
        for name in self._queues:
            by_name = Binding(source=t.DEFAULT_EXCHANGE, destination=name, key=name)
            self._bindings.setdefault(t.DEFAULT_EXCHANGE, []).append(by_name)
        self._by_key: dict[tuple[str, str | None], list[Binding]] = {}
        for source, bindings in self._bindings.items():
            for binding in bindings:
                self._by_key.setdefault((source, binding.key), []).append(binding)

    @cached_property
    def targets(self) -> dict[str, frozenset[str]]:
        """Queue → the queues that its dead letters can reach."""
        found: dict[str, frozenset[str]] = dict.fromkeys(self._queues, frozenset())
        for name, queue in self._queues.items():
            if queue.dead_exchange is not None:
                found[name] = self.possible(queue.dead_exchange, queue.arguments.get(t.DEAD_KEY))
        return found

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

    def leading_to(self, dead_queue: str, is_main: Callable[[str], bool]) -> frozenset[str]:
        """The queues whose letters end in it: the broker sends them there, if need be through wait queues and other
        dead queues, or the exchange by which the layouts have their consumers park leads there."""
        targets = {name: self._letters_of(queue) for name, queue in self._queues.items()}
        found = {name for name in self._queues if dead_queue in self._parked_into(name)}
        seen, waiting = {dead_queue}, [dead_queue]
        while waiting:
            queue = waiting.pop()
            before = {name for name, reached in targets.items() if queue in reached} - seen
            seen |= before
            found |= before
            waiting += [name for name in before if not is_main(name)]
        return frozenset(name for name in found if is_main(name) and name != dead_queue)

    def _letters_of(self, queue: Queue) -> set[str]:
        """Where its dead letters are meant to go: what only an alternate exchange takes has lost its way."""
        exchange, key = queue.dead_exchange, queue.arguments.get(t.DEAD_KEY)
        if exchange is None or (not exchange and key is None):
            return set()
        return self._walk(exchange, key, alternates=False)[0]

    def _parked_into(self, queue: str) -> set[str]:
        found = [pattern.format(queue=queue) for pattern in t.DEAD_EXCHANGES]
        exchanges = [exchange for exchange in found if exchange in self._exchanges]
        return {name for exchange in exchanges for name in self._walk(exchange, None, alternates=False)[0]}

    def possible(self, exchange: str, key: str | None) -> frozenset[str]:
        """The queues that a publish with that key can reach; None is a key that is not known.

        What depends on the message (an unknown key, headers) counts as possible.
        """
        if not exchange and key is None:
            return frozenset()  # the key that it came with, which names no queue but by chance
        return frozenset(self._walk(exchange, key)[0] & self._queues.keys())

    def reached(self, exchange: str, key: str, *, alternates: bool = True) -> set[str] | None:
        """The queues that get a message with this key; None where headers decide."""
        found, is_certain = self._walk(exchange, key, alternates=alternates)
        return found if is_certain else None

    def only_alternate(self, exchange: str, key: str) -> str:
        """The alternate exchange that takes a message because no binding does.

        Empty when a binding does, or headers decide, or nothing takes it.
        """
        if self.reached(exchange, key, alternates=False) != set() or not self.reached(exchange, key):
            return ""
        return self._exchanges[exchange].alternate or "of another exchange behind it"

    def _walk(self, exchange: str, key: str | None, *, alternates: bool = True) -> tuple[set[str], bool]:
        """The queues that it comes to, and whether that is certain whatever its headers are."""
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [exchange]
        is_certain = True
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            there = self._exchanges.get(name)
            kind = there.type if there else t.BROKERS_EXCHANGES.get(name, "direct")
            is_certain &= kind in _BY_KEY
            # Behind the default exchange is every queue: they are not all looked at for each of them.
            is_direct = kind == "direct" and key is not None
            bound = self._by_key.get((name, key), []) if is_direct else self._bindings.get(name, [])
            taken = [binding for binding in bound if _takes(kind, binding.key, key)]
            found |= {binding.destination for binding in taken if binding.destination_type == "queue"}
            waiting += [binding.destination for binding in taken if binding.destination_type == "exchange"]
            if alternates and there and there.alternate and (not taken or key is None):
                waiting.append(there.alternate)
        return found, is_certain

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


def roles_of(design: Design) -> dict[str, Literal["main", "wait", "dead"]]:
    """What each queue is for: work, a delay, or what died."""
    graph = Graph(design.topology)
    dead = design.dead_queues | graph.terminal
    waits = {wait.queue for family in design.families for wait in family.waits}
    found: dict[str, Literal["main", "wait", "dead"]] = {}
    for queue in design.topology.queues:
        waits_here = queue.name in waits or (queue.name in graph.cyclic and t.TTL in queue.arguments)
        found[queue.name] = "wait" if waits_here else "dead" if queue.name in dead else "main"
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
        if net and old.possible(net, None) and not new.possible(net, None):
            return f"what exchange '{exchange.name}' cannot route"
    return ""


def topic_matches(pattern: str, key: str) -> bool:
    """Whether a topic exchange would route the key by this binding: `*` is one word, `#` any number."""
    words = key.split(".") if key else []
    positions: dict[str, int] = {}  # of each word, as bits
    for position, word in enumerate(words):
        positions[word] = positions.get(word, 0) | 1 << position
    everywhere = (1 << len(words) + 1) - 1
    # Which prefixes of the words the pattern so far can end at. All at a time: the pattern is a stranger's.
    ends = 1
    for part in pattern.split(".") if pattern else ():
        if part == "#":
            ends = everywhere & -(ends & -ends)  # from the first of them on
        else:
            ends = (ends & (everywhere if part == "*" else positions.get(part, 0))) << 1 & everywhere
        if not ends:
            return False
    return bool(ends >> len(words))


def _takes(kind: str, binding_key: str, key: str | None) -> bool:
    if key is None or kind not in ("direct", "topic"):
        return True
    return binding_key == key if kind == "direct" else topic_matches(binding_key, key)
