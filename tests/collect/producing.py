"""A producer for the tests: answers with numbered messages on the embedded queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import holdfast
from holdfast.core.collect import Transaction, queue_names
from holdfast.core.item import NewItem
from tests.support.eventually import eventually

PRODUCER = "producer"
NOTIFY = "notify"
PART_BYTES = 100


def body_of(series: str, ordinal: int) -> bytes:
    """The bytes of an ordinal: binary, and different for each."""
    return (f"{series}/{ordinal}/".encode() + bytes(range(256)))[:PART_BYTES]


def reference(**attributes: Any) -> str:
    """The attributes of a message, as an item's reference."""
    return msgspec.json.encode({name.replace("_", "-"): value for name, value in attributes.items()}).decode()


def header(transaction: str, series: str, count: int, **more: Any) -> NewItem:
    """A header message."""
    return NewItem(reference=reference(transaction_id=transaction, series=series, count=count, **more))


def payload(transaction: str, series: str, ordinal: int, body: bytes | None = None) -> NewItem:
    """A payload message."""
    text = reference(transaction_id=transaction, series=series, ordinal=ordinal)
    return NewItem(payload=body_of(series, ordinal) if body is None else body, reference=text)


async def make_queues(queues: holdfast.Queues) -> None:
    """The two addresses."""
    for name in (PRODUCER, NOTIFY):
        try:
            await queues.queues_info(name)
        except holdfast.QueueMissing:
            await queues.queues_create(name, lease_timeout="500ms")


async def produce(queues: holdfast.Queues, transaction: str, kind: str, items: Sequence[NewItem]) -> None:
    """Put messages into the transaction's header or payload queue."""
    if items:
        await queues.queue_produce(queue_names(transaction)[kind == "payload"], items)


async def answer(queues: holdfast.Queues, transaction: str, shape: dict[str, int]) -> None:
    """The whole result: every payload of every series, then the headers."""
    payloads = [payload(transaction, name, number) for name, count in shape.items() for number in range(count)]
    await produce(queues, transaction, "payload", payloads)
    await produce(queues, transaction, "header", [header(transaction, name, count) for name, count in shape.items()])


async def notices(queues: holdfast.Queues) -> list[bytes]:
    """The bodies in the notification queue."""
    return [item.payload for item in await queues.storage_items_list(NOTIFY)]


async def parked(queues: holdfast.Queues) -> list[str]:
    """Why messages were parked."""
    return sorted(item.death_reason for item in await queues.storage_items_list("collector.dlq"))


async def take_request(queues: holdfast.Queues) -> tuple[bytes, dict[str, Any]]:
    """Wait for a request and take it: its body and its attributes. The queues in it exist by then."""
    reply = await queues.queue_lease(PRODUCER, batch_size=1, request_timeout="10s")
    (item,) = reply.items
    await queues.queue_complete(PRODUCER, [item.id], partition=reply.partition)
    return item.payload, msgspec.json.decode(item.reference)


async def cleaned(collector: holdfast.Collector, transaction: str) -> Transaction:
    """A transaction for which nothing is left to do: after its end also its queues are gone."""

    async def found() -> Transaction:
        ended = await collector.service.find(transaction)
        assert ended.is_clean
        return ended

    return await eventually(found)
