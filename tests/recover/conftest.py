"""A dead-letter queue of one's own: classic on Debian's RabbitMQ, and one of each kind on each version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue
from tests.support.amqp import Admin


@pytest.fixture
async def dlq(admin: Admin, tmp_path: Path) -> DeadLetterQueue:
    """A classic dead-letter queue."""
    return await DeadLetterQueue(admin, tmp_path).make()


@pytest.fixture(params=["classic", "quorum"])
async def any_dlq(request: pytest.FixtureRequest, admin: Admin, tmp_path: Path) -> DeadLetterQueue:
    """A dead-letter queue of each kind."""
    return await DeadLetterQueue(admin, tmp_path, kind=request.param).make()
