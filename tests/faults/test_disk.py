"""A disk that is full or read-only, and SQLite files that are locked, corrupt or gone: a clear 454 or a clear end,
nothing acknowledged that is not stored, the other queues go on, and service goes on when the cause is gone."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.core.item import NewItem
from holdfast.errors import HoldfastError, TryAgain
from tests.faults.serving import Serving
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

GOOD, BAD = "good", "bad"
BIG = b"x" * 200_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB of our own, where we may mount one; files that may not grow, below, need no right at all."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


async def fill(client: holdfast.Client) -> tuple[list[str], TryAgain]:
    """Produce until it is refused: what was answered, and the refusal."""
    stored: list[str] = []
    for _ in range(100):
        try:
            stored += await produce(client, BAD, BIG)
        except TryAgain as error:
            return stored, error
    raise AssertionError("the disk is not small")


async def produce(client: holdfast.Client, name: str, payload: bytes, count: int = 1) -> list[str]:
    reply = await client.queue_produce(name, [NewItem(payload=payload)] * count, request_timeout="20s")
    return [item.id for item in reply.items]


async def ids_of(client: holdfast.Client, name: str) -> list[str]:
    return [item.id for item in await client.storage_items_list(name)]


async def is_served_again(client: holdfast.Client, name: str) -> bool:
    try:
        await produce(client, name, b"again")
    except TryAgain:
        return False
    return True


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server on an ordinary folder with two queues, one item in each."""
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server, server.client() as client:
        await server.start()
        for name in (GOOD, BAD):
            await client.queues_create(name)
            await produce(client, name, b"first")
        yield server


def file_of(server: Serving, name: str) -> Path:
    (file,) = (server.folder / "data" / "queues").glob(f"*-{name}.db")
    return file


async def test_a_full_disk_is_454_and_service_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{small_disk}/data", tmp_path) as server, server.client() as client:
        await server.start()
        await client.queues_create(BAD)
        stored = await produce(client, BAD, b"first")
        more, refusal = await fill(client)
        stored += more
        assert "full" in refusal.message
        assert await ids_of(client, BAD) == stored, "what was answered is there, and nothing else"
        _mount("-o", "remount,size=64m", small_disk)
        await eventually(lambda: is_served_again(client, BAD))
        assert (await ids_of(client, BAD))[: len(stored)] == stored


async def test_files_that_may_not_grow_are_454_and_service_goes_on_when_they_may(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server, server.client() as client:
        child = await server.start(prefix=["prlimit", f"--fsize={2**21}:unlimited"])
        for name in (GOOD, BAD):
            await client.queues_create(name)
        stored, refusal = await fill(client)
        assert refusal.message.startswith(("storage failed; ", "partition is failing; "))
        assert await ids_of(client, BAD) == stored, "what was answered is there, and nothing else"
        await produce(client, GOOD, b"small")
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await eventually(lambda: is_served_again(client, BAD))
        assert (await ids_of(client, BAD))[: len(stored)] == stored


async def test_a_read_only_disk_is_454_and_a_clear_end_at_a_start(small_disk: Path, tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{small_disk}/data", tmp_path) as server, server.client() as client:
        child = await server.start()
        await client.queues_create(BAD)
        stored = await produce(client, BAD, b"first")
        await child.terminate()
        _mount("-o", "remount,ro", small_disk)
        child = await server.launch()
        assert await child.wait() not in {0, -9}
        assert "data folder" in child.stderr.tail
        _mount("-o", "remount,rw", small_disk)
        await server.start()
        assert await ids_of(client, BAD) == stored
        assert await is_served_again(client, BAD)


async def test_a_locked_file_is_454_for_its_queue_alone(server: Serving) -> None:
    async with server.client() as client:
        lock = apsw.Connection(str(file_of(server, BAD)))
        lock.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TryAgain, match=r"locked|failing"):
            await produce(client, BAD, b"second")
        await produce(client, GOOD, b"second")
        lock.execute("ROLLBACK")
        lock.close()
        assert len(await ids_of(client, BAD)) == 1
        await eventually(lambda: is_served_again(client, BAD))


@pytest.mark.parametrize("where", ["header", "pages"])
async def test_a_corrupt_file_is_454_for_its_queue_alone_until_it_is_restored(server: Serving, where: str) -> None:
    await server.child.terminate()
    file = file_of(server, BAD)
    backup = file.with_suffix(".backup")
    shutil.copy(file, backup)
    with file.open("r+b") as damaged:
        size = file.stat().st_size
        damaged.seek(0 if where == "header" else 4096)
        damaged.write(b"\xa5" * (100 if where == "header" else size - 4096))
    await server.start()
    async with server.client() as client:
        with pytest.raises(HoldfastError) as refused:
            await produce(client, BAD, b"second")
        assert refused.value.code == 454, refused.value.message
        with pytest.raises(TryAgain, match=r"corrupt|not a SQLite database|not loaded|missing|malformed"):
            await client.storage_items_list(BAD)
        await produce(client, GOOD, b"second")
        for extra in file.parent.glob(f"{file.name}-*"):
            extra.unlink()
        shutil.copy(backup, file)
        await eventually(lambda: is_served_again(client, BAD))
        assert [item.payload for item in await client.storage_items_list(BAD)] == [b"first", b"again"]


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_queue_file_that_is_gone_is_an_error_and_not_an_empty_queue(server: Serving, is_there: bool) -> None:
    await server.child.terminate()
    file = file_of(server, BAD)
    hidden = file.rename(file.with_suffix(".hidden"))
    if is_there:
        file.touch()  # as in the first moment of a copy
    await server.start()
    async with server.client() as client:
        with pytest.raises(TryAgain):
            await produce(client, BAD, b"second")
        with pytest.raises(TryAgain, match=r"missing|empty|not loaded"):
            await client.storage_items_list(BAD)
        await produce(client, GOOD, b"second")
        hidden.rename(file)
        await eventually(lambda: is_served_again(client, BAD))
        assert [item.payload for item in await client.storage_items_list(BAD)] == [b"first", b"again"]


async def test_a_corrupt_catalog_is_a_clear_end_at_the_start(server: Serving) -> None:
    await server.child.terminate()
    with (server.folder / "data" / "catalog.db").open("r+b") as damaged:
        damaged.write(b"\xa5" * 100)
    child = await server.launch()
    assert await child.wait() not in {0, -9}
    assert "catalog.db" in child.stderr.tail
