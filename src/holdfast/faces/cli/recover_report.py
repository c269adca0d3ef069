"""`--report`: opened before anything is taken, so that a path that cannot be written is noticed in time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.core.recovery import Summary
from holdfast.faces.cli.context import CommandFailed


class ReportFile:
    """For its owner alone: the summary has samples of letters. What is there stays until the summary replaces it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error, "nothing was taken") from error

    def write(self, summary: Summary) -> None:
        """Raises CommandFailed."""
        data = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
        self._is_new = False
        try:
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.ftruncate(self._file, 0)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._failed(error, "the run itself is done, and its summary is the one that was printed") from error

    def close(self) -> None:
        """A run that never came to its summary leaves no empty file behind."""
        os.close(self._file)
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def _failed(self, error: OSError, now: str) -> CommandFailed:
        return CommandFailed(f"report cannot be written; '{self._path}': {error.strerror or error}; {now}")


@contextmanager
def open_report(path: Path | None) -> Iterator[ReportFile | None]:
    """None where none was asked for."""
    if path is None:
        yield None
        return
    report = ReportFile(path)
    try:
        yield report
    finally:
        report.close()
