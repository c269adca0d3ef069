"""Several blobs in one go: each step is taken for all of them before the next, so that they share what a step costs.

The fsyncs of the files go at the same time, one fsync of a directory makes all names in it durable, and whoever waits
for all of it changes threads once. Everything here blocks and is called in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.engines.folder.threads import THREADS_COUNT_MAX
from holdfast.engines.folder.tree import BlobFolder
from holdfast.engines.folder.unnamed import UnnamedFile

#: Threads that do nothing but fsync. Those who wait for them are others, so that nobody waits for himself.
_syncs = ThreadPoolExecutor(THREADS_COUNT_MAX, thread_name_prefix="fsync")


class BlobWrite:
    """One blob on its way: it is done, or has its error; or neither, where there are no files without a name."""

    def __init__(self, tree: BlobFolder, segments: tuple[str, ...], content: bytes) -> None:
        self.segments = segments
        self.error: OSError | None = None
        self.is_done = False
        self.folder = -1
        self._content = content
        self._tree = tree
        self._own = -1
        self._file = UnnamedFile()
        self._is_going = True

    def write(self) -> None:
        """Make the file and fill it."""
        folder = self._tree.held(self.segments[:-1])
        if folder is None:
            with self._tree.directory(self.segments[:-1], create=True) as found:
                folder = self._own = os.dup(found)
        self.folder = folder
        self._is_going = self._file.open(folder)
        if self._is_going:
            self._file.write(self._content)

    def sync(self) -> None:
        """Put its bytes on the disk, before its name is: whoever sees the name finds all of them."""
        self._file.sync()

    def link(self) -> None:
        """Give it its name."""
        self._is_going = self._file.link(self.segments[-1], self.folder)

    @property
    def is_going(self) -> bool:
        """Whether the next step is to be taken."""
        return self._is_going and self.error is None

    def attempt(self, step: Callable[[], None]) -> None:
        """One step, unless an earlier one was the last."""
        if self.is_going:
            try:
                step()
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Let go of everything; without a name by now, it is gone."""
        self._file.close()
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


def put_together(tree: BlobFolder, blobs: Sequence[tuple[tuple[str, ...], bytes]]) -> list[BlobWrite]:
    """Put each under its path, durably. What goes wrong with one is its own."""
    entries = [BlobWrite(tree, segments, content) for segments, content in blobs]
    try:
        for entry in entries:
            entry.attempt(entry.write)
        _sync_files([entry for entry in entries if entry.is_going])
        for entry in entries:
            entry.attempt(entry.link)
        _sync_folders(tree, [entry for entry in entries if entry.is_going])
    finally:
        for entry in entries:
            entry.close()
    return entries


def _sync_files(written: Sequence[BlobWrite]) -> None:
    """All at the same time: where an fsync takes long, several take hardly longer than one."""
    others = [_syncs.submit(entry.attempt, entry.sync) for entry in written[1:]]
    for entry in written[:1]:
        entry.attempt(entry.sync)
    for other in others:
        other.result()


def _sync_folders(tree: BlobFolder, linked: Sequence[BlobWrite]) -> None:
    by_folder: dict[tuple[str, ...], list[BlobWrite]] = {}
    for entry in linked:
        by_folder.setdefault(entry.segments[:-1], []).append(entry)
    for segments, entries in by_folder.items():
        try:
            tree.sync(segments, entries[0].folder)
        except OSError as error:
            for entry in entries:
                entry.error = error
            continue
        for entry in entries:
            entry.is_done = True
