"""Which stores and which faces the suite runs over, and the house that a test lives in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path

import pytest

from holdfast import Queues
from holdfast.engines.memory.storage import MemoryStorage
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.testing import FrozenClock
from tests.conformance.queue.house import House, MakeStorage

STORES = ["memory", "sqlite"]
FACES = ["in process", "http"]


@pytest.fixture(params=STORES)
def make_storage(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStorage:
    """A storage by its name; opened again, the same name has the same data."""
    if request.param == "memory":
        return cache(lambda name, clock: MemoryStorage(clock))
    return lambda name, clock: SqliteStorage(tmp_path / name, clock=clock)


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def make_house(make_storage: MakeStorage, face: str) -> AsyncIterator[Callable[..., object]]:
    """Makes houses, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def make(*storages: str) -> House:
            house = House(make_storage, face, storages=storages or ("default",))
            stack.push_async_callback(house.close)
            await house.open()
            return house

        yield make


@pytest.fixture
async def house(make_house: Callable[..., object]) -> House:
    """A service with one storage."""
    return await make_house()  # type: ignore[misc,no-any-return]


@pytest.fixture
def queues(house: House) -> Queues:
    """The queues, through the face."""
    return house.queues


@pytest.fixture
def clock(house: House) -> FrozenClock:
    """The clock of the house."""
    return house.clock
