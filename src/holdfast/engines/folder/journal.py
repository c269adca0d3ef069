"""The journal of a recovery: which letters are published and not yet acked, in a small file.

Records are appended by plain writes: they survive a kill of this process, and a restart of the machine is told by its
boot id, after which nothing in the file is believed. So there is nothing to sync: a record that the machine lost
could only be one whose file is not believed any more. Two records per letter, `C` when its copy is confirmed and `A`
just before its ack is sent; what has a `C` and no `A` was never acked. `D` is how many letters were published, perhaps
for the second time: should this run be killed, the next one tells of them.

A queue may have several: runs that were killed kept theirs at other places. All of them are looked at, and each entry
ends in the file that it is in, also by a run that keeps none: an entry whose letter has left the queue would take a
later letter of the same bytes for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast.engines.folder.journal_file import (
    ACKING,
    CONFIRMED,
    Head,
    JournalFile,
    forget_elsewhere,
    found_elsewhere,
    note_elsewhere,
)
from holdfast.errors import CannotStart
from holdfast.ports.recovery import RunEnd
from holdfast.telemetry.events import emit

FILE_BYTES_MAX = 4 * 2**20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FileJournal:
    """`FileJournal.open(path, source=…, run=…)`; without a path it recognises nothing, and ends what others left."""

    def __init__(self, head: Head, own: JournalFile | None, usual: Path | None) -> None:
        self._head = head
        self._own = own
        self._usual = usual
        self._files = [own] if own else []  # our own first
        self._busy: list[Path] = []  # somebody else's, as long as he runs
        self._open: Counter[bytes] = Counter()  # of this run
        self._is_used = False
        self.follows_killed_run = False
        self.doubted_count = 0

    @classmethod
    def open(
        cls, path: Path | None, *, source: str, run: str, others: Iterable[Path] = (), usual: Path | None = None
    ) -> FileJournal:
        """Take over what killed runs left, and begin a file of our own at `path`.

        `others` are further places where this queue may have one, beside those that `usual`, the place that everybody
        knows, has links to. Raises CannotStart when it cannot be kept or is another queue's.
        """
        head = Head(run=run, source=source, boot=_boot())
        path = path.absolute() if path else None
        journal = cls(head, _begun(path, head) if path else None, usual)
        places = [*([usual, *found_elsewhere(usual)] if usual else ()), *others]
        for place in dict.fromkeys(place.absolute() for place in places):
            if not journal._has(place):
                journal._look_at(place)
        journal.follows_killed_run = any(file.is_left for file in journal._files)
        journal.doubted_count = sum(file.doubted_count for file in journal._files)
        if own := journal._own:
            journal.doubt(journal.doubted_count - own.doubted_count)
        if usual and path and path != usual.absolute():
            note_elsewhere(usual, path)
        return journal

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
                self._append(file, ACKING, [digest for digest in ended for _ in range(file.left.pop(digest))])
        if self._own:
            self._open.update(digests)
            self._append(self._own, CONFIRMED, digests)

    def acking(self, digests: Sequence[bytes]) -> None:
        """Their acks are about to be sent: from here on they are not recognised any more, whatever happens."""
        if not (own := self._own):
            return
        still = self._open
        for digest in digests:
            if (count := still.pop(digest, 0)) > 1:
                still[digest] = count - 1
        self._append(own, ACKING, digests)
        if own.size_bytes > FILE_BYTES_MAX:
            self._keep_only(own, (own.left + still).elements())

    def recognise(self, digest: bytes) -> bool:
        """Whether a letter that came again was published and never acked; uses the entry up."""
        if not self._own:
            return False
        for file in self._files:
            if digest in file.left:
                file.use_up(digest)
                self._append(file, ACKING, [digest])
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
                    self._keep_only(file, ())
                file.close(remove=not is_known)
            elif end is RunEnd.KEPT:
                self._keep_only(file, ())
            elif end in (RunEnd.PARTLY, RunEnd.LOST) and file is self._own:
                self._keep_only(file, file.left.elements())
            file.close(remove=end is RunEnd.WHOLE)
        if self._usual:
            forget_elsewhere(self._usual)

    def _has_told(self) -> None:
        """What killed runs had to tell of duplicates is in this run's summary."""
        for file in self._files:
            if file.doubted_count and file.is_open:
                file.doubted_count = 0
                self._guarded(file, file.doubt)

    def _has(self, place: Path) -> bool:
        """One file by two names is one."""
        try:
            return any(file.path.samefile(place) for file in self._files)
        except OSError:
            return False

    def _look_at(self, place: Path) -> None:
        try:
            file = JournalFile(place, self._head, create=False)
        except FileNotFoundError:
            return
        except BlockingIOError:
            self._busy.append(place)
        except CannotStart:
            return  # none of this queue
        except OSError as error:
            emit("recovery.no_journal", queue=str(place), error=error)
        else:
            self._files.append(file)

    def _look_again(self) -> None:
        """What was left by somebody who ran beside us may have been published again by us: nothing of it is known."""
        before, busy = len(self._files), self._busy
        self._busy = []
        for place in busy:
            self._look_at(place)
        for file in self._files[before:]:
            self._keep_only(file, ())

    def _keep_only(self, file: JournalFile, digests: Iterable[bytes]) -> None:
        if file.is_open:
            self._guarded(file, lambda: file.rewrite(digests))

    def _append(self, file: JournalFile, kind: bytes, digests: Sequence[bytes]) -> None:
        if file.is_open and digests:
            self._guarded(file, lambda: file.append(kind, digests))

    def _guarded(self, file: JournalFile, action: Callable[[], None]) -> None:
        """A file that cannot be written to would say less than is true: it goes, and the run goes on without."""
        try:
            action()
        except OSError as error:
            emit("recovery.no_journal", queue=str(file.path), error=error)
            file.close(remove=True)


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
