"""Letters, messages that died, with the story of their death, as they are taken into custody and kept there; and the
groups of those that died of the same cause. Pure.

Whatever a stranger wrote (headers, error texts, moments) is cut to a size here and never believed further.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Literal, TypeAlias

from msgspec import Struct

from holdfast.core.states import LetterState

BLOB_BYTES_MIN = 1024 * 1024
SEARCHED_TEXT_BYTES_MAX = 64 * 1024
REASON_CHARACTERS_MAX = 200
ERROR_CHARACTERS_MAX = 8 * 1024
NAME_CHARACTERS_MAX = 512
TITLE_CHARACTERS_MAX = 300
NOTE_CHARACTERS_MAX = 2_000
FINGERPRINT_CHARACTERS = 16

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+, in (?P<name>\S+)', re.MULTILINE)
#: Frames of these are not the application's: the first one below them tells where it went wrong.
_NOT_OURS = ("site-packages", "dist-packages", "/lib/python", "<frozen")

#: Where a letter was taken from: a queue of RabbitMQ, or an embedded dead queue.
Origin: TypeAlias = Literal["rabbitmq", "queue"]
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

#: Headers that decide what a message does where it goes: an edit must say that it means them.
SENSITIVE_HEADERS = ("x-kept-cc", "x-kept-expiration", "x-kept-user-id")


class DeathStory(Struct, frozen=True):
    """All deaths of a letter in one: where, why, when and how often it died, and of which error."""

    queue: str = ""
    reason: str = ""
    count: int = 0
    first_at_us: int = 0
    last_at_us: int = 0
    error_type: str = ""
    error_message: str = ""
    error_stack: str = ""


class NewLetter(Struct, frozen=True, kw_only=True):
    """What capture hands to the vault. `properties` are the broker's bytes, `shown` is the same for people."""

    queue: str
    origin: Origin
    body: bytes
    properties: bytes
    digest: bytes
    death: DeathStory
    message_id: str = ""
    type: str = ""
    exchange: str = ""
    routing_key: str = ""
    shown: Mapping[str, JsonValue] = {}
    headers: Mapping[str, JsonValue] = {}
    redelivered: bool = False
    redrive_id: str = ""
    redriven_count: int = 0
    group: str = ""
    group_title: str = ""
    blob: str = ""
    body_bytes: int = 0


class Letter(Struct, frozen=True):
    """A letter in the vault, without its body."""

    id: int
    queue: str
    origin: Origin
    state: LetterState
    message_id: str
    type: str
    exchange: str
    routing_key: str
    group: str
    redrive_id: str  #: with which it came back, if it did
    redriven_count: int
    revision: int
    acked: bool
    captured_at_us: int
    changed_at_us: int
    body_bytes: int
    digest: bytes
    headers: dict[str, JsonValue]
    shown: dict[str, JsonValue]
    came_from: int  #: the letter that was redriven and came back as this one; 0 for none
    death: DeathStory


class Content(Struct, frozen=True, kw_only=True):
    """What of a letter is published: the original bytes, or those of a revision."""

    body: bytes
    properties: bytes
    blob: str = ""
    put: dict[str, JsonValue] = {}
    drop: tuple[str, ...] = ()


def clip(text: str, characters_max: int) -> str:
    """The beginning of a text that somebody else wrote, storable in every engine."""
    if len(text) <= characters_max and text.isascii() and "\x00" not in text:
        return text  # nearly always
    clean = text.replace("\x00", "�")[:characters_max]
    return clean if clean.isascii() else clean.encode("utf-8", "replace").decode("utf-8")


def searched_text(letter: NewLetter) -> str:
    """What a search for words looks at: the error, and the body as far as it is text."""
    head = letter.body[:SEARCHED_TEXT_BYTES_MAX]
    try:
        body = head.decode("utf-8", "strict" if len(head) == len(letter.body) else "ignore")
    except UnicodeDecodeError:
        body = ""
    death = letter.death
    return clip(f"{death.error_type} {death.error_message} {body}", SEARCHED_TEXT_BYTES_MAX)


class Kinds(Struct, frozen=True):
    """What a broker calls the kinds of a letter's properties and headers: `shortstr`, `int64`; none where it has no
    such kinds, or is not there to tell."""

    properties: dict[str, str] = {}
    headers: dict[str, str] = {}


class GroupStatus(Enum):
    """What somebody said of a group; *regressed* is what we say of one that was resolved and got another letter."""

    OPEN = "open"
    RESOLVED = "resolved"
    IGNORED = "ignored"
    REGRESSED = "regressed"


class Fingerprint(Struct, frozen=True):
    """The key by which letters are grouped, and the same for people."""

    key: str
    title: str


#: The function that finds the group of a letter can be another one. Type, death, headers, and the dead-letter queue.
Fingerprinter = Callable[[str, DeathStory, Mapping[str, JsonValue], str], Fingerprint]


def fingerprint(
    message_type: str,
    death: DeathStory,
    headers: Mapping[str, JsonValue] | None = None,
    queue: str = "",
) -> Fingerprint:
    """Message type, error type and first application frame; where there is no error, reason and queue; where nothing is
    known of its death, dead-letter queue and type."""
    del headers
    if death.error_type:
        frame = application_frame(death.error_stack)
        parts = ("error", message_type, death.error_type, frame)
        title = f"{death.error_type} in {frame or message_type or death.queue or 'unknown'}"
    elif not death.reason and not death.queue:
        parts = ("unknown", message_type, queue, "")
        title = f"{message_type or 'unknown'} in {queue or 'unknown'}"
    else:
        parts = ("reason", death.reason, death.queue, "")
        title = f"{death.reason or 'unknown'} in {death.queue or 'unknown'}"
    digest = hashlib.sha256("\x1f".join(parts).encode("utf-8", "replace")).hexdigest()
    return Fingerprint(digest[:FINGERPRINT_CHARACTERS], clip(title, TITLE_CHARACTERS_MAX))


def application_frame(stack: str) -> str:
    """The innermost frame that is not a library's, as `file:function`; the innermost of all when none is."""
    frames = [(match["file"], match["name"]) for match in _FRAME.finditer(stack)]
    ours = [frame for frame in frames if not any(part in frame[0] for part in _NOT_OURS)]
    for file, name in reversed(ours or frames):
        return f"{file.rpartition('/')[2]}:{name}"
    return ""
