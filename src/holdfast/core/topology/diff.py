"""What a live broker lacks, has differently, or has too much of, measured against what a file asks for.

AMQP can add, and can delete; it can change nothing. Each difference says which of the two is left, and how.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct, structs

from holdfast.core.topology.model import ALTERNATE, POLICY_KEYS, Binding, Exchange, Policy, Queue, Topology, binding_id

_POLICY_NAMES = {argument: key for key, argument in POLICY_KEYS.items()} | {ALTERNATE: "alternate-exchange"}
_NOTHING = "(none)"
_DELETE = {
    "binding": "apply with --delete takes it away",
    "queue": "apply with --delete deletes it once it is empty and nobody consumes from it",
    "exchange": "apply with --delete deletes it once nothing is bound to it",
}


class DifferenceKind(StrEnum):
    """What is the matter."""

    MISSING = "missing"
    DIFFERENT = "different"
    SUPERFLUOUS = "superfluous"


class Aspect(Struct, frozen=True, kw_only=True):
    """One thing that differs; None is "not set"."""

    name: str
    wanted: Any = None
    found: Any = None

    def __str__(self) -> str:
        return f"{self.name} is {_said(self.found)}, wanted {_said(self.wanted)}"


class Difference(Struct, frozen=True, kw_only=True):
    """One exchange, queue, binding or policy that is not as it should be."""

    kind: DifferenceKind
    what: str  #: exchange, queue, binding, policy
    name: str
    aspects: tuple[Aspect, ...] = ()
    way_out: str = ""
    by_policy: bool = False  #: all of it comes from a policy: making the thing anew would change nothing
    thing: Exchange | Queue | Binding | Policy

    def __str__(self) -> str:
        detail = "; ".join(str(aspect) for aspect in self.aspects)
        name = self.name if "'" in self.name else f"'{self.name}'"  # that of a binding quotes what it binds
        return f"{self.what} {name} is {self.kind}" + (f": {detail}" if detail else "")


def diff(wanted: Topology, found: Topology, *, owns: Sequence[str] = ()) -> list[Difference]:
    """Every difference, in the order in which it is to be put right: nets and targets come before what needs them.

    Superfluous is a binding into one of the wanted queues or exchanges that nobody asked for, and whatever has a name
    that matches `owns` and is not wanted. Anything else on the broker is somebody else's.
    """
    return [
        *_compared("exchange", wanted.exchanges, found.exchanges),
        *_compared("queue", wanted.queues, found.queues),
        *_bindings(wanted, found),
        *_compared("policy", wanted.policies, found.policies),
        *_superfluous(wanted, found, owns),
    ]


def _compared(what: str, wanted: Iterable[Any], found: Iterable[Any]) -> list[Difference]:
    there = {thing.name: thing for thing in found}
    differences = []
    for thing in wanted:
        if thing.name not in there:
            differences.append(Difference(kind=DifferenceKind.MISSING, what=what, name=thing.name, thing=thing))
        elif unlike := _aspects(thing, there[thing.name]):
            differences.append(
                Difference(
                    kind=DifferenceKind.DIFFERENT,
                    what=what,
                    name=thing.name,
                    aspects=tuple(unlike),
                    way_out=_way_out(what, thing.name, unlike),
                    thing=thing,
                )
            )
    return differences


def _aspects(wanted: Exchange | Queue | Policy, found: Exchange | Queue | Policy) -> list[Aspect]:
    """The fields that differ, in their order, and after them the arguments, by name."""
    ours, theirs = structs.asdict(wanted), structs.asdict(found)
    our_arguments, their_arguments = ours.pop("arguments", {}), theirs.pop("arguments", {})
    pairs = [(name, ours[name], theirs[name]) for name in ours if name != "name"]
    arguments = sorted(our_arguments.keys() | their_arguments.keys())
    pairs += [(name, our_arguments.get(name), their_arguments.get(name)) for name in arguments]
    return [Aspect(name=name, wanted=want, found=have) for name, want, have in pairs if want != have]


def _bindings(wanted: Topology, found: Topology) -> list[Difference]:
    there = {binding_id(binding) for binding in found.bindings}
    nets = {queue.dead_exchange for queue in wanted.queues} | {exchange.alternate for exchange in wanted.exchanges}
    final = {queue.name for queue in wanted.queues if queue.dead_exchange is None}
    missing = [binding for binding in wanted.bindings if binding_id(binding) not in there]
    # What feeds a queue comes last: nothing may arrive before the way out of it is there.
    missing.sort(key=lambda binding: binding.source not in nets and binding.destination not in final)
    return [Difference(kind=DifferenceKind.MISSING, what="binding", name=str(each), thing=each) for each in missing]


def _superfluous(wanted: Topology, found: Topology, owns: Sequence[str]) -> list[Difference]:
    queues = {queue.name for queue in wanted.queues}
    exchanges = {exchange.name for exchange in wanted.exchanges}
    wanted_bindings = {binding_id(binding) for binding in wanted.bindings}
    differences: list[Difference] = []

    def add(what: str, name: str, thing: Exchange | Queue | Binding) -> None:
        differences.append(
            Difference(kind=DifferenceKind.SUPERFLUOUS, what=what, name=name, thing=thing, way_out=_DELETE[what])
        )

    for binding in found.bindings:
        ours = queues if binding.destination_type == "queue" else exchanges
        if binding.destination in ours and binding_id(binding) not in wanted_bindings:
            add("binding", str(binding), binding)
    for queue in found.queues:
        if queue.name not in queues and _owned(queue.name, owns):
            add("queue", queue.name, queue)
    for exchange in found.exchanges:
        if exchange.name not in exchanges and _owned(exchange.name, owns):
            add("exchange", exchange.name, exchange)
    return differences


def _owned(name: str, owns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in owns)


def _way_out(what: str, name: str, aspects: list[Aspect]) -> str:
    """AMQP cannot change what exists. A policy can add what is not set; everything else needs a new one."""
    if what == "policy":
        return "set the policy anew, with the management API or rabbitmqctl set_policy"
    addable = all(aspect.found is None and aspect.name in _POLICY_NAMES for aspect in aspects)
    if addable:
        added = json.dumps({_POLICY_NAMES[aspect.name]: aspect.wanted for aspect in aspects}, ensure_ascii=False)
        return f"a policy can add it: pattern ^{_escaped(name)}$, definition {added}"
    if what == "exchange":
        return "make an exchange of another name, move the bindings and the publishers, then delete this one"
    return (
        "empty it and end its consumers, then apply with --delete makes it anew; or give the new queue another name, "
        "move the bindings, and delete this one when it has run empty"
    )


def _escaped(name: str) -> str:
    return "".join(f"\\{c}" if c in r".^$*+?()[]{}|\\" else c for c in name)


def _said(value: object) -> str:
    return _NOTHING if value is None else repr(value) if isinstance(value, str) else str(value)
