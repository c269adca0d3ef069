"""Which letters: the filter that a search, a count, a plan and an action share, with the cursor of its pages; and the
conditions by which a recovery takes letters of a dead-letter queue. Pure.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from operator import contains, eq, ne
from typing import TypeAlias

from msgspec import Struct, ValidationError, json

from holdfast.core.death import QueueNames, newest_death, where_it_died
from holdfast.core.message import Message
from holdfast.core.moments import SECOND_US, microseconds, parse_duration
from holdfast.core.states import LetterState
from holdfast.errors import Invalid

PAGE_COUNT_DEFAULT = 50
PAGE_COUNT_MAX = 1_000
IDS_COUNT_MAX = 100_000
TEXT_CHARACTERS_MAX = 500
#: How many letters a search without an index walks past before it says where it stopped.
WALK_COUNT_MAX = 20_000
ID_MAX = 2**63 - 1
MOMENTS = ("captured_after_us", "captured_before_us", "died_after_us", "died_before_us")
#: Fields of a selection that no index answers.
NOT_INDEXED = ("error", "header", "reason", "source_queue", *MOMENTS)

CONDITIONS_COUNT_MAX = 50
#: The name of a header ends before the operator: neither its `!` nor a space before it belongs to the name.
FORM = re.compile(r"(type|reason|queue|age|body|header\.[^=~<>]*[^=~<>!\s])\s*(!=|[=~<>])\s*(.*)", re.DOTALL)
#: What a text is compared by; age and body have others.
COMPARISONS: dict[str, Callable[[str, str], bool]] = {"=": eq, "!=": ne, "~": contains}
OPERATORS = {"age": ("<", ">"), "body": ("~",)}

#: Message, its type, and the moment in microseconds → whether it fits.
Condition: TypeAlias = Callable[[Message, str, int], bool]


class Selection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of what is set must fit. Nothing set is every letter."""

    ids: tuple[int, ...] = ()
    queue: str = ""
    source_queue: str = ""
    type: str = ""
    reason: str = ""
    error: str = ""  #: a part of the error's type or message
    group: str = ""
    state: LetterState | None = None
    header: str = ""
    header_value: str = ""
    text: str = ""  #: words in the body or the error
    captured_after_us: int = 0
    captured_before_us: int = 0
    died_after_us: int = 0
    died_before_us: int = 0

    @property
    def walks(self) -> bool:
        """Whether it has a condition that no index answers."""
        return any(getattr(self, name) for name in NOT_INDEXED)

    @property
    def is_plain(self) -> bool:
        """Whether the vault's own tallies can count it: nothing but queue and state."""
        return self == Selection(queue=self.queue, state=self.state)


def check_selection(selection: Selection) -> None:
    """Raises Invalid for what no vault can answer."""
    if len(selection.ids) > IDS_COUNT_MAX:
        raise Invalid(f"selection is invalid; at most {IDS_COUNT_MAX} ids, got {len(selection.ids)}, use a filter")
    if any(not 0 < one <= ID_MAX for one in selection.ids):
        raise Invalid("selection is invalid; an id is a positive whole number")
    for name in ("queue", "source_queue", "type", "reason", "error", "group", "header", "header_value", "text"):
        text = getattr(selection, name)
        if len(text) > TEXT_CHARACTERS_MAX:
            raise Invalid(f"selection is invalid; {name} has more than {TEXT_CHARACTERS_MAX} characters")
        if "\x00" in text or (not text.isascii() and any("\ud800" <= one <= "\udfff" for one in text)):
            raise Invalid(f"selection is invalid; {name} holds a character that cannot be stored")
    if selection.header_value and not selection.header:
        raise Invalid("selection is invalid; header_value needs header")
    for name in MOMENTS:
        if not 0 <= getattr(selection, name) <= ID_MAX:
            raise Invalid(f"selection is invalid; {name} is out of range")
    if selection.text and not words(selection.text):
        raise Invalid("selection is invalid; text has no word to search for")


def words(text: str) -> list[str]:
    """The words of a search: letters and digits, everything else parts them."""
    spaced = "".join(one if one.isalnum() else " " for one in text)
    return spaced.split()


class _Cursor(Struct, frozen=True, array_like=True):
    kind: str
    after: int


def encode_cursor(kind: str, after: int) -> str:
    """Where the next page begins, for a client to hand back as it is."""
    return base64.urlsafe_b64encode(json.encode(_Cursor(kind, after))).decode().rstrip("=")


def decode_cursor(kind: str, cursor: str) -> int:
    """Raises Invalid for a cursor of another list, or one that we never gave out."""
    try:
        raw = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        found = json.decode(raw, type=_Cursor)
    except (ValueError, UnicodeEncodeError, binascii.Error, ValidationError) as error:
        raise Invalid("cursor is invalid; begin without one") from error
    if found.kind != kind or not 0 <= found.after <= ID_MAX:
        raise Invalid("cursor is invalid; it belongs to another list, begin without one")
    return found.after


class LetterFilter:
    """`--where`: all conditions together. Without any, every letter fits.

    type=CollectionScan   reason=rejected   queue=orders   age>1h   age<48h
    header.tenant!=acme   body~timeout   reason~NoSuchOrder
    """

    def __init__(self, texts: Sequence[str] = (), names: QueueNames | None = None) -> None:
        if len(texts) > CONDITIONS_COUNT_MAX:
            raise Invalid(f"filter is invalid; more than {CONDITIONS_COUNT_MAX} conditions were given")
        self.texts = tuple(texts)
        self._conditions = [_condition(text, names or QueueNames()) for text in texts]

    def __bool__(self) -> bool:
        return bool(self._conditions)

    def fits(self, message: Message, kind: str, now_us: int) -> bool:
        """Whether the letter is one of those."""
        return all(condition(message, kind, now_us) for condition in self._conditions)


def _condition(text: str, names: QueueNames) -> Condition:
    found = FORM.fullmatch(text.strip())
    if found is None:
        forms = "type=…, reason=…, queue=…, age>1h, header.NAME=… or body~…"
        raise Invalid(f"filter is invalid; '{text}' is none of {forms}")
    name, operator, value = found[1], found[2], found[3].strip()
    allowed = OPERATORS.get(name, tuple(COMPARISONS))
    if operator not in allowed:
        raise Invalid(f"filter is invalid; '{text}': {name} is compared with {' or '.join(allowed)}")
    if name == "age":
        return _age(operator, parse_duration(value, what="age"), names)
    if name == "body":
        wanted = value.encode()
        return lambda message, kind, now_us: wanted in message.body
    if name == "reason":
        return _reason(operator, value, names)
    return _text_condition(_reader(name, names), operator, value)


def _reader(name: str, names: QueueNames) -> Callable[[Message, str], str]:
    if name == "type":
        return lambda message, kind: kind or message.type
    if name == "queue":
        return lambda message, kind: died_in(message, names)
    header = name.removeprefix("header.")
    return lambda message, kind: _shown(message.headers.get(header))


def _text_condition(read: Callable[[Message, str], str], operator: str, value: str) -> Condition:
    compare = COMPARISONS[operator]
    return lambda message, kind, now_us: compare(read(message, kind), value)


def died_in(message: Message, names: QueueNames) -> str:
    """The queue in which a letter died, as far as it tells."""
    died, _ = where_it_died(message.headers, message.queue, names)
    return died.queue if died else ""


def _reason(operator: str, value: str, names: QueueNames) -> Condition:
    """The reason itself, or what stands before its details: `permanent; shop.NoSuchOrder: …` is permanent."""

    def fits(message: Message, kind: str, now_us: int) -> bool:
        death = newest_death(message.headers, message.queue, names)
        reason = death.reason if death else _shown(message.headers.get("x-parked-reason"))
        if operator == "~":
            return value in reason
        return (value in (reason, reason.partition(";")[0].strip())) == (operator == "=")

    return fits


def _age(operator: str, age_us: int, names: QueueNames) -> Condition:
    def fits(message: Message, kind: str, now_us: int) -> bool:
        death = newest_death(message.headers, message.queue, names)
        if death is None or death.at is None:
            return False  # nobody knows: not older than anything, and not younger
        died_us = microseconds(death.at)
        # x-death tells whole seconds.
        return now_us - died_us > age_us if operator == ">" else now_us - died_us < age_us + SECOND_US

    return fits


def _shown(value: object) -> str:
    return "" if value is None else value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
