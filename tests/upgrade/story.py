"""What is in the fixtures, as far as the tests need it too: names, letters and payloads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.support.amqp import Admin

FIXTURES = Path(__file__).parent / "fixtures"
VHOST = "fixture"

#: Nothing that is to be found later may expire before.
LONG = "700000h"

ORDERS, SHOP, DEAD = "orders", "shop", "orders-dead"
QUICK, ATTIC, PAUSED = "quick", "attic", "paused"
DLQ, LATE_DLQ, SCAN = "imageviewer.dlq", "late.dlq", "collection.scan"
EXCHANGE = "imageviewer"
PRODUCER, NOTIFY = "producer", "notify"

OPEN, DONE, DROPPED = "t-open", "t-done", "t-dropped"
#: How many payloads each series of the transactions has.
SERIES = {"rows": 8, "lines": 3}
#: Those of the open one that were sent before the kill; of `lines` no header was sent either.
SENT = {"rows": 6, "lines": 2}

#: How many letters the recovery that was killed had before it.
RECOVERED = 24
LARGE = b"a body of more than a mebibyte. " * 40_000


def part(series: str, ordinal: int) -> bytes:
    """The bytes of an ordinal: binary, and different for each."""
    return f"{series}/{ordinal}/".encode() + bytes(range(200))


def letter(number: int, *, told: dict[str, Any] | None = None) -> dict[str, Any]:
    """The properties of a dead letter of RabbitMQ."""
    death = {
        "count": 1,
        "reason": "rejected",
        "queue": SCAN,
        "exchange": EXCHANGE,
        "routing-keys": [SCAN],
        "time": 1_700_000_000 + number,
    }
    headers = {"MessageType": "CollectionScan", "tenant": "acme", "weight": 2.5, "nested": {"list": [1, "two", True]}}
    return {
        "content_type": "application/json",
        "correlation_id": f"c-{number:03}",
        "message_id": f"m-{number:03}",
        "delivery_mode": 2,
        "headers": {**headers, "x-death": [death], **(told or {})},
    }


def send(broker: Admin, queue: str, *numbers: int, told: dict[str, Any] | None = None) -> None:
    """Put letters into a queue, by the management API as they were then: so their bytes are those of the fixtures."""
    for number in numbers:
        body = json.dumps({"n": number, "text": f"apple number {number}"})
        message = {"properties": letter(number, told=told), "routing_key": queue}
        message |= {"payload": body, "payload_encoding": "string"}
        answer = broker.node.api("POST", f"/exchanges/{broker.vhost}/amq.default/publish", message)
        assert answer.json()["routed"], f"no queue '{queue}'"


PARKED = {
    "x-original-queue": SCAN,
    "x-original-exchange": EXCHANGE,
    "x-original-routing-key": SCAN,
    "x-error-type": "shop.errors.NoSuchOrder",
    "x-error-message": "order 4711 is unknown",
    "x-error-stack": 'File "shop/orders.py", line 7, in handle',
    "x-parked-reason": "attempts",
    "x-parked-at": "2026-01-02T03:04:05+00:00",
    "x-retry-count": 3,
}


def told_of(name: str) -> dict[str, Any]:
    """What was noted of a fixture while it was made."""
    noted: dict[str, Any] = json.loads(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))
    return noted
