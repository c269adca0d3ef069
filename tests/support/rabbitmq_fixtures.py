"""Brokers for tests: one node per run and version, one virtual host per test. Imported by the root `conftest`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from tests.support.amqp import Admin
from tests.support.folders import memory_place
from tests.support.rabbitmq import Node, running_node, versions, vhost_name


@pytest.fixture(scope="session")
def nodes() -> Iterator[dict[str, Node]]:
    """The nodes of this run, started when they are first asked for."""
    with ExitStack() as stack:
        running: dict[str, Node] = {}

        class Nodes(dict[str, Node]):
            def __missing__(self, version: str) -> Node:
                self[version] = node = stack.enter_context(running_node(version, memory=memory_place()))
                return node

        running = Nodes()
        yield running


@pytest.fixture
def node(nodes: dict[str, Node]) -> Node:
    """Debian's RabbitMQ. A test that kills or blocks one makes its own: `running_node()`."""
    return nodes["3.10"]


@pytest.fixture(params=versions())
def every_node(request: pytest.FixtureRequest, nodes: dict[str, Node]) -> Node:
    """Each version in turn, where it is there."""
    return nodes[request.param]


@pytest.fixture
async def admin(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Admin]:
    """A virtual host of one's own, on Debian's RabbitMQ."""
    async with Admin.open(node, vhost_name(request.node.name)) as admin:
        yield admin


@pytest.fixture
async def every_admin(request: pytest.FixtureRequest, every_node: Node) -> AsyncIterator[Admin]:
    """A virtual host of one's own, on each version in turn."""
    async with Admin.open(every_node, vhost_name(request.node.name)) as admin:
        yield admin
