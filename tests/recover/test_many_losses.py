"""A connection that is lost again and again: each loss is a return, also of letters that were only on their way."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import DeadLetterQueue, letter, summary
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

DELIVER = bytes((0, 60, 0, 60))
ACK = bytes((0, 60, 0, 80))
COUNT = 50


async def test_whoever_is_cut_off_whenever_letters_are_on_their_way_ends_before_the_broker_deletes_them(
    nodes: dict[str, Node], tmp_path: Path
) -> None:
    node = nodes["4.0"]
    async with Admin.open(node, "cut-off") as admin:
        dlq = DeadLetterQueue(admin, tmp_path)
        await admin.quorum_queue(dlq.name, **{"x-delivery-limit": 8})
        await dlq.make(declare_it=False)
        await dlq.fill(letter(n) for n in range(COUNT))
        async with Proxy("127.0.0.1", node.port) as proxy:
            given = _arguments(dlq, proxy, "--management", node.management_url)
            lost_ack = proxy.cut_when("up", lambda data: ACK in data)
            process = dlq.command().start(*given, "--rate", "5/s")
            ended = asyncio.create_task(asyncio.to_thread(process.communicate, timeout=60.0))
            await asyncio.wait_for(lost_ack.fired.wait(), 60.0)
            while not ended.done():
                trip = proxy.cut_when("down", lambda data: DELIVER in data and not ended.done())
                fired = asyncio.create_task(trip.fired.wait())
                await asyncio.wait((fired, ended), return_when=asyncio.FIRST_COMPLETED)
                fired.cancel()
            out, err = await ended
            told = json.loads(out.splitlines()[-1])
            assert (process.returncode, told["stopped_by"]) == (3, "stall"), err
            assert any(note.startswith("ended instead of reconnecting") for note in told["notes"])
            await _recover_the_rest(dlq, given, told)


async def test_a_letter_whose_ack_was_lost_is_counted_by_whoever_publishes_it_again(any_dlq: DeadLetterQueue) -> None:
    """It comes again, but the run that knows it is stopped before it is due."""
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(COUNT))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        given = _arguments(dlq, proxy)
        proxy.cut_when("up", lambda data: ACK in data)
        process = dlq.command().start(*given, "--one-at-a-time", "--rate", "0.02/s")
        await asyncio.wait_for(asyncio.to_thread(_wait_until_it_says, process, b"Connected again"), 60.0)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.to_thread(process.communicate, timeout=60.0)
        told = json.loads(out.splitlines()[-1])
        assert (told["stopped_by"], told["interruptions"], told["remaining"]) == ("signal", 1, COUNT), err
        await _recover_the_rest(dlq, given, told)


def _wait_until_it_says(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr)


def _arguments(dlq: DeadLetterQueue, proxy: Proxy, *more: str) -> list[str]:
    """Of every run: by another address of the broker nothing would be known of the runs before."""
    url = dlq.admin.node.url(dlq.admin.vhost, port=proxy.port)
    return ["recover", url, dlq.name, "--json", "--routes", str(dlq.routes), *more]


async def _recover_the_rest(dlq: DeadLetterQueue, given: list[str], told: dict[str, Any]) -> None:
    """Which acks were lost when a run ends nobody knows: the next one counts what it publishes again."""

    async def is_all_back() -> bool:
        return not await dlq.admin.consumers_count(dlq.name)

    await eventually(is_all_back)
    again = summary(await asyncio.to_thread(dlq.command(), *given))
    assert again["remaining"] == 0
    report = await dlq.check(duplicates_max=told["possible_duplicates"] + again["possible_duplicates"])
    assert report.duplicates_count > 0
