"""The journal of a recovery: which letters are published and not yet acked, in a small file.

Records are appended by plain writes: they survive a kill of this process, and a restart of the machine is told by its
boot id, after which nothing in the file is believed. So there is nothing to sync: a record that the machine lost
could only be one whose file is not believed any more. Two records per letter, `C` when its copy is confirmed and `A`
just before its ack is sent; what has a `C` and no `A` was never acked.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.errors import CannotStart
from holdfast.telemetry.events import emit

DIGEST_BYTES = 16
RECORD_BYTES = 1 + DIGEST_BYTES
FILE_BYTES_MAX = 4 * 2**20
READ_BYTES_MAX = 64 * 2**20
CONFIRMED, ACKING = b"C", b"A"
WHAT = "holdfast recovery journal 1"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    run: str
    source: str  #: which queue of which broker, without any login
    boot: str


class FileJournal:
    """`FileJournal.open(path, source=…, run=…)`. Raises CannotStart when it cannot be kept or is another queue's."""

    def __init__(self, path: Path, head: _Head) -> None:
        self._path = path
        self._head = msgspec.json.encode(head) + b"\n"
        self._open: Counter[bytes] = Counter()
        self._file = -1
        self._bytes = 0
        self.follows_killed_run = False
        self._is_used = False

    @classmethod
    def open(cls, path: Path, *, source: str, run: str) -> FileJournal:
        """Take over what a killed run left, and begin a file of our own."""
        head = _Head(what=WHAT, run=run, source=source, boot=_boot())
        journal = cls(path, head)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            journal._lock()
            journal._take_over(head)
            journal._rewrite()
        except OSError as error:
            text = f"journal cannot be kept; '{path}': {error.strerror or error}"
            raise CannotStart(f"{text}, give another --journal FILE or use --no-journal") from error
        return journal

    def confirmed(self, digests: Sequence[bytes]) -> None:
        """The broker has these."""
        self._is_used = True
        self._open.update(digests)
        self._append(CONFIRMED, digests)

    def acking(self, digests: Sequence[bytes]) -> None:
        """Their acks are about to be sent: from here on they are not recognised any more, whatever happens."""
        still = self._open
        for digest in digests:
            if (count := still.pop(digest, 0)) > 1:
                still[digest] = count - 1
        self._append(ACKING, digests)
        if self._bytes > FILE_BYTES_MAX:
            self._guarded(self._rewrite)

    def recognise(self, digest: bytes) -> bool:
        """Whether a letter that came again was published and never acked; uses the entry up."""
        if not self._open or digest not in self._open:
            return False
        self._use_up(digest)
        self._append(ACKING, [digest])
        return True

    def close(self, *, clean: bool) -> None:
        """A clean end ends the file as well; so does any end of a run that neither wrote nor took over anything."""
        if self._file >= 0:
            if clean or not (self._is_used or self.follows_killed_run):
                self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _use_up(self, digest: bytes) -> None:
        if self._open[digest] > 1:
            self._open[digest] -= 1
        else:
            del self._open[digest]

    def _append(self, kind: bytes, digests: Sequence[bytes]) -> None:
        if self._file >= 0 and digests:
            data = kind + kind.join(digests)
            self._guarded(lambda: self._write(data))

    def _write(self, data: bytes) -> None:
        self._bytes += len(data)
        while data:
            data = data[os.write(self._file, data) :]

    def _guarded(self, action: object) -> None:
        """A file that cannot be written to would say less than is true: it goes, and the run goes on without."""
        try:
            action()  # type: ignore[operator]
        except OSError as error:
            emit("recovery.no_journal", queue=str(self._path), error=error)
            self.close(clean=True)

    def _lock(self) -> None:
        """Of two runs on one file, each would believe the other's entries."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise CannotStart(f"journal is in use; '{self._path}' belongs to a recovery that is running") from error
        self._file = file

    def _take_over(self, head: _Head) -> None:
        data = os.pread(self._file, READ_BYTES_MAX, 0)
        if not data:
            return
        first, newline, records = data.partition(b"\n")
        try:
            before = msgspec.json.decode(first, type=_Head)
        except msgspec.MsgspecError as error:
            raise CannotStart(self._not_ours()) from error
        if not newline or before.what != WHAT:
            raise CannotStart(self._not_ours())
        if before.source != head.source:
            raise CannotStart(
                f"journal belongs to another queue; '{self._path}' is of {before.source}, give another --journal FILE"
            )
        self.follows_killed_run = True
        if before.boot != head.boot or not head.boot or len(data) >= READ_BYTES_MAX:
            return  # what was written last may be missing: nothing of it can be believed
        for start in range(0, len(records) - RECORD_BYTES + 1, RECORD_BYTES):
            kind, digest = records[start : start + 1], records[start + 1 : start + RECORD_BYTES]
            if kind == CONFIRMED:
                self._open[digest] += 1
            elif kind == ACKING:
                self._use_up(digest)
            else:
                self._open.clear()
                return

    def _not_ours(self) -> str:
        return f"journal is none; '{self._path}' is another file, give another --journal FILE"

    def _rewrite(self) -> None:
        """A file with nothing but what is still open, in place of the old one."""
        fresh = self._path.with_name(self._path.name + ".new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        old, self._file, self._bytes = self._file, file, 0
        self._write(self._head + b"".join(CONFIRMED + digest for digest in self._open.elements()))
        os.fsync(file)
        os.replace(fresh, self._path)
        os.close(old)


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""  # not Linux: a journal is then good for this run alone
