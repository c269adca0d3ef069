"""A letter that really died is known again by its digest, however often and from whatever queue it is delivered."""

from __future__ import annotations

import pytest

from holdfast.core.message import Delivery, Outgoing
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.letters import digest
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire.table import Value
from tests.support.amqp import Admin

pytestmark = pytest.mark.rabbitmq


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_redelivered_letters_have_the_digest_that_they_had(every_admin: Admin, kind: str) -> None:
    admin = every_admin
    make = admin.quorum_queue if kind == "quorum" else admin.queue
    await make("dead")
    await make("main", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    headers: dict[str, Value] = {"z": 1, "MessageType": "T", "a": "x"}
    raw = [properties.encode({"headers": headers, "message_id": str(number)}) for number in range(3)]
    raw.append(properties.encode({"message_id": "3"}))  # no header table at all
    async with RabbitPublisher(admin.broker_url()) as publisher:
        outcomes = await publisher.publish([Outgoing("", "main", one, b"body") for one in raw])
        assert all(outcome.stored for outcome in outcomes)
    async with ResumingConsumer(admin.broker_url(), "main") as consumer:
        consumer.dead_letter(await _all(consumer))
    seen = []
    letters: list[Delivery] = []
    for _ in range(3):
        async with ResumingConsumer(admin.broker_url(), "dead") as consumer:
            letters = await _all(consumer)
            seen.append(
                {properties.decode(one.properties)["message_id"]: digest(one.properties, one.body) for one in letters}
            )
    assert letters[0].redelivered
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0].values())) == len(raw)


async def _all(consumer: ResumingConsumer) -> list[Delivery]:
    found: list[Delivery] = []
    while len(found) < 4:
        batch = await consumer.batch(timeout_s=60.0)
        assert batch
        found += batch
    return found
