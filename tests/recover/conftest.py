"""A dead-letter queue of one's own: classic on Debian's RabbitMQ, and one of each kind on each version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recover.world import World
from tests.support.amqp import Admin


@pytest.fixture
async def world(admin: Admin, tmp_path: Path) -> World:
    """A classic dead-letter queue."""
    return await World(admin, tmp_path).make()


@pytest.fixture(params=["classic", "quorum"])
async def any_world(request: pytest.FixtureRequest, admin: Admin, tmp_path: Path) -> World:
    """A dead-letter queue of each kind."""
    return await World(admin, tmp_path, kind=request.param).make()
