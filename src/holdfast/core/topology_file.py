"""The topology file: TOML → entries whose every key and type has been checked. What they mean is `topology_layouts`."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from holdfast.core.moments import parse_duration
from holdfast.errors import Invalid

FILE_BYTES_MAX = 4_000_000
ENTRIES_COUNT_MAX = 10_000
STEPS_COUNT_MAX = 32
#: The broker's own ceiling for a time to live: 49 days.
TTL_MS_MAX = 2**32 - 1

Layout = Literal["per-consumer", "quorum", "shared-dlq", "plain"]
QueueType = Literal["classic", "quorum"]
Count = Annotated[int, Meta(ge=0)]


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


def parse_file(data: bytes, *, source: str) -> TopologyFile:
    """Read a topology file. Raises Invalid, which says what is wrong and where."""
    if len(data) > FILE_BYTES_MAX:
        raise Invalid(f"topology file is invalid; {source} is larger than {FILE_BYTES_MAX} bytes")
    try:
        table = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Invalid(f"topology file is invalid; {source} is not UTF-8 at byte {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Invalid(f"topology file is invalid; {source} is not TOML: {error}") from error
    _check_keys(table, TopologyFile, source, "")
    try:
        file = msgspec.convert(table, TopologyFile)
    except msgspec.ValidationError as error:
        raise Invalid(f"topology file is invalid; {source}: {_readable(str(error))}") from error
    if len(file.queues) + len(file.exchanges) > ENTRIES_COUNT_MAX:
        raise Invalid(f"topology file is invalid; {source} has more than {ENTRIES_COUNT_MAX} queues and exchanges")
    return file


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


def _check_keys(table: dict[str, Any], kind: type[Struct], source: str, place: str) -> None:
    """Here and not by the converter, because it would not say which key was meant."""
    hints = _hints(kind)
    for key, value in table.items():
        where = f"{place}.{key}" if place else key
        if key not in hints:
            raise Invalid(f"topology file has an unknown key; {source}: '{where}', {_nearest(key, tuple(hints))}")
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


def _nearest(key: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


_PLAIN_WORDS = {"`int`": "a whole number", "`str`": "a text", "`bool`": "true or false", "`object`": "a table"}


def _readable(message: str) -> str:
    text, _, place = message.partition(" - at `$")
    for word, plain in (*_PLAIN_WORDS.items(), ("`array`", "a list")):
        text = text.replace(f"got {word}", f"not {plain}").replace(word, plain)
    text = text.replace("Object missing", "misses the").replace("`", "'")
    where = place.rstrip("`").lstrip(".")
    return f"{text[:1].lower()}{text[1:]}" + (f" at {where}" if where else "")
