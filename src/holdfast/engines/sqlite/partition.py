"""How the partitions of a file stand, kept in memory and written with every commit that changes them."""

from __future__ import annotations

import apsw

from holdfast.core.item import SEQUENCE_BITS, SEQUENCE_MAX, PartitionIds
from holdfast.core.moments import NEVER_US
from holdfast.engines.sqlite.connection import fetch_all, fetch_one
from holdfast.ports.queue_store import PartitionState

#: Ids are given out ahead of what is written for so long; after a crash they go on behind it.
RESERVE_US = 60_000_000
_LOW_BITS = 12
_LOWS = [f"{low:03x}" for low in range(1 << _LOW_BITS)]


class SqlitePartition(PartitionIds):
    """Counts of one partition, its ids, and the range of row ids that is its own."""

    def __init__(self, generation: int, row: tuple[int, int, int, int, int, int, int]) -> None:
        self.number, self.queued, self.leased, self.scheduled, self.dying, self.last_sequence, exact = row
        self.exact = bool(exact)
        self._reserved = self.last_sequence
        super().__init__(generation, self.number, first=self.number << SEQUENCE_BITS)
        self.last = self.first | SEQUENCE_MAX

    def next_row_id(self, now_us: int) -> int:
        """A row id after every other of this partition: the clock, or one more where the clock stood still."""
        self.last_sequence = max(self.last_sequence + 1, now_us)
        return self.first | self.last_sequence

    def next_row_ids(self, now_us: int, count: int) -> range:
        """So many row ids in a row."""
        start = self.next_row_id(now_us)
        self.last_sequence += count - 1
        return range(start, start + count)

    def ids_of(self, row_ids: range) -> list[str]:
        """The texts of ids in a row, which differ in their last digits alone."""
        if len(row_ids) == 1:
            return [self.id_of(row_ids[0])]
        suffix, texts = self.suffix, []
        first, last = row_ids[0] & SEQUENCE_MAX, row_ids[-1] & SEQUENCE_MAX
        for high in range(first >> _LOW_BITS, (last >> _LOW_BITS) + 1):
            start = max(first - (high << _LOW_BITS), 0)
            beginning = format(high, "011x")
            texts += [beginning + low + suffix for low in _LOWS[start : last - (high << _LOW_BITS) + 1]]
        return texts

    def row(self) -> tuple[int, ...]:
        """As the table has it."""
        return self.number, self.queued, self.leased, self.scheduled, self.dying, self.last_sequence, int(self.exact)

    def reserve(self) -> tuple[int, ...] | None:
        """The row to write with this commit, if one is needed: that the counts in it are stale from now on, and up to
        where ids may be given out before it has to be written again."""
        if not self.exact and self.last_sequence <= self._reserved:
            return None
        self.exact = False
        self._reserved = min(self.last_sequence + RESERVE_US, SEQUENCE_MAX)
        return self.number, 0, 0, 0, 0, self._reserved, 0


def read_partitions(connection: apsw.Connection, generation: int) -> dict[int, SqlitePartition]:
    """The partitions of a file, from its table; counted, where the file was not closed by us."""
    partitions = {row[0]: SqlitePartition(generation, row) for row in fetch_all(connection, "select_partitions")}
    if not all(partition.exact for partition in partitions.values()):
        for partition in partitions.values():
            partition.queued = partition.leased = partition.scheduled = partition.dying = 0
        for number, state, count in fetch_all(connection, "count_rows"):
            setattr(partitions[number], state, count)
    return partitions


class Moments:
    """The nearest deadlines of a file, never later than the truth: looking once too early costs little, and what is
    added is known without asking. The truth is read when the file is opened and after deadlines were carried out.
    """

    __slots__ = ("death_us", "due_us", "expiry_us")

    def __init__(self, connection: apsw.Connection) -> None:
        self.due_us = self.expiry_us = self.death_us = 0
        self.read(connection)

    def read(self, connection: apsw.Connection) -> None:
        """The truth, by four indexes."""
        lease, schedule, expiry, death = fetch_one(connection, "next_moments")
        self.due_us = min(lease or NEVER_US, schedule or NEVER_US)
        self.expiry_us = expiry or NEVER_US
        self.death_us = death or NEVER_US

    def state(self, partition: SqlitePartition) -> PartitionState:
        """How a partition stands. Deadlines are those of the whole file."""
        return PartitionState(
            partition.queued,
            partition.leased,
            partition.scheduled,
            partition.dying,
            self.due_us if self.due_us < NEVER_US else 0,
            self.expiry_us if self.expiry_us < NEVER_US else 0,
            self.death_us if self.death_us < NEVER_US else 0,
        )
