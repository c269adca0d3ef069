"""Files under a blob folder, each durable and complete before anybody sees its name.

A blob is written to a file that has no name yet (`UnnamedFile`): if its writer dies, the kernel forgets it. Where the
file system cannot do that, `PartialFile` stands in, a temporary file that is linked to its name at the end. Temporaries
lie together in one directory, on the same file system, so that what a crash left behind is found without walking the
folder. A writer holds a lock on its file, and the lock goes with the process, however it ends: a file that somebody
else can lock is a leftover, even when several processes share the folder.

Of several blobs in one go each step is taken for all before the next: the fsyncs of the files go at the same time, one
fsync of a directory makes all names in it durable, and whoever waits for all of it changes threads once.

Directories are reached without following links, made so that a crash cannot undo them, and never removed. Everything
here but `in_thread` blocks and is called in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from holdfast.engines import threads
from holdfast.errors import Invalid
from holdfast.ports.blobs import BlobContent, check_path
from holdfast.proof import crash_point

PARTIAL = (".partial",)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
#: What a system says that has no files without a name, or no way to give them one.
CANNOT = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.EPERM, errno.EXDEV})
DURABLE_COUNT_MAX = 10_000
HELD_COUNT_MAX = 64
#: Threads that mostly wait for the disk: more than processors, and not those that others wait for.
THREADS_COUNT_MAX = 32
P = ParamSpec("P")
T = TypeVar("T")
_threads = ThreadPoolExecutor(THREADS_COUNT_MAX, thread_name_prefix="folder")
#: Threads that do nothing but fsync. Those who wait for them are others, so that nobody waits for himself.
_syncs = ThreadPoolExecutor(THREADS_COUNT_MAX, thread_name_prefix="fsync")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do this in a thread of the folder's; a cancellation goes out only when it is done."""
    return await threads.in_thread(_threads, partial(work, *args, **kwargs))


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


@dataclass(slots=True)
class _Sync:
    """The fsyncs of one directory: who has asked, and up to whom it is done."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    asked: int = 0
    done: int = 0


class PartialFile:
    """Open, write, `publish` or not, and `close` in any case."""

    def __init__(self, root: BlobFolder) -> None:
        self.size_bytes = 0
        self._root = root
        self._name = ""
        self._file = -1
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def open(self) -> None:
        """Make the temporary file. Raises OSError."""
        with self._root.directory(PARTIAL, create=True) as folder:
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
        _write(self._file, data)

    def publish(self, segments: tuple[str, ...]) -> None:
        """Give it its name, durably. Raises FileExistsError when the name is taken; then nothing changed.

        A link never replaces what is there, unlike a rename. The bytes are on the disk before the name is, so
        that whoever sees the name finds all of them, after a power cut too.
        """
        crash_point("blobs.after_write")
        os.fsync(self._file)
        crash_point("blobs.after_fsync")
        with (
            self._root.directory(PARTIAL) as source,
            self._root.directory(segments[:-1], create=True) as target,
        ):
            os.link(self._name, segments[-1], src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            crash_point("blobs.after_rename")
            self._root.sync(segments[:-1], target)

    def close(self) -> None:
        """Remove the temporary name; a published blob keeps its own. May be called when `open` failed."""
        if self._file < 0:
            return
        try:
            with suppress(FileNotFoundError), self._root.directory(PARTIAL) as folder:
                os.unlink(self._name, dir_fd=folder)
        finally:
            os.close(self._file)
            self._file = -1


class UnnamedFile:
    """One blob on its way in a file without a name: it is done, or has its error; or neither, where there are no such
    files. Its name is durable when its directory is synced."""

    def __init__(self, root: BlobFolder, blob: BlobContent) -> None:
        self.segments: tuple[str, ...] = ()
        self.error: OSError | Invalid | None = None
        self.is_done = False
        self.folder = -1
        self._blob = blob
        self._root = root
        self._own = -1
        self._file = -1
        self._is_going = True

    def write(self) -> None:
        """Make the file and fill it. Raises Invalid for a path that is none."""
        self.segments = check_path(self._blob.path)
        folder = self._root.held(self.segments[:-1])
        if folder is None:
            with self._root.directory(self.segments[:-1], create=True) as found:
                folder = self._own = os.dup(found)
        self.folder = folder
        with self._where_possible():
            self._file = os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
        if self._is_going:
            _write(self._file, self._blob.content)

    def sync(self) -> None:
        """Put its bytes on the disk, before its name is: whoever sees the name finds all of them."""
        crash_point("blobs.after_write")
        os.fsync(self._file)
        crash_point("blobs.after_fsync")

    def link(self) -> None:
        """Give it its name. Raises FileExistsError when that is taken."""
        with self._where_possible():
            os.link(f"/proc/self/fd/{self._file}", self.segments[-1], dst_dir_fd=self.folder, follow_symlinks=True)
            crash_point("blobs.after_rename")

    @contextmanager
    def _where_possible(self) -> Iterator[None]:
        """Where the system cannot do that, this was the last step."""
        try:
            yield
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            self._is_going = False

    @property
    def is_going(self) -> bool:
        """Whether the next step is to be taken."""
        return self._is_going and self.error is None

    def attempt(self, step: Callable[[], None]) -> None:
        """One step, unless an earlier one was the last."""
        if self.is_going:
            try:
                step()
            except (OSError, Invalid) as error:
                self.error = error

    def close(self) -> None:
        """Let go of everything; without a name by now, it is gone."""
        for descriptor in (self._file, self._own):
            if descriptor >= 0:
                os.close(descriptor)


def put_blobs(root: BlobFolder, blobs: Sequence[BlobContent]) -> list[UnnamedFile]:
    """Put each under its path, durably. What goes wrong with one is its own."""
    entries = [UnnamedFile(root, blob) for blob in blobs]
    try:
        for entry in entries:
            entry.attempt(entry.write)
        _sync_files([entry for entry in entries if entry.is_going])
        for entry in entries:
            entry.attempt(entry.link)
        _sync_folders(root, [entry for entry in entries if entry.is_going])
    finally:
        for entry in entries:
            entry.close()
    return entries


def remove_leftovers(root: BlobFolder) -> int:
    """Remove the temporaries whose writers are gone; returns how many. Raises OSError."""
    removed = 0
    for name, _ in root.entries(PARTIAL)[1]:
        with suppress(FileNotFoundError, BlockingIOError), root.directory(PARTIAL) as folder:
            file = os.open(name, LOOK, dir_fd=folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
                removed += 1
            finally:
                os.close(file)
    return removed


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_files(written: Sequence[UnnamedFile]) -> None:
    """All at the same time: where an fsync takes long, several take hardly longer than one."""
    others = [_syncs.submit(entry.attempt, entry.sync) for entry in written[1:]]
    for entry in written[:1]:
        entry.attempt(entry.sync)
    for other in others:
        other.result()


def _sync_folders(root: BlobFolder, linked: Sequence[UnnamedFile]) -> None:
    by_folder: dict[tuple[str, ...], list[UnnamedFile]] = {}
    for entry in linked:
        by_folder.setdefault(entry.segments[:-1], []).append(entry)
    for segments, entries in by_folder.items():
        try:
            root.sync(segments, entries[0].folder)
        except OSError as error:
            for entry in entries:
                entry.error = error
            continue
        for entry in entries:
            entry.is_done = True


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
