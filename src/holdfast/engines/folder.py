"""Blobs in a folder, each durable and complete before anybody sees its name. Several processes may share it.

A blob is written to a file that has no name yet: if its writer dies, the kernel forgets it. A stream is written to a
temporary file, which is linked to its name at the end, and so is any blob where the file system cannot do the other.
Temporaries lie together in one directory, on the same file system, so that what a crash left behind is found without
walking the folder. A writer holds a lock on its file, and the lock goes with the process, however it ends: a file that
somebody else can lock is a leftover, even when several processes share the folder.

Of several blobs in one go each step is taken for all before the next: the fsyncs of the files go at the same time, one
fsync of a directory makes all names in it durable, and whoever waits for all of it changes threads once.

Directories are reached without following links, made so that a crash cannot undo them, and never removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from holdfast.engines import threads
from holdfast.errors import BlobExists, BlobMissing, CannotStart, HoldfastError, Invalid, StorageFailed
from holdfast.ports.blobs import Blob, BlobContent, BlobStat, check_path
from holdfast.proof import crash_point

PARTIAL = (".partial",)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
COPY_BYTES = 1 << 30
LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
#: What a system says that has no files without a name, or no way to give them one.
CANNOT = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.EPERM, errno.EXDEV})
DURABLE_COUNT_MAX = 10_000
KEPT_OPEN_COUNT_MAX = 64
#: Threads that mostly wait for the disk: more than processors, and not those that others wait for.
THREADS_COUNT_MAX = 32
P = ParamSpec("P")
T = TypeVar("T")
_threads = ThreadPoolExecutor(THREADS_COUNT_MAX, thread_name_prefix="folder")
#: Threads that do nothing but fsync. Those who wait for them are others, so that nobody waits for himself.
_syncs = ThreadPoolExecutor(THREADS_COUNT_MAX, thread_name_prefix="fsync")
CHUNK_BYTES = 1 << 18
# Not blocking: a named pipe that somebody put there must not hold us up.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
NO_BLOB = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


@asynccontextmanager
async def open_folder_blobs(root: Path) -> AsyncIterator[FolderBlobs]:
    """Open the store in `root`, made where it is missing, and remove what a crash left half written.

    Raises CannotStart when the folder cannot be used.
    """
    folder = BlobFolder(root)
    try:
        try:
            await in_thread(folder.open)
            await in_thread(remove_leftovers, folder)
        except OSError as error:
            raise CannotStart(f"the blob folder cannot be used; {root}: {error.strerror}") from error
        yield FolderBlobs(folder)
    finally:
        folder.close()


class FolderBlobs:
    """See `holdfast.ports.blobs.Blobs`; made by `open_folder_blobs`. Several processes may share a folder."""

    def __init__(self, root: BlobFolder) -> None:
        self._root = root

    async def put(self, path: str, content: bytes | AsyncIterable[bytes], *, sha256: str | None = None) -> Blob:
        check_path(path)
        if isinstance(content, bytes):
            digest = sha256 or hashlib.sha256(content).hexdigest()
            (done,) = await self.put_all([BlobContent(path=path, content=content, sha256=digest)])
        else:
            done = await self._put_stream(path, content)
        if isinstance(done, HoldfastError):
            raise done
        return done

    async def _put_stream(self, path: str, content: AsyncIterable[bytes]) -> Blob | HoldfastError:
        made, size_bytes, file = hashlib.sha256(), 0, NewFile(self._root, path, named=True)

        def append(data: bytes) -> None:
            made.update(data)
            file.write(data)

        try:
            await in_thread(file.attempt, file.open)
            async with aclosing(_sized(content)) as pieces:
                while file.error is None and (data := await anext(pieces, None)) is not None:
                    await in_thread(file.attempt, append, data)
                    size_bytes += len(data)
            await in_thread(finish, self._root, [file])
            return await in_thread(self._outcome, file, path, size_bytes, made.hexdigest())
        finally:
            with _translated("putting", path):
                await in_thread(file.close)

    async def put_all(self, blobs: Sequence[BlobContent]) -> Sequence[Blob | HoldfastError]:
        return await in_thread(self._put_all, blobs)

    async def get(self, path: str) -> AsyncGenerator[bytes, None]:
        segments = check_path(path)
        with ExitStack() as stack:
            with _translated("reading", path):
                file = await in_thread(self._open, segments, stack)
            if file is None:
                raise BlobMissing(f"blob does not exist; {path!r}")
            while True:
                with _translated("reading", path):
                    chunk = await in_thread(os.read, file, CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    async def stat(self, path: str) -> BlobStat | None:
        segments = check_path(path)
        with ExitStack() as stack, _translated("looking at", path):
            file = await in_thread(self._open, segments, stack)
            return None if file is None else BlobStat(path=path, size_bytes=os.fstat(file).st_size)

    async def delete(self, path: str) -> bool:
        segments = check_path(path)
        with _translated("deleting", path):
            return await in_thread(self._delete, segments)

    async def find(self, prefix: str = "") -> AsyncIterator[BlobStat]:
        waiting: list[tuple[str, int | None]] = [("", None)]  # without a size: a directory, still to be read
        while waiting:
            path, size_bytes = waiting.pop()
            if size_bytes is not None:
                yield BlobStat(path=path, size_bytes=size_bytes)
            else:
                with _translated("listing", path):
                    waiting += await in_thread(self._below, path, prefix)

    # What follows blocks, and runs in a thread.

    def _put_all(self, blobs: Sequence[BlobContent]) -> list[Blob | HoldfastError]:
        """All of them in one go: each change of threads costs as much as a small write."""
        return [
            self._outcome(file, blob.path, len(blob.content), blob.sha256)
            for blob, file in zip(blobs, put_blobs(self._root, blobs), strict=True)
        ]

    def _outcome(self, file: NewFile, path: str, size_bytes: int, sha256: str) -> Blob | HoldfastError:
        try:
            with _translated("putting", path):
                created = file.is_done or self._taken(file, sha256)
        except HoldfastError as error:
            return error
        return Blob(path=path, size_bytes=size_bytes, sha256=sha256, created=created)

    def _taken(self, file: NewFile, sha256: str) -> bool:
        """The path is taken: by the same bytes, which is no error, or by something else. Raises what went wrong."""
        segments, path, error = file.segments, "/".join(file.segments), file.error
        assert error is not None  # noqa: S101  else it is done
        if isinstance(error, NotADirectoryError):
            raise Invalid(f"blob path is invalid; a part of {path!r} is not a folder") from error
        if not isinstance(error, FileExistsError):
            raise error
        found = self._sha256(segments)
        if found is None and not self._is_taken(segments):
            raise FileNotFoundError(errno.ENOENT, "it was deleted meanwhile") from error
        if found != sha256:
            raise BlobExists(f"blob path is taken; {path!r} holds something else") from error
        # Whoever created it may have died between the link and the fsync.
        with self._root.directory(segments[:-1], create=True) as folder:
            os.fsync(folder)
        return False

    def _sha256(self, segments: tuple[str, ...]) -> str | None:
        with ExitStack() as stack:
            if (descriptor := self._open(segments, stack)) is None:
                return None
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

    def _open(self, segments: tuple[str, ...], stack: ExitStack) -> int | None:
        """A descriptor that the stack closes; none when there is no blob: a link, or a directory, is none."""
        try:
            with self._root.directory(segments[:-1]) as folder:
                file = os.open(segments[-1], READ, dir_fd=folder)
        except OSError as error:
            if error.errno in NO_BLOB:
                return None
            raise
        stack.callback(os.close, file)
        return file if stat.S_ISREG(os.fstat(file).st_mode) else None

    def _is_taken(self, segments: tuple[str, ...]) -> bool:
        with suppress(FileNotFoundError), self._root.directory(segments[:-1]) as folder:
            os.stat(segments[-1], dir_fd=folder, follow_symlinks=False)
            return True
        return False

    def _delete(self, segments: tuple[str, ...]) -> bool:
        try:
            with self._root.directory(segments[:-1]) as folder:
                if not stat.S_ISREG(os.stat(segments[-1], dir_fd=folder, follow_symlinks=False).st_mode):
                    return False  # nor is a link to one
                os.unlink(segments[-1], dir_fd=folder)
                os.fsync(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _below(self, path: str, prefix: str) -> list[tuple[str, int | None]]:
        """What is in a directory and may match, the last first: it is taken from the end."""
        directories, files = self._root.entries(path.split("/") if path else ())
        start = f"{path}/" if path else ""
        found: list[tuple[str, int | None]] = []
        for name, size_bytes in files:
            if _is_ours(name) and f"{start}{name}".startswith(prefix):
                found.append((f"{start}{name}", size_bytes))
        for name in directories:
            below = f"{start}{name}/"
            if _is_ours(name) and (below.startswith(prefix) or prefix.startswith(below)):
                found.append((below[:-1], None))
        # With its slash, a directory sorts among the files where the paths below it belong.
        found.sort(key=lambda entry: entry[0] + ("/" if entry[1] is None else ""), reverse=True)
        return found


async def _sized(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The content in pieces worth a thread, however small the given ones are."""
    waiting = bytearray()
    async for chunk in content:
        waiting += chunk
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _is_ours(name: str) -> bool:
    try:
        check_path(name)
    except Invalid:
        return False
    return True


@contextmanager
def _translated(doing: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"blob storage failed; {doing} {path!r}: {error.strerror or error}") from error


# --- files: all but `in_thread` blocks, and is called in a thread -----------------------------------------------------


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
        self._kept_open: dict[tuple[str, ...], int] = {}

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
        while self._kept_open:
            os.close(self._kept_open.popitem()[1])
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def kept_open(self, segments: tuple[str, ...]) -> int | None:
        """A descriptor of a directory that is made if it is missing, kept open until `close`: for who comes often.

        None when too many are kept. Raises what `directory` raises.
        """
        known = self._kept_open.get(segments)
        if known is not None or len(self._kept_open) >= KEPT_OPEN_COUNT_MAX:
            return known
        with self.directory(segments, create=True) as found, self._lock:
            if segments not in self._kept_open:
                self._kept_open[segments] = os.dup(found)
            return self._kept_open[segments]

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


class NewFile:
    """One blob on its way: `open`, `write`, `finish` it with others, and `close` it in any case. It is done then, or
    has its error.

    Until it is whole nobody sees it: it has no name, or a temporary one if it is to be `named`, or has to.
    """

    def __init__(self, root: BlobFolder, path: str, *, named: bool = False) -> None:
        self.segments: tuple[str, ...] = ()
        self.error: OSError | Invalid | None = None
        self.is_done = False
        self.folder = -1
        self._path = path
        self._root = root
        self._is_named = named
        self._name = ""
        self._own = -1
        self._file = -1

    def attempt(self, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """One step, unless an earlier one has failed."""
        if self.error is None:
            try:
                step(*args, **kwargs)
            except (OSError, Invalid) as error:
                self.error = error

    def open(self) -> None:
        """Make the file. Raises OSError, and Invalid for a path that is none."""
        self.segments = check_path(self._path)
        folder = self._root.kept_open(self.segments[:-1])
        if folder is None:
            with self._root.directory(self.segments[:-1], create=True) as found:
                folder = self._own = os.dup(found)
        self.folder = folder
        if not self._is_named:
            with self._where_possible():
                self._file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
        if self._file < 0:
            self._open_named()

    def write(self, data: bytes) -> None:
        """Append. Raises OSError; then the file is only good for closing."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def sync(self) -> None:
        """Put its bytes on the disk, before its name is: whoever sees the name finds all of them, after a power cut
        too."""
        crash_point("blobs.after_write")
        os.fsync(self._file)
        crash_point("blobs.after_fsync")

    def link(self) -> None:
        """Give it its name, durable when its directory is synced. Raises FileExistsError when that is taken: a link
        never replaces what is there, unlike a rename."""
        is_linked = False
        if not self._name:
            with self._where_possible():
                os.link(f"/proc/self/fd/{self._file}", self.segments[-1], dst_dir_fd=self.folder, follow_symlinks=True)
                is_linked = True
        if not is_linked:
            if not self._name:
                self._copy()
            with self._root.directory(PARTIAL) as source:
                os.link(self._name, self.segments[-1], src_dir_fd=source, dst_dir_fd=self.folder, follow_symlinks=False)
        crash_point("blobs.after_rename")

    def close(self) -> None:
        """Let go of everything. What has no name by now is gone, and a temporary name goes; a blob keeps its own."""
        try:
            if self._name:
                with suppress(FileNotFoundError), self._root.directory(PARTIAL) as folder:
                    os.unlink(self._name, dir_fd=folder)
        finally:
            for descriptor in (self._file, self._own):
                if descriptor >= 0:
                    os.close(descriptor)

    def _open_named(self) -> None:
        with self._root.directory(PARTIAL, create=True) as folder:
            while True:
                name = uuid.uuid4().hex
                self._file = os.open(name, CREATE, mode=0o600, dir_fd=folder)
                self._name = name
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if os.fstat(self._file).st_nlink > 0:
                    return
                # Somebody who opened the store took it for a leftover before it was locked.
                unlinked, self._file = self._file, -1
                os.close(unlinked)

    def _copy(self) -> None:
        """Into a file with a name: the one without cannot be given any here."""
        unnamed, size = self._file, 0
        self._file = -1
        try:
            self._open_named()
            while count := os.sendfile(self._file, unnamed, size, COPY_BYTES):
                size += count
            os.fsync(self._file)
        finally:
            os.close(unnamed)

    @contextmanager
    def _where_possible(self) -> Iterator[None]:
        """What not every system can do; whoever finds it not done goes another way."""
        try:
            yield
        except OSError as error:
            if error.errno not in CANNOT:
                raise


def put_blobs(root: BlobFolder, blobs: Sequence[BlobContent]) -> list[NewFile]:
    """Put each under its path, durably. What goes wrong with one is its own."""
    files = [NewFile(root, blob.path) for blob in blobs]
    try:
        for file, blob in zip(files, blobs, strict=True):
            file.attempt(file.open)
            file.attempt(file.write, blob.content)
        finish(root, files)
    finally:
        for file in files:
            file.close()
    return files


def finish(root: BlobFolder, files: Sequence[NewFile]) -> None:
    """Give those that are written their names, durably."""
    # All at the same time: where an fsync takes long, several take hardly longer than one.
    others = [_syncs.submit(file.attempt, file.sync) for file in files[1:]]
    for file in files[:1]:
        file.attempt(file.sync)
    for other in others:
        other.result()
    by_folder: dict[tuple[str, ...], list[NewFile]] = {}
    for file in files:
        file.attempt(file.link)
        if file.error is None:
            by_folder.setdefault(file.segments[:-1], []).append(file)
    for segments, linked in by_folder.items():
        try:
            root.sync(segments, linked[0].folder)
        except OSError as error:
            for file in linked:
                file.error = error
            continue
        for file in linked:
            file.is_done = True


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
