"""Blobs in a bucket of S3, Azure or Google (obstore): one conditional PUT each, so that nothing is overwritten.

Access is configured as the store's own tools are: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP and
so on. A put whose answer was lost is found there by the next one, and compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from holdfast.errors import BlobExists, BlobMissing, CannotStart, HoldfastError, Invalid, StorageFailed
from holdfast.ports.blobs import Blob, BlobContent, BlobStat, check_path

try:
    import obstore
    from obstore.store import from_url
except ImportError as error:
    raise CannotStart("blobs cannot be used; install the package 'obstore': pip install 'holdfast[s3]'") from error

#: A stream is gathered before it is put: one PUT either creates the blob or does not, a multipart upload overwrites.
STREAM_BYTES_MAX = 512 * 2**20
RETRIES_COUNT_MAX = 3
RETRY_TIMEOUT_S = 20
REQUEST_TIMEOUT = "60s"
CONNECT_TIMEOUT = "5s"


@asynccontextmanager
async def open_object_blobs(url: str) -> AsyncIterator[ObjectBlobs]:
    """Open `s3://bucket/prefix`, `az://…` or `gs://…`. Raises CannotStart when it cannot be used."""
    bucket = f"{urlsplit(url).scheme}://{urlsplit(url).hostname or ''}{urlsplit(url).path}"
    try:
        store = from_url(
            url,
            retry_config={"max_retries": RETRIES_COUNT_MAX, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)},
            client_options={
                "timeout": REQUEST_TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
                # Options given here hide what the environment says.
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"},
            },
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise CannotStart(f"blob URL is invalid; {bucket}: {_first_line(error).replace(url, bucket)}") from error
    yield ObjectBlobs(store, bucket=bucket)


class ObjectBlobs:
    """See `holdfast.ports.blobs.Blobs`; made by `open_object_blobs`."""

    def __init__(self, store: Any, *, bucket: str) -> None:
        self._store = store
        self._bucket = bucket

    async def put(self, path: str, content: bytes | AsyncIterable[bytes], *, sha256: str | None = None) -> Blob:
        check_path(path)
        body = content if isinstance(content, bytes) else await _gathered(path, content)
        sha256 = sha256 or hashlib.sha256(body).hexdigest()
        created = True
        with self._translated("putting", path):
            try:
                await obstore.put_async(self._store, path, body, mode="create", use_multipart=False)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError, FileExistsError):
                created = False
        if not created and await self._sha256(path) != sha256:
            raise BlobExists(f"blob path is taken; {path!r} holds something else")
        return Blob(path=path, size_bytes=len(body), sha256=sha256, created=created)

    async def put_all(self, blobs: Sequence[BlobContent]) -> Sequence[Blob | HoldfastError]:
        async def one(blob: BlobContent) -> Blob | HoldfastError:
            try:
                return await self.put(blob.path, blob.content, sha256=blob.sha256)
            except HoldfastError as error:
                return error

        return await asyncio.gather(*map(one, blobs))

    async def get(self, path: str) -> AsyncGenerator[bytes, None]:
        check_path(path)
        try:
            with self._translated("reading", path):
                answer = await obstore.get_async(self._store, path)
                stream = answer.stream().__aiter__()
        except FileNotFoundError as error:
            raise BlobMissing(f"blob does not exist; {path!r}") from error
        while True:
            with self._translated("reading", path):
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    return
            yield bytes(chunk)

    async def stat(self, path: str) -> BlobStat | None:
        check_path(path)
        try:
            with self._translated("looking at", path):
                known = await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return None
        return BlobStat(path=path, size_bytes=known["size"])

    async def delete(self, path: str) -> bool:
        if await self.stat(path) is None:
            return False
        try:
            with self._translated("deleting", path):
                await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return False
        return True

    async def find(self, prefix: str = "") -> AsyncIterator[BlobStat]:
        folder = prefix.rpartition("/")[0]
        with self._translated("listing", prefix):
            pages = obstore.list(self._store, folder or None).__aiter__()
        while True:
            with self._translated("listing", prefix):
                try:
                    page = await anext(pages)
                except StopAsyncIteration:
                    return
            for known in page:
                if known["path"].startswith(prefix):
                    yield BlobStat(path=known["path"], size_bytes=known["size"])

    async def _sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        async for chunk in self.get(path):
            digest.update(chunk)
        return digest.hexdigest()

    @contextmanager
    def _translated(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (obstore.exceptions.BaseError, OSError) as error:
            text = f"blob storage failed; {doing} {path!r} in {self._bucket}: {_first_line(error)}, try again"
            raise StorageFailed(text) from error


async def _gathered(path: str, content: AsyncIterable[bytes]) -> bytes:
    body = bytearray()
    async for chunk in content:
        body += chunk
        if len(body) > STREAM_BYTES_MAX:
            raise Invalid(f"blob is too large; {path!r} has more than {STREAM_BYTES_MAX} bytes as a stream")
    return bytes(body)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
