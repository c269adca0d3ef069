"""What stands in a virtual host: exchanges, queues, bindings and policies, as values that can be compared.

Nothing here knows how it came about (a topology file, `definitions.json`, a live broker): equal models behave alike.
In JSON each thing is written as RabbitMQ writes it, in `definitions.json` and in its management API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, field, structs

from holdfast.errors import Invalid

NAME_BYTES_MAX = 255
DEFAULT_EXCHANGE = ""
QUEUE_TYPE = "x-queue-type"
DEAD_EXCHANGE = "x-dead-letter-exchange"
DEAD_KEY = "x-dead-letter-routing-key"
DEAD_STRATEGY = "x-dead-letter-strategy"
TTL = "x-message-ttl"
EXPIRES = "x-expires"
LENGTH_MAX = "x-max-length"
BYTES_MAX = "x-max-length-bytes"
OVERFLOW = "x-overflow"
DELIVERY_LIMIT = "x-delivery-limit"
ALTERNATE = "alternate-exchange"
#: The exchanges that every virtual host has, with their types. No topology names them among its own.
BROKERS_EXCHANGES = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.rabbitmq.trace": "topic",
}
#: What the layouts call the exchange before the dead queue of one queue.
DEAD_EXCHANGES = ("dlq.{queue}", "{queue}.dlq")

#: What a policy calls what an argument sets; those with a number: the smaller of the two holds.
POLICY_KEYS = {
    "message-ttl": TTL,
    "expires": EXPIRES,
    "max-length": LENGTH_MAX,
    "max-length-bytes": BYTES_MAX,
    "overflow": OVERFLOW,
    "delivery-limit": DELIVERY_LIMIT,
    "dead-letter-exchange": DEAD_EXCHANGE,
    "dead-letter-routing-key": DEAD_KEY,
    "dead-letter-strategy": DEAD_STRATEGY,
}

#: Arguments that the rules go by, and what they have to be.
_NUMBERS = frozenset({TTL, EXPIRES, LENGTH_MAX, BYTES_MAX, DELIVERY_LIMIT})
_TEXTS = frozenset({DEAD_EXCHANGE, DEAD_KEY, DEAD_STRATEGY, OVERFLOW, ALTERNATE})

Arguments = Mapping[str, Any]
Text = Annotated[str, Meta(max_length=4096)]


class Version(NamedTuple):
    """A broker's version, as far as it decides anything here."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `3.10.8` or `4.0`. Raises Invalid."""
        parts = text.split(".")
        if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts[:2]):
            raise Invalid(f"broker version is invalid; '{text}' is not a version such as 3.10 or 4.0.5")
        return cls(int(parts[0]), int(parts[1]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class Exchange(Struct, frozen=True, kw_only=True):
    """An exchange."""

    name: Text
    type: Text = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}

    @property
    def alternate(self) -> str | None:
        """The exchange that gets what this one cannot route."""
        return self.arguments.get(ALTERNATE)


class Queue(Struct, frozen=True, kw_only=True):
    """A queue. Its type is a field of its own: brokers differ in whether they list it among the arguments."""

    name: Text
    type: Text = "classic"
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}

    @property
    def dead_exchange(self) -> str | None:
        """Where its dead letters go; None when the broker deletes them."""
        return self.arguments.get(DEAD_EXCHANGE)

    @property
    def all_arguments(self) -> dict[str, Any]:
        """The arguments to declare it with. The type is always said: a virtual host may have a default of its own."""
        return {QUEUE_TYPE: self.type, **self.arguments}


class Binding(Struct, frozen=True, kw_only=True):
    """A binding of an exchange to a queue, or to another exchange."""

    source: Text
    destination: Text
    destination_type: str = "queue"
    key: Text = field(default="", name="routing_key")
    arguments: dict[str, Any] = {}

    def __str__(self) -> str:
        more = f" {self.arguments}" if self.arguments else ""
        return f"{self.source} → {self.destination_type} {self.destination} by '{self.key}'{more}"


class Policy(Struct, frozen=True, kw_only=True):
    """A policy."""

    name: Text
    pattern: Text
    apply_to: str = field(default="all", name="apply-to")
    definition: dict[str, Any]
    priority: int = 0


class Topology(Struct, frozen=True, kw_only=True):
    """All of it, sorted by name. Make one with `topology`, which sorts and refuses contradictions."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()
    policies: tuple[Policy, ...] = ()

    def exchange(self, name: str) -> Exchange | None:
        """The exchange of that name."""
        return next((exchange for exchange in self.exchanges if exchange.name == name), None)

    def queue(self, name: str) -> Queue | None:
        """The queue of that name."""
        return next((queue for queue in self.queues if queue.name == name), None)


class FamilyQueue(Struct, frozen=True, kw_only=True):
    """A queue with the address that leads into it: publish to `exchange` with `key`."""

    queue: str
    exchange: str
    key: str
    delay_ms: int | None = None  #: in a wait queue: how long a message sits there


class Family(Struct, frozen=True, kw_only=True):
    """A main queue with its wait queues, in the order of the ladder, and its dead queue."""

    queue: str
    layout: str
    waits: tuple[FamilyQueue, ...] = ()
    dead: FamilyQueue | None = None
    #: Where the broker itself puts what is rejected: the first wait queue, or the dead queue.
    rejected_to: str | None = None


class Design(Struct, frozen=True, kw_only=True):
    """What a topology file asks for, on a broker of that version."""

    topology: Topology
    families: tuple[Family, ...] = ()
    #: Queues whose messages nobody may ever lose: dead queues, and where the unroutable goes.
    dead_queues: frozenset[str] = frozenset()
    #: Where the unroutable goes; None when the file says that nobody wants it.
    unroutable: FamilyQueue | None = None
    #: Patterns of names that are the file's alone: what matches and is not in the file is superfluous.
    owns: tuple[str, ...] = ()
    version: Version = field(default=Version(3, 10))


def topology(
    *,
    exchanges: Iterable[Exchange] = (),
    queues: Iterable[Queue] = (),
    bindings: Iterable[Binding] = (),
    policies: Iterable[Policy] = (),
    checked: bool = True,
) -> Topology:
    """Sort, and merge what is said twice in the same words. Raises Invalid for a bad name or two different words.

    What a broker has is not `checked`: an odd name or value of somebody else's is no reason to see nothing at all.
    """
    bindings = list(bindings)
    for binding in bindings if checked else ():
        check_arguments("binding", str(binding), binding.arguments)
    return Topology(
        exchanges=_unique("exchange", exchanges, checked=checked),
        queues=_unique("queue", queues, checked=checked),
        bindings=tuple(sorted({binding_id(binding): binding for binding in bindings}.values(), key=binding_id)),
        policies=_unique("policy", policies, checked=False),
    )


def plain_queue(told: Queue) -> Queue:
    """The queue that a broker or a file tells of, which may name its type among the arguments."""
    arguments = dict(told.arguments)
    kind = str(arguments.pop(QUEUE_TYPE, told.type))
    return Queue(name=told.name, type=kind, durable=told.durable, auto_delete=told.auto_delete, arguments=arguments)


def check_name(what: str, name: str) -> None:
    """A name that a broker takes and that is not its own. Raises Invalid."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not name:
        raise Invalid(f"{what} name is invalid; it is empty")
    if size > NAME_BYTES_MAX:
        raise Invalid(f"{what} name is too long; '{name[:40]}…' has {size} bytes, {NAME_BYTES_MAX} are allowed")
    if name.startswith("amq."):
        raise Invalid(f"{what} name is reserved; '{name}' begins with 'amq.', which is the broker's own")


def check_arguments(what: str, name: str, arguments: Arguments) -> None:
    """Values that AMQP can carry, and of the kind that the broker expects. Raises Invalid."""
    for key, value in arguments.items():
        if key == QUEUE_TYPE:
            raise Invalid(f"argument is invalid; {QUEUE_TYPE} of {what} '{name}' is said by its type")
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int)):
            raise Invalid(f"argument is invalid; {key} of {what} '{name}' is to be a whole number, not {value!r}")
        if key in _TEXTS and not isinstance(value, str):
            raise Invalid(f"argument is invalid; {key} of {what} '{name}' is to be a text, not {value!r}")
        if not _can_be_sent(value):
            raise Invalid(f"argument is invalid; {key} of {what} '{name}' cannot be {value!r}")


def _can_be_sent(value: object) -> bool:
    match value:
        case bool() | str():
            return True
        case int():
            return -(2**63) <= value < 2**63
        case float():
            return isfinite(value)  # a double that is no number closes the connection
        case list():
            return all(_can_be_sent(each) for each in value)
        case dict():
            return all(_can_be_sent(each) for each in value.values())
    return False


def effective(arguments: Arguments, policy: Arguments) -> dict[str, Any]:
    """What holds for a queue: its arguments and what the policies add, as the broker merges them."""
    merged = dict(arguments)
    for key, argument in POLICY_KEYS.items():
        if key not in policy:
            continue
        ours, theirs = merged.get(argument), policy[key]
        if ours is None or (argument == DELIVERY_LIMIT and ours == -1):
            merged[argument] = theirs
        elif isinstance(ours, int) and isinstance(theirs, int) and not (argument == DELIVERY_LIMIT and theirs == -1):
            merged[argument] = min(ours, theirs)
    return merged


def in_force(topology: Topology) -> Topology:
    """The same with what its policies add. Of several that fit, the one with the highest priority is in force alone."""
    fitting = sorted(topology.policies, key=lambda policy: -policy.priority)

    def added(thing: Exchange | Queue, kinds: tuple[str, ...]) -> dict[str, Any]:
        found = next((p.definition for p in fitting if p.apply_to in kinds and fits(p, thing.name)), {})
        return {key: value for key, value in found.items() if _is_sound(key, value)}

    return structs.replace(
        topology,
        queues=tuple(
            structs.replace(
                queue, arguments=effective(queue.arguments, added(queue, ("all", "queues", f"{queue.type}_queues")))
            )
            for queue in topology.queues
        ),
        exchanges=tuple(
            structs.replace(each, arguments={**({ALTERNATE: net} if net else {}), **each.arguments})
            for each in topology.exchanges
            for net in [added(each, ("all", "exchanges")).get(ALTERNATE)]
        ),
    )


def fits(policy: Policy, name: str) -> bool | None:
    """Whether its pattern is in a name; None for a pattern that the broker may read, and we cannot."""
    try:
        return re.search(policy.pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def _is_sound(key: str, value: object) -> bool:
    """Whether a policy can say so: the broker refuses a number in the place of a text."""
    if POLICY_KEYS.get(key) in _NUMBERS:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def binding_id(binding: Binding) -> tuple[str, str, str, str, str]:
    """What tells it from every other binding; it can be sorted and hashed, which arguments cannot."""
    arguments = repr(sorted(binding.arguments.items(), key=lambda item: item[0]))
    return binding.source, binding.destination_type, binding.destination, binding.key, arguments


def _unique(what: str, things: Iterable[Any], *, checked: bool) -> tuple[Any, ...]:
    found: dict[str, Any] = {}
    for thing in things:
        if checked:
            check_name(what, thing.name)
            check_arguments(what, thing.name, thing.arguments)
        if found.setdefault(thing.name, thing) != thing:
            raise Invalid(f"{what} is defined twice; '{thing.name}' is asked for in two ways that differ")
    return tuple(found[name] for name in sorted(found))
