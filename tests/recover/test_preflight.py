"""What the pre-flight says is known or assumed, and it says so."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq


async def said(dlq: DeadLetterQueue, *more: str) -> str:
    """For people."""
    arguments = ("recover", dlq.url, dlq.name, "--routes", str(dlq.routes), "--dry-run", *more)
    return (await asyncio.to_thread(dlq.command(), *arguments)).text


async def test_a_limit_that_nobody_could_see_is_assumed(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill([letter(1)])
    assert "delivery limit none (assumed from the version)" in await said(dlq)
    seen = await said(dlq, "--management", dlq.admin.node.management_url)
    assert f"type {dlq.kind}, delivery limit none\n" in seen
    await dlq.check()


async def test_the_limit_of_a_newer_version_is_assumed_as_well(
    nodes: dict[str, Node], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with Admin.open(nodes["4.0"], "assumed") as admin:
        dlq = await DeadLetterQueue(admin, tmp_path_factory.mktemp("assumed"), kind="quorum").make()
        await dlq.fill([letter(1)])
        assert "delivery limit 20 (assumed from the version)" in await said(dlq)
        assert "delivery limit 20\n" in await said(dlq, "--management", admin.node.management_url)
        await dlq.check()


@pytest.mark.parametrize("managed", [False, True])
async def test_nobody_may_write_to_an_exchange_that_is_not_there(dlq: DeadLetterQueue, managed: bool) -> None:
    await dlq.fill([letter(1)])
    there = "{ exchange = 'imageviewer', key = 'collection.scan' }"
    dlq.routes.write_text(f"exchange = 'missing'\n[routes]\nCollectionScan = 'k'\nOther = {there}")
    more = ("--management", dlq.admin.node.management_url) if managed else ()
    for keeps in ((), ("--keep-unroutable",)):
        text = await said(dlq, *more, *keeps)
        [permissions] = [line for line in text.splitlines() if line.startswith("Permissions: ")]
        assert "'missing'" not in permissions
        assert "write exchange 'imageviewer': yes" in permissions
        assert "Warning: exchange 'missing' does not exist" in text
    await dlq.check()


async def test_where_letters_would_be_lost_is_said_by_the_rules_of_topologies(dlq: DeadLetterQueue) -> None:
    """A policy deletes what lies in the dead-letter queue for long, and one target forgets when it is full."""
    await dlq.fill([letter(1)])
    node, vhost = dlq.admin.node, dlq.admin.vhost
    for name, definition in ((dlq.name, {"message-ttl": 3_600_000}), ("collection.scan", {"max-length": 5})):
        policy = {"pattern": f"^{re.escape(name)}$", "definition": definition, "apply-to": "queues"}
        node.api("PUT", f"/policies/{vhost}/for-{name}", policy)

    async def losses() -> list[str]:
        lines = (await said(dlq, "--management", node.management_url)).splitlines()
        return [line for line in lines if line.startswith("Warning: queue ")]

    async def are_said() -> bool:
        return len(await losses()) == 2

    await eventually(are_said)
    dead, target = await losses()
    assert dead.startswith(f"Warning: queue '{dlq.name}': x-message-ttl on a dead queue deletes the letters")
    assert target.startswith("Warning: queue 'collection.scan': when it is full, the oldest message is deleted")
    await dlq.check()
