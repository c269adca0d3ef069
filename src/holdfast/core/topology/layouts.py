"""The topology file and its layouts → exchanges, queues and bindings, safe by construction for the broker's version.

`per-consumer`: main → `retry.{queue}` → wait queue → main, and `dlq.{queue}` → dead queue. `quorum`: the same on quorum
queues, through the default exchange, with a fanout exchange before the dead queue. `shared-dlq`: many main queues, one
dead queue. `plain`: a queue by itself, for where the layouts' queues are fed from.

`parse_file` checks every key and type of the file, `design` says what its entries mean.
"""

from __future__ import annotations

import string
import tomllib
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs

from holdfast.core.checks import nearest
from holdfast.core.moments import parse_duration
from holdfast.core.topology import model as t
from holdfast.core.topology.model import Binding, Design, Exchange, Family, FamilyQueue, Queue, Version
from holdfast.core.topology.rules import HAS_DEFAULT_LIMIT, hazards, refuse
from holdfast.errors import Invalid

FILE_BYTES_MAX = 4_000_000
ENTRIES_COUNT_MAX = 10_000
STEPS_COUNT_MAX = 32
#: The broker's own ceiling for a time to live: 49 days.
TTL_MS_MAX = 2**32 - 1

Layout = Literal["per-consumer", "quorum", "shared-dlq", "plain"]
QueueType = Literal["classic", "quorum"]
Count = Annotated[int, Meta(ge=0)]

DELAY_DEFAULT = "15s"
#: The first version that has at-least-once dead-lettering.
HAS_AT_LEAST_ONCE = Version(3, 10)
EXCHANGE_TYPES = ("direct", "fanout", "topic", "headers")
_PLAIN_WORDS = {
    "`int`": "a whole number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`object`": "a table",
    "`array`": "a list",
}


class NamesEntry(Struct, frozen=True, kw_only=True):
    """How the parts of a layout are called; `{queue}` stands for the main queue, `{step}` for a place in the ladder."""

    wait_queue: str | None = None
    step_suffix: str | None = None
    retry_exchange: str | None = None
    retry_key: str | None = None
    dead_exchange: str | None = None
    dead_key: str | None = None
    dead_queue: str | None = None


class BindingEntry(Struct, frozen=True, kw_only=True):
    """A binding, or several that differ in their keys alone."""

    exchange: str
    key: str | None = None
    keys: list[str] | None = None
    arguments: dict[str, Any] = {}


class DefaultsEntry(Struct, frozen=True, kw_only=True):
    """What holds for every queue that does not say otherwise."""

    layout: Layout | None = None
    type: QueueType | None = None
    retry_delay: str | list[str] | None = None
    message_timeout: str | None = None
    names: NamesEntry = NamesEntry()


class QueueEntry(DefaultsEntry, frozen=True, kw_only=True):
    """A main queue."""

    max_length: Count | None = None
    max_length_bytes: Count | None = None
    delivery_limit: int | None = None
    bindings: list[BindingEntry] = []
    arguments: dict[str, Any] = {}


class ExchangeEntry(Struct, frozen=True, kw_only=True):
    """An exchange."""

    type: str = "topic"
    internal: bool = False
    alternate_exchange: str | None = None
    bindings: list[BindingEntry] = []
    arguments: dict[str, Any] = {}


class UnroutableEntry(Struct, frozen=True, kw_only=True):
    """Where messages go that no binding takes; switched off by `enabled = false`."""

    enabled: bool = True
    exchange: str = "unroutable"
    queue: str = "unroutable"
    type: QueueType | None = None


class TopologyFile(Struct, frozen=True, kw_only=True):
    """The whole file."""

    defaults: DefaultsEntry = DefaultsEntry()
    unroutable: UnroutableEntry = UnroutableEntry()
    owns: list[str] = []
    exchanges: dict[str, ExchangeEntry] = {}
    queues: dict[str, QueueEntry] = {}


class _Style(NamedTuple):
    """What makes a layout."""

    type: str
    names: NamesEntry
    dead_type: str = "direct"  #: of the exchange before the dead queue
    waits_by_default: bool = True


_WAIT_NAMES = NamesEntry(
    wait_queue="{queue}.retry", step_suffix=".{step}", retry_exchange="", retry_key="retry", dead_key=""
)

STYLES: dict[str, _Style] = {
    "per-consumer": _Style(
        "classic",
        structs.replace(
            _WAIT_NAMES,
            retry_exchange="retry.{queue}",
            dead_exchange=t.DEAD_EXCHANGES[0],
            dead_key="parking",
            dead_queue="{queue}.dlq",
        ),
    ),
    "quorum": _Style(
        "quorum",
        structs.replace(_WAIT_NAMES, dead_exchange=t.DEAD_EXCHANGES[1], dead_queue="{queue}.dlq"),
        dead_type="fanout",
    ),
    "shared-dlq": _Style(
        "classic",
        structs.replace(_WAIT_NAMES, dead_exchange="", dead_queue="dlq"),
        dead_type="fanout",
        waits_by_default=False,
    ),
    "plain": _Style("classic", NamesEntry(), waits_by_default=False),
}


def parse_file(data: bytes, *, source: str) -> TopologyFile:
    """Read a topology file. Raises Invalid, which says what is wrong and where."""
    if len(data) > FILE_BYTES_MAX:
        raise Invalid(f"topology file is invalid; {source} is larger than {FILE_BYTES_MAX} bytes")
    try:
        table = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Invalid(f"topology file is invalid; {source} is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # also of a number that is too long
        raise Invalid(f"topology file is invalid; {source} is not TOML: {error}") from error
    _check_keys(table, TopologyFile, source, "")
    try:
        file = msgspec.convert(table, TopologyFile)
    except msgspec.ValidationError as error:
        raise Invalid(f"topology file is invalid; {source}: {_readable(str(error))}") from error
    if len(file.queues) + len(file.exchanges) > ENTRIES_COUNT_MAX:
        raise Invalid(f"topology file is invalid; {source} has more than {ENTRIES_COUNT_MAX} queues and exchanges")
    return file


def design(file: TopologyFile, version: Version) -> Design:
    """What the file asks for on a broker of this version. Raises Invalid: nothing unsafe is ever designed."""
    parts = _Parts()
    for name, exchange in file.exchanges.items():
        _add_exchange(parts, name, exchange)
    for name, entry in file.queues.items():
        _add_queue(parts, name, entry, file.defaults, version)
    unroutable = _add_unroutable(parts, file, version)
    made = Design(
        topology=t.topology(exchanges=parts.exchanges, queues=parts.queues, bindings=parts.bindings),
        families=tuple(sorted(parts.families, key=lambda family: family.queue)),
        dead_queues=frozenset(
            [family.dead.queue for family in parts.families if family.dead] + ([unroutable.queue] if unroutable else [])
        ),
        unroutable=unroutable,
        owns=tuple(file.owns),
        version=version,
    )
    _check_bindings(made)
    refuse([hazard for hazard in hazards(made) if hazard.fatal], "topology is")
    return made


def milliseconds(text: str, *, what: str) -> int:
    """A duration as the broker wants it: 1 ms to 49 days. Raises Invalid."""
    duration_us = parse_duration(text, what=what)
    if duration_us % 1000 or not 1 <= duration_us // 1000 <= TTL_MS_MAX:
        raise Invalid(f"{what} is invalid; '{text}' is not a whole number of milliseconds from 1ms to 49 days")
    return duration_us // 1000


def delays(value: str | list[str], *, what: str) -> list[int]:
    """The steps of a delay ladder in milliseconds; one text is a ladder of one step. Raises Invalid."""
    texts = [value] if isinstance(value, str) else value
    if not 1 <= len(texts) <= STEPS_COUNT_MAX:
        raise Invalid(f"{what} is invalid; a ladder has 1 to {STEPS_COUNT_MAX} steps, not {len(texts)}")
    return [milliseconds(text, what=what) for text in texts]


class _Parts:
    """What the layouts of a file add up to."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.queues: list[Queue] = []
        self.bindings: list[Binding] = []
        self.families: list[Family] = []


def _add_exchange(parts: _Parts, name: str, entry: ExchangeEntry) -> None:
    if entry.type not in EXCHANGE_TYPES and not entry.type.startswith("x-"):
        raise Invalid(
            f"exchange type is unknown; '{name}' is to be a '{entry.type}', use one of {', '.join(EXCHANGE_TYPES)}"
        )
    arguments = dict(entry.arguments)
    if entry.alternate_exchange:
        arguments[t.ALTERNATE] = entry.alternate_exchange
    parts.exchanges.append(Exchange(name=name, type=entry.type, internal=entry.internal, arguments=arguments))
    parts.bindings += _bindings(name, "exchange", entry.bindings)


def _add_queue(parts: _Parts, name: str, entry: QueueEntry, defaults: DefaultsEntry, version: Version) -> None:
    layout = entry.layout or defaults.layout or "per-consumer"
    style = STYLES[layout]
    kind = entry.type or defaults.type or style.type
    names = _Names(name, entry.names, defaults.names, style.names)
    what = f"retry_delay of '{name}'"
    wanted = entry.retry_delay if entry.retry_delay is not None else defaults.retry_delay
    if layout == "plain":
        wanted = entry.retry_delay  # a default for the others is none for a queue by itself
        if wanted is not None:
            raise Invalid(f"{what} is invalid; a queue of layout 'plain' has no wait queues")
    elif wanted is None and style.waits_by_default:
        wanted = DELAY_DEFAULT
    steps = delays(wanted, what=what) if wanted is not None else []
    waits = _waits(parts, names, steps, kind, version)
    dead = None if layout == "plain" else _dead(parts, names, style, kind, version)
    rejected_to: FamilyQueue | None = waits[0] if waits and style.waits_by_default else dead
    timeout = entry.message_timeout if entry.message_timeout is not None else defaults.message_timeout
    arguments = _own_arguments(name, entry, timeout if layout != "plain" else entry.message_timeout)
    if rejected_to is not None:
        key = names.retry_key if rejected_to in waits and rejected_to.exchange else rejected_to.key
        arguments |= _dead_lettering(rejected_to.exchange, key, kind, version)
    if rejected_to is None or rejected_to in waits:
        arguments = {**no_limit(kind, version), **arguments}
    parts.queues.append(Queue(name=name, type=kind, arguments={**arguments, **entry.arguments}))
    parts.bindings += _bindings(name, "queue", entry.bindings)
    parts.families.append(
        Family(
            queue=name, layout=layout, waits=waits, dead=dead, rejected_to=rejected_to.queue if rejected_to else None
        )
    )


def _waits(parts: _Parts, names: _Names, steps: list[int], kind: str, version: Version) -> tuple[FamilyQueue, ...]:
    """One wait queue per delay: in one queue for all, a long delay at the head would hold up the short ones."""
    waits = []
    exchange = names.text("retry_exchange")
    if exchange and steps:
        parts.exchanges.append(Exchange(name=exchange, type="direct"))
    for step, delay_ms in enumerate(steps, 1):
        suffix = names.text("step_suffix", step=str(step)) if len(steps) > 1 else ""
        queue = names.text("wait_queue") + suffix
        key = (names.retry_key + suffix) if exchange else queue
        back = _dead_lettering(t.DEFAULT_EXCHANGE, names.queue, kind, version)
        parts.queues.append(
            Queue(name=queue, type=kind, arguments={t.TTL: delay_ms, **back, **no_limit(kind, version)})
        )
        if exchange:
            # The first step is also where the main queue's own dead letters go, which all have the same key.
            keys = {key, names.retry_key} if step == 1 else {key}
            parts.bindings += [Binding(source=exchange, destination=queue, key=each) for each in keys]
        waits.append(FamilyQueue(queue=queue, exchange=exchange, key=key, delay_ms=delay_ms))
    return tuple(waits)


def _dead(parts: _Parts, names: _Names, style: _Style, kind: str, version: Version) -> FamilyQueue:
    exchange, queue = names.text("dead_exchange"), names.text("dead_queue")
    key = names.text("dead_key") if exchange else queue
    parts.queues.append(Queue(name=queue, type=kind, arguments=no_limit(kind, version)))
    if exchange:
        parts.exchanges.append(Exchange(name=exchange, type=style.dead_type))
        parts.bindings.append(Binding(source=exchange, destination=queue, key=key))
    return FamilyQueue(queue=queue, exchange=exchange, key=key)


def _add_unroutable(parts: _Parts, file: TopologyFile, version: Version) -> FamilyQueue | None:
    """The net under every exchange: what nothing is bound for is kept instead of confirmed and gone."""
    entry = file.unroutable
    if not entry.enabled or not parts.exchanges:
        return None
    kind = entry.type or ("quorum" if any(queue.type == "quorum" for queue in parts.queues) else "classic")
    parts.exchanges = [
        exchange
        if exchange.alternate
        else structs.replace(exchange, arguments={**exchange.arguments, t.ALTERNATE: entry.exchange})
        for exchange in parts.exchanges
    ]
    parts.exchanges.append(Exchange(name=entry.exchange, type="fanout"))
    parts.queues.append(Queue(name=entry.queue, type=kind, arguments=no_limit(kind, version)))
    parts.bindings.append(Binding(source=entry.exchange, destination=entry.queue))
    return FamilyQueue(queue=entry.queue, exchange=entry.exchange, key="")


def _dead_lettering(exchange: str, key: str, kind: str, version: Version) -> dict[str, Any]:
    arguments: dict[str, Any] = {t.DEAD_EXCHANGE: exchange, t.DEAD_KEY: key}
    if kind == "quorum":
        if version < HAS_AT_LEAST_ONCE:
            raise Invalid(
                f"broker is too old; RabbitMQ {version} has no at-least-once dead-lettering, which came with "
                f"{HAS_AT_LEAST_ONCE}: without it a quorum queue loses dead letters whose target is missing or full"
            )
        # Without reject-publish the broker takes at-least-once for at-most-once, and says nothing.
        arguments |= {t.DEAD_STRATEGY: "at-least-once", t.OVERFLOW: "reject-publish"}
    return arguments


def no_limit(kind: str, version: Version) -> dict[str, Any]:
    """-1 from 4.0, where the default of 20 deletes. Nothing on 3.x, where -1 drops a message at its first requeue."""
    return {t.DELIVERY_LIMIT: -1} if kind == "quorum" and version >= HAS_DEFAULT_LIMIT else {}


def _own_arguments(name: str, entry: QueueEntry, message_timeout: str | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if message_timeout is not None:
        arguments[t.TTL] = milliseconds(message_timeout, what=f"message_timeout of '{name}'")
    for argument, value in ((t.LENGTH_MAX, entry.max_length), (t.BYTES_MAX, entry.max_length_bytes)):
        if value is not None:
            # The default overflow drops the oldest message of a full queue.
            arguments |= {argument: value, t.OVERFLOW: "reject-publish"}
    if entry.delivery_limit is not None:
        arguments[t.DELIVERY_LIMIT] = entry.delivery_limit
    return arguments


def _bindings(destination: str, kind: str, entries: list[BindingEntry]) -> list[Binding]:
    found = []
    for entry in entries:
        if entry.key is not None and entry.keys is not None:
            raise Invalid(f"binding is ambiguous; one of '{destination}' has 'key' and 'keys', keep one of them")
        keys = entry.keys if entry.keys is not None else [entry.key or ""]
        for key in keys:
            if len(key.encode("utf-8", "surrogatepass")) > t.NAME_BYTES_MAX:
                raise Invalid(f"binding key is too long; one of '{destination}' has more than {t.NAME_BYTES_MAX} bytes")
            found.append(
                Binding(
                    source=entry.exchange,
                    destination=destination,
                    destination_type=kind,
                    key=key,
                    arguments=entry.arguments,
                )
            )
    return found


def _check_bindings(made: Design) -> None:
    known = {exchange.name for exchange in made.topology.exchanges}
    for binding in made.topology.bindings:
        if binding.source in known or binding.source.startswith("amq."):
            continue
        if not binding.source:
            raise Invalid(
                f"binding is invalid; '{binding.destination}' is bound to the default exchange, "
                "which leads to every queue by its name already"
            )
        raise Invalid(
            f"exchange is missing; '{binding.destination}' is bound to '{binding.source}', which the file does not "
            f'define: add [exchanges."{binding.source}"]'
        )


class _Names:
    """The names of one queue's parts: its own, else the file's, else the layout's."""

    def __init__(self, queue: str, *entries: NamesEntry) -> None:
        self.queue = queue
        self._entries = entries

    @property
    def retry_key(self) -> str:
        return self.text("retry_key")

    def text(self, part: str, **more: str) -> str:
        """The name of a part. Raises Invalid for a pattern that cannot be filled in."""
        found = [getattr(entry, part) for entry in self._entries]
        pattern: str = next((each for each in found if each is not None), "")
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
            if unknown := fields - {"queue", *more}:
                raise Invalid(
                    f"name is invalid; {part} '{pattern}' has '{{{min(unknown)}}}', known are "
                    + ", ".join(f"'{{{name}}}'" for name in ("queue", *more))
                )
            return pattern.format(queue=self.queue, **more)
        except ValueError as error:
            raise Invalid(f"name is invalid; {part} '{pattern}': {error}") from error


def _check_keys(table: dict[str, Any], kind: type[Struct], source: str, path: str) -> None:
    """Here and not by the converter, because it would not say which key was meant."""
    hints = _hints(kind)
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if key not in hints:
            raise Invalid(f"topology file has an unknown key; {source}: '{where}', {nearest(key, tuple(hints))}")
        inner, shape = hints[key]
        if inner is None:
            continue
        if shape is dict and isinstance(value, dict):
            for name, entry in value.items():
                if isinstance(entry, dict):
                    _check_keys(entry, inner, source, f'{where}."{name}"')
        elif shape is list and isinstance(value, list):
            for number, entry in enumerate(value, 1):
                if isinstance(entry, dict):
                    _check_keys(entry, inner, source, f"{where}[{number}]")
        elif isinstance(value, dict):
            _check_keys(value, inner, source, where)


@cache
def _hints(kind: type[Struct]) -> dict[str, tuple[type[Struct] | None, Any]]:
    return {key: _inner(hint) for key, hint in get_type_hints(kind).items()}


def _inner(hint: Any) -> tuple[type[Struct] | None, Any]:
    """The struct that a hint is made of, and whether it stands alone, in a list or under names."""
    for one in (hint, *get_args(hint)):
        if isinstance(one, type) and issubclass(one, Struct):
            return one, get_origin(hint)
    return None, None


def _readable(message: str) -> str:
    text, _, path = message.partition(" - at `$")
    for word, plain in _PLAIN_WORDS.items():
        text = text.replace(f"got {word}", f"not {plain}").replace(word, plain)
    text = text.replace("Object missing", "misses the").replace("`", "'")
    where = path.rstrip("`").lstrip(".")
    return f"{text[:1].lower()}{text[1:]}" + (f" at {where}" if where else "")
