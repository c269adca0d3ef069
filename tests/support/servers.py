"""Which servers the tests may start, and that none outlives the tests.

A missing one fails; only HOLDFAST_TEST_WITHOUT leaves its tests out.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

VARIABLE = "HOLDFAST_TEST_WITHOUT"
KNOWN = frozenset({"postgres", "rabbitmq"})


def left_out(setting: str | None = None) -> frozenset[str]:
    """The servers named in HOLDFAST_TEST_WITHOUT. A name that is no server is an error."""
    text = os.environ.get(VARIABLE, "") if setting is None else setting
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := names - KNOWN:
        raise pytest.UsageError(f"{VARIABLE}: no such server: {', '.join(sorted(unknown))}")
    return names


def skip_left_out(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker names a server that was left out; called by conftest."""
    for name in left_out():
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{VARIABLE} names {name}"))


class Guard:
    """Ends a server and removes its folder when this process is gone, also when it was killed; `close` once it ended.

    It waits for the end of what we never write to it: nobody else holds our end of that pipe.
    """

    SCRIPT = 'folder=$0; cat; for group in "$@"; do kill -s KILL -- "-$group"; done; sleep 1; rm -rf "$folder"'

    def __init__(self, folder: Path, *groups: int) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", self.SCRIPT, str(folder), *map(str, groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """It has ended in order."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
