"""RabbitMQ's `definitions.json` ⇄ a topology. Users, permissions and parameters are no topology and stay out of it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, structs

from holdfast.core.topology.model import Topology, plain_queue, topology
from holdfast.errors import Invalid

#: What belongs to a topology; any other section of a file is left out, and said.
SECTIONS = ("exchanges", "queues", "bindings", "policies")
#: Sections that say nothing about what would be lost by leaving them out.
_LABELS = frozenset(
    {"rabbit_version", "rabbitmq_version", "product_name", "product_version", "original_cluster_name", "explanation"}
    | {"rabbitmq_definition_format", "original_vhost_name", "metadata", "description", "default_queue_type", "vhosts"}
    | {"limits"}
)


class _Located(Struct):
    vhost: str | None = None  #: None in a file that is for any virtual host


class _Locations(Struct):
    """Of each thing in the file, the virtual host."""

    exchanges: list[_Located] = []
    queues: list[_Located] = []
    bindings: list[_Located] = []
    policies: list[_Located] = []


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
        file = msgspec.json.decode(data, type=Topology)
        located = structs.asdict(msgspec.json.decode(data, type=_Locations))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"definitions are invalid; {source}: {error}") from error
    left_out = [name for name in sections if name not in SECTIONS and name not in _LABELS]
    named = {entry.vhost for part in located.values() for entry in part if entry.vhost is not None}
    others = sorted(named - {vhost})
    if named and vhost not in named:
        if len(named) > 1:
            raise Invalid(
                f"definitions have several virtual hosts; {source} has {', '.join(others)}, and none is '{vhost}'"
            )
        others = []
        vhost = named.pop()

    def of_vhost(section: str) -> list[Any]:
        pairs = zip(getattr(file, section), located[section], strict=True)
        return [thing for thing, entry in pairs if entry.vhost in (None, vhost)]

    bindings = of_vhost("bindings")
    for binding in bindings:
        if binding.destination_type not in ("queue", "exchange"):
            raise Invalid(
                f"definitions are invalid; a binding of '{binding.source}' goes to a '{binding.destination_type}', "
                "which is neither queue nor exchange"
            )
    return Definitions(
        topology=topology(
            exchanges=of_vhost("exchanges"),
            queues=[plain_queue(queue) for queue in of_vhost("queues")],
            bindings=bindings,
            policies=of_vhost("policies"),
        ),
        left_out=(*left_out, *(f"virtual host '{other}'" for other in others)),
    )


def to_definitions(found: Topology, *, vhost: str | None = "/") -> dict[str, object]:
    """What `definitions.json` says about it. Without a virtual host: the form for importing into any one."""
    place = {} if vhost is None else {"vhost": vhost}
    queues = []
    for queue in found.queues:
        written = {"name": queue.name, **place, **msgspec.to_builtins(queue), "arguments": queue.all_arguments}
        del written["type"]
        queues.append(written)
    return {
        "exchanges": [{"name": each.name, **place, **msgspec.to_builtins(each)} for each in found.exchanges],
        "queues": queues,
        "bindings": [{"source": each.source, **place, **msgspec.to_builtins(each)} for each in found.bindings],
        "policies": [{**place, **msgspec.to_builtins(each)} for each in found.policies],
    }


def is_brokers_own(exchange: str) -> bool:
    """The default exchange and those that every virtual host has."""
    return not exchange or exchange.startswith("amq.")
