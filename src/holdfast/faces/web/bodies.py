"""Bytes that a stranger sent, as a person can read them: indented where they are JSON or XML, else text, else in hex;
and what two of them differ in. Only what is shown is changed, and of that nothing but white space between its parts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Literal, NamedTuple
from xml.parsers import expat

import msgspec

#: What is larger is not indented, and shown in parts.
WHOLE_BYTES_MAX = 64 * 1024
PART_BYTES = 64 * 1024
HEX_PART_BYTES = 8 * 1024
HEX_LINE_BYTES = 16
#: Who reads a text does not need more of it to see what has changed in it.
DIFF_BYTES_MAX = 256 * 1024
DIFF_LINES_MAX = 400
DIFF_SHOWN_MAX = 1_000
CONTEXT_LINES = 3
CHARACTER_BYTES_MAX = 4
#: What is nested deeper is not indented: a stranger would make a large text of a small one.
DEPTH_MAX = 64
#: No text has these; what has is shown in hex.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_JSON_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')

BodyKind = Literal["empty", "JSON", "XML", "text", "bytes"]
BodyMode = Literal["", "raw", "hex"]


class BodyView(NamedTuple):
    """A body, or a part of it, as it is shown. `kind` is what it is, `mode` how it is shown."""

    kind: BodyKind
    mode: Literal["pretty", "raw", "hex"]
    text: str
    start: int  #: which bytes of it these are
    end: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it is shown."""
        return self.end - self.start == self.size


class DiffLine(NamedTuple):
    """A line of a difference: it was added (`ins`), taken away (`del`) or stands beside (`span`)."""

    tag: Literal["ins", "del", "span"]
    text: str


def part_of(size: int, mode: str) -> int:
    """How many bytes of a body of this size are shown at once."""
    if mode == "hex":
        return HEX_PART_BYTES
    return size if size <= WHOLE_BYTES_MAX else PART_BYTES


def shown_body(content: bytes, *, start: int, size: int, mode: BodyMode) -> BodyView:
    """Of `size` bytes those from `start` on. A text that was cut inside a character is shown from one to another."""
    if not size:
        return BodyView("empty", "raw", "", 0, 0, 0)
    first, text = as_text(content, is_cut_before=start > 0, is_cut_behind=start + len(content) < size)
    if text is None:
        content = content[:HEX_PART_BYTES]
        return BodyView("bytes", "hex", hex_lines(content, start), start, start + len(content), size)
    kind: BodyKind = "text"
    pretty = None
    if len(content) == size:
        kind, pretty = indented(text)
    if mode == "hex":
        content = content[:HEX_PART_BYTES]
        return BodyView(kind, "hex", hex_lines(content, start), start, start + len(content), size)
    ends = start + first + len(text.encode())
    if pretty is not None and not mode:
        return BodyView(kind, "pretty", pretty, start, ends, size)
    return BodyView(kind, "raw", text, start + first, ends, size)


def as_text(content: bytes, *, is_cut_before: bool = False, is_cut_behind: bool = False) -> tuple[int, str | None]:
    """What can be read of it, and where that begins; None where it is no text."""
    first, last = 0, len(content)
    if is_cut_before:
        first = sum(1 for _ in takewhile(lambda byte: byte & 0xC0 == 0x80, content[: CHARACTER_BYTES_MAX - 1]))
    for tried in range(CHARACTER_BYTES_MAX if is_cut_behind else 1):
        try:
            text = content[first : last - tried].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return first, None if _CONTROLS.search(text) else text
    return first, None


def indented(text: str) -> tuple[BodyKind, str | None]:
    """Which kind of text it is, and the same with the white space between its parts made readable."""
    begin = text.lstrip("\ufeff \t\r\n")[:1]
    if begin in ("{", "["):
        try:
            msgspec.json.decode(text.encode(), type=msgspec.Raw)  # looks at all of it and makes nothing of it
        except (msgspec.DecodeError, RecursionError):
            return "text", None
        if _json_depth(text) > DEPTH_MAX:
            return "JSON", None
        return "JSON", msgspec.json.format(text.encode(), indent=2).decode()
    if begin == "<":
        pretty = _indented_xml(text)
        return ("XML", pretty) if pretty is not None else ("text", None)
    return "text", None


def _json_depth(text: str) -> int:
    depth = deepest = 0
    for one in _JSON_BRACKETS.findall(text):
        depth += (one in "[{") - (one in "]}")
        deepest = max(deepest, depth)
    return deepest


class _BodyRefused(Exception):
    """Something that is not taken apart: a document type could name other files, or grow without end."""


def _indented_xml(text: str) -> str | None:
    """Where its parts are is asked of a parser; what they are is never written anew."""
    raw = text.encode()
    marks: list[tuple[int, int]] = []  # where a part begins, and how much deeper what follows it is
    depth = 0

    def mark(change: int) -> None:
        nonlocal depth
        depth += change
        if depth > DEPTH_MAX:
            raise _BodyRefused
        marks.append((parser.CurrentByteIndex, change))

    def refuse(*_: object) -> None:
        raise _BodyRefused

    parser = expat.ParserCreate("utf-8")
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = lambda *_: mark(1)
    parser.EndElementHandler = lambda *_: mark(-1)
    parser.CommentHandler = lambda *_: mark(0)
    parser.ProcessingInstructionHandler = lambda *_: mark(0)
    try:
        parser.Parse(raw, True)
    except (expat.ExpatError, _BodyRefused):
        return None
    return "\n".join(_xml_lines(raw, marks))


def _xml_lines(raw: bytes, marks: Sequence[tuple[int, int]]) -> Iterator[str]:
    """A line for each part; an element that holds nothing but text stays on one."""
    depth, line = 0, raw[: marks[0][0]].decode().strip()
    for place, (start, change) in enumerate(marks):
        end = marks[place + 1][0] if place + 1 < len(marks) else len(raw)
        if start == end:  # an element that is empty by its own tag ends where it begins
            depth += change
            continue
        piece = raw[start:end].decode().strip()
        is_end_of_line_before = change < 0 and place and marks[place - 1][1] > 0
        if is_end_of_line_before:
            depth -= 1
            line += piece
            continue
        if line:
            yield line
        if change < 0:
            depth -= 1
        line = "  " * depth + piece
        if change > 0:
            depth += 1
    if line:
        yield line


def hex_lines(content: bytes, start: int = 0) -> str:
    """Sixteen bytes a line, with where they are and what of them is text."""
    lines = []
    for place in range(0, len(content), HEX_LINE_BYTES):
        row = content[place : place + HEX_LINE_BYTES]
        digits = f"{row[:8].hex(' ')}  {row[8:].hex(' ')}"
        seen = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
        lines.append(f"{start + place:08x}  {digits:<49} {seen}")
    return "\n".join(lines)


def diff(before: bytes, after: bytes) -> list[DiffLine] | None:
    """The lines in which one differs from the other, with some beside; None for what nobody would read as lines."""
    if max(len(before), len(after)) > DIFF_BYTES_MAX:
        return None
    (_, old), (_, new) = as_text(before), as_text(after)
    if old is None or new is None:
        return None
    both = [indented(text) for text in (old, new)]
    if both[0][0] == both[1][0] and None not in (both[0][1], both[1][1]):
        old, new = both[0][1] or "", both[1][1] or ""
    found = list(_changes(old.splitlines(), new.splitlines()))
    more = len(found) - DIFF_SHOWN_MAX
    return [*found[:DIFF_SHOWN_MAX], DiffLine("span", f"… and {more} more lines")] if more > 0 else found


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[DiffLine]:
    """Only what lies between an equal beginning and an equal end is compared, and that only while it is short: the
    time for it grows with the square."""
    begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    left = zip(reversed(old[begin:]), reversed(new[begin:]), strict=False)
    behind = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], left))
    was, now = old[begin : len(old) - behind], new[begin : len(new) - behind]
    if not was and not now:
        return
    yield from (DiffLine("span", line) for line in old[max(0, begin - CONTEXT_LINES) : begin])
    if max(len(was), len(now)) > DIFF_LINES_MAX:
        yield from (DiffLine("del", line) for line in was)
        yield from (DiffLine("ins", line) for line in now)
    else:
        tags: dict[str, Literal["ins", "del", "span"]] = {"+": "ins", "-": "del", " ": "span"}
        told = difflib.unified_diff(was, now, n=CONTEXT_LINES, lineterm="")
        for line in islice(told, 3, None):  # behind its own head
            yield DiffLine("span", "⋯") if line[:1] == "@" else DiffLine(tags[line[:1]], line[1:])
    yield from (DiffLine("span", line) for line in old[len(old) - behind :][:CONTEXT_LINES])
