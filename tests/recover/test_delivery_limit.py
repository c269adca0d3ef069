"""The command that is printed against a delivery limit, run as given, takes it away: there and nowhere else."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.recover.world import World, letter, summary
from tests.support.amqp import Admin, RabbitConsumer
from tests.support.command import Ended
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

VHOST = "it's a $HOME"
RETURNS = 30
#: The management API shows what a policy makes of a queue after some seconds.
SHOWN_S = 30.0


@pytest.fixture
async def limited(nodes: dict[str, Node], tmp_path: Path) -> AsyncIterator[World]:
    """A quorum queue of 4.0 in a virtual host that a shell would misread, beside one with nearly the same name."""
    async with Admin.open(nodes["4.0"], VHOST) as admin:
        world = await World(admin, tmp_path, kind="quorum").make()
        await world.queue("imageviewer-dlq", "quorum")
        await world.fill(letter(n) for n in range(5))
        yield world


async def strict(world: World) -> Ended:
    return await world.recover("--strict", "--management", world.admin.node.management_url)


async def commands(world: World, *more: str) -> list[str]:
    """The lines of the pre-flight that are commands; nothing is taken."""
    arguments = ("recover", world.url, world.dlq, "--routes", str(world.routes), "--dry-run", "--limit", "1", *more)
    ended = await asyncio.to_thread(world.command(), *arguments)
    return [line.strip() for line in ended.text.splitlines() if line.strip().startswith("rabbitmqctl")]


async def run(world: World, command: str) -> None:
    """As it was given, word by word."""
    program, *words = shlex.split(command)
    assert program == "rabbitmqctl"
    await asyncio.to_thread(world.admin.node.ctl, *words)


def info(world: World, queue: str) -> dict[str, Any]:
    found: dict[str, Any] = world.admin.node.api("GET", f"/queues/{quote(VHOST, safe='')}/{queue}").json()
    return found


async def is_accepted(world: World) -> bool:
    ended = await strict(world)
    assert ended.code == 0, ended.stderr
    return bool(summary(ended)["recovered"] == 5)


async def test_run_as_it_is_printed_it_takes_the_limit_away(limited: World) -> None:
    world = limited
    [command] = await commands(world, "--management", world.admin.node.management_url)
    refused = await strict(world)
    assert refused.code == 1
    assert command in refused.stderr.splitlines()[-1].replace('\\"', '"').replace("\\\\", "\\")
    await run(world, command)
    await eventually(
        lambda: info(world, world.dlq)["effective_policy_definition"] == {"delivery-limit": -1}, timeout_s=SHOWN_S
    )
    assert not info(world, "imageviewer-dlq").get("policy"), "the dot is no wildcard"
    async with RabbitConsumer(world.admin.address(), world.dlq, prefetch=5) as consumer:
        for _ in range(RETURNS):
            came = await consumer.batch(count_max=1, timeout_s=60.0)
            consumer.give_back(came)
    await eventually(lambda: is_accepted(world), timeout_s=SHOWN_S)
    await world.check()


async def test_the_settings_of_a_policy_that_it_replaces_are_kept(limited: World) -> None:
    world = limited
    path = f"/policies/{quote(VHOST, safe='')}/bounds"
    bounds = {"pattern": "^imageviewer", "definition": {"max-length": 1000}, "priority": 7, "apply-to": "queues"}
    world.admin.node.api("PUT", path, bounds)
    await eventually(lambda: info(world, world.dlq)["policy"] == "bounds", timeout_s=SHOWN_S)
    said = (await strict(world)).stderr
    assert "in place of 'bounds', whose settings it keeps" in said
    [command] = await commands(world, "--management", world.admin.node.management_url)
    await run(world, command)
    expected = {"max-length": 1000, "delivery-limit": -1}
    await eventually(lambda: info(world, world.dlq)["effective_policy_definition"] == expected, timeout_s=SHOWN_S)
    await eventually(lambda: is_accepted(world), timeout_s=SHOWN_S)
    await world.check()


async def test_without_the_management_api_it_says_what_it_would_replace(limited: World) -> None:
    world = limited
    ended = await world.recover("--strict")
    assert ended.code == 1
    assert "a policy of lower priority that the queue has is no longer in force" in ended.stderr
    assert "assumed from the version" in ended.stderr
    [command] = await commands(world)
    await run(world, command)
    await eventually(lambda: is_accepted(world), timeout_s=SHOWN_S)


async def test_a_limit_of_the_queue_itself_is_not_cured_by_a_policy(limited: World) -> None:
    world = limited
    await world.admin.quorum_queue("own.dlq", **{"x-delivery-limit": 30})
    world.dlq = "own.dlq"
    refused = await strict(world)
    assert refused.code == 1
    assert "x-delivery-limit 30" in refused.stderr
    assert "rabbitmqctl" not in refused.stderr
    document = json.loads(refused.stderr.splitlines()[-1])
    assert "no policy" in document["message"]
