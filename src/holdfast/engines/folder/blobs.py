"""Blobs on a folder: written to a temporary name, fsynced, linked to the final name, and the directory fsynced."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from holdfast.engines.folder.partial import Partial, remove_leftovers
from holdfast.engines.folder.threads import in_thread
from holdfast.engines.folder.tree import Tree
from holdfast.errors import Invalid, StorageFailed
from holdfast.ports.blobs import Blob, BlobExists, BlobMissing, BlobStat, check_path

CHUNK_BYTES = 1 << 18
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@asynccontextmanager
async def open_folder_blobs(root: Path) -> AsyncIterator[FolderBlobs]:
    """Open the store in `root`, made when missing, and remove what a crash left half written.

    Raises StorageFailed when the folder cannot be used.
    """
    with _translated(f"opening {root}"):
        tree = await in_thread(Tree, root)
    try:
        with _translated(f"opening {root}"):
            await in_thread(remove_leftovers, tree)
        yield FolderBlobs(tree)
    finally:
        tree.close()


class FolderBlobs:
    """See `holdfast.ports.blobs.Blobs`; made by `open_folder_blobs`. Processes may share one folder."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    async def put(self, path: str, content: bytes | AsyncIterable[bytes]) -> Blob:
        segments = check_path(path)
        with _translated(f"putting {path}"):
            partial = await in_thread(Partial, self._tree)
        try:
            await self._fill(partial, content, path)
            with _translated(f"putting {path}"):
                created = await in_thread(self._publish, partial, segments)
        finally:
            with _translated(f"putting {path}"):
                await in_thread(partial.close)
        return Blob(path=path, size_bytes=partial.size_bytes, sha256=partial.sha256, created=created)

    async def get(self, path: str) -> AsyncIterator[bytes]:
        segments = check_path(path)
        with _translated(f"reading {path}"):
            file = await in_thread(self._open, segments)
        if file is None:
            raise BlobMissing(f"blob does not exist; {path!r}")
        try:
            while True:
                with _translated(f"reading {path}"):
                    chunk = await in_thread(os.read, file, CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk
        finally:
            os.close(file)

    async def stat(self, path: str) -> BlobStat | None:
        segments = check_path(path)
        with _translated(f"looking at {path}"):
            size_bytes = await in_thread(self._size, segments)
        return None if size_bytes is None else BlobStat(path=path, size_bytes=size_bytes)

    async def delete(self, path: str) -> bool:
        segments = check_path(path)
        with _translated(f"deleting {path}"):
            return await in_thread(self._delete, segments)

    async def find(self, prefix: str = "") -> AsyncIterator[BlobStat]:
        waiting: list[tuple[str, int | None]] = [("", None)]  # None: a directory, still to be read
        while waiting:
            path, size_bytes = waiting.pop()
            if size_bytes is not None:
                yield BlobStat(path=path, size_bytes=size_bytes)
                continue
            with _translated(f"listing {prefix!r}"):
                waiting += await in_thread(self._below, path, prefix)

    async def _fill(self, partial: Partial, content: bytes | AsyncIterable[bytes], path: str) -> None:
        """Write in chunks of a good size, however small or large the given ones are."""
        if isinstance(content, bytes):
            with _translated(f"putting {path}"):
                await in_thread(partial.write, content)
            return
        waiting = bytearray()
        async for chunk in content:
            waiting += chunk
            if len(waiting) >= CHUNK_BYTES:
                with _translated(f"putting {path}"):
                    await in_thread(partial.write, bytes(waiting))
                waiting.clear()
        with _translated(f"putting {path}"):
            await in_thread(partial.write, bytes(waiting))

    # What follows blocks, and runs in a thread.

    def _publish(self, partial: Partial, segments: tuple[str, ...]) -> bool:
        try:
            partial.publish(segments)
            return True
        except FileExistsError as error:
            if self._sha256(segments) != partial.sha256:
                raise BlobExists(f"blob exists with other bytes; {'/'.join(segments)!r}") from error
        # Whoever created it may have died, or be about to, between the link and the fsync.
        with self._tree.directory(segments[:-1], create=True) as folder:
            os.fsync(folder)
        return False

    def _open(self, segments: tuple[str, ...]) -> int | None:
        """A descriptor of the blob, or None. A link, or a file where a directory should be, is no blob."""
        try:
            with self._tree.directory(segments[:-1]) as folder:
                file = os.open(segments[-1], READ, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return file

    def _sha256(self, segments: tuple[str, ...]) -> str | None:
        file = self._open(segments)
        if file is None:
            return None
        with os.fdopen(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def _size(self, segments: tuple[str, ...]) -> int | None:
        file = self._open(segments)
        if file is None:
            return None
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def _delete(self, segments: tuple[str, ...]) -> bool:
        try:
            with self._tree.directory(segments[:-1]) as folder:
                os.unlink(segments[-1], dir_fd=folder)
                os.fsync(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _below(self, path: str, prefix: str) -> list[tuple[str, int | None]]:
        """What is in a directory and may match, last first. A directory sorts by its name with the slash."""
        directories, files = self._tree.entries(path.split("/") if path else ())
        start = f"{path}/" if path else ""
        found: list[tuple[str, int | None]] = [(f"{start}{name}", size_bytes) for name, size_bytes in files]
        found = [entry for entry in found if entry[0].startswith(prefix)]
        for name in directories:
            below = f"{start}{name}/"
            if not name.startswith(".") and (below.startswith(prefix) or prefix.startswith(below)):
                found.append((below[:-1], None))
        found.sort(key=lambda entry: entry[0] + ("/" if entry[1] is None else ""), reverse=True)
        return found


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except Invalid:
        raise
    except OSError as error:
        raise StorageFailed(f"blob storage failed; {doing}: {error.strerror or error}") from error
