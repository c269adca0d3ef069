"""What is asked before and while letters are recovered."""

from __future__ import annotations

import pytest

from holdfast.core.routes import Mode, RouteTable
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.inspector import RabbitRunInspector, _facts
from holdfast.engines.rabbitmq.management import ManagedQueue
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from tests.support.amqp import Admin

pytestmark = pytest.mark.rabbitmq


async def test_after_a_question_about_an_exchange_the_queue_can_still_be_asked_for(admin: Admin) -> None:
    """That question has a connection of its own, which ends with it; the one that consumes is not touched."""
    await admin.queue("dead")
    async with await Connection.open(admin.broker_url()) as consuming, RabbitPublisher(admin.broker_url()) as publisher:
        inspector = RabbitRunInspector(consuming, publisher, "dead", management=None)
        assert "404" in await inspector.refusal("nowhere")
        found = await inspector.preflight(RouteTable(mode=Mode.SOURCE))
        assert (found.depth.ready, found.missing) == (0, [])


@pytest.mark.parametrize(("declared", "policy", "is_free"), [(5, -1, False), (-1, 5, False), (-1, None, True)])
def test_a_look_is_free_only_where_neither_queue_nor_policy_has_a_finite_delivery_limit(
    declared: int, policy: int | None, *, is_free: bool
) -> None:
    """The broker takes the finite one of both: a policy of -1 does not take the queue's own limit away."""
    info = ManagedQueue(
        name="dead",
        vhost="/",
        type="quorum",
        arguments={"x-delivery-limit": declared},
        effective_policy_definition={} if policy is None else {"delivery-limit": policy},
    )
    assert _facts(info).peek_is_free is is_free
