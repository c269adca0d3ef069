"""Every way we know in which a topology loses messages or stands still, each with its reason.

The facts are measured (docs/topology.md has them). A hazard that is `fatal` is refused in a topology file; one that is
not is a remark on what the chosen queue type cannot promise.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from holdfast.core.topology import model as t
from holdfast.core.topology.model import Design, Queue, Topology, Version
from holdfast.core.topology.routing import Graph
from holdfast.errors import Invalid

#: The first version on which a quorum queue without a delivery limit of its own has one: 20.
HAS_DEFAULT_LIMIT = Version(4, 0)
DELIVERY_LIMIT_DEFAULT = 20
_LIMITS = (t.LENGTH_MAX, t.BYTES_MAX)
#: Remarks on a queue that is not wrong.
AT_MOST_ONCE = "a classic queue moves its dead letters at most once: one whose target is gone or full is lost"
NO_DEAD_EXCHANGE = "what is rejected in it is deleted: it has no dead-letter exchange"


class Hazard(Struct, frozen=True, kw_only=True):
    """One way to lose messages: where, and why."""

    name: str
    reason: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"'{self.name}': {self.reason}"


def hazards(design: Design) -> list[Hazard]:
    """Everything that is wrong with it, by name."""
    graph = Graph(design.topology)
    dead = design.dead_queues | graph.terminal
    # A retry that the consumer publishes goes round as well, though the broker knows of no cycle.
    retried = {
        name
        for family in design.families
        if family.waits
        for name in (family.queue, *(wait.queue for wait in family.waits))
    }
    exchanges = {exchange.name for exchange in design.topology.exchanges}
    found: set[Hazard] = set()
    for queue in design.topology.queues:
        reasons = [*_about_type(queue, design.version), *_about_dead_letters(queue, exchanges, graph)]
        if queue.name in graph.cyclic:
            reasons += _about_cycle(queue, design.version, graph)
        if queue.name in graph.cyclic or queue.name in retried:
            reasons += _about_length(queue)
        if queue.name in dead:
            reasons += _about_dead_queue(queue, design.version)
        elif queue.dead_exchange is None:
            reasons += _about_nowhere(queue, design.version)
            found.add(Hazard(name=queue.name, reason=NO_DEAD_EXCHANGE, fatal=False))
        if queue.type == "classic" and queue.dead_exchange is not None:
            found.add(Hazard(name=queue.name, reason=AT_MOST_ONCE, fatal=False))
        found |= {Hazard(name=queue.name, reason=reason) for reason in reasons}
    found |= {*_about_exchanges(design.topology), *_about_bindings(design.topology)}
    reason = "its pattern cannot be read here: nobody can say what it does to which queue"
    found |= {Hazard(name=each.name, reason=reason) for each in design.topology.policies if t.fits(each, "") is None}
    return sorted(found, key=lambda hazard: (not hazard.fatal, hazard.name, hazard.reason))


def loses(queue: Queue, version: Version, *, is_dead: bool) -> list[str]:
    """By what a queue alone deletes what is in it, but for returns: a run that reads it goes by its delivery limit."""
    held = structs.replace(queue, arguments={**queue.arguments, t.DELIVERY_LIMIT: -1})
    if is_dead:
        return [*_about_dead_queue(held, version)]
    return [] if queue.dead_exchange is not None else [*_about_nowhere(held, version)]


def refuse(found: list[Hazard], what: str) -> None:
    """Raises Invalid with the first hazard, and how many more there are."""
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise Invalid(f"{what} unsafe; {found[0]}{more}", ids=[hazard.name for hazard in found])


def delivery_limit(queue: Queue, version: Version) -> int | None:
    """After how many returns a message leaves the queue; None for never. On 3.x, -1 has a rule of its own."""
    if queue.type != "quorum":
        return None
    limit: int | None = queue.arguments.get(t.DELIVERY_LIMIT)
    if limit is None and version >= HAS_DEFAULT_LIMIT:
        return DELIVERY_LIMIT_DEFAULT
    return None if limit == -1 else limit


# What is fatal about a queue: the reasons alone.


def _about_type(queue: Queue, version: Version) -> Iterator[str]:
    limit = queue.arguments.get(t.DELIVERY_LIMIT)
    if queue.type == "classic":
        for argument in (t.DELIVERY_LIMIT, t.DEAD_STRATEGY):
            if argument in queue.arguments:
                yield f"{argument} is for quorum queues, a classic one refuses it"
    if queue.type == "quorum" and limit == -1 and version < HAS_DEFAULT_LIMIT:
        yield f"x-delivery-limit = -1 drops a message at its first requeue on {version}; leave it out before 4.0"
    if not queue.durable or queue.auto_delete:
        yield "a queue that is not durable, or deletes itself, takes its messages along"


def _about_dead_letters(queue: Queue, exchanges: set[str], graph: Graph) -> Iterator[str]:
    exchange = queue.dead_exchange
    if exchange is None:
        return
    if exchange and exchange not in exchanges and exchange not in t.BROKERS_EXCHANGES:
        yield f"its dead letters go to exchange '{exchange}', which is not there: they would be lost"
    elif not graph.targets[queue.name]:
        where = f"exchange '{exchange}'" if exchange else "the default exchange"
        key = queue.arguments.get(t.DEAD_KEY)
        by = f"key '{key}'" if key is not None else "the key of each message"
        yield f"its dead letters go to {where} with {by}, which leads to no queue here: they would be lost"
    if queue.type == "quorum":
        overflow = queue.arguments.get(t.OVERFLOW)
        if queue.arguments.get(t.DEAD_STRATEGY) != "at-least-once":
            reason = "its dead letters are moved at most once: one whose target is missing or full is lost"
            yield f"{reason}; set {t.DEAD_STRATEGY} = at-least-once"
        elif overflow != "reject-publish":
            yield "at-least-once without x-overflow = reject-publish is at most once, and the broker does not say so"
        if overflow == "reject-publish-dlx":
            yield "a quorum queue takes reject-publish-dlx for drop-head, and does not say so"


def _about_length(queue: Queue) -> Iterator[str]:
    for argument in _LIMITS:
        if argument in queue.arguments:
            yield (
                f"{argument} on a queue of a wait cycle: main and wait queue wait for each other's room when one is "
                "full, and nothing is delivered any more"
            )


def _about_cycle(queue: Queue, version: Version, graph: Graph) -> Iterator[str]:
    limit = delivery_limit(queue, version)
    if limit is not None and t.TTL not in queue.arguments:
        yield (
            f"a delivery limit ({limit}) on a queue whose dead letters come back to it: the broker takes that for a "
            "loop and drops the message at the second round; count attempts in the consumer"
        )
    if queue.name in graph.expiring_cycle:
        yield (
            f"{t.TTL} on every queue of the cycle: what expires all the way round, with nobody rejecting it, is "
            "dropped by the broker without a word"
        )
    if t.EXPIRES in queue.arguments:
        yield f"{t.EXPIRES} deletes the queue with its messages, dead-lettering none"


def _about_dead_queue(queue: Queue, version: Version) -> Iterator[str]:
    """Nobody may lose what is in it. With a dead-letter exchange of its own, a limit moves instead of deleting."""
    if t.EXPIRES in queue.arguments:
        yield f"{t.EXPIRES} deletes a dead queue with everything in it"
    for argument in _LIMITS:
        if argument in queue.arguments:
            yield f"{argument} on a dead queue: when it is full, dead letters are lost"
    if queue.dead_exchange is not None:
        return
    if t.TTL in queue.arguments:
        yield f"{t.TTL} on a dead queue deletes the letters that nobody came for"
    limit = delivery_limit(queue, version)
    if limit is not None:
        fix = "set x-delivery-limit = -1" if version >= HAS_DEFAULT_LIMIT else "leave it out"
        yield f"a delivery limit ({limit}) on a dead queue deletes what is looked at; {fix}"


def _about_nowhere(queue: Queue, version: Version) -> Iterator[str]:
    if t.TTL in queue.arguments or t.EXPIRES in queue.arguments:
        yield "what expires in it is deleted, since it has no dead-letter exchange"
    bounded = any(argument in queue.arguments for argument in _LIMITS)
    if bounded and queue.arguments.get(t.OVERFLOW) != "reject-publish":
        yield "when it is full, the oldest message is deleted; set x-overflow = reject-publish"
    limit = delivery_limit(queue, version)
    if limit is not None:
        yield f"a delivery limit ({limit}) without a dead-letter exchange deletes what comes back too often"


def _about_bindings(topology: Topology) -> Iterator[Hazard]:
    direct = {exchange.name for exchange in topology.exchanges if exchange.type == "direct"} | {"amq.direct"}
    for binding in topology.bindings:
        if binding.source in direct and {"#", "*"} & set(binding.key.split(".")):
            reason = f"it is a direct exchange: to '{binding.key}' only messages go whose key is that very text"
            yield Hazard(name=binding.source, reason=f"{reason}; make it a topic exchange, or a fanout")


def _about_exchanges(topology: Topology) -> Iterator[Hazard]:
    known = {exchange.name for exchange in topology.exchanges}
    nets = {exchange.alternate for exchange in topology.exchanges}
    for exchange in topology.exchanges:
        alternate = exchange.alternate
        if alternate is None and exchange.name not in nets:
            reason = "it has no alternate exchange: what nothing is bound for is confirmed and gone, unless mandatory"
            yield Hazard(name=exchange.name, reason=reason, fatal=False)
        elif alternate is not None and alternate not in known and alternate not in t.BROKERS_EXCHANGES:
            yield Hazard(name=exchange.name, reason=f"its alternate exchange '{alternate}' is not there")
        if not exchange.durable or exchange.auto_delete:
            yield Hazard(name=exchange.name, reason="an exchange that is not durable, or deletes itself, leaves a hole")
