"""An installation under a state machine: its own event loop, a frozen clock, a store with faults, and crashes.

A crash here is what is left in the files (or in the memory) between two commits: for SQLite the folder is copied as
it stands and the service is opened on the copy, so that nothing that a close would write can help. SIGKILL itself is
in `tests/faults`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import psycopg
from hypothesis import HealthCheck, settings

from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.errors import HoldfastError
from holdfast.ports.queue_store import QueueStore, Storage
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.testing import FrozenClock
from tests.support.flaky import Faults, FlakyQueueStore, LastingMemory, flaky
from tests.support.postgres import emptied
from tests.support.servers import memory_place

T = TypeVar("T")
HEAL_STEP_S = 0.25
HEAL_STEPS_COUNT_MAX = 400
ASYNCHRONOUS = "do $$begin execute format('alter database %I set synchronous_commit = off', current_database()); end$$"


class ModelClock(FrozenClock):
    """A frozen clock that can be handed to the next process, and stops until the store is at rest.

    A commit in a thread ends at a moment of its own: time that went on meanwhile would make every run another one.
    """

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    async def _consequences(self) -> None:
        await self._faults.rest()

    def forget(self) -> None:
        """The process whose calls were armed is gone."""
        self._calls.clear()


class Backend:
    """Where the items are, by the kind of store: opened again after a stop or a crash, it has what was there.

    In memory where the machine has such a place, and never killed: the model asks for logic, not for the disk.
    """

    #: A PostgreSQL database of the test's own, named by whoever runs the machine; emptied for each example.
    url = ""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._folder = TemporaryDirectory(prefix="holdfast-model-", dir=memory_place())
        self._number = 0
        self._memory: LastingMemory | None = None
        if kind == "postgres":
            assert self.url, "no database was named"
            with psycopg.connect(emptied(self.url), autocommit=True) as connection:
                connection.execute(ASYNCHRONOUS)

    def open(self, clock: FrozenClock) -> Storage:
        """A storage on what is there."""
        match self._kind:
            case "postgres":
                return PostgresStorage(self.url, name="default", clock=clock)
            case "sqlite":
                return SqliteStorage(Path(self._folder.name, str(self._number)), clock=clock)
        self._memory = self._memory or LastingMemory(clock)
        return self._memory

    def crash(self) -> None:
        """From now on `open` finds what a killed process would have left. Of a database and of memory that is all:
        nothing is in flight between two commits."""
        old, self._number = Path(self._folder.name, str(self._number)), self._number + 1
        if self._kind == "sqlite":
            shutil.copytree(old, Path(self._folder.name, str(self._number)))

    def close(self) -> None:
        """Remove everything."""
        self._folder.cleanup()
        if self._memory is not None:
            asyncio.run(self._memory.forget())


class ModelInstallation:
    """The whole in-process service over one flaky storage."""

    def __init__(self, kind: str) -> None:
        self.faults = Faults()
        self.clock = ModelClock(self.faults)
        self._runner = asyncio.Runner()
        self._backend = Backend(kind)
        self._storage: Storage
        self.manager: QueueManager
        self.queues: Queues
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it, then wait until its consequences have happened too."""

        async def whole() -> T:
            try:
                return await work
            finally:
                await self.faults.rest()

        return self._runner.run(whole())

    async def _open(self) -> None:
        self._storage = flaky(self._backend.open(self.clock), self.faults)
        self.manager = QueueManager({"default": self._storage}, clock=self.clock)
        await self.manager.open()
        self.queues = Queues(QueueService(self.manager, affinities={"default": 1.0}))

    def restart(self) -> None:
        """An orderly stop, and a start."""
        self.run(self.manager.close())
        self.clock.forget()
        self.run(self._open())

    def crash(self) -> None:
        """The process is gone between two commits; start again on what is left."""
        self.faults.armed.clear()
        self._backend.crash()
        self._runner.run(self._abandon())
        self.clock.forget()
        self.run(self._open())

    async def _abandon(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._storage.close()

    def close(self) -> None:
        """Everything is given back."""
        self.faults.gate = None
        self._runner.run(self._abandon())
        self._runner.close()
        self._backend.close()

    # --- time -------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Time passes, and what is due happens."""
        self.run(self.clock.advance(seconds))

    def attempt(self, call: Coroutine[Any, Any, T], *, within_s: float = 0.0) -> T | HoldfastError:
        """The answer of a verb, or its error. Time stands still: a verb that needs time for its answer is a bug. But of
        a long poll that is not answered at once: then time passes until it must be."""

        async def answered() -> T | HoldfastError:
            task = asyncio.ensure_future(call)
            if within_s:
                await asyncio.sleep(0)
                await self.faults.rest()
                if not task.done():
                    await self.clock.advance(within_s)
                    await self.faults.rest()
            try:
                async with asyncio.timeout(30):
                    return await task
            except HoldfastError as error:
                return error

        return self.run(answered())

    # --- looking behind the faults ----------------------------------------------------------------------------

    def store(self, queue_name: str) -> QueueStore:
        """A queue's real store, which never fails."""
        queue = self.manager.find(queue_name)
        assert queue is not None
        (share,) = queue.shares
        real: QueueStore = cast(FlakyQueueStore, share.store).real
        return real

    @property
    def is_shared(self) -> bool:
        """Whether other servers could use the same storage."""
        return self._storage.abilities.shared

    def was_loaded(self, queue_name: str) -> bool:
        """Whether its store has been read at all since the start."""
        queue = self.manager.find(queue_name)
        return queue is not None and all(share.loaded for share in queue.shares)

    def is_healthy(self, queue_name: str) -> bool:
        queue = self.manager.find(queue_name)
        return queue is not None and all(share.healthy for share in queue.shares)

    def heal(self, settled: Any) -> None:
        """Nothing fails any more; time passes until `settled()`."""
        self.faults.armed.clear()
        self.faults.down.clear()
        for _ in range(HEAL_STEPS_COUNT_MAX):
            if settled():
                return
            self.advance(HEAL_STEP_S)
        raise AssertionError(f"not settled after {HEAL_STEPS_COUNT_MAX * HEAL_STEP_S} s without any fault")


def settings_for(*, examples: int, steps: int = 40) -> settings:
    """No deadline per step: a step may wait for a disk. A failure prints how to repeat it."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
