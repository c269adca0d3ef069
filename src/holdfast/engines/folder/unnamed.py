"""A blob that is being written and has no name yet: if its writer dies, the kernel forgets it and nothing is left.

Where the file system cannot do that, `Partial` stands in. Everything here blocks and is called in a thread.
"""

from __future__ import annotations

import errno
import os

from holdfast.proof import crash_point

#: What a system says that has no files without a name, or no way to give them one.
CANNOT = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.EPERM, errno.EXDEV})


class UnnamedFile:
    """Open, write, sync, link or not, and `close` in any case. The name is durable when its directory is synced."""

    def __init__(self) -> None:
        self._file = -1

    def open(self, folder: int) -> bool:
        """Make the file in a directory; false where that cannot be done. Raises OSError."""
        try:
            self._file = os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno in CANNOT:
                return False
            raise
        return True

    def write(self, data: bytes) -> None:
        """Append. Raises OSError; then the file is only good for closing."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def sync(self) -> None:
        """Put the bytes on the disk. Raises OSError."""
        crash_point("blobs.after_write")
        os.fsync(self._file)
        crash_point("blobs.after_fsync")

    def link(self, name: str, folder: int) -> bool:
        """Give it its name; false where that cannot be done. Raises FileExistsError when the name is taken."""
        try:
            os.link(f"/proc/self/fd/{self._file}", name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError as error:
            if error.errno in CANNOT:
                return False
            raise
        crash_point("blobs.after_rename")
        return True

    def close(self) -> None:
        """Without a name by now, it is gone. May be called when `open` failed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
