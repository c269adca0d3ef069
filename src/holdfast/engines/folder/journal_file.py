"""The file of one journal: locked while a run has it, appended to by plain writes, replaced as a whole or removed."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.errors import CannotStart

DIGEST_BYTES = 16
RECORD_BYTES = 1 + DIGEST_BYTES
READ_BYTES_MAX = 64 * 2**20
CONFIRMED, ACKING, DOUBTED = b"C", b"A", b"D"
WHAT = "holdfast recovery journal 1"
ELSEWHERE = ".at-"


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    what: str = WHAT
    run: str
    source: str  #: which queue of which broker, without any login
    boot: str


class JournalFile:
    """`JournalFile(path, head)`; whoever makes it closes it.

    Raises BlockingIOError when somebody has it, FileNotFoundError when it is not there and not to be made, another
    OSError when it cannot be used, CannotStart when it is no journal of this queue.
    """

    def __init__(self, path: Path, head: Head, *, create: bool) -> None:
        self.path = path
        self.left: Counter[bytes] = Counter()  #: published and not acked by a run that was killed
        self.doubted_count = 0  #: letters that it published, perhaps for the second time, and told nobody of
        self.is_left = False  #: a run left the file that did not come to its end
        self.size_bytes = 0
        self._head = msgspec.json.encode(head) + b"\n"
        self.number = _locked(path, create=create)
        try:
            self._read(head)
        except BaseException:
            os.close(self.number)
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can still be written to."""
        return self.number >= 0

    def use_up(self, digest: bytes) -> None:
        """One entry less of those that were left."""
        if self.left[digest] > 1:
            self.left[digest] -= 1
        else:
            del self.left[digest]

    def append(self, kind: bytes, digests: Sequence[bytes]) -> None:
        """Raises OSError."""
        self._write(kind + kind.join(digests))

    def doubt(self) -> None:
        """Write how many there are now. Raises OSError."""
        self._write(self._doubted())

    def rewrite(self, digests: Iterable[bytes]) -> None:
        """A file with these confirms in place of the old one. Raises OSError."""
        fresh = self.path.with_name(self.path.name + ".new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        old, self.number, self.size_bytes = self.number, file, 0
        try:
            doubted = self._doubted() if self.doubted_count else b""
            self._write(self._head + doubted + b"".join(CONFIRMED + digest for digest in digests))
            os.fsync(file)
            os.replace(fresh, self.path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(old)  # not before: whoever has its lock may take the file

    def close(self, *, remove: bool) -> None:
        """Nobody's any more, or gone."""
        if self.is_open:
            if remove:
                self.path.unlink(missing_ok=True)
            os.close(self.number)
            self.number = -1

    def _write(self, data: bytes) -> None:
        self.size_bytes += len(data)
        while data:
            data = data[os.write(self.number, data) :]

    def _doubted(self) -> bytes:
        return DOUBTED + self.doubted_count.to_bytes(DIGEST_BYTES, "big")

    def _read(self, head: Head) -> None:
        data = os.pread(self.number, READ_BYTES_MAX, 0)
        if not data:
            return
        first, newline, records = data.partition(b"\n")
        try:
            before = msgspec.json.decode(first, type=Head)
        except msgspec.MsgspecError as error:
            raise CannotStart(self._not_ours()) from error
        if not newline or before.what != WHAT:
            raise CannotStart(self._not_ours())
        if before.source != head.source:
            raise CannotStart(
                f"journal belongs to another queue; '{self.path}' is of {before.source}, give another --journal FILE"
            )
        self.is_left = True
        if torn := len(records) % RECORD_BYTES:
            os.ftruncate(self.number, len(data) - torn)  # what is appended begins where a record begins
        if before.boot != head.boot or not head.boot or len(data) >= READ_BYTES_MAX:
            return  # what was written last may be missing: nothing of it can be believed
        for start in range(0, len(records) - RECORD_BYTES + 1, RECORD_BYTES):
            kind, digest = records[start : start + 1], records[start + 1 : start + RECORD_BYTES]
            if kind == CONFIRMED:
                self.left[digest] += 1
            elif kind == ACKING:
                self.use_up(digest)
            elif kind == DOUBTED:
                self.doubted_count = int.from_bytes(digest, "big")
            else:
                self.left.clear()
                return

    def _not_ours(self) -> str:
        return f"journal is none; '{self.path}' is another file, give another --journal FILE"


def _locked(path: Path, *, create: bool) -> int:
    """Of two runs on one file, each would believe the other's entries."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was replaced or removed before we had its lock


def note_elsewhere(usual: Path, path: Path) -> None:
    """A journal is kept at another place than the usual one: leave a link to it there, if that can be."""
    mark = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    with suppress(OSError):
        usual.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        usual.with_name(f"{usual.name}{ELSEWHERE}{mark}").symlink_to(path)


def found_elsewhere(usual: Path) -> list[Path]:
    """Where journals of this queue are said to be kept beside the usual place."""
    found = []
    for link in _links(usual):
        with suppress(OSError):
            found.append(link.readlink())
    return found


def forget_elsewhere(usual: Path) -> None:
    """Links to journals that have ended go as well."""
    for link in _links(usual):
        if not link.exists():
            with suppress(OSError):
                link.unlink()


def _links(usual: Path) -> list[Path]:
    try:
        names = os.listdir(usual.parent)
    except OSError:
        return []
    links = [usual.with_name(name) for name in sorted(names) if name.startswith(usual.name + ELSEWHERE)]
    return [link for link in links if link.is_symlink()]
