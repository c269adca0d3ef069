"""Everything at once: good and bad messages in many batches, while connections are cut. Each outcome must be right."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast.core.message import OutcomeKind, Outgoing
from holdfast.core.moments import Backoff
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.wire import properties
from holdfast.proof.proxy import Proxy
from tests.engines.rabbitmq.raw import HEADERS, header_table
from tests.support.amqp import Admin, outgoing

pytestmark = pytest.mark.rabbitmq

QUICK = Backoff(first_s=0.01, delay_s_max=0.1)
BATCHES, EACH = 12, 40


def message(fault: str, body: bytes) -> Outgoing:
    match fault:
        case "unroutable":
            return outgoing("nowhere", body, message_id="same")
        case "exchange":
            return outgoing("q", body, exchange="missing")
        case "user":
            return outgoing("q", body, user_id="somebody")
        case "nan":
            raw = properties.join({"headers": header_table({"nan": b"d\x7f\xf8\0\0\0\0\0\0"})})
            return Outgoing("", "q", raw, body)
        case "unsendable":
            return outgoing("k" * 300, body)
        case _:
            raw = properties.join({"headers": header_table(HEADERS), "message_id": b"\4same"})
            return Outgoing("", "q", raw, body)


EXPECTED = {
    "good": OutcomeKind.CONFIRMED,
    "unroutable": OutcomeKind.RETURNED,
    "exchange": OutcomeKind.REFUSED,
    "user": OutcomeKind.REFUSED,
    "nan": OutcomeKind.REFUSED,
    "unsendable": OutcomeKind.REFUSED,
}


@pytest.mark.parametrize("cut", [False, True], ids=["steady", "cut"])
async def test_every_message_gets_the_outcome_that_it_deserves(every_admin: Admin, cut: bool) -> None:
    await every_admin.queue("q")
    chance = random.Random(f"{every_admin.node.version} {cut}")
    weights = [90, 6, 1, 1, 0.5, 1]
    faults = [chance.choices(list(EXPECTED), weights, k=EACH) for _ in range(BATCHES)]
    faults[3][5] = "nan"
    bodies = [[b"%d.%d" % (batch, place) for place in range(EACH)] for batch in range(BATCHES)]
    async with (
        Proxy("127.0.0.1", every_admin.node.port) as proxy,
        RabbitPublisher(every_admin.broker_url(port=proxy.port), window_messages=60, backoff=QUICK) as publisher,
    ):
        if cut:
            for _ in range(4):
                proxy.cut_after("up", chance.randrange(2000, 200_000))
                proxy.cut_after("down", chance.randrange(500, 8000))
        outcomes = await asyncio.gather(
            *(
                publisher.publish([message(f, b) for f, b in zip(*pair, strict=True)])
                for pair in zip(faults, bodies, strict=True)
            )
        )
        again = publisher.counts["sent_again"]
    got = [[outcome.kind for outcome in batch] for batch in outcomes]
    assert got == [[EXPECTED[fault] for fault in batch] for batch in faults]
    good = {b for fs, bs in zip(faults, bodies, strict=True) for f, b in zip(fs, bs, strict=True) if f == "good"}
    count = await every_admin.count("q")
    assert len(good) <= count <= len(good) + again
    assert {delivery.body for delivery in await every_admin.drain("q", count)} == good
