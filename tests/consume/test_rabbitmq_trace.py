"""W3C trace context goes round with its message: retry, parking, redrive. Each step is a line with the same fields."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Message, Retry
from tests.consume.brokers import QUEUE, RabbitUnderTest
from tests.support.amqp import headers_of, outgoing
from tests.support.command import Command
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1,b=t61rcWkgMzE"}
#: What every line about a failure, a retry or a parking has.
FIELDS = {
    "queue": QUEUE,
    "correlationId": "flow-7",
    "routingKey": "orders.new",
    "messageType": "order.created",
    "attempts_max": 2,
}


async def test_trace_context_survives_retry_parking_and_redrive(
    rabbit: RabbitUnderTest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")
    app, seen = holdfast.App(rabbit.url), list[dict[str, object]]()

    @app.consumer(QUEUE, retry=Retry(attempts=2, delay="100ms"))
    async def handle(message: Message) -> None:
        seen.append(dict(message.headers))
        if len(seen) <= 2:
            raise ValueError("no")

    rabbit._app = app
    more: dict[str, Any] = {"headers": dict(TRACE), "type": "order.created", "correlation_id": "flow-7"}
    sent = outgoing("orders.new", b"{}", exchange="orders", **more)
    async with app.running(declare=True):
        await rabbit.admin.exchange("orders")
        await rabbit.admin.bind(QUEUE, "orders", "orders.new")
        await rabbit.admin.publish([sent])
        (letter,) = await eventually(rabbit.letters)
        recover = ("recover", rabbit.url, f"{QUEUE}.dlq", "--to-source", "--json")
        ended = await asyncio.to_thread(lambda: Command(tmp_path, "memory://")(*recover, stdin=b""))
        assert ended.code == 0, ended
        await eventually(lambda: len(seen) == 3)
    for headers in (*seen, headers_of(letter)):
        assert {name: headers[name] for name in TRACE} == TRACE
    told = [record for record in caplog.records if str(getattr(record, "event", "")).startswith("message.")]
    events = [(record.event, record.fields["attempt"]) for record in told if record.event != "message.done"]  # type: ignore[attr-defined]
    assert events == [("message.failed", 1), ("message.retried", 1), ("message.failed", 2), ("message.parked", 2)]
    for record in told:
        if record.event != "message.done":  # type: ignore[attr-defined]
            assert {name: record.fields[name] for name in FIELDS} == FIELDS  # type: ignore[attr-defined]
