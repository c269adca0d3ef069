"""A blob that is being written: a temporary file, locked while its writer lives, linked to its name at the end.

The temporaries of a store lie together in one directory of it, on the same file system, so that what a crash
left behind is found without walking the store. A writer holds a lock on its file, and the lock goes with the
process, however it ends. So a file that can be locked by somebody else is a leftover, even when several
processes share the folder. Everything here blocks and is called in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from contextlib import suppress

from holdfast.engines.folder.tree import BlobFolder
from holdfast.proof import crash_point

PARTIAL = (".partial",)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class PartialFile:
    """Open, write, `publish` or not, and `close` in any case."""

    def __init__(self, tree: BlobFolder) -> None:
        self.size_bytes = 0
        self._tree = tree
        self._name = ""
        self._file = -1
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def open(self) -> None:
        """Make the temporary file. Raises OSError."""
        with self._tree.directory(PARTIAL, create=True) as folder:
            while True:
                self._name = uuid.uuid4().hex
                self._file = os.open(self._name, CREATE, mode=0o600, dir_fd=folder)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if os.fstat(self._file).st_nlink > 0:
                    return
                # Somebody who opened the store took it for a leftover before it was locked.
                os.close(self._file)

    def write(self, data: bytes) -> None:
        """Append. Raises OSError; then the file is only good for closing."""
        self._digest.update(data)
        self.size_bytes += len(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def publish(self, segments: tuple[str, ...]) -> None:
        """Give it its name, durably. Raises FileExistsError when the name is taken; then nothing changed.

        A link never replaces what is there, unlike a rename. The bytes are on the disk before the name is, so
        that whoever sees the name finds all of them, after a power cut too.
        """
        crash_point("blobs.after_write")
        os.fsync(self._file)
        crash_point("blobs.after_fsync")
        with (
            self._tree.directory(PARTIAL) as source,
            self._tree.directory(segments[:-1], create=True) as target,
        ):
            os.link(self._name, segments[-1], src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            crash_point("blobs.after_rename")
            self._tree.sync(segments[:-1], target)

    def close(self) -> None:
        """Remove the temporary name; a published blob keeps its own. May be called when `open` failed."""
        if self._file < 0:
            return
        try:
            with suppress(FileNotFoundError), self._tree.directory(PARTIAL) as folder:
                os.unlink(self._name, dir_fd=folder)
        finally:
            os.close(self._file)
            self._file = -1


def remove_leftovers(tree: BlobFolder) -> int:
    """Remove the temporaries whose writers are gone; returns how many. Raises OSError."""
    removed = 0
    for name, _ in tree.entries(PARTIAL)[1]:
        with suppress(FileNotFoundError, BlockingIOError), tree.directory(PARTIAL) as folder:
            file = os.open(name, LOOK, dir_fd=folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
                removed += 1
            finally:
                os.close(file)
    return removed
