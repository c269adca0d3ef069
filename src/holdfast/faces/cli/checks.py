"""What a command checks before it begins. A mistake in what was typed is bad usage, whatever the command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from holdfast.core.moments import parse_duration
from holdfast.errors import Invalid
from holdfast.faces.cli.failures import BadUsage


def duration(text: str, *, option: str) -> str:
    """The text, when it is a duration; raises BadUsage."""
    try:
        parse_duration(text, what=option)
    except Invalid as error:
        raise BadUsage(error.message) from error
    return text


def one_of(text: str, allowed: Iterable[str], *, option: str) -> str:
    """The text, when it is one of these; raises BadUsage, which lists them."""
    words = list(allowed)
    if text not in words:
        raise BadUsage(f"{option} is invalid; '{text}' is none of {', '.join(words)}")
    return text


def read_file(path: Path, *, bytes_max: int) -> bytes:
    """What a file holds; raises BadUsage when it cannot be read or is too large."""
    try:
        with path.open("rb") as stream:
            data = stream.read(bytes_max + 1)
    except OSError as error:
        raise BadUsage(f"file cannot be read; '{path}': {error.strerror or error}") from error
    if len(data) > bytes_max:
        raise BadUsage(f"file is too large; '{path}' has more than {bytes_max} bytes")
    return data
