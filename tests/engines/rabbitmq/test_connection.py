"""Connecting: every way in which it can fail is said in plain words, and never with the password."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import (
    BadAddress,
    BrokerError,
    BrokerLost,
    BrokerRefused,
    BrokerUnreachable,
    NotABroker,
    TlsRefused,
)
from holdfast.proof.proxy import Proxy
from tests.support.amqp import Admin, Recorder
from tests.support.eventually import eventually
from tests.support.ports import free_ports
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq


async def connect(url: str) -> str:
    """Connect, ask something, and answer the broker's version."""
    async with await Connection.open(BrokerUrl.parse(url)) as connection:
        channel = await connection.channel(Recorder())
        await channel.end()
        return connection.session.version


async def failure(url: str, kind: type[BrokerError]) -> str:
    with pytest.raises(kind) as caught:
        await connect(url)
    assert type(caught.value) is kind
    assert "secret" not in str(caught.value)
    return str(caught.value)


async def test_it_connects_and_knows_the_version(every_node: Node) -> None:
    assert (await connect(every_node.url())).startswith(every_node.version)


async def test_a_wrong_password_is_said(every_node: Node) -> None:
    assert "login refused; user 'guest'" in await failure(every_node.url(user="guest:secret"), BrokerRefused)


async def test_a_missing_virtual_host_is_said(every_node: Node) -> None:
    assert "virtual host refused; 'nowhere'" in await failure(every_node.url("nowhere"), BrokerRefused)


async def test_tls_with_the_right_authority_works(every_node: Node) -> None:
    assert await connect(every_node.tls_url())


async def test_external_login_by_client_certificate_works(every_node: Node) -> None:
    files = every_node.certificates
    more = f"&certfile={files}/client.pem&keyfile={files}/client.key&auth_mechanism=external"
    assert await connect(every_node.tls_url(user="nobody:secret", more=more))


async def test_external_login_without_a_certificate_is_refused(node: Node) -> None:
    await failure(node.tls_url(user="nobody:secret", more="&auth_mechanism=external"), BrokerRefused)


async def test_an_unknown_authority_is_refused_by_us(node: Node) -> None:
    url = node.tls_url().replace("/ca.pem", "/stranger.pem")
    text = await failure(url, TlsRefused)
    assert "TLS was refused" in text
    assert await connect(url + "&verify=verify_none")


async def test_another_servers_name_is_refused_unless_it_is_given(node: Node) -> None:
    url = node.tls_url().replace("@localhost:", "@127.0.0.1:")
    assert "mismatch" in await failure(url, TlsRefused)
    assert await connect(url + "&server_name_indication=localhost")


async def test_tls_files_that_are_not_there_are_said(node: Node) -> None:
    assert "/nope" in await failure(node.tls_url(more="&certfile=/nope"), BadAddress)


async def test_tls_to_a_plain_port_and_plain_to_a_tls_port_are_told_apart(node: Node) -> None:
    wrong = node.tls_url().replace(str(node.tls_port), str(node.port))
    assert "TLS was refused" in await failure(wrong, TlsRefused)
    await failure(node.url(port=node.tls_port), NotABroker)


async def test_the_port_of_the_management_api_is_no_broker(node: Node) -> None:
    url = node.url(port=node.management_port, more="?connection_timeout=300")
    assert "sent no greeting" in await failure(url, NotABroker)


async def test_a_port_where_nobody_listens_is_said() -> None:
    (port,) = free_ports(1)
    assert f"127.0.0.1:{port}" in await failure(f"amqp://u:secret@127.0.0.1:{port}", BrokerUnreachable)


@contextlib.asynccontextmanager
async def server(greeting: bytes | None) -> AsyncIterator[int]:
    """A server that says one thing, and then nothing; None: it hangs up at once."""
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        try:
            if greeting is not None:
                writer.write(greeting)
                await reader.read()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            writer.transport.abort()
        finally:
            ended[-1].set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield listener.sockets[0].getsockname()[1]
        for event in ended:
            await event.wait()


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        (None, "without a greeting"),
        (b"", "no greeting within 0.3 s"),
        (b"220 mail.example ESMTP\r\n", "not a frame"),
        (b"AMQP\3\1\0\0", "another AMQP"),
        (b"\1\0\0\0\0\0\4\0\x0a\0\x0a\xce", "cannot be read"),
        (b"\1\0\0\xff\xff\xff\xff", "at most"),
    ],
)
async def test_a_port_that_speaks_something_else_is_said(greeting: bytes | None, text: str) -> None:
    async with server(greeting) as port:
        url = f"amqp://u:secret@127.0.0.1:{port}/?connection_timeout=300"
        assert text in await failure(url, NotABroker)


async def test_the_first_host_that_answers_is_taken(node: Node) -> None:
    (nobody,) = free_ports(1)
    async with server(b"HTTP/1.1 400\r\n") as web:
        url = node.url().replace("127.0.0.1:", f"127.0.0.1:{nobody},127.0.0.1:{web},127.0.0.1:")
        assert await connect(url)


async def test_when_no_host_answers_each_is_named(node: Node) -> None:
    ports = free_ports(2)
    url = f"amqp://u:secret@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    text = await failure(url, BrokerUnreachable)
    assert all(str(port) in text for port in ports)


async def test_whoever_waits_is_told_when_the_connection_is_cut(admin: Admin) -> None:
    async with Proxy("127.0.0.1", admin.node.port) as proxy:
        connection = await Connection.open(admin.broker_url(port=proxy.port))
        listener = Recorder()
        channel = await connection.channel(listener)
        proxy.pause("down")
        waiting = asyncio.create_task(channel.call(methods.QueueDeclare(queue="q")))
        await eventually(lambda: proxy.connected_count == 1)
        await proxy.cut()
        with pytest.raises(BrokerLost):
            await waiting
        assert not connection.is_open
        with pytest.raises(BrokerLost):
            await connection.channel(listener)
        await connection.close()


async def test_an_answer_that_does_not_come_has_a_limit(admin: Admin) -> None:
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        await Connection.open(admin.broker_url(port=proxy.port)) as connection,
    ):
        channel = await connection.channel(Recorder())
        proxy.pause("down")
        with pytest.raises(BrokerLost, match=r"Queue.Declare after 0.1 s"):
            await channel.call(methods.QueueDeclare(queue="q"), timeout_s=0.1)
        proxy.resume()
        # The answer that was given up comes first, and must not be taken for the next one.
        answer = await channel.call(methods.QueueDelete(queue="q"))
        assert answer.name == "Queue.DeleteOk"


async def test_the_refusal_of_a_question_that_was_given_up_is_no_answer_to_the_next(every_admin: Admin) -> None:
    await every_admin.queue("there")
    async with await Connection.open(every_admin.broker_url()) as connection:
        assert await connection.has_queue("there")
        for _ in range(20):
            given_up = asyncio.create_task(connection.has_queue("nowhere"))
            await asyncio.sleep(0)  # it is sent
            given_up.cancel()
            assert await connection.has_queue("there")
        await eventually(lambda: len(connection._channels) == 1)


async def test_a_broker_that_falls_silent_is_noticed_by_its_heartbeats(admin: Admin) -> None:
    async with Proxy("127.0.0.1", admin.node.port) as proxy:
        connection = await Connection.open(admin.broker_url(port=proxy.port, more="?heartbeat=1"))
        proxy.pause("down")
        error = await asyncio.wait_for(connection.closed, 60.0)
        assert "fallen silent" in str(error)


async def test_heartbeats_keep_an_idle_connection_open(admin: Admin) -> None:
    async with await Connection.open(admin.broker_url(more="?heartbeat=1")) as connection:
        # The broker hangs up after two intervals without a sign of life; that is the fact to outlast.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(connection.closed), 3.5)
        await connection.channel(Recorder())
