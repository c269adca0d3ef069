"""How many letters a run takes: at most those that were there at the start, and of those that fit, as many as asked."""

from __future__ import annotations

from holdfast.core.recovery import StoppedBy, Summary

#: With a filter nobody knows which letters fit: so many are looked at together even when fewer are still wanted.
AHEAD_COUNT = 100


class Quota:
    """Counts letters, not deliveries. What `--where` leaves out does not count toward the limit."""

    def __init__(self, limit: int | None, *, filters: bool) -> None:
        self.seen_max = None if filters else limit  #: letters looked at; None: not known yet
        self.is_bounded = False  #: by how many there were
        self.seen_count = 0
        self.left_out_count = 0
        self._fits_max = limit if filters else None

    def starts_with(self, found: int) -> None:
        """So many are there: no more are taken, or letters that die again would be chased. 0 means nothing yet."""
        if found and not self.is_bounded:
            self.is_bounded = True
            self.seen_max = found if self.seen_max is None else min(self.seen_max, found)

    def take(self) -> bool:
        """Count one more letter that is looked at; False, and not counted, when it is none of those wanted."""
        if self.seen_max is not None and self.seen_count >= self.seen_max:
            return False
        if self._fits_max is not None and self.seen_count - self.left_out_count >= self._fits_max:
            return False
        self.seen_count += 1
        return True

    def left(self) -> int | None:
        """How many more may be taken at once; None: whatever there is."""
        left = None if self.seen_max is None else max(0, self.seen_max - self.seen_count)
        if self._fits_max is None:
            return left
        wanted = self._fits_max - (self.seen_count - self.left_out_count)
        ahead = max(wanted, AHEAD_COUNT) if wanted > 0 else 0
        return ahead if left is None else min(left, ahead)

    def unseen(self, summary: Summary) -> int:
        """Of those that were found, how many were not looked at; what somebody else has taken is none of them.

        A broker that lost a node may count letters to a connection that is gone, and say that the queue is empty.
        """
        unseen = max(0, summary.found - self.seen_count)
        if summary.interruptions or summary.remaining is None:
            return unseen
        return 0 if summary.stopped_by is StoppedBy.EMPTY else min(unseen, summary.remaining)
