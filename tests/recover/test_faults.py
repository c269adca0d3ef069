"""The broker is killed, cut off, full, alarmed or unwilling in the middle of a recovery: every letter is counted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import EXCHANGE, QUORUM_AGE_S, DeadLetterQueue, ended, letter, summary
from tests.support.amqp import Admin
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

ALARMED = 5_000  # letters: some are left when the alarm comes, however long that takes
STALL_S = 1.5


@pytest.fixture(scope="module")
def private_node() -> Iterator[Node]:
    """A node that these tests kill and alarm."""
    with Node() as node:
        yield node


@asynccontextmanager
async def alarmed(dlq: DeadLetterQueue, node: Node, *more: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A run that is surprised by an alarm in its middle, until the end of the block."""
    process = dlq.start("--rate", "100/s", *more)
    try:
        await dlq.arrived(20)
        with node.memory_alarm():
            await asyncio.wait_for(_says(process, b"takes no publishes"), 60.0)
            yield process
    except BaseException:
        process.kill()
        raise


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_the_broker_is_killed_in_the_middle(kind: str, private_node: Node, tmp_path: Path) -> None:
    node, vhost = private_node, f"killed-{kind}"
    async with Admin.open(node, vhost, keep=True) as admin:
        dlq = await DeadLetterQueue(admin, tmp_path, kind=kind).make()
        await dlq.fill(letter(n) for n in range(4_000))
        await asyncio.sleep(QUORUM_AGE_S if kind == "quorum" else 0)
        process = dlq.start("--rate", "2000/s", "--window", "500")
        await dlq.arrived(800)
        node.kill()
    await asyncio.to_thread(node.start)
    told = await ended(process)
    assert told["interruptions"] >= 1
    # Each letter once, also one that was recovered before the broker forgot its ack.
    assert told["recovered"] <= 4_000 <= told["recovered"] + told["remaining"]
    async with Admin.open(node, vhost) as admin:
        dlq.admin = admin
        again = summary(await dlq.recover("--empty-timeout", "500ms"))
        await dlq.check(duplicates_max=told["possible_duplicates"] + again["possible_duplicates"])


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_the_connections_are_cut_again_and_again(kind: str, every_admin: Admin, tmp_path: Path) -> None:
    """On 4.0 with its default delivery limit of 20: whatever comes back too often is not lost."""
    dlq = await DeadLetterQueue(every_admin, tmp_path, kind=kind).make()
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 20 == 19]) for n in range(3_000))
    node = every_admin.node
    async with Proxy("127.0.0.1", node.port) as proxy:
        url = node.url(every_admin.vhost, port=proxy.port, more="?heartbeat=5")
        given = ("recover", url, dlq.name, "--json", "--routes", str(dlq.routes))
        process = dlq.command().start(*given, "--rate", "1500/s", "--window", "300")
        for cut in range(1, 4):
            await dlq.arrived(cut * 400)
            await proxy.cut()
        told = await ended(process)
        # By the same address: only so does it know of acks that were lost, and counts what it publishes again.
        again = summary(await asyncio.to_thread(dlq.command(), *given))
    assert again["skipped"] == 150
    await dlq.check(duplicates_max=told["possible_duplicates"] + again["possible_duplicates"])


async def test_an_alarm_in_the_middle_is_waited_out(private_node: Node, tmp_path: Path) -> None:
    """For longer than a stall may last: what cannot be published is not stalled."""
    async with Admin.open(private_node, "alarm") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path).make()
        await dlq.fill(letter(n) for n in range(ALARMED))
        async with alarmed(dlq, private_node, "--stall-timeout", f"{STALL_S}s") as process:
            await asyncio.sleep(2 * STALL_S)
            before = await admin.count("collection.scan")
        await dlq.arrived(before + 1, unless_ended=process)
        process.send_signal(signal.SIGINT)
        told = await ended(process)
        assert (told["stopped_by"], told["failed"]) == ("signal", 0)
        assert told["recovered"] > before
        await dlq.check(duplicates_max=told["possible_duplicates"])


async def test_a_second_signal_ends_it_at_once(private_node: Node, tmp_path: Path) -> None:
    """The first one waits for confirms, which do not come."""
    async with Admin.open(private_node, "alarm-second-signal") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path).make()
        await dlq.fill(letter(n) for n in range(ALARMED))
        async with alarmed(dlq, private_node, "--stop-timeout", "1h") as process:
            process.send_signal(signal.SIGINT)
            await _says(process, b"Stopping: waiting for ")
            process.send_signal(signal.SIGTERM)
            told = await ended(process, timeout_s=30.0)
        assert (told["stopped_by"], process.returncode) == ("signal", 3)
        assert 0 < told["unknown"] <= told["possible_duplicates"]
        await dlq.arrived(ALARMED, "collection.scan", dlq.name)  # nobody has one in hand
        # Acks may have been lost with the connection: which letters they were of, nobody knows.
        again = summary(await dlq.recover())
        assert 0 < again["possible_duplicates"] <= again["recovered"]
        await dlq.check(duplicates_max=told["possible_duplicates"] + again["possible_duplicates"])


async def test_an_alarm_that_does_not_end(private_node: Node, tmp_path: Path) -> None:
    async with Admin.open(private_node, "alarm-without-end") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path).make()
        await dlq.fill(letter(n) for n in range(50))
        with private_node.memory_alarm():
            ended_at_last = await dlq.recover("--total-timeout", "3s", "--stop-timeout", "500ms")
            told = summary(ended_at_last)
            assert (told["recovered"], told["stopped_by"], told["remaining"]) == (0, "total", 50)
        await dlq.check(duplicates_max=told["possible_duplicates"])


async def test_nothing_is_taken_while_nothing_can_be_published(private_node: Node, tmp_path: Path) -> None:
    """To take and give back would count as a return each time, until the broker deletes the letters."""
    async with Admin.open(private_node, "alarm-again") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path, kind="quorum").make()
        await dlq.fill(letter(n) for n in range(30))
        with private_node.memory_alarm():
            for _ in range(3):
                told = summary(await dlq.recover("--total-timeout", "1s", "--management", private_node.management_url))
                assert (told["recovered"], told["returned"], told["stopped_by"]) == (0, 0, "total")
                assert (told["remaining"], told["unseen"]) == (30, 30)
        assert summary(await dlq.recover())["recovered"] == 30
        await dlq.check()


async def test_a_signal_ends_the_wait_for_an_alarm(private_node: Node, tmp_path: Path) -> None:
    async with Admin.open(private_node, "alarm-signal") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path).make()
        await dlq.fill(letter(n) for n in range(30))
        with private_node.memory_alarm():
            process = dlq.start("--management", private_node.management_url)
            assert process.stderr is not None
            while b"takes no publishes" not in await asyncio.to_thread(process.stderr.readline):
                pass
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(process.communicate, timeout=60)
        assert (process.returncode, out) == (130, b"")
        assert b"nothing was taken" in err
        await dlq.check()


async def test_a_user_who_may_not_publish_there(dlq: DeadLetterQueue) -> None:
    _user(dlq.admin.node, dlq.admin.vhost, configure=".*", write=f"^(?!{EXCHANGE}$).*", read=".*")
    await dlq.fill(letter(n) for n in range(30))
    url = dlq.admin.node.url(dlq.admin.vhost, user="weak:weak")
    got = await asyncio.to_thread(dlq.command(), "recover", url, dlq.name, "--json", "--routes", str(dlq.routes))
    told = summary(got)
    assert (got.code, told["recovered"], told["failed"], told["remaining"]) == (3, 0, 30, 30)
    assert any("403" in reason for reason in told["reasons"])
    await dlq.check()


async def test_a_user_who_may_not_take_the_lock_is_warned(dlq: DeadLetterQueue) -> None:
    _user(dlq.admin.node, dlq.admin.vhost, configure="^$", write=".*", read=".*")
    await dlq.fill(letter(n) for n in range(5))
    url = dlq.admin.node.url(dlq.admin.vhost, user="weak:weak")
    got = await asyncio.to_thread(dlq.command(), "recover", url, dlq.name, "--json", "--routes", str(dlq.routes))
    assert got.code == 0, got
    assert any("no lock" in note for note in summary(got)["notes"])
    await dlq.check()


async def test_a_user_who_may_not_read_the_queue_is_told_before_the_start(any_dlq: DeadLetterQueue) -> None:
    """An administrator can be told by the management API, everybody else by the broker's refusal."""
    dlq = any_dlq
    _user(dlq.admin.node, dlq.admin.vhost, configure=".*", write=".*", read="^other$")
    await dlq.fill(letter(n) for n in range(5))
    url = dlq.admin.node.url(dlq.admin.vhost, user="weak:weak")
    given = ("recover", url, dlq.name, "--json", "--routes", str(dlq.routes))
    refused = await asyncio.to_thread(dlq.command(), *given)
    shown = await asyncio.to_thread(dlq.command(), *given, "--management", dlq.admin.node.management_url)
    assert (refused.code, shown.code) == (1, 1)
    assert f"access to queue '{dlq.name}'" in refused.stderr
    assert f"permission is missing; read queue '{dlq.name}': NO" in shown.stderr
    await dlq.check()


@pytest.mark.parametrize("managed", [False, True])
async def test_permissions_are_said_before_the_start(dlq: DeadLetterQueue, managed: bool) -> None:
    """Without an administrator's eyes the broker is asked in ways that change nothing."""
    write = f"^(?!{EXCHANGE}$).*"
    _user(dlq.admin.node, dlq.admin.vhost, configure="^$", write=write, read=f"^{dlq.name}$")
    await dlq.fill(letter(n) for n in range(5))
    url = dlq.admin.node.url(dlq.admin.vhost, user="weak:weak")
    more = ("--management", dlq.admin.node.management_url) if managed else ()
    routes = ("--routes", str(dlq.routes))
    got = await asyncio.to_thread(dlq.command(), "recover", url, dlq.name, "--json", *routes, *more)
    said = next(line for line in got.stderr.splitlines() if "Permissions:" in line)
    assert f"write exchange '{EXCHANGE}': NO" in said
    assert "write the default exchange: yes" in said
    assert (f"read queue '{dlq.name}': yes" in said) == managed
    assert (f"its lock 'recovery-lock.{dlq.name}': NO" in said) == managed
    assert (got.code, summary(got)["failed"]) == (3, 5)
    await dlq.check()


async def test_a_letter_near_its_delivery_limit_is_put_back_by_a_publish(
    nodes: dict[str, Node], tmp_path: Path
) -> None:
    """A quorum queue deletes what comes back too often, and unknown letters come back at every run."""
    async with Admin.open(nodes["4.0"], "limits") as admin:
        dlq = DeadLetterQueue(admin, tmp_path, name="limited.dlq")
        await admin.quorum_queue("limited.dlq", **{"x-delivery-limit": 7})
        await dlq.make(declare_it=False)
        await dlq.fill(letter(n, kind="Strange") for n in range(5))
        put_back = []
        for _ in range(8):
            told = summary(await dlq.recover("--management", admin.node.management_url))
            assert (told["skipped"], told["remaining"]) == (5, 5)
            put_back.append(told["put_back"])
        assert put_back[:3] == [0, 0, 5]
        assert sum(put_back) >= 10
        await dlq.check()


async def test_strict_refuses_a_queue_with_a_delivery_limit(nodes: dict[str, Node], tmp_path: Path) -> None:
    async with Admin.open(nodes["4.0"], "strict") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path, kind="quorum").make()
        await dlq.fill(letter(n) for n in range(5))
        management = ("--management", admin.node.management_url)
        got = await dlq.recover("--strict", *management)
        assert got.code == 1
        assert "delivery limit" in got.stderr
        assert "set_policy" in got.stderr
        assert await admin.count(dlq.name) == 5


async def _says(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stderr is not None
    while True:
        line = await asyncio.to_thread(process.stderr.readline)
        assert line, "it ended without saying so"
        if words in line:
            return


def _user(node: Node, vhost: str, **permissions: str) -> None:
    node.api("PUT", "/users/weak", {"password": "weak", "tags": ""})
    node.api("PUT", f"/permissions/{vhost}/weak", permissions)
