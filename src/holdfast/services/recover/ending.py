"""The end of a run: no new letters, confirms awaited, everything unsettled given back, and what is left counted.

In this order: consuming is cancelled first, because letters given back before would be delivered again; those that
cannot bear another return go back by a publish; the rest goes back by one frame, which keeps their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.core.message import Outcome, OutcomeKind
from holdfast.core.recovery import RunLetter, RunLimits, Summary, address_text
from holdfast.errors import BrokerError
from holdfast.services.recover.letter_table import LetterTable
from holdfast.services.recover.limits import unless
from holdfast.services.recover.source import LetterSource

ANSWER_STEP_S = 0.1
STEADY_COUNT = 3
STEADY_STEP_S = 0.1
STEADY_TIMEOUT_S = 30.0
HASTY_TIMEOUT_S = 5.0


class Ending:
    """`run` once. Never raises BrokerError: without a broker, it gives everything back by itself."""

    def __init__(
        self, source: LetterSource, letters: LetterTable, summary: Summary, limits: RunLimits, abandoned: asyncio.Event
    ) -> None:
        self._source = source
        self._letters = letters
        self._summary = summary
        self._limits = limits
        self._abandoned = abandoned
        self._leftovers: Sequence[RunLetter] = ()

    async def run(self, delivery_limit: int | None, *, settle: Callable[[], None], room: asyncio.Event) -> int:
        """Leaves the numbers in the summary. Answers how many letters were taken and never published."""
        summary, letters = self._summary, self._letters
        try:
            if not self._abandoned.is_set():
                await unless(self._abandoned, self._stop())
                await self._await_answers(room)
            settle()
            self._give_up()
            if self._abandoned.is_set():
                await self._source.abandon()
            else:
                await self._put_back(delivery_limit)
                if not await unless(self._abandoned, self._give_back()):
                    await self._source.abandon()
        except BrokerError as error:
            summary.notes.append(f"the broker gave the rest back by itself; {error}")
            settle()
            self._give_up()
            await self._source.abandon()
        unsent_count = letters.unsent_count()
        confirmed = letters.end()
        for letter in confirmed:
            # Published, and never acked: its other copy is still in the queue, and nobody will recognise it.
            summary.recovered += 1
            summary.went(address_text(letter.address))
            summary.possible_duplicates += 1
        if missing := letters.away_count - len(confirmed):
            summary.notes.append(
                f"{missing} letters that a lost connection took have not come again; the broker may still count them "
                "to that connection, look at the queue's unacknowledged messages"
            )
        await self._count()
        return unsent_count

    async def _stop(self) -> None:
        self._leftovers = await self._source.stop()

    async def _await_answers(self, room: asyncio.Event) -> None:
        """Wait for the confirms that are still to come."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._limits.stop_timeout_s
        while self._letters.sent and not self._abandoned.is_set():
            room.clear()
            waiting = [asyncio.ensure_future(event.wait()) for event in (room, self._abandoned)]
            # In steps: a letter that was put back makes no room.
            timeout_s = min(ANSWER_STEP_S, max(0.0, deadline_s - loop.time()))
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if loop.time() >= deadline_s:
                return

    def _give_up(self) -> None:
        """Nobody knows whether the broker has these: they are not acked."""
        summary = self._summary
        sent, returning = self._letters.give_up()
        summary.possible_duplicates += len(returning)  # they were being put back, and are counted as kept
        for letter in sent:
            summary.unknown += 1
            summary.possible_duplicates += 1
            summary.failed_at(address_text(letter.address))
            summary.reason("unknown: no answer before the end").count += 1

    async def _put_back(self, delivery_limit: int | None) -> None:
        if delivery_limit is None:
            return
        near_limit = self._letters.near_limit(self._leftovers, delivery_limit)
        if not near_limit:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = set(near_limit)  # not those of the table: nobody waits for the answer to an earlier publish any more
        stored: list[RunLetter] = []

        def on_outcome(letters: Sequence[RunLetter], outcome: Outcome) -> None:
            waiting.difference_update(letters)
            if outcome.stored:
                stored.extend(letters)
            else:
                self._letters.not_put_back(letters)
                self._summary.possible_duplicates += len(letters) if outcome.kind is OutcomeKind.UNKNOWN else 0
            if not waiting and not done.done():
                done.set_result(None)

        self._letters.put_back(near_limit, at_end=True)
        self._source.put_back(near_limit, on_outcome, timeout_s=self._limits.stop_timeout_s)
        await done
        missed = self._source.settle(stored)
        self._summary.put_back += len(stored) - len(missed)
        self._summary.possible_duplicates += len(missed)  # both are in the queue now
        self._letters.was_put_back(stored)

    async def _give_back(self) -> None:
        self._summary.returned += await self._source.give_back()

    async def _count(self) -> None:
        """Not for long, once somebody has no more time."""
        if self._abandoned.is_set() or not await unless(self._abandoned, self._read_depth(STEADY_TIMEOUT_S)):
            await self._read_depth(HASTY_TIMEOUT_S)

    async def _read_depth(self, timeout_s: float) -> None:
        """While letters are being given back, a queue says fewer than it has: read until it is steady.

        A busy broker says 0 for seconds. Nobody else consumes: then it must come to say what was given back.
        """
        seen: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    depth = await self._source.depth()
                    seen.append(depth.ready)
                    is_whole = depth.ready >= self._summary.returned or depth.consumers
                    if depth.is_sure or (
                        is_whole and len(seen) >= STEADY_COUNT and len(set(seen[-STEADY_COUNT:])) == 1
                    ):
                        break
                    await asyncio.sleep(STEADY_STEP_S)
        except (BrokerError, TimeoutError) as error:
            if not seen:
                self._summary.notes.append(f"how many letters remain could not be read; {str(error) or 'no answer'}")
        self._summary.remaining = seen[-1] if seen else None
