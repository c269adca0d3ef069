"""Blobs on a real folder: once, whole, durable, and never outside of it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from holdfast.engines.folder import (
    CHUNK_BYTES,
    BlobFolder,
    FolderBlobs,
    NewFile,
    finish,
    in_thread,
    open_folder_blobs,
    remove_leftovers,
)
from holdfast.errors import BlobExists, BlobMissing, CannotStart, Invalid, StorageFailed
from holdfast.ports.blobs import Blobs, BlobStat


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


@pytest.fixture
async def blobs(root: Path) -> AsyncIterator[FolderBlobs]:
    async with open_folder_blobs(root) as opened:
        yield opened


async def read(blobs: Blobs, path: str) -> bytes:
    return b"".join([chunk async for chunk in blobs.get(path)])


async def paths(blobs: Blobs, prefix: str = "") -> list[str]:
    return [found.path async for found in blobs.find(prefix)]


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def leftovers(root: Path) -> list[str]:
    return os.listdir(root / ".partial") if (root / ".partial").exists() else []


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(3 * CHUNK_BYTES + 1)], ids=["empty", "one", "large"])
async def test_what_was_put_is_read_back_whole(blobs: FolderBlobs, root: Path, content: bytes) -> None:
    blob = await blobs.put("a/b/c", content)
    assert (blob.path, blob.size_bytes, blob.created) == ("a/b/c", len(content), True)
    assert blob.sha256 == hashlib.sha256(content).hexdigest()
    assert await read(blobs, "a/b/c") == content
    assert await blobs.stat("a/b/c") == BlobStat(path="a/b/c", size_bytes=len(content))
    assert leftovers(root) == []


async def test_chunks_of_any_size_make_one_blob(blobs: FolderBlobs) -> None:
    parts = [b"", b"one", os.urandom(CHUNK_BYTES * 2), b"", b"end"]
    blob = await blobs.put("a", pieces(*parts))
    assert await read(blobs, "a") == b"".join(parts)
    assert blob.sha256 == hashlib.sha256(b"".join(parts)).hexdigest()


async def test_the_same_bytes_again_are_no_error(blobs: FolderBlobs, root: Path) -> None:
    first = await blobs.put("a", b"same")
    again = await blobs.put("a", pieces(b"sa", b"me"))
    assert (first.created, again.created) == (True, False)
    assert first.sha256 == again.sha256
    assert leftovers(root) == []


async def test_other_bytes_are_refused_and_the_first_stay(blobs: FolderBlobs, root: Path) -> None:
    await blobs.put("a", b"first")
    with pytest.raises(BlobExists, match="blob path is taken"):
        await blobs.put("a", b"second")
    assert await read(blobs, "a") == b"first"
    assert leftovers(root) == []


async def test_of_concurrent_puts_exactly_one_creates(blobs: FolderBlobs, root: Path) -> None:
    async with open_folder_blobs(root) as other:
        puts = [store.put("new/folder/a", b"same") for store in (blobs, other) for _ in range(8)]
        results = await asyncio.gather(*puts)
    assert [blob.created for blob in results].count(True) == 1


async def test_of_concurrent_puts_of_different_bytes_one_wins_and_stays_whole(blobs: FolderBlobs) -> None:
    puts = [blobs.put("a", bytes([number]) * 10_000) for number in range(8)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert sum(isinstance(result, BlobExists) for result in results) == 7
    assert len(set(await read(blobs, "a"))) == 1


async def test_a_path_below_a_blob_and_a_blob_above_paths_are_refused(blobs: FolderBlobs, root: Path) -> None:
    await blobs.put("a", b"1")
    with pytest.raises(Invalid, match="a part of 'a/b' is not a folder"):
        await blobs.put("a/b", b"2")
    await blobs.put("c/d", b"3")
    with pytest.raises(BlobExists):
        await blobs.put("c", b"4")
    assert await blobs.stat("a/b") is None
    assert await blobs.stat("c") is None
    assert await blobs.delete("c") is False
    assert leftovers(root) == []


async def test_a_missing_blob_is_missing_everywhere(blobs: FolderBlobs) -> None:
    assert await blobs.stat("no/such") is None
    assert await blobs.delete("no/such") is False
    with pytest.raises(BlobMissing, match="blob does not exist; 'no/such'"):
        await read(blobs, "no/such")


async def test_a_deleted_blob_is_gone_and_can_be_put_anew(blobs: FolderBlobs) -> None:
    await blobs.put("a/b", b"old")
    assert await blobs.delete("a/b") is True
    assert await blobs.delete("a/b") is False
    assert await blobs.stat("a/b") is None
    assert (await blobs.put("a/b", b"new")).created


async def test_a_reader_keeps_what_is_deleted_under_it(blobs: FolderBlobs) -> None:
    content = os.urandom(2 * CHUNK_BYTES)
    await blobs.put("a", content)
    async with aclosing(blobs.get("a")) as chunks:
        first = await anext(chunks)
        await blobs.delete("a")
        assert first + b"".join([chunk async for chunk in chunks]) == content


async def test_find_lists_by_prefix_in_the_order_of_the_paths(blobs: FolderBlobs, root: Path) -> None:
    names = ["a", "a-b", "a/b", "a0", "b/c/d", "b/c/e", "b/cc", "ü"]
    for name in names:
        if name != "a":
            await blobs.put(name, b"x")
    (root / ".hidden").write_bytes(b"")
    (root / "b" / "link").symlink_to(root / "a0")
    assert await paths(blobs) == sorted(names[1:])
    assert await paths(blobs, "a") == ["a-b", "a/b", "a0"]
    assert await paths(blobs, "a/") == ["a/b"]
    assert await paths(blobs, "b/c") == ["b/c/d", "b/c/e", "b/cc"]
    assert await paths(blobs, "b/c/") == ["b/c/d", "b/c/e"]
    assert await paths(blobs, "b/c/d") == ["b/c/d"]
    assert await paths(blobs, "none") == []
    assert await paths(blobs, "../") == []


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", "a\0", ".partial/x"])
async def test_a_path_that_leads_out_is_refused_by_every_method(blobs: FolderBlobs, path: str) -> None:
    with pytest.raises(Invalid, match="blob path is invalid"):
        await blobs.put(path, b"")
    with pytest.raises(Invalid, match="blob path is invalid"):
        await read(blobs, path)
    with pytest.raises(Invalid, match="blob path is invalid"):
        await blobs.stat(path)
    with pytest.raises(Invalid, match="blob path is invalid"):
        await blobs.delete(path)


async def test_a_link_is_never_followed(blobs: FolderBlobs, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    for path in ("folder/secret", "file"):
        assert await blobs.stat(path) is None
        assert await blobs.delete(path) is False
        with pytest.raises(BlobMissing):
            await read(blobs, path)
    with pytest.raises(Invalid, match="is not a folder"):
        await blobs.put("folder/new", b"x")
    with pytest.raises(BlobExists):
        await blobs.put("file", b"secret")
    assert os.listdir(outside) == ["secret"]
    assert await paths(blobs) == []


async def test_a_pipe_in_the_folder_is_no_blob_and_holds_nobody_up(blobs: FolderBlobs, root: Path) -> None:
    os.mkfifo(root / "pipe")
    async with asyncio.timeout(60):
        assert await blobs.stat("pipe") is None


async def test_an_error_out_of_the_content_leaves_nothing(blobs: FolderBlobs, root: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * CHUNK_BYTES
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await blobs.put("a", broken())
    assert await blobs.stat("a") is None
    assert leftovers(root) == []


async def test_a_cancelled_put_leaves_nothing(blobs: FolderBlobs, root: Path) -> None:
    waiting = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * CHUNK_BYTES
        waiting.set()
        await asyncio.Event().wait()

    put = asyncio.create_task(blobs.put("a", endless()))
    await waiting.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await blobs.stat("a") is None
    assert leftovers(root) == []


async def test_a_cancellation_waits_for_the_thread() -> None:
    loop = asyncio.get_running_loop()
    started, may_end, order = asyncio.Event(), asyncio.Event(), []

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(10)
        order.append("the thread ended")

    task = asyncio.create_task(in_thread(work))
    await started.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["the thread ended"]


@pytest.mark.parametrize("call", ["os.write", "os.fsync", "os.link"])
async def test_a_store_that_refuses_says_so_and_the_put_can_be_repeated(
    blobs: FolderBlobs, root: Path, call: str
) -> None:
    with (
        patch(f"holdfast.engines.folder.{call}", side_effect=OSError(28, "No space left on device")),
        pytest.raises(StorageFailed, match="blob storage failed; putting 'a': No space left on device"),
    ):
        await blobs.put("a", b"x")
    assert leftovers(root) == []
    assert (await blobs.put("a", b"x")).created


async def test_files_are_for_their_owner_alone(blobs: FolderBlobs, root: Path) -> None:
    await blobs.put("a/b", b"x")
    assert (root / "a" / "b").stat().st_mode & 0o777 == 0o600
    assert (root / "a").stat().st_mode & 0o777 == 0o700
    assert root.stat().st_mode & 0o777 == 0o700


async def test_every_new_name_is_put_on_the_disk(blobs: FolderBlobs, root: Path) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    async def stream() -> AsyncIterator[bytes]:
        yield b"x"

    await blobs.put("warm", stream())
    with patch("os.fsync", fsync):
        await blobs.put("a/b/c", stream())
    *made, file, folder = synced
    assert Path(file).parent == root / ".partial"
    assert [*made, folder] == [str(root), str(root / "a"), str(root / "a" / "b")]
    synced.clear()
    with patch("os.fsync", fsync):
        await blobs.put("d/e/f", b"x")
    *made, file, folder = synced
    assert made == [str(root), str(root / "d")]
    assert file.endswith("(deleted)"), "it has no name until its bytes are on the disk"
    assert folder == str(root / "d" / "e")


@pytest.mark.parametrize("refuses", ["open", "link"])
async def test_where_a_file_must_have_a_name_it_has_one(blobs: FolderBlobs, root: Path, refuses: str) -> None:
    real = getattr(os, refuses)

    def refuse(path: Any, *rest: Any, **more: Any) -> Any:
        if path == "." or str(path).startswith("/proc/self/fd/"):
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, *rest, **more)

    with patch(f"os.{refuses}", refuse):
        assert (await blobs.put("a/b", b"x")).created
    assert (root / "a/b").read_bytes() == b"x"
    assert leftovers(root) == []


async def test_opening_removes_what_the_dead_left_and_nothing_of_the_living(root: Path) -> None:
    async with open_folder_blobs(root) as blobs:
        await blobs.put("a", b"kept")
        (root / ".partial").mkdir()
        (root / ".partial" / "of-the-dead").write_bytes(b"half")
        living = NewFile(tree := BlobFolder(root), "b", named=True)
        tree.open()
        living.open()
        async with open_folder_blobs(root) as again:
            assert len(leftovers(root)) == 1
            assert await read(again, "a") == b"kept"
        living.write(b"whole")
        finish(tree, [living])
        living.close()
        assert remove_leftovers(tree) == 0
        tree.close()
        assert await read(blobs, "b") == b"whole"


async def test_a_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CannotStart, match=r"the blob folder cannot be used; .*file"):
        async with open_folder_blobs(tmp_path / "file"):
            pass


async def test_nothing_stays_open(root: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with open_folder_blobs(root) as blobs:
        await blobs.put("a", b"x")
    before = descriptors()
    async with open_folder_blobs(root) as blobs:
        for path in ("a", "b/c", "b/c", "a/x"):
            await asyncio.gather(blobs.put(path, b"x"), return_exceptions=True)
        await blobs.stat("a")
        await blobs.stat("b")
        await read(blobs, "a")
        await paths(blobs)
        await blobs.delete("a")
    assert descriptors() == before
