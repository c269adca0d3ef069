"""The journal of a recovery: which letters are published and not yet acked, in a small file.

Records are appended by plain writes: they survive a kill of this process, and a restart of the machine is told by its
boot id, after which nothing in the file is believed. So there is nothing to sync: a record that the machine lost
could only be one whose file is not believed any more. Two records per letter, `C` when its copy is confirmed and `A`
just before its ack is sent; what has a `C` and no `A` was never acked. `D` is how many letters were published, perhaps
for the second time: should this run be killed, the next one tells of them.

A queue may have several: runs that were killed kept theirs at other places. All of them are looked at, and each entry
ends in the file that it is in, also by a run that keeps none: an entry whose letter has left the queue would take a
later letter of the same bytes for it. A file is locked while a run has it, and replaced as a whole or removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVarTuple

import msgspec

from holdfast.core.recovery import RunEnd
from holdfast.errors import CannotStart
from holdfast.telemetry.events import emit

DIGEST_BYTES = 16
RECORD_BYTES = 1 + DIGEST_BYTES
READ_BYTES_MAX = 64 * 2**20
FILE_BYTES_MAX = 4 * 2**20  #: then what has been acked is left out
RECORD_CONFIRMED, RECORD_ACKING, RECORD_DOUBTED = b"C", b"A", b"D"
WHAT = "holdfast recovery journal 1"
ELSEWHERE = ".at-"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Ts = TypeVarTuple("Ts")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    what: str = WHAT
    run: str
    origin: str = msgspec.field(name="source")  #: which queue of which broker, without any login
    boot: str


class JournalPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Where the journals of a queue are."""

    origin: str  #: which queue of which broker, without any login
    own: Path | None  #: this run's; None: it keeps none
    usual: Path | None = None  #: where every run of this user looks, also for links to further ones
    others: tuple[Path, ...] = ()  #: where a server keeps it that cannot write to the usual place

    @contextmanager
    def kept(self, run: str) -> Iterator[FileJournal]:
        """The journal of a run, which also ends what killed runs left at other places. Raises CannotStart."""
        journal = FileJournal(self, run)
        try:
            yield journal
        finally:
            journal.close(journal.end)


def journal_paths(
    origin: str,
    dead_queue: str,
    data_folder: Path,
    *,
    file: Path | None = None,
    keeps: bool = True,
    serves: bool = False,
) -> JournalPaths:
    """Those of a run that keeps its journal in `file`, at the usual place, or nowhere. A server that cannot write to
    the usual place keeps it in the data folder."""
    mark = hashlib.sha256(origin.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', dead_queue)[:80]}-{mark}.journal"
    usual, spare = (folder / "recover" / name for folder in (_state_folder() or data_folder, data_folder))
    own = file or (spare if serves and not _is_writable(usual.parent) else usual)
    return JournalPaths(origin=origin, own=own if keeps else None, usual=usual, others=(spare,))


def _state_folder() -> Path | None:
    """Where the journals of a user are, whichever folder a run is started in and whatever runs it."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if Path(given).is_absolute():
        return Path(given) / "holdfast"
    try:
        return Path.home() / ".local" / "state" / "holdfast"
    except RuntimeError:  # a user without a home
        return None


class FileJournal:
    """Takes over what killed runs left, and begins a file of its own; where it keeps none it recognises nothing, and
    ends what others left. Raises CannotStart when it cannot be kept or is another queue's."""

    def __init__(self, paths: JournalPaths, run: str) -> None:
        self.end = RunEnd.BROKEN  #: how the run leaves its queue; it says so when it came to its end
        self._head = Head(run=run, origin=paths.origin, boot=_boot())
        path = paths.own.absolute() if paths.own else None
        self._own = _begun(path, self._head) if path else None
        self._usual = usual = paths.usual
        self._files = [self._own] if self._own else []  # our own first
        self._busy: list[Path] = []  # somebody else's, as long as he runs
        self._open: Counter[bytes] = Counter()  # of this run
        self._is_used = False
        others = [*([usual, *found_elsewhere(usual)] if usual else ()), *paths.others]
        for other in dict.fromkeys(other.absolute() for other in others):
            if not self._has(other):
                self._look_at(other)
        self.follows_killed_run = any(file.is_left for file in self._files)
        self.doubted_count = sum(file.doubted_count for file in self._files)
        if self._own:
            self.doubt(self.doubted_count - self._own.doubted_count)
        if usual and path and path != usual.absolute():
            note_elsewhere(usual, path)

    def doubt(self, count: int) -> None:
        """So many more are about to be published, perhaps for the second time."""
        if count and self._own and self._own.is_open:
            self._is_used = True
            self._own.doubted_count += count
            self._guarded(self._own, self._own.doubt)

    def confirmed(self, digests: Sequence[bytes]) -> None:
        """The broker has these. Who published them again cannot say whether letters of entries are still there."""
        self._is_used = True
        for file in self._files:
            if file.left and (ended := [digest for digest in set(digests) if digest in file.left]):
                every = [digest for digest in ended for _ in range(file.left.pop(digest))]
                self._guarded(file, file.append, RECORD_ACKING, every)
        if self._own:
            self._open.update(digests)
            self._guarded(self._own, self._own.append, RECORD_CONFIRMED, digests)

    def acking(self, digests: Sequence[bytes]) -> None:
        """Their acks are about to be sent: from here on they are not recognised any more, whatever happens."""
        if not (own := self._own):
            return
        still = self._open
        for digest in digests:
            if (count := still.pop(digest, 0)) > 1:
                still[digest] = count - 1
        self._guarded(own, own.append, RECORD_ACKING, digests)
        if own.size_bytes > FILE_BYTES_MAX:
            self._guarded(own, own.rewrite, (own.left + still).elements())

    def recognise(self, digest: bytes) -> bool:
        """Whether a letter that came again was published and never acked; uses the entry up."""
        if not self._own:
            return False
        for file in self._files:
            if digest in file.left:
                file.use_up(digest)
                self._guarded(file, file.append, RECORD_ACKING, [digest])
                return True
        if digest in self._open:
            self.acking([digest])
            return True
        return False

    def close(self, end: RunEnd) -> None:
        """Every file ends with a run that left nothing in the queue; our own entries end with any clean end.

        Of a run that lost its connection the next one must know, though nothing that it noted is to be believed.
        """
        is_known = end in (RunEnd.BROKEN, RunEnd.LOST) and self._is_used
        if end is not RunEnd.BROKEN:
            self._has_told()
            self._look_again()
        for file in self._files:
            if file is self._own and not file.is_left:
                if end is RunEnd.LOST:
                    self._guarded(file, file.rewrite, ())
                file.close(remove=not is_known)
            elif end is RunEnd.KEPT:
                self._guarded(file, file.rewrite, ())
            elif end in (RunEnd.PARTLY, RunEnd.LOST) and file is self._own:
                self._guarded(file, file.rewrite, file.left.elements())
            file.close(remove=end is RunEnd.WHOLE)
        if self._usual:
            forget_elsewhere(self._usual)

    def _has_told(self) -> None:
        """What killed runs had to tell of duplicates is in this run's summary."""
        for file in self._files:
            if file.doubted_count:
                file.doubted_count = 0
                self._guarded(file, file.doubt)

    def _has(self, path: Path) -> bool:
        """One file by two names is one."""
        try:
            return any(file.path.samefile(path) for file in self._files)
        except OSError:
            return False

    def _look_at(self, path: Path) -> None:
        try:
            file = JournalFile(path, self._head, create=False)
        except FileNotFoundError:
            return
        except BlockingIOError:
            self._busy.append(path)
        except CannotStart:
            return  # none of this queue
        except OSError as error:
            emit("recovery.no_journal", queue=str(path), error=error)
        else:
            self._files.append(file)

    def _look_again(self) -> None:
        """What was left by somebody who ran beside us may have been published again by us: nothing of it is known."""
        before, busy = len(self._files), self._busy
        self._busy = []
        for path in busy:
            self._look_at(path)
        for file in self._files[before:]:
            self._guarded(file, file.rewrite, ())

    def _guarded(self, file: JournalFile, write: Callable[[*Ts], None], *what: *Ts) -> None:
        """A file that cannot be written to would say less than is true: it goes, and the run goes on without."""
        try:
            if file.is_open:
                write(*what)
        except OSError as error:
            emit("recovery.no_journal", queue=str(file.path), error=error)
            file.close(remove=True)


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
        """One record each. Raises OSError."""
        self._write(kind + kind.join(digests) if digests else b"")

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
            self._write(self._head + doubted + b"".join(RECORD_CONFIRMED + digest for digest in digests))
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
        return RECORD_DOUBTED + self.doubted_count.to_bytes(DIGEST_BYTES, "big")

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
        if before.origin != head.origin:
            raise CannotStart(
                f"journal belongs to another queue; '{self.path}' is of {before.origin}, give another --journal FILE"
            )
        self.is_left = True
        if torn := len(records) % RECORD_BYTES:
            os.ftruncate(self.number, len(data) - torn)  # what is appended begins where a record begins
        if before.boot != head.boot or not head.boot or len(data) >= READ_BYTES_MAX:
            return  # what was written last may be missing: nothing of it can be believed
        for start in range(0, len(records) - RECORD_BYTES + 1, RECORD_BYTES):
            kind, digest = records[start : start + 1], records[start + 1 : start + RECORD_BYTES]
            if kind == RECORD_CONFIRMED:
                self.left[digest] += 1
            elif kind == RECORD_ACKING:
                self.use_up(digest)
            elif kind == RECORD_DOUBTED:
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
    return [link for link in sorted(usual.parent.glob(f"{usual.name}{ELSEWHERE}*")) if link.is_symlink()]


def _begun(path: Path, head: Head) -> JournalFile:
    """A file of our own, with what a killed run left in it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = JournalFile(path, head, create=True)
        try:
            file.rewrite(file.left.elements())
        except OSError:
            file.close(remove=False)
            raise
    except BlockingIOError as error:
        raise CannotStart(f"journal is in use; '{path}' belongs to a recovery that is running") from error
    except OSError as error:
        text = f"journal cannot be kept; '{path}': {error.strerror or error}"
        raise CannotStart(f"{text}, give another --journal FILE or use --no-journal") from error
    return file


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""  # not Linux: a journal is then good for this run alone


def _is_writable(folder: Path) -> bool:
    """A service may have no home of its own, or may not write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
