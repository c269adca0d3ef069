"""A topology service over a virtual host of the tests, and the files that it is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.core.topology.layouts import TopologyFile, parse_file
from holdfast.engines.rabbitmq.topology import COUNTS_AGE_S_MAX, RabbitTopology
from holdfast.services.topology import Topologies
from tests.consume.conftest import _no_growing  # noqa: F401 - here too
from tests.support.amqp import Admin

EXAMPLES = Path(__file__).parents[2] / "examples" / "topologies"


def example(name: str) -> TopologyFile:
    """One of the files that ship."""
    return parse_file((EXAMPLES / f"{name}.toml").read_bytes(), source=name)


def file(text: str) -> TopologyFile:
    """A file of the test's own."""
    return parse_file(text.encode(), source="test.toml")


@asynccontextmanager
async def broker(admin: Admin, *, counts_age_s_max: float = COUNTS_AGE_S_MAX) -> AsyncIterator[RabbitTopology]:
    """The broker behind the service."""
    url, management = admin.node.url(admin.vhost), admin.node.management_url
    async with RabbitTopology(url, management=management, counts_age_s_max=counts_age_s_max) as found:
        yield found


@asynccontextmanager
async def topologies(admin: Admin, *, counts_age_s_max: float = COUNTS_AGE_S_MAX) -> AsyncIterator[Topologies]:
    """The service."""
    async with broker(admin, counts_age_s_max=counts_age_s_max) as found:
        yield Topologies(found)
