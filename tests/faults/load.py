"""A small load over real HTTP that keeps books: what was acknowledged, who holds what, what was completed.

An item is known by its payload. Completing it is what finds it: when everything has been drained, each acknowledged
item was completed once, or its completion is in doubt because the answer was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import holdfast
from holdfast.core.item import LeasedItem, NewItem, RetryItem
from holdfast.errors import BadIds, HoldfastError, NothingToLease, QueueMissing, Unreachable
from holdfast.proof.conservation import Conservation, ConservationReport
from tests.consume.brokers import count_of
from tests.faults.serving import Serving
from tests.support.eventually import eventually

WORK, DEAD = "work", "dead"
LEASE_S = 0.4
MAX_ATTEMPTS = 2
PAUSE_S = 0.01  # between two tries of a server that is down
TIDY_COUNT = 10
DRAIN_TIMEOUT_S = 60.0
ANSWERS_COUNT_MAX = 60  # between two kills
NOTHING_SENT = "nothing was sent"  # the client's own words for a connection that was refused


class Broken(Exception):
    """A promise was not kept; raised where it was seen. No wait takes it for a "not yet"."""


async def create_queues(queues: holdfast.Queues, *, partitions: int = 1) -> None:
    """The two queues that the load works on."""
    await queues.queues_create(DEAD, lease_timeout=f"{LEASE_S}s", requested_partitions=partitions)
    await queues.queues_create(
        WORK,
        lease_timeout=f"{LEASE_S}s",
        dead_queue=DEAD,
        max_attempts=MAX_ATTEMPTS,
        requested_partitions=partitions,
    )


class Load:
    """Producers and consumers: `async with load.working()`, then `drain`."""

    def __init__(self, clients: Sequence[holdfast.Client], *, seed: int = 1, name: str = "") -> None:
        self.clients = clients
        self.books = Conservation()
        self.put_count = 0
        self.answered_count = 0
        self._name = name
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._held: dict[tuple[str, bytes], datetime] = {}  # until when it is somebody's
        self._attempts: dict[tuple[str, bytes], int] = {}
        self._stopping = asyncio.Event()

    # --- producing ----------------------------------------------------------------------------------------------

    async def produce(self, client: holdfast.Client, count: int) -> None:
        """One request; its items are certain when it was answered, and in doubt when it was not."""
        tokens = [f"{self._name}{next(self._numbers)}".encode() for _ in range(count)]
        items = [NewItem(payload=token) for token in tokens]
        try:
            await client.queue_produce(WORK, items, request_timeout="20s")
        except HoldfastError as error:
            if isinstance(error, Unreachable) and NOTHING_SENT in error.message:
                raise
            for token in tokens:
                self.books.put_in_doubt(token.decode(), token)
            raise
        self.answered_count += 1
        self.put_count += count
        for token in tokens:
            self.books.put(token.decode(), token)

    # --- consuming ----------------------------------------------------------------------------------------------

    async def consume(self, client: holdfast.Client, name: str, *, wait: str = "200ms", tidy: bool = False) -> int:
        """One lease, and what a consumer does with it; `tidy` completes everything, many at a time."""
        reply = await client.queue_lease(name, batch_size=TIDY_COUNT if tidy else 4, request_timeout=wait)
        for item in reply.items:
            self._check_lease(name, item)
        # At once: on a slow machine the leases would run out before the last one's turn.
        settling = [self._settle(client, name, reply.partition, item, tidy=tidy) for item in reply.items]
        for error in filter(None, await asyncio.gather(*settling, return_exceptions=True)):
            raise error
        return len(reply.items)

    def _check_lease(self, name: str, item: LeasedItem) -> None:
        key = (name, item.payload)
        began_at = item.lease_deadline - timedelta(seconds=LEASE_S)
        held_until = self._held.get(key)
        if held_until is not None and began_at < held_until:
            raise Broken(f"{key} was leased until {held_until} and again at {began_at}: twice at once")
        if item.attempts <= self._attempts.get(key, 0):
            raise Broken(f"{key} has attempts {item.attempts} and had {self._attempts[key]}: an attempt was lost")
        if name == WORK and item.attempts > MAX_ATTEMPTS:
            raise Broken(f"{key} was leased {item.attempts} times, {MAX_ATTEMPTS} are allowed")
        self._held[key] = item.lease_deadline
        self._attempts[key] = item.attempts

    async def _settle(
        self, client: holdfast.Client, name: str, partition: int, item: LeasedItem, *, tidy: bool
    ) -> None:
        chance = 0.0 if tidy else self._random.random()
        token = item.payload.decode()
        if chance > 0.92:
            return  # a consumer that died: the lease runs out
        try:
            if chance > 0.6 and name == WORK:
                dead = chance > 0.75
                # Somebody else may have it before we hear that it was taken back.
                self._held.pop((name, item.payload), None)
                await client.queue_retry(name, [RetryItem(id=item.id, dead=dead)], partition=partition)
                return
            await client.queue_complete(name, [item.id], partition=partition, request_timeout="20s")
        except BadIds:
            return  # the lease ran out first: it goes to somebody else
        except HoldfastError:
            # Whether it was settled is open, and so is whether somebody else may have it already.
            self._held.pop((name, item.payload), None)
            if chance <= 0.6 or name != WORK:
                self.books.found_in_doubt("completed", token, item.payload)
            raise
        self.answered_count += 1
        self._held.pop((name, item.payload), None)
        self.books.found("completed", token, item.payload)

    # --- running ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def working(self, *, producers: int = 3, consumers: int = 3) -> AsyncIterator[None]:
        """Work on all clients until the end of the block; a server that is down or refuses is tried again, and a
        promise that is broken ends the block."""
        async with asyncio.TaskGroup() as group:
            for index in range(producers):
                client = self.clients[index % len(self.clients)]
                group.create_task(self._keep(partial(self._produce_some, client)))
            for index in range(consumers):
                client, name = self.clients[index % len(self.clients)], DEAD if index == 0 else WORK
                group.create_task(self._keep(partial(self.consume, client, name)))
            try:
                yield
            finally:
                self._stopping.set()

    async def answers(self, count: int) -> None:
        """Wait until so many more came."""
        wanted = self.answered_count + count
        await eventually(lambda: self.answered_count >= wanted)

    async def _produce_some(self, client: holdfast.Client) -> None:
        await self.produce(client, self._random.randint(1, 3))

    async def _keep(self, step: Callable[[], Awaitable[object]]) -> None:
        while not self._stopping.is_set():
            try:
                await step()
            except (NothingToLease, QueueMissing):
                continue
            except HoldfastError:
                # The pace of a client that tries again, not a wait for a fact.
                await asyncio.sleep(PAUSE_S)

    # --- the count ----------------------------------------------------------------------------------------------

    async def drain(self, client: holdfast.Client) -> ConservationReport:
        """Complete everything that is left, then count."""

        async def is_empty() -> bool:
            for name in (WORK, DEAD):
                try:
                    while await self.consume(client, name, wait="20ms", tidy=True):
                        pass
                except NothingToLease:
                    pass
            return not any([await count_of(client, name) for name in (WORK, DEAD)])

        await eventually(is_empty, timeout_s=DRAIN_TIMEOUT_S)
        return self.books.report()


async def random_kills(url: str, folder: Path, *, kills: int, seed: int, partitions: int = 1) -> ConservationReport:
    """The short form is a test, the long one `make soak`: kill the real server so many times, each after a random
    number of answers; then drain and count."""
    chance = random.Random(seed)
    async with holdfast.open(url) as queues:
        await create_queues(queues, partitions=partitions)
    async with Serving(url, folder) as server, server.client() as client:
        load = Load([client], seed=seed)
        child = await server.start()
        async with load.working():
            for _ in range(kills):
                await load.answers(chance.randint(0, ANSWERS_COUNT_MAX))
                assert await child.kill() == -9
                child = await server.start()
        return await load.drain(client)
