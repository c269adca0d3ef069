"""A connection that is lost again and again: each loss is a return, also of letters that were only on their way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from holdfast.proof.proxy import Proxy
from tests.engines.rabbitmq.admin import Admin
from tests.recover.world import World, letter
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

DELIVER = bytes((0, 60, 0, 60))
COUNT = 50


async def test_whoever_is_cut_off_whenever_letters_are_on_their_way_ends_before_the_broker_deletes_them(
    nodes: dict[str, Node], tmp_path: Path
) -> None:
    node = nodes["4.0"]
    async with Admin.open(node, "cut-off") as admin:
        world = World(admin, tmp_path)
        await admin.quorum_queue(world.dlq, **{"x-delivery-limit": 8})
        await world.make(declare_dlq=False)
        await world.fill(letter(n) for n in range(COUNT))
        async with Proxy("127.0.0.1", node.port) as proxy:
            url = node.url(admin.vhost, port=proxy.port)
            given = ("--routes", world.routes, "--management", node.management_url, "--rate", "5/s")
            process = world.command().start("recover", url, world.dlq, "--json", *given)
            ended = asyncio.create_task(asyncio.to_thread(process.communicate, timeout=60.0))
            await eventually(lambda: admin.count("collection.scan"), timeout_s=30.0)
            await proxy.cut()
            while not ended.done():
                trip = proxy.cut_when("down", lambda data: DELIVER in data)
                fired = asyncio.create_task(trip.fired.wait())
                await asyncio.wait((fired, ended), return_when=asyncio.FIRST_COMPLETED)
                fired.cancel()
            out, err = await ended
        told = json.loads(out.splitlines()[-1])
        assert (process.returncode, told["stopped_by"]) == (3, "stall"), err
        assert any(note.startswith("ended instead of reconnecting") for note in told["notes"])
        await eventually(lambda: _all_are_back(world))
        await world.check(duplicates_max=told["possible_duplicates"])


async def _all_are_back(world: World) -> bool:
    return await world.admin.count(world.dlq) + await world.admin.count("collection.scan") >= COUNT
