"""The folder underneath: directories reached without following links, and made so that a crash cannot undo them.

Everything here blocks and is called in a thread.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DURABLE_COUNT_MAX = 10_000


class Tree:
    """A root directory, held open. Paths are walked from it one segment at a time, never through a link."""

    def __init__(self, root: Path) -> None:
        os.makedirs(root, mode=0o700, exist_ok=True)
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fsync_directory(root.resolve().parent)
        self._durable: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        os.close(self._root)

    @contextmanager
    def directory(self, segments: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """A descriptor of the directory. Raises FileNotFoundError, or NotADirectoryError for a link or a file."""
        current = os.dup(self._root)
        try:
            for depth, segment in enumerate(segments, start=1):
                if create:
                    self._make(current, tuple(segments[:depth]))
                below = os.open(segment, DIRECTORY, dir_fd=current)
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)

    def _make(self, parent: int, segments: tuple[str, ...]) -> None:
        """Make the directory if it is missing, and make sure once per process that its entry is on the disk.

        An existing one is not enough: whoever made it may have died before the fsync.
        """
        try:
            os.mkdir(segments[-1], mode=0o700, dir_fd=parent)
        except FileExistsError:
            if segments in self._durable:
                return
        os.fsync(parent)
        with self._lock:
            if len(self._durable) >= DURABLE_COUNT_MAX:
                self._durable.clear()
            self._durable.add(segments)

    def entries(self, segments: Sequence[str]) -> tuple[list[str], list[tuple[str, int]]]:
        """The directories, and the files with their sizes; links and other things are not ours, and left out."""
        directories, files = [], []
        try:
            with self.directory(segments) as current, os.scandir(current) as found:
                for entry in found:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted meanwhile
                    if stat.S_ISDIR(status.st_mode):
                        directories.append(entry.name)
                    elif stat.S_ISREG(status.st_mode):
                        files.append((entry.name, status.st_size))
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        return directories, files


def fsync_directory(path: Path) -> None:
    """Put the entries of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
