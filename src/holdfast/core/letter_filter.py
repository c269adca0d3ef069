"""`--where`: which letters of a dead-letter queue a recovery takes. Pure; all conditions must fit.

type=CollectionScan   reason=rejected   queue=orders   age>1h   age<48h
header.tenant!=acme   body~timeout   reason~NoSuchOrder
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from holdfast.core.death import Death, deaths
from holdfast.core.message import Message
from holdfast.core.moments import SECOND_US, microseconds, parse_duration
from holdfast.errors import Invalid

CONDITIONS_COUNT_MAX = 50
#: The name of a header ends before the operator: neither its `!` nor a space before it belongs to the name.
FORM = re.compile(r"(type|reason|queue|age|body|header\.[^=~<>]*[^=~<>!\s])\s*(!=|[=~<>])\s*(.*)", re.DOTALL)
OPERATORS = {
    "type": ("=", "!=", "~"),
    "reason": ("=", "!=", "~"),
    "queue": ("=", "!=", "~"),
    "age": ("<", ">"),
    "body": ("~",),
}
HEADER_OPERATORS = ("=", "!=", "~")

#: Message, its type, and the moment in microseconds → whether it fits.
Condition: TypeAlias = Callable[[Message, str, int], bool]


class LetterFilter:
    """All conditions together. Without any, every letter fits."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        if len(texts) > CONDITIONS_COUNT_MAX:
            raise Invalid(f"filter is invalid; more than {CONDITIONS_COUNT_MAX} conditions were given")
        self.texts = tuple(texts)
        self._conditions = [_condition(text) for text in texts]

    def __bool__(self) -> bool:
        return bool(self._conditions)

    def fits(self, message: Message, kind: str, now_us: int) -> bool:
        """Whether the letter is one of those."""
        return all(condition(message, kind, now_us) for condition in self._conditions)


def _condition(text: str) -> Condition:
    found = FORM.fullmatch(text.strip())
    if found is None:
        forms = "type=…, reason=…, queue=…, age>1h, header.NAME=… or body~…"
        raise Invalid(f"filter is invalid; '{text}' is none of {forms}")
    name, operator, value = found[1], found[2], found[3].strip()
    allowed = OPERATORS.get(name, HEADER_OPERATORS)
    if operator not in allowed:
        raise Invalid(f"filter is invalid; '{text}': {name} is compared with {' or '.join(allowed)}")
    if name == "age":
        return _age(operator, parse_duration(value, what="age"))
    if name == "body":
        wanted = value.encode()
        return lambda message, kind, now_us: wanted in message.body
    if name == "reason":
        return _reason(operator, value)
    return _text_condition(_reader(name), operator, value)


def _reader(name: str) -> Callable[[Message, str], str]:
    if name == "type":
        return lambda message, kind: kind
    if name == "queue":
        return lambda message, kind: death.queue if (death := _death(message)) else ""
    header = name.removeprefix("header.")
    return lambda message, kind: _shown(message.headers.get(header))


def _text_condition(read: Callable[[Message, str], str], operator: str, value: str) -> Condition:
    if operator == "=":
        return lambda message, kind, now_us: read(message, kind) == value
    if operator == "!=":
        return lambda message, kind, now_us: read(message, kind) != value
    return lambda message, kind, now_us: value in read(message, kind)


def _reason(operator: str, value: str) -> Condition:
    """The reason itself, or what stands before its details: `permanent; shop.NoSuchOrder: …` is permanent."""

    def fits(message: Message, kind: str, now_us: int) -> bool:
        death = _death(message)
        reason = death.reason if death else _parked_reason(message)
        if operator == "~":
            return value in reason
        return (value in (reason, reason.partition(";")[0].strip())) == (operator == "=")

    return fits


def _age(operator: str, age_us: int) -> Condition:
    def fits(message: Message, kind: str, now_us: int) -> bool:
        death = _death(message)
        if death is None or death.at is None:
            return False  # nobody knows: not older than anything, and not younger
        died_us = microseconds(death.at)
        # x-death tells whole seconds.
        return now_us - died_us > age_us if operator == ">" else now_us - died_us < age_us + SECOND_US

    return fits


def _death(message: Message) -> Death | None:
    found = deaths(message.headers)
    return found[0] if found else None


def _parked_reason(message: Message) -> str:
    return _shown(message.headers.get("x-parked-reason"))


def _shown(value: object) -> str:
    return "" if value is None else value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
