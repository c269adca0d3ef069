"""Which letters: the filter that a search, a count, a plan and an action share, and the cursor of its pages. Pure."""

from __future__ import annotations

import base64
import binascii

from msgspec import Struct, ValidationError, json

from holdfast.core.states import LetterState
from holdfast.errors import Invalid

PAGE_COUNT_DEFAULT = 50
PAGE_COUNT_MAX = 1_000
IDS_COUNT_MAX = 100_000
TEXT_CHARACTERS_MAX = 500
#: How many letters a search without an index walks past before it says where it stopped.
WALK_COUNT_MAX = 20_000
ID_MAX = 2**63 - 1


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
        return bool(
            self.error
            or self.header
            or self.reason
            or self.source_queue
            or self.captured_after_us
            or self.captured_before_us
            or self.died_after_us
            or self.died_before_us
        )

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
    for name in ("captured_after_us", "captured_before_us", "died_after_us", "died_before_us"):
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
