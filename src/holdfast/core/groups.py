"""Failure groups: letters that died of the same cause. The fingerprint is a pure function, and can be another one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import datetime
from enum import Enum

from msgspec import Struct

from holdfast.core.letter import DeathStory, clip

TITLE_CHARACTERS_MAX = 300
NOTE_CHARACTERS_MAX = 2_000
FINGERPRINT_CHARACTERS = 16

#: Frames of these are not the application's: the first one below them tells where it went wrong.
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+, in (?P<name>\S+)', re.MULTILINE)
_NOT_OURS = ("site-packages", "dist-packages", "/lib/python", "<frozen")


class GroupStatus(Enum):
    """What somebody said of a group; *regressed* is what we say of one that was resolved and got another letter."""

    OPEN = "open"
    RESOLVED = "resolved"
    IGNORED = "ignored"
    REGRESSED = "regressed"


class Group(Struct, frozen=True, kw_only=True):
    """Letters with one fingerprint."""

    key: str
    title: str
    count: int
    first_at: datetime
    last_at: datetime
    sample: int  #: the id of its newest letter
    status: GroupStatus = GroupStatus.OPEN
    note: str = ""


class Fingerprint(Struct, frozen=True):
    """The key by which letters are grouped, and the same for people."""

    key: str
    title: str


Fingerprinter = Callable[[str, DeathStory], Fingerprint]


def fingerprint(message_type: str, death: DeathStory) -> Fingerprint:
    """Message type, error type and first application frame; where there is no error, reason and queue."""
    if death.error_type:
        frame = application_frame(death.error_stack)
        parts = ("error", message_type, death.error_type, frame)
        title = f"{death.error_type} in {frame or message_type or death.queue or 'unknown'}"
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
