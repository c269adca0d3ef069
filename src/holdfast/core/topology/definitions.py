"""RabbitMQ's `definitions.json` ⇄ a topology. Users, permissions and parameters are no topology and stay out of it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from holdfast.core.topology.model import QUEUE_TYPE, Binding, Exchange, Policy, Queue, Topology, topology
from holdfast.errors import Invalid

#: What belongs to a topology; any other section of a file is left out, and said.
SECTIONS = ("exchanges", "queues", "bindings", "policies")
#: Sections that say nothing about what would be lost by leaving them out.
_LABELS = frozenset(
    {"rabbit_version", "rabbitmq_version", "product_name", "product_version", "original_cluster_name", "explanation"}
    | {"rabbitmq_definition_format", "original_vhost_name", "metadata", "description", "default_queue_type", "vhosts"}
    | {"limits"}
)

Text = Annotated[str, Meta(max_length=4096)]


class _Exchange(Struct, kw_only=True):
    name: Text
    type: Text = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}
    vhost: str | None = None


class _Queue(Struct, kw_only=True):
    name: Text
    type: Text | None = None
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}
    vhost: str | None = None


class _Binding(Struct, kw_only=True):
    source: Text
    destination: Text
    destination_type: str = "queue"
    routing_key: Text = ""
    arguments: dict[str, Any] = {}
    vhost: str | None = None


class _Policy(Struct, kw_only=True):
    name: Text
    pattern: Text
    definition: dict[str, Any]
    priority: int = 0
    apply_to: str = msgspec.field(default="all", name="apply-to")
    vhost: str | None = None


class _DefinitionsFile(Struct, kw_only=True):
    exchanges: list[_Exchange] = []
    queues: list[_Queue] = []
    bindings: list[_Binding] = []
    policies: list[_Policy] = []


class Definitions(Struct, frozen=True, kw_only=True):
    """A definitions file as far as it is a topology, and what else was in it."""

    topology: Topology
    left_out: tuple[str, ...] = ()  #: sections, or virtual hosts, that were not read


def from_definitions(data: bytes, *, vhost: str, source: str) -> Definitions:
    """Read a file for a virtual host.

    A file of one virtual host fits any; of one with several, the part of `vhost` is taken. Raises Invalid.
    """
    try:
        sections = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        file = msgspec.json.decode(data, type=_DefinitionsFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"definitions are invalid; {source}: {error}") from error
    left_out = [name for name in sections if name not in SECTIONS and name not in _LABELS]
    named = {entry.vhost for part in _parts(file) for entry in part if entry.vhost is not None}
    others = sorted(named - {vhost})
    if named and vhost not in named:
        if len(named) > 1:
            raise Invalid(
                f"definitions have several virtual hosts; {source} has {', '.join(others)}, and none is '{vhost}'"
            )
        others = []
        vhost = named.pop()
    kept = {None, vhost}
    return Definitions(
        topology=topology(
            exchanges=[_exchange(entry) for entry in file.exchanges if entry.vhost in kept],
            queues=[_queue(entry) for entry in file.queues if entry.vhost in kept],
            bindings=[_binding(entry) for entry in file.bindings if entry.vhost in kept],
            policies=[_policy(entry) for entry in file.policies if entry.vhost in kept],
        ),
        left_out=(*left_out, *(f"virtual host '{other}'" for other in others)),
    )


def to_definitions(found: Topology, *, vhost: str | None = "/") -> dict[str, object]:
    """What `definitions.json` says about it. Without a virtual host: the form for importing into any one."""
    place = {} if vhost is None else {"vhost": vhost}
    return {
        "exchanges": [
            {
                "name": exchange.name,
                **place,
                "type": exchange.type,
                "durable": exchange.durable,
                "auto_delete": exchange.auto_delete,
                "internal": exchange.internal,
                "arguments": exchange.arguments,
            }
            for exchange in found.exchanges
        ],
        "queues": [
            {
                "name": queue.name,
                **place,
                "durable": queue.durable,
                "auto_delete": queue.auto_delete,
                "arguments": queue.all_arguments,
            }
            for queue in found.queues
        ],
        "bindings": [
            {
                "source": binding.source,
                **place,
                "destination": binding.destination,
                "destination_type": binding.destination_type,
                "routing_key": binding.key,
                "arguments": binding.arguments,
            }
            for binding in found.bindings
        ],
        "policies": [
            {
                **place,
                "name": policy.name,
                "pattern": policy.pattern,
                "apply-to": policy.apply_to,
                "definition": policy.definition,
                "priority": policy.priority,
            }
            for policy in found.policies
        ],
    }


def is_brokers_own(exchange: str) -> bool:
    """The default exchange and those that every virtual host has."""
    return not exchange or exchange.startswith("amq.")


def _parts(file: _DefinitionsFile) -> tuple[list[_Exchange], list[_Queue], list[_Binding], list[_Policy]]:
    return file.exchanges, file.queues, file.bindings, file.policies


def _exchange(entry: _Exchange) -> Exchange:
    return Exchange(
        name=entry.name,
        type=entry.type,
        durable=entry.durable,
        auto_delete=entry.auto_delete,
        internal=entry.internal,
        arguments=entry.arguments,
    )


def _queue(entry: _Queue) -> Queue:
    arguments = dict(entry.arguments)
    kind = arguments.pop(QUEUE_TYPE, entry.type or "classic")
    return Queue(
        name=entry.name, type=str(kind), durable=entry.durable, auto_delete=entry.auto_delete, arguments=arguments
    )


def _binding(entry: _Binding) -> Binding:
    if entry.destination_type not in ("queue", "exchange"):
        raise Invalid(
            f"definitions are invalid; a binding of '{entry.source}' goes to a '{entry.destination_type}', "
            "which is neither queue nor exchange"
        )
    return Binding(
        source=entry.source,
        destination=entry.destination,
        destination_type=entry.destination_type,
        key=entry.routing_key,
        arguments=entry.arguments,
    )


def _policy(entry: _Policy) -> Policy:
    return Policy(
        name=entry.name,
        pattern=entry.pattern,
        definition=entry.definition,
        priority=entry.priority,
        apply_to=entry.apply_to,
    )
