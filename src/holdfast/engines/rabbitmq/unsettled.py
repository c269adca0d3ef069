"""Which deliveries of one channel are still unsettled, and the fewest frames that settle those that are done. Pure.

An ack with `multiple` settles everything up to its tag, so it may only be used for a prefix in which nothing is open.
What is settled behind an open delivery goes out as frames of its own: waiting for the prefix would use up the
prefetch whenever one message is held for long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from holdfast.engines.rabbitmq.wire import commands


class AckTracker:
    """Tags come in ascending order (`delivered`), are settled in any (`ack`, `nack`), and `flush` packs the frames."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._open: dict[int, None] = {}  # a dict keeps the order: the lowest open tag is its first key
        self._acks: list[int] = []
        self._nacks: list[tuple[int, bool]] = []
        self._last_tag = self._past_tag = 0
        self.past_count = 0  #: unacked, as the broker sees it, of consumers that have ended
        self.singles_count = 0  #: acks that `flush` packed one by one, the last time

    def __len__(self) -> int:
        return len(self._open)

    @property
    def pending(self) -> bool:
        """Whether `flush` has something to say."""
        return bool(self._acks or self._nacks)

    @property
    def unsent_count(self) -> int:
        """Acks that `flush` has not packed yet."""
        return len(self._acks)

    def delivered(self, tag: int) -> None:
        """A message came."""
        self._open[tag] = None
        self._last_tag = tag

    def delivered_all(self, tags: Sequence[int]) -> None:
        """Messages came, in this order."""
        self._open.update(dict.fromkeys(tags))
        self._last_tag = tags[-1]

    def consumer_ended(self) -> None:
        """Nothing more comes in the place of what has come so far, when that is settled."""
        self._past_tag = self._last_tag
        self.past_count = len(self._open) + len(self._acks)

    def ack(self, tag: int) -> bool:
        """It is done. False when it is not open: settled before, or never delivered here."""
        if tag not in self._open:
            return False
        del self._open[tag]
        self._acks.append(tag)
        return True

    def ack_all(self, tags: Iterable[int]) -> list[int]:
        """They are done. Answers those that are not open: settled before, or never delivered here."""
        still, acks, others = self._open, self._acks, []
        for tag in tags:
            if tag in still:
                del still[tag]
                acks.append(tag)
            else:
                others.append(tag)
        return others

    def nack(self, tag: int, *, requeue: bool) -> bool:
        """It goes back to the queue, or to the dead-letter exchange. False as for `ack`."""
        if tag not in self._open:
            return False
        del self._open[tag]
        self._nacks.append((tag, requeue))
        return True

    def nack_all(self) -> None:
        """Everything that is open goes back, in the end by one frame: one by one is quadratic on a classic queue."""
        for tag in list(self._open):
            self.nack(tag, requeue=True)

    def parts(self, joints: Iterable[int]) -> list[int]:
        """The last open tag of each part, when what is open is parted behind these tags; not that of the last part."""
        tags = list(self._open)
        places = sorted({bisect_right(tags, joint) for joint in joints})
        return [tags[place - 1] for place in places if 0 < place < len(tags)]

    def flush(self, acks_count_max: int | None = None) -> bytes:
        """The frames for everything that was settled since the last time; of the acks that make the broker send more,
        the lowest so many tags."""
        acks = sorted(self._acks)
        past_count = bisect_right(acks, self._past_tag) if self.past_count else 0
        self.past_count -= past_count
        if acks_count_max is None:
            self._acks = []
        else:
            count_max = past_count + acks_count_max
            acks, self._acks = acks[:count_max], acks[count_max:]
        nacks, self._nacks = sorted(self._nacks), []
        lowest_open = next(iter(self._open), None)
        frames = []
        # Nacks first, each run of the same kind: with `multiple` they would take along acks that were not sent yet.
        if nacks and not acks and _may_join(nacks, lowest_open):
            tag, requeue = nacks[-1]
            return commands.nack(self._channel, tag, multiple=True, requeue=requeue)
        for tag, requeue in nacks:
            frames.append(commands.nack(self._channel, tag, multiple=False, requeue=requeue))
        prefix = acks if lowest_open is None else acks[: bisect_left(acks, lowest_open)]
        if prefix:
            frames.append(commands.ack(self._channel, prefix[-1], multiple=True))
        singles = acks[len(prefix) :]
        self.singles_count = len(singles)
        frames += [commands.ack(self._channel, tag, multiple=False) for tag in singles]
        return b"".join(frames)


def _may_join(nacks: list[tuple[int, bool]], lowest_open: int | None) -> bool:
    same_kind = len({requeue for _, requeue in nacks}) == 1
    return same_kind and (lowest_open is None or nacks[-1][0] < lowest_open)
