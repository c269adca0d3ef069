"""Which brokers the suite runs over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.engines.rabbitmq import topology
from holdfast.ports.broker import Layout
from tests.consume.brokers import BrokerUnderTest, EmbeddedUnderTest, RabbitUnderTest
from tests.support.amqp import Admin
from tests.support.rabbitmq import Node, versions, vhost_name

#: Which layout the suite runs over on which version: each of both at least once.
LAYOUTS: dict[str, Layout] = {"3.10": "per-consumer", "4.0": "quorum", "4.3": "quorum"}
RABBITS = [pytest.param(version, marks=pytest.mark.rabbitmq, id=f"rabbitmq {version}") for version in versions()]


@pytest.fixture(autouse=True)
def _no_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker is killed right after a declaration here; the one test that does so sets it back."""
    monkeypatch.setattr(topology, "GROWN_S", 0.0)


@pytest.fixture(params=["memory", "sqlite", *RABBITS])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BrokerUnderTest]:
    """One broker in turn."""
    match request.param:
        case "memory":
            yield EmbeddedUnderTest("memory://")
        case "sqlite":
            yield EmbeddedUnderTest(f"sqlite:///{tmp_path}/data")
        case version:
            nodes: dict[str, Node] = request.getfixturevalue("nodes")
            async with Admin.open(nodes[version], vhost_name(request.node.name)) as admin:
                yield RabbitUnderTest(admin, LAYOUTS[version])


@pytest.fixture
def rabbit(admin: Admin) -> RabbitUnderTest:
    """Debian's RabbitMQ with classic queues."""
    return RabbitUnderTest(admin, "per-consumer")
