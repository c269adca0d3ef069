"""What is asked before and while letters are recovered."""

from __future__ import annotations

import pytest

from holdfast.core.routes import Mode, RouteTable
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.inspector import RabbitRunInspector
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from tests.support.amqp import Admin

pytestmark = pytest.mark.rabbitmq


async def test_after_a_question_about_an_exchange_the_queue_can_still_be_asked_for(admin: Admin) -> None:
    """That question has a connection of its own, which ends with it; the one that consumes is not touched."""
    await admin.queue("dead")
    async with await Connection.open(admin.address()) as consuming, RabbitPublisher(admin.address()) as publisher:
        inspector = RabbitRunInspector(consuming, publisher, "dead", management=None)
        assert "404" in await inspector.refusal("nowhere")
        found = await inspector.preflight(RouteTable(mode=Mode.SOURCE))
        assert (found.depth.ready, found.missing) == (0, [])
