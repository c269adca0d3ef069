"""Blobs on a folder: written without a name, fsynced, linked to their path, directory fsynced; see `files`."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from holdfast.engines.folder.files import BlobFolder, NewFile, finish, in_thread, put_blobs, remove_leftovers
from holdfast.errors import BlobExists, BlobMissing, CannotStart, HoldfastError, Invalid, StorageFailed
from holdfast.ports.blobs import Blob, BlobContent, BlobStat, check_path

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
