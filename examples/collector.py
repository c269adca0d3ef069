"""A large result, gathered: requester, producer and receiver in one program. `python examples/collector.py [FOLDER]`.

Kill it (Ctrl-\\, or kill -9) and start it again with the same folder: it goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import sys

import holdfast

SERIES = {"orders": 200, "lines": 1_000}
ID = "report-of-may"


async def produce(queues: holdfast.Queues) -> None:
    """The producer: answers a request with numbered messages. It knows a repeated request by its id."""
    answered: set[str] = set()
    async for lease in queues.consume("reports"):
        for item in lease.items:
            asked = json.loads(item.reference)
            transaction = asked["transaction-id"]
            if asked["message-id"] not in answered:
                answered.add(asked["message-id"])
                for series, count in SERIES.items():
                    await send(queues, asked["payload-queue"], transaction, series, count)
                    header = {"transaction-id": transaction, "series": series, "count": count}
                    await queues.queue_produce(asked["header-queue"], [holdfast.NewItem(reference=json.dumps(header))])
        await lease.complete()


async def send(queues: holdfast.Queues, queue: str, transaction: str, series: str, count: int) -> None:
    """The payloads of one series, a hundred at a time."""
    items = [
        holdfast.NewItem(
            payload=f"{series} {ordinal}\n".encode(),
            reference=json.dumps({"transaction-id": transaction, "series": series, "ordinal": ordinal}),
        )
        for ordinal in range(count)
    ]
    for start in range(0, count, 100):
        await queues.queue_produce(queue, items[start : start + 100])


async def receive(queues: holdfast.Queues, *, request_timeout: str) -> dict[str, object] | None:
    """The receiver: waits for the notice. It may come more than once, always the same."""
    try:
        reply = await queues.queue_lease("done", request_timeout=request_timeout)
    except holdfast.NothingToLease:
        return None
    await queues.queue_complete("done", [item.id for item in reply.items], partition=reply.partition)
    notice: dict[str, object] = json.loads(reply.items[0].payload)
    return notice


async def main(folder: str) -> None:
    url = f"sqlite:///{folder}"
    async with holdfast.open(url) as queues:
        for name in ("reports", "done"):
            try:
                await queues.queues_create(name, lease_timeout="5s")
            except holdfast.Invalid:
                pass  # it is there from the last time
        async with holdfast.Collector(url, queues=queues, lease_timeout="5s") as collector:
            producing = asyncio.create_task(produce(queues))
            begun = await collector.start(
                b"May", producer="reports", notify="done", transaction_id=ID, series=list(SERIES)
            )
            ended = await collector.wait(ID)
            # One that was complete before has sent its notice; a run before this one may have received it.
            notice = await receive(queues, request_timeout="1s" if begun.state == ended.state else "1m")
            if notice is None:
                print(f"{ID} is {ended.state.value}; its notice was received before")
            else:
                print(f"{ID} is {ended.state.value}: {notice['parts_count']} parts, {notice['total_bytes']} bytes")
            async for part in collector.parts(ID, "orders"):
                if part.ordinal < 3:
                    print(part.body.decode().strip())
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "holdfast-data"))
