"""A fingerprint function of the user's own: loaded once, at the start, and never trusted with a letter's safety.

It gets the message type and the story of the death, and answers with a `Fingerprint`. One that fails or answers
something else does not hold up a capture: the letter is grouped by the built-in function, and the failure is told.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from holdfast.core.groups import TITLE_CHARACTERS_MAX, Fingerprint, Fingerprinter, fingerprint
from holdfast.core.letter import NAME_CHARACTERS_MAX, DeathStory, clip
from holdfast.errors import CannotStart
from holdfast.telemetry.events import emit


def load_fingerprint(target: str | None) -> Fingerprinter:
    """The function that MODULE:FUNCTION names, made safe; without one the built-in. Raises CannotStart."""
    if target is None:
        return fingerprint
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise CannotStart(f"fingerprint is invalid; '{target}' is not MODULE:FUNCTION")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise CannotStart(
            f"fingerprint cannot be loaded; importing '{module_name}': {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "is not there" if found is None else f"is a {type(found).__name__}, not a function"
        raise CannotStart(f"fingerprint cannot be loaded; '{name}' in '{module_name}' {what}")
    _try_out(found, target)
    return _guarded(found, target)


def _try_out(function: Fingerprinter, target: str) -> None:
    """With a death that nobody can object to: a function of another shape is told at the start, not at each letter."""
    try:
        answer: object = function("type", DeathStory(queue="queue", reason="rejected"))
    except Exception as error:
        raise CannotStart(f"fingerprint cannot be used; {target} raised {type(error).__name__}: {error}") from error
    if not _is_good(answer):
        raise CannotStart(f"fingerprint cannot be used; {target} answered {answer!r}, not a Fingerprint with a key")


def _guarded(function: Fingerprinter, target: str) -> Fingerprinter:
    def grouped(message_type: str, death: DeathStory) -> Fingerprint:
        try:
            found = function(message_type, death)
            if _is_good(found):
                return Fingerprint(clip(found.key, NAME_CHARACTERS_MAX), clip(found.title, TITLE_CHARACTERS_MAX))
            error: object = f"it answered a {type(found).__name__}"
        except Exception as bug:  # noqa: BLE001 - whatever it does, the letter is captured
            error = f"{type(bug).__name__}: {bug}"
        emit("fingerprint.failed", function=target, error=error)
        return fingerprint(message_type, death)

    return grouped


def _is_good(answer: object) -> bool:
    if not isinstance(answer, Fingerprint):
        return False
    texts: tuple[object, ...] = (answer.key, answer.title)  # whatever somebody put there
    return all(isinstance(text, str) for text in texts) and bool(answer.key.strip())
