"""The folder of a SQLite storage: made if need be, and locked, so that two processes never write the same files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.errors import CannotStart


class FolderLock:
    """An OS lock that ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Make and lock the folder; raises CannotStart that names the process which holds it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CannotStart(
                f"data folder cannot be used; '{self._folder}': {error.strerror}, choose another folder or mend it"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise CannotStart(
                f"data folder is in use; '{self._folder}' is locked by process {holder}, stop it, choose another "
                "folder, or use PostgreSQL to share queues between processes"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise CannotStart(
                f"data folder cannot be written; '{self._folder}': {error.strerror}, free some space or mend it"
            ) from error
        self._descriptor = descriptor

    def let_go(self) -> None:
        """Unlock the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
