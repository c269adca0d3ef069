"""The folder underneath: directories reached without following links, made so that a crash cannot undo them.

Everything here blocks and is called in a thread. Directories are never removed.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
DURABLE_COUNT_MAX = 10_000
HELD_COUNT_MAX = 64


class _Sync:
    """The fsyncs of one directory: who has asked, and up to whom it is done."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.asked = 0
        self.done = 0


class BlobFolder:
    """A root directory, held open. Paths are walked from it one segment at a time, never through a link."""

    def __init__(self, root: Path) -> None:
        self._path = root.absolute()
        self._root = -1
        self._durable: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._syncs: dict[tuple[str, ...], _Sync] = {}
        self._held: dict[tuple[str, ...], int] = {}

    def open(self) -> None:
        """Make the root where it is missing, and hold on to it. Raises OSError."""
        for folder in [*reversed(self._path.parents), self._path]:
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                fsync_folder(folder.parent)
        # Whoever made it may have died before the fsync; but its parent need not be ours to open.
        with suppress(PermissionError):
            fsync_folder(self._path.parent)
        self._root = os.open(self._path, DIRECTORY)

    def close(self) -> None:
        """Let go of the root. May be called when `open` failed, and more than once."""
        while self._held:
            os.close(self._held.popitem()[1])
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def held(self, segments: tuple[str, ...]) -> int | None:
        """A descriptor of a directory that is made if it is missing, kept open until `close`: for who comes often.

        None when too many are kept. Raises what `directory` raises.
        """
        known = self._held.get(segments)
        if known is not None or len(self._held) >= HELD_COUNT_MAX:
            return known
        with self.directory(segments, create=True) as found, self._lock:
            if segments not in self._held:
                self._held[segments] = os.dup(found)
            return self._held[segments]

    @contextmanager
    def directory(self, segments: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """A descriptor. Raises FileNotFoundError, and NotADirectoryError for a link or a file on the way."""
        current = os.dup(self._root)
        try:
            for depth, segment in enumerate(segments, start=1):
                if create:
                    self._make(current, tuple(segments[:depth]))
                below = os.open(segment, DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)

    def sync(self, segments: Sequence[str], descriptor: int) -> None:
        """Put what was linked into a directory on the disk. Those who ask at the same time share one fsync."""
        with self._lock:
            sync = self._syncs.setdefault(tuple(segments), _Sync())
            sync.users += 1
            sync.asked += 1
            ticket = sync.asked
        try:
            with sync.lock:
                if sync.done < ticket:
                    upto = sync.asked  # everybody up to here has linked before this fsync begins
                    os.fsync(descriptor)
                    sync.done = upto
        finally:
            with self._lock:
                sync.users -= 1
                if not sync.users:
                    self._syncs.pop(tuple(segments), None)

    def entries(self, segments: Sequence[str]) -> tuple[list[str], list[tuple[str, int]]]:
        """The directories, and the files with their sizes; links and other things are left out."""
        directories: list[str] = []
        files: list[tuple[str, int]] = []
        try:
            with self.directory(segments) as current, os.scandir(current) as found:
                for entry in found:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            directories.append(entry.name)
                        elif stat.S_ISREG(status.st_mode):
                            files.append((entry.name, status.st_size))
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        return directories, files

    def _make(self, parent: int, segments: tuple[str, ...]) -> None:
        """Make the directory if it is missing, and see once per process that its entry is on the disk.

        That it exists is not enough: whoever made it may have died before the fsync.
        """
        if segments in self._durable:
            return  # directories are never removed
        with suppress(FileExistsError):
            os.mkdir(segments[-1], mode=0o700, dir_fd=parent)
        os.fsync(parent)
        with self._lock:
            if len(self._durable) >= DURABLE_COUNT_MAX:
                self._durable.clear()
            self._durable.add(segments)


def is_file(name: str, folder: int) -> bool:
    """Whether the entry is a plain file; a link to one is not. Raises FileNotFoundError."""
    return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
