"""A batch of operations inside one transaction: what every operation needs to know and to hand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from holdfast.engines.postgres.counts import CountChange, PostgresPartition
from holdfast.engines.postgres.link import Rows
from holdfast.engines.postgres.transaction import PipelineTransaction
from holdfast.engines.postgres.values import Value, texts
from holdfast.ports.queues import IdsRefused, Result

#: Called after the commit: an operation's result, from the answers to its statements.
Finish: TypeAlias = Callable[[], Result]
#: Of an item outside of its state table: id, created_at, expire_at, attempts.
State: TypeAlias = tuple[int, int, int, int]


class OperationBatch:
    """One commit of one queue."""

    def __init__(
        self,
        work: PipelineTransaction,
        *,
        storage: str,
        queue_name: str,
        generation: int,
        find_stand: Callable[[int, int], PostgresPartition],
    ) -> None:
        self.work = work
        self.storage = storage
        self.queue_name = queue_name
        self.generation = generation
        self._find_stand = find_stand
        self.looked = False  # deadlines were looked at: read the next ones
        #: Partitions in which a lease found less than it asked for: whether it began behind the start.
        self.short: dict[int, bool] = {}
        self._held = work.put("hold_queue", generation, work.now_us)
        self._now_us = work.now_us or 0

    @property
    def now_us(self) -> int:
        """The transaction's moment; known after the first flush."""
        if not self._now_us:
            self._now_us = self.work.rows(self._held)[0][0]
        return self._now_us

    def stand(self, partition: int) -> PostgresPartition:
        """A partition of this queue."""
        return self._find_stand(self.generation, partition)

    def change(self, partition: int) -> CountChange:
        """What the batch changes in a partition of this queue."""
        return self.work.change(self.generation, partition)

    def put(self, statement: str, partition: int, *values: Value) -> int:
        """Queue a statement about a partition of this queue."""
        return self.work.put(statement, self.generation, partition, *values)

    async def ask(self, statement: str, partition: int, *values: Value) -> Rows:
        """Queue a statement about a partition of this queue and wait for its answer."""
        return await self.work.ask(statement, self.generation, partition, *values)

    def note(self, action: str, item_ids: Sequence[str], reason: str, *, count: int = 1, detail: str = "") -> None:
        """Rows of the ledger, in this transaction."""
        if item_ids:
            ids, reasons = texts(item_ids), texts([reason] * len(item_ids))
            self.work.put(
                "insert_ledger",
                *(self.generation, self.queue_name, self.work.now_us, action, ids, reasons, count, detail),
            )

    def made_available(self) -> None:
        """Items of this queue can be leased now: other servers shall hear of it."""
        self.work.available.add(self.queue_name)


def refusal(
    stand: PostgresPartition, ids: Sequence[str], *, leased: Sequence[int] | None, queued: Sequence[int] | None
) -> IdsRefused:
    """Which ids do not exist and which are not leased."""
    held, known = set(leased or ()), set(queued or ())
    missing: list[str] = []
    unleased: list[str] = []
    for text in ids:
        number = stand.number_of(text)
        if number not in held:
            (unleased if number in known else missing).append(text)
    return IdsRefused(missing, unleased)


def columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[int]]:
    """Rows turned into columns, for arrays."""
    return [[row[index] for row in rows] for index in range(count)]
