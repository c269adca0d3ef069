"""The management API: what it says about queues, policies and bindings, and how its failures read."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import suppress

import pytest

from holdfast.core.topology.model import Binding
from holdfast.engines.rabbitmq import management as module
from holdfast.engines.rabbitmq.management import Management
from holdfast.errors import BadAddress, BrokerError, BrokerRefused, BrokerUnreachable, NotABroker
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.ports import free_ports
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq


async def test_queues_come_with_arguments_and_effective_policies(every_admin: Admin) -> None:
    node, vhost = every_admin.node, every_admin.vhost
    await every_admin.queue("plain")
    await every_admin.quorum_queue("größe/1")
    policy = {"pattern": "^pl", "definition": {"max-length": 7}, "apply-to": "queues", "priority": 3}
    node.api("PUT", f"/policies/{vhost}/short", policy)
    async with Management(node.management_url) as management:

        async def policy_applies() -> bool:
            return (await management.queue(vhost, "plain")).effective_policy == {"max-length": 7}

        await eventually(policy_applies)
        queues = {queue.name: queue for queue in await management.queues(vhost)}
        assert set(queues) == {"plain", "größe/1"}
        assert queues["plain"].policy == "short"
        assert queues["größe/1"].arguments["x-queue-type"] == "quorum"
        assert queues["größe/1"].type == "quorum"
        assert queues["größe/1"].effective_policy == {}
        assert (await management.queue(vhost, "größe/1")).durable
        (found,) = await management.policies(vhost)
        assert (found.name, found.apply_to, found.priority) == ("short", "queues", 3)


async def test_bindings_and_exchanges(every_admin: Admin) -> None:
    await every_admin.queue("q")
    await every_admin.exchange("x", "topic")
    await every_admin.bind("q", "x", "a.#")
    async with Management(every_admin.node.management_url) as management:
        bindings = await management.bindings(every_admin.vhost)
        assert Binding(source="x", destination="q", key="a.#") in bindings
        assert any(binding.source == "" and binding.destination == "q" for binding in bindings)
        exchanges = {exchange.name: exchange.type for exchange in await management.exchanges(every_admin.vhost)}
        assert exchanges["x"] == "topic"
        assert (await management.overview()).rabbitmq_version.startswith(every_admin.node.version)
        assert await management.alarms() is None


async def test_long_lists_come_in_pages(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_ROWS", 2)
    for number in range(5):
        await admin.queue(f"q{number}")
    async with Management(admin.node.management_url) as management:
        assert len(await management.queues(admin.vhost)) == 5


async def failure(url: str, kind: type[BrokerError]) -> str:
    async with Management(url) as management:
        with pytest.raises(kind) as caught:
            await management.queues("/")
    assert "secret" not in str(caught.value)
    return str(caught.value)


async def test_failures_are_told_without_the_password(node: Node) -> None:
    (nobody,) = free_ports(1)
    base = f"http://guest:secret@127.0.0.1:{node.management_port}"
    assert "user 'guest'" in await failure(base, BrokerRefused)
    await failure(f"http://guest:secret@127.0.0.1:{nobody}", BrokerUnreachable)
    await failure(f"http://guest:secret@127.0.0.1:{node.port}", BrokerUnreachable)
    async with Management(node.management_url) as management:
        with pytest.raises(BrokerRefused, match="no such thing") as caught:
            await management.queue("/", "nope")
        assert caught.value.reply_code == 404


def test_what_is_no_answer_of_a_broker_is_said() -> None:
    with pytest.raises(NotABroker, match="makes no sense"):
        module._decode(b"<html>", module.Overview, "http://somewhere")


def zipped() -> bytes:
    """1 GiB of nothing in 1 MiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([packer.compress(bytes(2**20)) for _ in range(1024)]) + packer.flush()


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "endless"])
async def test_an_answer_is_bounded_whoever_gives_it(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 2**20)
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        how = b"Content-Encoding: gzip\r\n" if is_packed else b""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + how + b"\r\n")
        with suppress(ConnectionError):
            if is_packed:
                writer.write(zipped())
            while not is_packed and not reader.at_eof():
                writer.write(bytes(2**16))
                await writer.drain()
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        text = await failure(f"http://u:secret@127.0.0.1:{port}", NotABroker)
    assert ("is packed" if is_packed else "more than 1048576 bytes") in text
    assert b"accept-encoding: identity" in asked[0].lower()


@pytest.mark.parametrize("url", ["ftp://u:secret@h", "http://", "http://u:secret@h:port"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(BadAddress) as caught:
        Management(url)
    assert "secret" not in str(caught.value)
