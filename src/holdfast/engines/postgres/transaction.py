"""One transaction: statements are queued, sent in as few round trips as their answers allow, and committed.

What a transaction changes in the counts of partitions is collected beside it and takes effect after the commit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg.pq.abc import PGresult

from holdfast.engines.postgres.counts import CountChange
from holdfast.engines.postgres.errors import QueueGone
from holdfast.engines.postgres.link import PipelineConnection, Rows
from holdfast.engines.postgres.pool import Pool
from holdfast.engines.postgres.values import Value
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.proof import crash_point


class PipelineTransaction:
    """A transaction that has begun. `now_us` is a frozen clock's moment; without one the database's clock holds."""

    def __init__(self, link: PipelineConnection, *, now_us: int | None) -> None:
        self._link = link
        self._results: list[PGresult] = []
        self._queued = 0
        self.now_us = now_us
        self.changes: dict[tuple[int, int], CountChange] = {}
        self.available: set[str] = set()  # queues in which it makes items available
        self.targets: dict[int, bool] = {}  # dead queues that were looked for: whether they are there
        self.put("begin")

    def change(self, generation: int, partition: int) -> CountChange:
        """What it changes in a partition."""
        return self.changes.setdefault((generation, partition), CountChange())

    def put(self, statement: str, *values: Value) -> int:
        """Queue a statement; `rows` gives its answer after the next flush or the commit."""
        self._link.send(statement, values)
        self._queued += 1
        return self._queued - 1

    async def ask(self, statement: str, *values: Value) -> Rows:
        """Queue a statement and wait for its answer."""
        place = self.put(statement, *values)
        await self.flush()
        return self.rows(place)

    async def flush(self) -> None:
        """Wait for the answers to everything that was queued."""
        self._results += await self._link.receive(sync=False)

    def rows(self, place: int) -> Rows:
        """The rows that a statement answered."""
        return self._link.rows(self._results[place])

    async def commit(self) -> None:
        """Make it last. When this raises StorageFailed, whether it did is unknown."""
        crash_point("postgres.before_commit")
        place = self.put("commit")
        self._results += await self._link.receive(sync=True)
        if self._results[place].command_status != b"COMMIT":
            raise StorageFailed("storage failed; the transaction was rolled back, try again")
        crash_point("postgres.after_commit")

    async def rollback(self) -> None:
        """Undo it."""
        self.put("rollback")
        await self._link.receive(sync=True)


@asynccontextmanager
async def transaction(pool: Pool, *, now_us: int | None) -> AsyncIterator[PipelineTransaction]:
    """Everything inside and one commit, or nothing. A refusal by ourselves undoes it and keeps the connection."""
    refusal: HoldfastError | None = None
    async with pool.link() as link:
        work = PipelineTransaction(link, now_us=now_us)
        try:
            yield work
        except (StorageFailed, QueueGone):
            raise
        except HoldfastError as error:
            refusal = error
            await work.rollback()
        else:
            await work.commit()
    if refusal is not None:
        raise refusal


async def read(pool: Pool, statement: str, *values: Value) -> Rows:
    """The answer to one statement, outside of any transaction."""
    async with pool.link() as link:
        link.send(statement, values)
        return link.rows((await link.receive(sync=True))[0])
