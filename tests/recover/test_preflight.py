"""What the pre-flight says is known or assumed, and it says so."""

from __future__ import annotations

import asyncio

import pytest

from tests.recover.world import World, letter
from tests.support.amqp import Admin
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq


async def said(world: World, *more: str) -> str:
    """For people."""
    arguments = ("recover", world.url, world.dlq, "--routes", str(world.routes), "--dry-run", *more)
    return (await asyncio.to_thread(world.command(), *arguments)).text


async def test_a_limit_that_nobody_could_see_is_assumed(any_world: World) -> None:
    world = any_world
    await world.fill([letter(1)])
    assert "delivery limit none (assumed from the version)" in await said(world)
    seen = await said(world, "--management", world.admin.node.management_url)
    assert f"type {world.kind}, delivery limit none\n" in seen
    await world.check()


async def test_the_limit_of_a_newer_version_is_assumed_as_well(
    nodes: dict[str, Node], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with Admin.open(nodes["4.0"], "assumed") as admin:
        world = await World(admin, tmp_path_factory.mktemp("assumed"), kind="quorum").make()
        await world.fill([letter(1)])
        assert "delivery limit 20 (assumed from the version)" in await said(world)
        assert "delivery limit 20\n" in await said(world, "--management", admin.node.management_url)
        await world.check()


@pytest.mark.parametrize("managed", [False, True])
async def test_nobody_may_write_to_an_exchange_that_is_not_there(world: World, managed: bool) -> None:
    await world.fill([letter(1)])
    there = "{ exchange = 'imageviewer', key = 'collection.scan' }"
    world.routes.write_text(f"exchange = 'missing'\n[routes]\nCollectionScan = 'k'\nOther = {there}")
    more = ("--management", world.admin.node.management_url) if managed else ()
    for keeps in ((), ("--keep-unroutable",)):
        text = await said(world, *more, *keeps)
        [permissions] = [line for line in text.splitlines() if line.startswith("Permissions: ")]
        assert "'missing'" not in permissions
        assert "write exchange 'imageviewer': yes" in permissions
        assert "Warning: exchange 'missing' does not exist" in text
    await world.check()
