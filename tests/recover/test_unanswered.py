"""A question about the queue that is not answered in time, or answered by a no, though letters are in hand."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.recovery import Depth, RunLimits, StoppedBy
from holdfast.engines.rabbitmq.connection import Channel
from holdfast.errors import BrokerRefused
from holdfast.proof.proxy import Proxy
from holdfast.services.recover.run import RecoveryRun
from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.recover.inside import DrainAround, Inside
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

COUNT = 20
CONSUME, CONSUME_BYTES_MAX = bytes((0, 60, 0, 20)), 60
#: Whoever does not end waits for ever.
ENDS_S = 60.0


class Unanswered(DrainAround):
    """The first time that somebody asks how many letters there are."""

    proxy: Proxy
    is_refused = False
    asked_count = 0

    async def depth(self) -> Depth:
        self.asked_count += 1
        if self.asked_count > 1:
            return await self.real.depth()
        if self.is_refused:
            raise BrokerRefused("the broker refused; 404 NOT_FOUND - home node is down", reply_code=404)
        self.proxy.pause("down")
        try:
            return await self.real.depth()
        finally:
            self.proxy.resume("down")


@pytest.mark.parametrize("is_refused", [False, True])
async def test_the_run_begins_anew_with_one_consumer(
    any_dlq: DeadLetterQueue, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was in hand comes again: had the first consumer stayed, it would hold all that until the end."""
    for question in (Channel.call, Channel.answer):
        assert question.__kwdefaults__ is not None
        monkeypatch.setitem(question.__kwdefaults__, "timeout_s", 1.0)
    dlq = any_dlq
    await dlq.fill(letter(n, kind="Strange" if n % 2 else "CollectionScan") for n in range(COUNT))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:

        def set_up(drain: Unanswered) -> None:
            drain.proxy, drain.is_refused = proxy, is_refused

        told = await Inside(Unanswered, dlq, port=proxy.port).run(on_open=set_up)
    assert (told.interruptions, told.stopped_by, told.failure) == (1, StoppedBy.EMPTY, "")
    assert (told.recovered, told.skipped, told.remaining) == (COUNT // 2, COUNT // 2, COUNT // 2)
    assert not [note for note in told.notes if "not come again" in note or "has not taken all acks" in note]
    await dlq.check(duplicates_max=told.possible_duplicates)


class SilentSource(DrainAround):
    """Nobody answers when more letters are to be let in."""

    silent: asyncio.Event
    is_open = False

    async def open(self) -> str:
        self.is_open = True
        return await self.real.open()

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        if self.is_open:
            self.silent.set()
            await asyncio.Event().wait()


async def test_a_second_signal_waits_for_no_answer(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(COUNT))
    SilentSource.silent = asyncio.Event()
    begun: list[RecoveryRun] = []
    async with asyncio.timeout(ENDS_S), asyncio.TaskGroup() as group:
        running = group.create_task(Inside(SilentSource, dlq).run(on_begin=begun.append))
        await SilentSource.silent.wait()
        begun[0].stop()
        begun[0].abandon()
    told = await running
    assert told.stopped_by is StoppedBy.SIGNAL
    await eventually(lambda: _all_are_there(dlq))
    # Acks may have been lost with the connection: the next run counts what it publishes again, and there is none.
    await dlq.check(duplicates_max=told.possible_duplicates + told.recovered)


class Locked(DrainAround):
    """The connections are lost, and then somebody else has the lock for long."""

    proxy: Proxy
    opened_count = 0

    async def depth(self) -> Depth:
        await self.proxy.cut()
        return await self.real.depth()

    async def open(self) -> str:
        self.opened_count += 1
        if self.opened_count > 1:
            await asyncio.Event().wait()
        return await self.real.open()


async def test_the_total_limit_holds_also_for_a_connection_that_does_not_come(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n, kind="Strange") for n in range(COUNT))
    async with asyncio.timeout(ENDS_S), Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        Locked.proxy = proxy
        told = await Inside(Locked, dlq, port=proxy.port).run(RunLimits(empty_timeout_s=0.2, total_timeout_s=1.5))
    assert (told.stopped_by, told.interruptions) == (StoppedBy.TOTAL, 1)
    await eventually(lambda: _all_are_there(dlq))
    await dlq.check()


async def test_whoever_does_not_come_back_has_lost_its_connection(dlq: DeadLetterQueue) -> None:
    """Of its last acks nobody knows whether they arrived: the next run is told so. The first question is refused; when
    it then consumes again, there is no answer until it lets go."""
    await dlq.fill(letter(n) for n in range(COUNT))
    consumed_count = 0

    def seen(data: bytes) -> bool:
        nonlocal consumed_count
        consumed_count += CONSUME in data[-CONSUME_BYTES_MAX:]
        if consumed_count == 2:
            proxy.pause("down")
        return False

    async with asyncio.timeout(ENDS_S), Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        proxy.cut_when("up", seen)
        inside = Inside(Unanswered, dlq, port=proxy.port)

        def set_up(drain: Unanswered) -> None:
            drain.proxy, drain.is_refused = proxy, True
            abandon = inside.broker.drain.abandon

            async def abandoned() -> None:
                proxy.resume()
                await abandon()

            inside.broker.drain.abandon = abandoned  # type: ignore[method-assign]

        told = await inside.run(RunLimits(empty_timeout_s=0.2, total_timeout_s=2.0), on_open=set_up)
    assert (told.stopped_by, told.interruptions) == (StoppedBy.TOTAL, 1)
    assert inside.broker.drain.is_lost


async def _all_are_there(dlq: DeadLetterQueue) -> bool:
    if await dlq.admin.consumers_count(dlq.name):
        return False
    return await dlq.admin.count(dlq.name) + await dlq.admin.count("collection.scan") >= COUNT
