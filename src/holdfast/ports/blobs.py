"""Blobs: large bodies and results, each written once under a path and never changed.

A path is relative, with `/` between its segments: `transactions/42/series-0/000017`. What is put is whole and
durable when the call returns; before that, no reader sees any of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.errors import HoldfastError, Invalid

PATH_BYTES_MAX: Final = 1024
SEGMENT_BYTES_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """What was put: its size, its SHA-256, and whether this very call created it."""

    path: str
    size_bytes: int
    sha256: str
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobStat:
    """What is known of a blob without reading it."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobContent:
    """A blob that is there as a whole, with its digest: what `put_all` takes."""

    path: str
    content: bytes
    sha256: str


class Blobs(Protocol):
    """A store of blobs. Every method raises Invalid for a path that `check_path` refuses; nothing changed."""

    async def put(self, path: str, content: bytes | AsyncIterable[bytes], *, sha256: str | None = None) -> Blob:
        """Store the bytes under the path, once. `sha256` is their digest when the caller knows it for sure.

        The same bytes again are no error: `created` is false then, and they are durable. Of concurrent puts
        exactly one creates. Raises BlobExists when something else is there. Raises StorageFailed when the store
        refused: then the blob is whole or not there at all, and the same put may be repeated. An error out of
        `content`, or a cancellation, leaves it just so.
        """

    async def put_all(self, blobs: Sequence[BlobContent]) -> Sequence[Blob | HoldfastError]:
        """Store several, each as `put` does and sharing what they can; for each, in order, what became of it.

        One that fails takes no other along. Nothing is raised but a cancellation.
        """

    def get(self, path: str) -> AsyncGenerator[bytes, None]:
        """The bytes in chunks. Raises BlobMissing before the first one, StorageFailed at any.

        Whoever may stop early wraps it in `contextlib.aclosing`.
        """

    async def stat(self, path: str) -> BlobStat | None:
        """Size of the blob, or None when there is none. Raises StorageFailed."""

    async def delete(self, path: str) -> bool:
        """Remove the blob for good; false when there was none.

        Raises StorageFailed: then it is there or not, and the same call may be repeated.
        """

    def find(self, prefix: str = "") -> AsyncIterator[BlobStat]:
        """The blobs whose path begins with the text `prefix`, ordered by path. Raises StorageFailed.

        Blobs that come or go meanwhile may be listed or not; the others are listed once.
        """


def check_path(path: str) -> tuple[str, ...]:
    """The segments of a path. Raises Invalid when it could lead anywhere else, or is not a name for a file.

    A segment does not begin with a dot: no `.` and no `..`, and such names are left for the store itself.
    """
    try:
        size_bytes = len(path.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise Invalid("blob path is invalid; it is not valid Unicode") from error
    if not 0 < size_bytes <= PATH_BYTES_MAX:
        raise Invalid(f"blob path is invalid; it must have 1 to {PATH_BYTES_MAX} bytes, got {size_bytes}")
    segments = tuple(path.split("/"))
    for segment in segments:
        if not segment or segment.startswith(".") or not segment.isprintable() or "\\" in segment:
            raise Invalid(
                f"blob path is invalid; a segment must not be empty, begin with '.' or hold a backslash or a "
                f"control character: {path[:100]!r}"
            )
        if len(segment.encode("utf-8")) > SEGMENT_BYTES_MAX:
            raise Invalid(f"blob path is invalid; a segment must not exceed {SEGMENT_BYTES_MAX} bytes")
    return segments
