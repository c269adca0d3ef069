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

from tests.recover.dead_letter_queue import DeadLetterQueue, letter, summary
from tests.support.amqp import Admin, ResumingConsumer
from tests.support.command import Ended
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

VHOST = "it's a $HOME"
RETURNS = 30
#: The management API shows what a policy makes of a queue after some seconds.
SHOWN_S = 30.0


@pytest.fixture
async def limited(nodes: dict[str, Node], tmp_path: Path) -> AsyncIterator[DeadLetterQueue]:
    """A quorum queue of 4.0 in a virtual host that a shell would misread, beside one with nearly the same name."""
    async with Admin.open(nodes["4.0"], VHOST) as admin:
        dlq = await DeadLetterQueue(admin, tmp_path, kind="quorum").make()
        await dlq.queue("imageviewer-dlq", "quorum")
        await dlq.fill(letter(n) for n in range(5))
        yield dlq


async def strict(dlq: DeadLetterQueue) -> Ended:
    return await dlq.recover("--strict", "--management", dlq.admin.node.management_url)


async def commands(dlq: DeadLetterQueue, *more: str) -> list[str]:
    """The lines of the pre-flight that are commands; nothing is taken."""
    arguments = ("recover", dlq.url, dlq.name, "--routes", str(dlq.routes), "--dry-run", "--limit", "1", *more)
    ended = await asyncio.to_thread(dlq.command(), *arguments)
    return [line.strip() for line in ended.text.splitlines() if line.strip().startswith("rabbitmqctl")]


async def run(dlq: DeadLetterQueue, command: str) -> None:
    """As it was given, word by word."""
    program, *words = shlex.split(command)
    assert program == "rabbitmqctl"
    await asyncio.to_thread(dlq.admin.node.ctl, *words)


def info(dlq: DeadLetterQueue, queue: str) -> dict[str, Any]:
    found: dict[str, Any] = dlq.admin.node.api("GET", f"/queues/{quote(VHOST, safe='')}/{queue}").json()
    return found


async def is_accepted(dlq: DeadLetterQueue) -> bool:
    ended = await strict(dlq)
    assert ended.code == 0, ended.stderr
    return bool(summary(ended)["recovered"] == 5)


async def test_run_as_it_is_printed_it_takes_the_limit_away(limited: DeadLetterQueue) -> None:
    dlq = limited
    [command] = await commands(dlq, "--management", dlq.admin.node.management_url)
    refused = await strict(dlq)
    assert refused.code == 1
    assert command in refused.stderr.splitlines()[-1].replace('\\"', '"').replace("\\\\", "\\")
    await run(dlq, command)
    await eventually(
        lambda: info(dlq, dlq.name)["effective_policy_definition"] == {"delivery-limit": -1}, timeout_s=SHOWN_S
    )
    assert not info(dlq, "imageviewer-dlq").get("policy"), "the dot is no wildcard"
    async with ResumingConsumer(dlq.admin.broker_url(), dlq.name, prefetch=5) as consumer:
        for _ in range(RETURNS):
            came = await consumer.batch(count_max=1, timeout_s=60.0)
            consumer.give_back(came)
    await eventually(lambda: is_accepted(dlq), timeout_s=SHOWN_S)
    await dlq.check()


async def test_the_settings_of_a_policy_that_it_replaces_are_kept(limited: DeadLetterQueue) -> None:
    dlq = limited
    path = f"/policies/{quote(VHOST, safe='')}/bounds"
    bounds = {"pattern": "^imageviewer", "definition": {"max-length": 1000}, "priority": 7, "apply-to": "queues"}
    dlq.admin.node.api("PUT", path, bounds)
    await eventually(lambda: info(dlq, dlq.name)["policy"] == "bounds", timeout_s=SHOWN_S)
    said = (await strict(dlq)).stderr
    assert "in place of 'bounds', whose settings it keeps" in said
    [command] = await commands(dlq, "--management", dlq.admin.node.management_url)
    await run(dlq, command)
    expected = {"max-length": 1000, "delivery-limit": -1}
    await eventually(lambda: info(dlq, dlq.name)["effective_policy_definition"] == expected, timeout_s=SHOWN_S)
    await eventually(lambda: is_accepted(dlq), timeout_s=SHOWN_S)
    await dlq.check()


async def test_without_the_management_api_it_says_what_it_would_replace(limited: DeadLetterQueue) -> None:
    dlq = limited
    ended = await dlq.recover("--strict")
    assert ended.code == 1
    assert "a policy of lower priority that the queue has is no longer in force" in ended.stderr
    assert "assumed from the version" in ended.stderr
    [command] = await commands(dlq)
    await run(dlq, command)
    await eventually(lambda: is_accepted(dlq), timeout_s=SHOWN_S)


async def test_a_limit_of_the_queue_itself_is_not_cured_by_a_policy(limited: DeadLetterQueue) -> None:
    dlq = limited
    await dlq.admin.quorum_queue("own.dlq", **{"x-delivery-limit": 30})
    dlq.name = "own.dlq"
    refused = await strict(dlq)
    assert refused.code == 1
    assert "x-delivery-limit 30" in refused.stderr
    assert "rabbitmqctl" not in refused.stderr
    document = json.loads(refused.stderr.splitlines()[-1])
    assert "no policy" in document["message"]
