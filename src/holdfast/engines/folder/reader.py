"""An open blob. Everything here blocks and is called in a thread."""

from __future__ import annotations

import errno
import hashlib
import os
import stat

from holdfast.engines.folder.tree import BlobFolder

# Not blocking: a named pipe that somebody put there must not hold us up.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
NO_BLOB = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


class BlobReader:
    """Open, read, and `close` in any case."""

    def __init__(self, tree: BlobFolder, segments: tuple[str, ...]) -> None:
        self.size_bytes = 0
        self._tree = tree
        self._segments = segments
        self._file = -1

    def open(self) -> bool:
        """False when there is no blob: a link, or a directory, is none. Raises OSError."""
        try:
            with self._tree.directory(self._segments[:-1]) as folder:
                self._file = os.open(self._segments[-1], READ, dir_fd=folder)
        except OSError as error:
            if error.errno in NO_BLOB:
                return False
            raise
        status = os.fstat(self._file)
        self.size_bytes = status.st_size
        return stat.S_ISREG(status.st_mode)

    def read(self, bytes_max: int) -> bytes:
        """The next bytes; empty at the end. Raises OSError."""
        return os.read(self._file, bytes_max)

    def sha256(self) -> str:
        """Of all the bytes, from the beginning. Raises OSError."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def close(self) -> None:
        """May be called when `open` failed, and more than once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
