"""A PostgreSQL database as a storage: several servers share its queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from holdfast.core.queue import QueueRecord
from holdfast.engines.postgres.catalog import PostgresCatalog
from holdfast.engines.postgres.counts import PostgresPartition
from holdfast.engines.postgres.errors import place_of
from holdfast.engines.postgres.hints import ChangeNotifier, listen
from holdfast.engines.postgres.pool import Pool
from holdfast.engines.postgres.schema import migrate
from holdfast.engines.postgres.shelves import PostgresQueueStore
from holdfast.engines.postgres.transaction import read, transaction
from holdfast.ports.clock import Clock
from holdfast.ports.queues import StorageAbilities

CONNECTIONS_COUNT_MAX = 8
DROP_COUNT_MAX = 5_000


class PostgresStorage:
    """Queues in a database. Without a clock, the database's own decides about every deadline."""

    abilities = StorageAbilities(shared=True, moves_in_one_commit=True, inline=False)

    def __init__(
        self, url: str, *, name: str, clock: Clock | None = None, connections_max: int = CONNECTIONS_COUNT_MAX
    ) -> None:
        self.name = name
        self._url = url
        self._clock = clock
        self._place = place_of(url)
        self.pool = Pool(url, place=self._place, connections_max=connections_max)
        self._stands: dict[tuple[int, int], PostgresPartition] = {}
        self.keeps_catalog = False
        self._catalog = PostgresCatalog(self)
        self._bell = ChangeNotifier(self.pool)

    async def open(self) -> None:
        await migrate(self._url)
        self.pool.open()

    async def close(self) -> None:
        await self._bell.close()
        await self.pool.close()

    def catalog(self) -> PostgresCatalog:
        # Whoever asks for it keeps the queues here; otherwise queues are adopted from another storage's catalog.
        self.keeps_catalog = True
        return self._catalog

    def shelves(self, record: QueueRecord, partitions: Sequence[int]) -> PostgresQueueStore:
        return PostgresQueueStore(self, record, partitions)

    async def drop(self, record: QueueRecord) -> None:
        async with transaction(self.pool, now_us=None) as work:
            work.put("catalog_delete_queue", record.generation)
        await self._drop(record.generation)
        for key in [key for key in self._stands if key[0] == record.generation]:
            del self._stands[key]

    async def _drop(self, generation: int) -> None:
        """Remove the items of a queue that is gone, a bounded number in each transaction."""
        for statement in ("drop_ready", "drop_leases", "drop_scheduled", "drop_dying"):
            count = DROP_COUNT_MAX
            while count == DROP_COUNT_MAX:
                count = (await read(self.pool, statement, generation, DROP_COUNT_MAX))[0][0]
        async with transaction(self.pool, now_us=None) as work:
            work.put("drop_arrivals", generation)
            work.put("drop_done", generation)

    async def watch(self, hint: Callable[[str], None]) -> None:
        for (generation,) in await read(self.pool, "select_dropped"):
            await self._drop(generation)  # a server ended between deleting a queue and removing its items
        await listen(
            self._url,
            self.pool,
            place=self._place,
            sender=self._bell.sender,
            hint=hint,
            now_us=self.given_now_us,
        )

    # --- called by shelves and catalog ------------------------------------------------------------------------

    def given_now_us(self) -> int | None:
        """A given clock's moment; none means the database's."""
        return self._clock.now_us() if self._clock is not None else None

    def stand(self, generation: int, partition: int) -> PostgresPartition:
        """How a partition stands, as far as this process knows."""
        stand = self._stands.get((generation, partition))
        if stand is None:
            stand = self._stands[generation, partition] = PostgresPartition(generation, partition)
        return stand

    def ring(self, names: Iterable[str]) -> None:
        """Other servers shall look at these queues."""
        self._bell.ring(names)
