"""What servers on one database tell each other: a queue's name, when items came in or the queue changed.

Only a hint, so it is sent after the commit, on its own, and joined: a NOTIFY inside a commit would make every commit
of the database wait for the one before it. Behind it is a poll for deadlines that have passed, of whichever server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from uuid import uuid4

import psycopg

from holdfast.engines.postgres.errors import failed
from holdfast.engines.postgres.link import connect
from holdfast.engines.postgres.pool import Pool
from holdfast.engines.postgres.transaction import read
from holdfast.engines.postgres.values import texts
from holdfast.errors import StorageFailed

POLL_S = 0.5
#: The first hint goes out at once, those after it together.
RING_S_MIN = 0.01
NAMES_COUNT_MAX = 1_000
CLOSE_TIMEOUT_S = 1.0


class ChangeNotifier:
    """Tells other servers which queues to look at."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._names: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.sender = uuid4().hex

    def ring(self, names: Iterable[str]) -> None:
        """Tell them soon; never waits and never fails."""
        self._names.update(names)
        if self._names and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="postgres hints")

    async def _run(self) -> None:
        while self._names:
            names = [self._names.pop() for _ in range(min(len(self._names), NAMES_COUNT_MAX))]
            try:
                await read(self._pool, "notify", texts([f"{self.sender} {name}" for name in names]))
            except StorageFailed:
                return  # whoever missed it polls
            await asyncio.sleep(RING_S_MIN)

    async def close(self) -> None:
        """Send what is left, unless the database takes too long: whoever misses it polls."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            self._task.cancel()
            await asyncio.wait([self._task])


async def listen(
    url: str, pool: Pool, *, place: str, sender: str, hint: Callable[[str], None], now_us: Callable[[], int | None]
) -> None:
    """Call `hint` for what others tell, and for queues with deadlines that have passed. Ends only by an error."""
    try:
        connection = await connect(url)
        try:
            await connection.execute("LISTEN holdfast")
            clock = asyncio.get_running_loop().time
            polled_s = 0.0
            while True:
                async for notice in connection.notifies(timeout=POLL_S, stop_after=1):
                    author, _, name = notice.payload.partition(" ")
                    if author != sender:
                        hint(name)
                if clock() - polled_s >= POLL_S:
                    polled_s = clock()
                    await _hint_overdue(pool, hint, now_us())
        finally:
            await connection.close()
    except (psycopg.Error, OSError) as error:
        raise failed(error, place) from error


async def _hint_overdue(pool: Pool, hint: Callable[[str], None], now_us: int | None) -> None:
    for (name,) in await read(pool, "select_overdue", now_us):
        hint(name)
