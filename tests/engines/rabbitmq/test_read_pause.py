"""Small reads are followed by a pause, which never ends a pause that somebody asked for, and is never for good."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.connection import READ_BYTES_ENOUGH, Connection
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import commands
from holdfast.engines.rabbitmq.wire import session as methods
from tests.support.amqp import Admin, Recorder, outgoing
from tests.support.eventually import eventually
from tests.support.quick_time import run_quickly

PAUSE_S = 0.01
COUNT = 3_000


class Tap(asyncio.Transport):
    """A transport of which only whether it reads is of interest."""

    reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.reads = False


def tapped() -> tuple[Connection, Tap]:
    connection, tap = Connection(BrokerUrl.parse("amqp://localhost")), Tap()
    connection.connection_made(tap)
    connection.read_pause_s = PAUSE_S
    return connection, tap


def test_it_reads_on_after_the_pause() -> None:
    async def story() -> None:
        connection, tap = tapped()
        connection.data_received(commands.HEARTBEAT)
        assert not tap.reads
        await asyncio.sleep(PAUSE_S * 2)
        assert tap.reads

    run_quickly(story())


def test_a_read_that_was_large_is_followed_by_the_next_at_once() -> None:
    async def story() -> None:
        connection, tap = tapped()
        connection.data_received(commands.HEARTBEAT * (READ_BYTES_ENOUGH // len(commands.HEARTBEAT) + 1))
        assert tap.reads

    run_quickly(story())


@pytest.mark.parametrize("is_resumed_early", [True, False])
def test_a_pause_that_was_asked_for_lasts_until_its_end(is_resumed_early: bool) -> None:
    async def story() -> None:
        connection, tap = tapped()
        connection.data_received(commands.HEARTBEAT)
        connection.pause_reading()
        if is_resumed_early:
            connection.resume_reading()
            assert not tap.reads
        await asyncio.sleep(PAUSE_S * 2)
        assert tap.reads == is_resumed_early
        connection.resume_reading()
        assert tap.reads

    run_quickly(story())


def test_a_connection_that_ended_is_left_alone() -> None:
    async def story() -> None:
        connection, tap = tapped()
        connection.data_received(commands.HEARTBEAT)
        await connection.close()
        await asyncio.sleep(PAUSE_S * 2)
        assert not tap.reads

    run_quickly(story())


@pytest.mark.rabbitmq
async def test_everything_comes(admin: Admin) -> None:
    queue = await admin.queue("q")
    async with RabbitPublisher(admin.broker_url()) as publisher:
        publisher.pause_between_reads(PAUSE_S)
        outcomes = await publisher.publish([outgoing(queue) for _ in range(COUNT)])
        assert all(outcome.stored for outcome in outcomes)
    listener = Recorder()
    async with await Connection.open(admin.broker_url()) as connection:
        connection.read_pause_s = PAUSE_S
        channel = await connection.channel(listener)
        await channel.call(methods.Consume(queue=queue))
        await eventually(lambda: sum(isinstance(event, Delivery) for event in listener.events) == COUNT)
