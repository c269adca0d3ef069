"""What proves that nothing gets lost: crash points, conservation checker, cutting proxy, process killer.

Here are the crash points, because the program itself passes them: named places where a test can end this process with
SIGKILL. `crash_point("recover.after_confirm")` marks one. A process started with
`HOLDFAST_CRASH_AT=recover.after_confirm:2` kills itself when it passes that place for the second time;
nothing is flushed, closed or unwound. With the variable unset or empty, `crash_point` is an empty function.
The variable is read once, at import: setting it later has no effect.

Which crash points there are is found by reading the source, so that a test can demand each of them.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.errors import CannotStart

PACKAGE = Path(__file__).parent.parent
VARIABLE: Final = "HOLDFAST_CRASH_AT"
NAME: Final = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")


class Trap:
    """A crash point that is armed: counts the passes of one name and kills the process at the n-th."""

    def __init__(self, name: str, *, passes: int) -> None:
        self.name = name
        self._passes_left = passes
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, setting: str) -> Trap:
        """Read `name:n`. Raises CannotStart, so that a mistyped trap is never a test that proves nothing."""
        name, _, passes = setting.rpartition(":")
        if not NAME.fullmatch(name) or not re.fullmatch(r"[1-9][0-9]{0,8}", passes, re.ASCII):
            raise CannotStart(f"{VARIABLE} is invalid; expected name:n with n from 1 on, got {setting!r}")
        return cls(name, passes=int(passes))

    def __call__(self, name: str, /) -> None:
        if name != self.name:
            return
        with self._lock:
            self._passes_left -= 1
            if self._passes_left > 0:
                return
            os.kill(os.getpid(), signal.SIGKILL)
            # The signal may reach another thread first; this one must not get past the point in the meantime.
            threading.Event().wait()


def _pass_by(name: str, /) -> None:
    """Do nothing: this process was not told to crash."""


_setting = os.environ.get(VARIABLE, "")
#: Marks a place where a test can end the process. Costs one empty call when off.
crash_point: Final[Callable[[str], None]] = Trap.parse(_setting) if _setting else _pass_by


def crash_points(folder: Path = PACKAGE) -> frozenset[str]:
    """All names given to `crash_point` in the Python files below `folder`.

    Raises ValueError for a call whose name is not a plain string: it could not be listed.
    """
    return frozenset(
        name for file in sorted(folder.rglob("*.py")) for name in _names(file.read_text("utf-8"), str(file))
    )


def _names(source: str, file: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source, file)):
        match node:
            case ast.Call(
                ast.Name(id="crash_point") | ast.Attribute(attr="crash_point"), [ast.Constant(value=str(name))]
            ):
                names.append(name)
            case ast.Call(ast.Name(id="crash_point") | ast.Attribute(attr="crash_point")):
                raise ValueError(f"{file}:{node.lineno}: crash_point takes one plain string")
    return names
