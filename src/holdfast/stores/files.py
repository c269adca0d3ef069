"""Files that only we read. A backup of letters as JSON Lines: byte-exact, on disk before the letter is published, and
read again from there; and a secret that is made once."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.core.message import Delivery
from holdfast.core.recovery import Depth
from holdfast.errors import CannotStart, Invalid

LINE_BYTES_MAX = 512 * 2**20

_encoder = msgspec.json.Encoder()


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A letter byte by byte; `properties` are the broker's own bytes."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    message_id: str = ""


class FileBackup:
    """Appends. Raises CannotStart when the file cannot be opened, OSError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_new = not path.exists()
        try:
            self._file: BinaryIO = open(path, "a+b", opener=_private)  # noqa: SIM115 - open until `close`
            if self._is_new:
                with suppress(PermissionError):  # a folder need not be ours to read
                    fsync_folder(path.parent)
        except OSError as error:
            raise CannotStart(f"backup cannot be written; '{path}': {error.strerror or error}") from error
        self.found_bytes = os.fstat(self._file.fileno()).st_size  #: before the first letter of this run
        if self.found_bytes and os.pread(self._file.fileno(), 1, self.found_bytes - 1) != b"\n":
            self._file.close()
            raise CannotStart(
                f"backup cannot be added to; '{path}' ends in the middle of a letter, as after a run that was killed: "
                "that letter was not published and is in its queue. Give another file"
            )

    async def write(self, letters: Sequence[Exported]) -> None:
        """Returns when they are on disk."""
        await asyncio.to_thread(self._write, letters)

    def close(self) -> None:
        """No more. A run that wrote nothing, such as a dry run, leaves no empty file behind."""
        if not self._file.closed and self._is_new and self._is_empty():
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written was told then; the file would tell it again
            self._file.close()

    def _is_empty(self) -> bool:
        """Whether what is at the path now is our file, and nobody has written to it."""
        ours = os.fstat(self._file.fileno())
        try:
            return ours.st_size == 0 and os.path.samestat(ours, self.path.stat())
        except OSError:
            return False

    def _write(self, letters: Sequence[Exported]) -> None:
        self._file.write(_encoder.encode_lines(letters))
        self._file.flush()
        os.fsync(self._file.fileno())


def _private(path: str, flags: int) -> int:
    """It holds bodies: for its owner alone."""
    return os.open(path, flags, 0o600)


def read_backup(path: Path) -> Iterator[Exported]:
    """The letters of a backup, one by one. Raises Invalid with the line that cannot be read, CannotStart."""
    decoder = msgspec.json.Decoder(Exported)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if not line.strip():
                    continue
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise Invalid(f"backup is damaged; '{path}' line {number}: {error}") from error
    except OSError as error:
        raise CannotStart(f"backup cannot be read; '{path}': {error.strerror or error}") from error


class BackupDrain:
    """The letters of a file, as a `ports.broker.DrainConsumer`. There is nothing to settle: the file stays as it is,
    and so does the queue that they came from. What was read before a damaged line is published."""

    is_lost = False
    is_connected = True

    def __init__(self, path: Path, *, bytes_max: int) -> None:
        self.queue = ""
        self.warnings: list[str] = []
        self.failure = ""  #: why not all letters can be read; the empty text while they can
        self._letters = read_backup(path)
        self._bytes_max = bytes_max
        self._read_count = 0

    async def open(self) -> str:
        return ""

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        pass

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery] | None:
        """As many as fit the window; None at the end of the file."""
        await asyncio.sleep(0)  # a signal may be heard
        batch: list[Delivery] = []
        size = 0
        while len(batch) < count_max and size < self._bytes_max and (one := self._next()) is not None:
            batch.append(Delivery(0, 0, False, one.exchange, one.routing_key, "", one.properties, one.body))
            size += len(one.properties) + len(one.body)
        return batch or None

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        return ()

    def forget_body(self, delivery: Delivery) -> None:
        pass

    async def stop(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        return ()

    async def give_back_all(self, *, others_count: int) -> int:
        return 0

    async def abandon(self) -> None:
        pass

    async def depth(self) -> Depth:
        """All that are in the file, as far as it can be read."""
        while self._next() is not None:
            pass
        return Depth(ready=self._read_count, is_sure=True)

    def _next(self) -> Exported | None:
        try:
            found = None if self.failure else next(self._letters, None)
        except Invalid as error:
            self.failure = error.message
            return None
        self._read_count += found is not None
        return found


def made_once(path: Path, text: str) -> bytes:
    """The secret in a file that only we read, which is made now, with this text, if it is not there. Raises OSError.

    It is never there in part: who reads it meanwhile, or after a kill, would go on with another secret, or with none.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):  # another process was faster
                os.link(name, path)
        finally:
            os.unlink(name)
        fsync_folder(path.parent)
    return path.read_bytes().strip()


def fsync_folder(path: Path) -> None:
    """Make the names in a folder last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
