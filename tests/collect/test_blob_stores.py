"""One suite for blobs, over a folder and over S3 as moto serves it."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.errors import BlobExists, BlobMissing, HoldfastError, Invalid, StorageFailed
from holdfast.ports.blobs import Blob, BlobContent, Blobs, BlobStat
from holdfast.wiring import open_blobs
from tests.collect.shared import BUCKET, Bucket


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
async def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Blobs]:
    if request.param == "s3":
        request.getfixturevalue("bucket")
    place = str(tmp_path / "blobs") if request.param == "folder" else f"s3://{BUCKET}/{tmp_path.name}"
    async with open_blobs(place) as opened:
        yield opened


def whole(path: str, content: bytes) -> BlobContent:
    return BlobContent(path=path, content=content, sha256=hashlib.sha256(content).hexdigest())


async def read(blobs: Blobs, path: str) -> bytes:
    return b"".join([chunk async for chunk in blobs.get(path)])


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(700_000)], ids=["empty", "one", "large"])
async def test_what_was_put_is_read_back(blobs: Blobs, content: bytes) -> None:
    blob = await blobs.put("t/a/0", content)
    assert (blob.size_bytes, blob.created) == (len(content), True)
    assert blob.sha256 == hashlib.sha256(content).hexdigest()
    assert await read(blobs, "t/a/0") == content
    assert await blobs.stat("t/a/0") == BlobStat(path="t/a/0", size_bytes=len(content))


async def test_a_stream_is_one_blob(blobs: Blobs) -> None:
    blob = await blobs.put("t/manifest", pieces(b"one", b"", b"two"))
    assert (blob.size_bytes, await read(blobs, "t/manifest")) == (6, b"onetwo")


async def test_a_path_is_taken_once(blobs: Blobs) -> None:
    assert (await blobs.put("t/a/0", b"first")).created
    assert not (await blobs.put("t/a/0", b"first")).created, "the same again is no error"
    with pytest.raises(BlobExists, match="blob path is taken"):
        await blobs.put("t/a/0", b"second")
    assert await read(blobs, "t/a/0") == b"first"


async def test_of_concurrent_puts_one_creates(blobs: Blobs) -> None:
    made = await asyncio.gather(*(blobs.put("t/a/0", b"same") for _ in range(8)))
    assert [blob.created for blob in made].count(True) == 1
    claims = await asyncio.gather(*(blobs.put("t/a/1", b"%d" % n) for n in range(8)), return_exceptions=True)
    winners = [claim for claim in claims if isinstance(claim, Blob)]
    assert len(winners) == 1
    assert all(isinstance(claim, (Blob, BlobExists)) for claim in claims)
    assert hashlib.sha256(await read(blobs, "t/a/1")).hexdigest() == winners[0].sha256


async def test_several_are_put_together_and_each_has_its_own_outcome(blobs: Blobs) -> None:
    await blobs.put("t/a/1", b"taken")
    await blobs.put("t/a/2", b"same")
    wanted = [
        whole("t/a/0", b"new"),
        whole("t/a/1", b"other"),
        whole("t/a/2", b"same"),
        whole("../out", b"never"),
        whole("t/b/0", b"another folder"),
        whole("t/a/3", b"twice"),
        whole("t/a/3", b"twice"),
    ]
    outcomes = await blobs.put_all(wanted)
    made = [outcome.created if isinstance(outcome, Blob) else type(outcome) for outcome in outcomes]
    assert made[:5] == [True, BlobExists, False, Invalid, True]
    assert sorted(made[5:], key=str) == [False, True], "one of the two created it"
    for blob, outcome in zip(wanted, outcomes, strict=True):
        if isinstance(outcome, Blob):
            assert (outcome.path, outcome.size_bytes, outcome.sha256) == (blob.path, len(blob.content), blob.sha256)
            assert await read(blobs, blob.path) == blob.content
    assert await read(blobs, "t/a/1") == b"taken"


async def test_many_folders_at_once(blobs: Blobs) -> None:
    """More than are kept open."""
    wanted = [whole(f"t/{number}/0", b"%d" % number) for number in range(100)]
    assert [isinstance(outcome, HoldfastError) for outcome in await blobs.put_all(wanted)] == [False] * 100
    assert len([stat async for stat in blobs.find("t/")]) == 100
    assert await blobs.put_all([]) == []


async def test_what_is_missing_and_what_is_deleted(blobs: Blobs) -> None:
    with pytest.raises(BlobMissing, match="blob does not exist"):
        await read(blobs, "t/a/0")
    assert await blobs.stat("t/a/0") is None
    assert not await blobs.delete("t/a/0")
    await blobs.put("t/a/0", b"x")
    assert await blobs.delete("t/a/0")
    assert await blobs.stat("t/a/0") is None
    assert (await blobs.put("t/a/0", b"other")).created


async def test_blobs_are_found_by_the_beginning_of_their_path_in_order(blobs: Blobs) -> None:
    for path in ("t/b/0", "t/a/1", "t/a/0", "t2/a/0", "u/a/0"):
        await blobs.put(path, path.encode())
    assert [stat.path async for stat in blobs.find("t/")] == ["t/a/0", "t/a/1", "t/b/0"]
    assert [stat.path async for stat in blobs.find("t")] == ["t/a/0", "t/a/1", "t/b/0", "t2/a/0"]
    assert [stat.size_bytes async for stat in blobs.find("u/")] == [5]


async def test_a_store_that_refuses_says_so_and_takes_the_same_put_later(bucket: Bucket, tmp_path: Path) -> None:
    async with open_blobs(f"s3://{BUCKET}/{tmp_path.name}") as blobs:
        await asyncio.to_thread(bucket.stop)
        try:
            with pytest.raises(StorageFailed, match="blob storage failed"):
                await blobs.put("t/a/0", b"x")
            (outcome,) = await blobs.put_all([whole("t/a/0", b"x")])
            assert isinstance(outcome, StorageFailed)
        finally:
            await asyncio.to_thread(bucket.start)
        assert (await blobs.put("t/a/0", b"x")).created
