"""Recoveries inside a server: a few at once, started by a request and followed while they run; when they have ended,
the vault has them.

Each is the run that the command line makes: the same lock, journal, summary and row in the ledger. A server that stops
gives back what its runs hold; of one that is killed the next run of that queue recognises by the journal what was
published, as it does of a command that was killed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from holdfast.core.letter import Origin
from holdfast.core.recovery import Preflight, RecoveryOrder, Summary
from holdfast.core.requests.declare import Caller, view
from holdfast.core.requests.recover import (
    ListRecoveries,
    PreflightRecovery,
    PreflightView,
    RecoveriesReply,
    RecoveryRequest,
    RecoveryRow,
    RecoveryState,
    RecoveryView,
    StartRecovery,
)
from holdfast.core.selection import ID_MAX, decode_cursor, encode_cursor
from holdfast.errors import Conflict, HoldfastError, Invalid, NotFound, RecoveryLocked, RecoveryRefused, ShuttingDown
from holdfast.ports.clock import Clock
from holdfast.services.recover.limits import LimitedRun
from holdfast.services.recover.report import Notices, check
from holdfast.services.recover.service import OnBegin, end_runs, new_run, row_of, view_of
from holdfast.stores.vault import Vault
from holdfast.telemetry.events import emit

RUNS_COUNT_MAX = 3
#: Whoever starts one is told at once why it cannot begin, if that is known so soon.
BEGIN_TIMEOUT_S = 10.0
PREFLIGHT_TIMEOUT_S = 30.0
SAID_COUNT_MAX = 200
PAGE_COUNT = 100
#: What an embedded dead queue cannot be asked for, by field: there each item goes back to the queue it died in.
BROKER_FIELDS = ("routes", "address", "source", "allow_copies", "keep_unroutable", "strict")

#: What runs need of whoever knows the brokers: which one has a queue, what stands there, and a run over it.
Find = Callable[[str, Caller], Awaitable[Origin]]
Look = Callable[[Origin, RecoveryOrder], Awaitable[Preflight]]
Run = Callable[[Origin, RecoveryOrder, OnBegin, Notices], Awaitable[Summary]]


class LiveRun:
    """A recovery from the moment in which it was asked for to its end."""

    def __init__(self, order: RecoveryOrder, *, began_us: int, on_news: Callable[[], None]) -> None:
        self.order = order
        self.began_us = began_us
        self.task: asyncio.Task[None] | None = None
        self.run: LimitedRun | None = None
        self.error: HoldfastError | None = None
        self.has_news = asyncio.Event()  #: it has begun, or ended
        self.notices = Notices(self._say, lambda summary: on_news(), self._say)
        self._said: deque[str] = deque(maxlen=SAID_COUNT_MAX)
        self._on_news = on_news

    def begin(self, run: LimitedRun) -> None:
        """The run itself is there."""
        self.run = run
        self.has_news.set()
        self._on_news()

    def _say(self, sentence: str) -> None:
        self._said.append(sentence)
        self._on_news()

    def row(self) -> RecoveryRow:
        """In a line."""
        summary = self.run.summary if self.run else Summary(dead_queue=self.order.dead_queue, remaining=None)
        is_stopping = self.run is not None and self.run.is_stopping
        state = RecoveryState.STOPPING if is_stopping else RecoveryState.RUNNING
        return replace(row_of(self.order, summary, began_us=self.began_us), state=state, remaining=None, stopped_by="")

    def view(self) -> RecoveryView:
        """All that can be told of it now."""
        summary = self.run.summary if self.run else Summary(remaining=None)
        return view_of(self.order, self.row(), summary, list(self._said))

    def stop(self) -> None:
        """Cleanly; asked for again at once; before it has begun nothing is to be given back."""
        if self.run is None:
            if self.task is not None:
                self.task.cancel()
        elif self.run.is_stopping:
            self.run.abandon()
        else:
            self.run.stop()
            self.notices.stopping(self.run.sent_count)
        self._on_news()


class ServerRuns:
    """All recoveries of this process. `changes` grows whenever there is something new to be seen."""

    def __init__(self, vault: Vault, *, find: Find, look: Look, run: Run, clock: Clock) -> None:
        self.changes = 0
        self._vault = vault
        self._find = find
        self._look = look
        self._run = run
        self._clock = clock
        self._live: dict[str, LiveRun] = {}
        self._is_closing = False

    # --- what is asked ----------------------------------------------------------------------------------------

    async def page(self, request: ListRecoveries, caller: Caller) -> RecoveriesReply:
        """Those that run, then those that ended, newest first. A caller who is held to queues sees those of his."""
        found: list[RecoveryRow] = []
        before = decode_cursor("recoveries", request.cursor) if request.cursor else ID_MAX
        if not request.cursor:
            live = sorted(self._live.values(), key=lambda one: -one.began_us)
            found = [one.row() for one in live if caller.may_touch(one.order.dead_queue)]
        while len(found) < request.limit:
            rows = await self._vault.recoveries.page(before=before, count_max=PAGE_COUNT)
            for number, row in rows:
                before = number
                if caller.may_touch(row.queue) and row.run not in self._live:
                    found.append(row)
                if len(found) >= request.limit:
                    break
            if len(rows) < PAGE_COUNT and len(found) < request.limit:
                return RecoveriesReply(recoveries=[row.seen_by(caller) for row in found])
        return RecoveriesReply(
            recoveries=[row.seen_by(caller) for row in found], next=encode_cursor("recoveries", before)
        )

    async def find(self, run: str, caller: Caller) -> RecoveryView:
        """One, wherever it was run. Raises NotFound."""
        live = self._live.get(run)
        found = live.view() if live else await self._vault.recoveries.find(run.replace("\x00", ""))
        if found is None or not caller.may_touch(found.recovery.queue):
            raise NotFound(f"recovery does not exist; there is none named '{run[:50]}', or it is too long ago")
        return found.seen_by(caller)

    async def preflight(self, request: PreflightRecovery, caller: Caller) -> PreflightView:
        """What a start would find. Raises NotFound, BrokerError."""
        origin, order = await self._order(request, caller, run="")
        try:
            async with asyncio.timeout(PREFLIGHT_TIMEOUT_S):
                found = await self._look(origin, order)
        except TimeoutError as error:
            raise Conflict(f"broker is slow; it has not answered for {PREFLIGHT_TIMEOUT_S:.0f} s") from error
        refused = ""
        try:
            check(order, found)
        except RecoveryRefused as error:
            refused = error.message
        return view(
            PreflightView,
            found,
            queue=request.queue,
            origin=origin,
            ready=found.depth.ready,
            consumers=found.depth.consumers,
            copies={key: list(queues) for key, queues in found.copies.items() if len(queues) > 1},
            warnings=[] if caller.queues else found.warnings,
            refused=refused,
        )

    async def start(self, request: StartRecovery, caller: Caller) -> RecoveryView:
        """Begin, in the background. Raises what kept it from beginning, where that is known soon."""
        origin, order = await self._order(request, caller, run=new_run(), dry_run=request.dry_run)
        self._check_free(order.dead_queue)
        live = LiveRun(order, began_us=self._clock.now_us(), on_news=self._tell)
        self._live[order.run] = live
        live.task = asyncio.create_task(self._keep(live, origin), name=f"recovery of {order.dead_queue}")
        await asyncio.wait(
            [live.task, waiting := asyncio.ensure_future(live.has_news.wait())],
            timeout=BEGIN_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        waiting.cancel()
        if live.error is not None and live.run is None:
            if isinstance(live.error, RecoveryLocked):
                raise Conflict(live.error.message) from live.error
            raise live.error
        return await self.find(order.run, caller)

    async def stop(self, run: str, caller: Caller) -> RecoveryView:
        """Stop one. Raises NotFound, or Conflict when it has ended."""
        await self.find(run, caller)
        live = self._live.get(run)
        if live is None:
            raise Conflict(f"recovery is over; '{run[:50]}' has ended, or another process runs it")
        live.stop()
        return await self.find(run, caller)

    # --- what runs --------------------------------------------------------------------------------------------

    @contextmanager
    def following(self, order: RecoveryOrder, on_begin: OnBegin) -> Iterator[tuple[OnBegin, Notices]]:
        """A run that is not started here, as those of a schedule: it is seen, and can be stopped, like the others.
        Raises Conflict while another of that queue runs."""
        self._check_free(order.dead_queue, counts=False)
        live = LiveRun(order, began_us=self._clock.now_us(), on_news=self._tell)

        def begin(run: LimitedRun) -> None:
            live.begin(run)
            on_begin(run)

        self._live[order.run] = live
        try:
            yield begin, live.notices
        finally:
            del self._live[order.run]
            self._tell()

    async def close(self) -> None:
        """Stop all that was started here, and let in no more."""
        self._is_closing = True
        ours = [one for one in self._live.values() if one.task is not None]
        for one in ours:
            if one.run is None:
                one.stop()
        await end_runs([one.task for one in ours if one.task], [one.run for one in ours if one.run])

    async def _keep(self, live: LiveRun, origin: Origin) -> None:
        try:
            await self._run(origin, live.order, live.begin, live.notices)
        except HoldfastError as error:
            live.error = error
            emit("recovery.failed", queue=live.order.dead_queue, error=error.message)
        except Exception as bug:  # noqa: BLE001 - a bug here must not take the server along
            emit("recovery.failed", queue=live.order.dead_queue, error=repr(bug), traceback=bug)
        finally:
            del self._live[live.order.run]
            self._tell()

    def _tell(self) -> None:
        self.changes += 1

    def _check_free(self, queue: str, *, counts: bool = True) -> None:
        """Raises Conflict, ShuttingDown."""
        if self._is_closing:
            raise ShuttingDown
        if any(one.order.dead_queue == queue for one in self._live.values()):
            raise Conflict(f"recovery runs already; '{queue}' is being recovered by this server, wait for its end")
        if counts and sum(one.task is not None for one in self._live.values()) >= RUNS_COUNT_MAX:
            raise Conflict(f"too many recoveries; {RUNS_COUNT_MAX} run at once, wait for the end of one")

    async def _order(
        self, request: RecoveryRequest[Any], caller: Caller, *, run: str, dry_run: bool = False
    ) -> tuple[Origin, RecoveryOrder]:
        order = request.order(caller, run=run, dry_run=dry_run)
        origin = await self._find(request.queue, caller)
        if origin == "queue":
            given = [name for name in BROKER_FIELDS if getattr(request, name)]
            if request.to not in ("routes", "source"):
                given.append("to")
            if given:
                raise Invalid(
                    f"option is for a broker; {', '.join(given)}: an embedded dead queue gives each item back to the "
                    "queue that it died in"
                )
            if any(text.strip().startswith("header.") for text in request.where):
                raise Invalid("filter is invalid; an item has no headers, use type, reason, queue, age or body")
        return origin, order
