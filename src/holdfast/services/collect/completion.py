"""State 2 and what follows: the manifest and the notice that names it, then queues, stray blobs and index are cleared.

Manifest and notice are made from the index alone, which no longer changes, so that a second try after a crash makes the
same bytes. Draining the queues loses nothing: a leftover is a known duplicate, or it is parked. A queue is deleted only
when it is empty.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from holdfast.core.collect import (
    Header,
    Payload,
    digest,
    header_contradiction,
    known_set,
    manifest_path,
    read_header,
    read_payload,
)
from holdfast.core.message import Delivery, Message
from holdfast.core.states import TransactionState
from holdfast.errors import QueueMissing, TryAgain
from holdfast.ports.broker import Consumer
from holdfast.proof import crash_point
from holdfast.services.collect.payloads import park
from holdfast.services.collect.transaction import OwnedTransaction

PAGE_COUNT_MAX = 1_000

_encode = msgspec.json.Encoder(order="deterministic").encode
DRAIN_IDLE_S = 0.05
DELETE_TRIES_MAX = 40
FORGET_COUNT_MAX = 1_000


async def manifest_lines(work: OwnedTransaction) -> AsyncIterator[bytes]:
    """JSON Lines: first the transaction, then one line per part, by series and ordinal."""
    stand = await work.context.store.stand(work.id)
    names = sorted(known_set(work.transaction.series, stand) or ())
    counts = {name: stand[name].count for name in names}
    yield _encode({"transaction-id": work.id, "series": counts}) + b"\n"
    for name in names:
        first = 0
        while page := await work.context.store.parts(work.id, name, first=first, count_max=PAGE_COUNT_MAX):
            yield b"".join(_encode(part) + b"\n" for part in page)
            first = page[-1].ordinal + 1


async def send_completion(work: OwnedTransaction) -> None:
    """Write the manifest and publish the notice."""
    manifest = await work.retrier.until_done(lambda: put_manifest(work))
    if not work.transaction.notify:
        return
    body = await work.retrier.until_done(lambda: notice(work, manifest))
    attributes = {"transaction-id": work.id, "kind": "completed"}
    crash_point("collect.before_notice")
    await work.retrier.until_done(
        lambda: work.send(work.transaction.notify, body, message_id=work.id, attributes=attributes)
    )
    crash_point("collect.after_notice")


async def put_manifest(work: OwnedTransaction) -> dict[str, object]:
    """Two passes: its path holds its digest."""
    sha256, size_bytes = hashlib.sha256(), 0
    async for lines in manifest_lines(work):
        sha256.update(lines)
        size_bytes += len(lines)
    path = manifest_path(work.id, sha256.hexdigest())
    crash_point("collect.before_manifest")
    await work.context.blobs.put(path, manifest_lines(work))
    crash_point("collect.after_manifest")
    return {"path": path, "sha256": sha256.hexdigest(), "size_bytes": size_bytes}


async def notice(work: OwnedTransaction, manifest: dict[str, object]) -> bytes:
    """Counts, bytes and the manifest; the parts themselves only while they are few."""
    counts = await work.context.store.count(work.id)
    stand = await work.context.store.stand(work.id)
    series = {
        name: {"count": stand[name].count, "bytes": counts.get(name, (0, 0, 0))[1]}
        for name in sorted(known_set(work.transaction.series, stand) or ())
    }
    told: dict[str, object] = {
        "transaction-id": work.id,
        "state": "completed",
        "series": series,
        "parts_count": sum(count for count, _, _ in counts.values()),
        "total_bytes": sum(size for _, size, _ in counts.values()),
        "manifest": manifest,
    }
    limit = work.context.limits.inline_bytes_max
    if int(str(manifest["size_bytes"])) < limit:
        text = b"".join([lines async for lines in manifest_lines(work)])
        told["parts"] = [msgspec.Raw(line) for line in text.splitlines()[1:]]
    return _encode(told)


async def clear(work: OwnedTransaction) -> None:
    """Everything that follows an end. May be repeated from the beginning after a crash."""
    context = work.context
    for queue in (work.header_queue, work.payload_queue):
        await delete_queue(work, queue)
    await remove_strays(work)
    if work.transaction.state is not TransactionState.COMPLETED:
        if not context.limits.keep_blobs:
            await remove_blobs(work)
        while await work.retrier.until_done(
            lambda: context.store.forget(work.id, fence=work.fence, count_max=FORGET_COUNT_MAX)
        ):
            pass
    crash_point("collect.before_clean")
    await work.retrier.until_done(lambda: context.store.set_clean(work.id, fence=work.fence))
    crash_point("collect.after_clean")


async def delete_queue(work: OwnedTransaction, queue: str) -> None:
    """Drain and delete, until a delete finds nothing left. Raises TryAgain when that never happens."""
    for failures in range(DELETE_TRIES_MAX):
        try:
            await drain(work, queue)
        except QueueMissing:
            return
        crash_point("collect.before_queue_delete")
        if await work.retrier.until_done(lambda: work.context.broker.delete_empty(queue)):
            crash_point("collect.after_queue_delete")
            return
        await asyncio.sleep(min(1.0, work.context.limits.backoff.delay_s(failures, spread=1.0)))
    raise TryAgain(f"queue is still not empty; '{queue}' of transaction '{work.id}', messages keep coming")


async def drain(work: OwnedTransaction, queue: str) -> None:
    """Settle what is in the queue now."""
    count_max = work.context.limits.uploads_max
    async with work.context.broker.consumer(work.subscription(queue, count_max=count_max)) as consumer:
        while batch := await consumer.take(count_max, timeout_s=DRAIN_IDLE_S):
            for delivery in batch:
                await settle(work, consumer, delivery, queue)


async def settle(work: OwnedTransaction, consumer: Consumer, delivery: Delivery, queue: str) -> None:
    """A leftover: acked when the index has it, parked when not."""
    message = consumer.message(delivery)
    why = await (judge_header if queue == work.header_queue else judge_payload)(work, message)
    if why:
        await park(work, consumer, delivery, why)
    else:
        await work.ack(consumer, delivery)


async def judge_payload(work: OwnedTransaction, message: Message) -> str:
    """Why a payload is not a duplicate; the empty text when it is."""
    payload = read_payload(message, work.id)
    if not isinstance(payload, Payload):
        return payload
    key = (payload.series, payload.ordinal)
    known = (await work.retrier.until_done(lambda: work.context.store.find_parts(work.id, [key]))).get(key)
    if known is not None and known.sha256 == digest(message.body):
        return ""
    return f"payload came after the end; the transaction is {work.transaction.state.value} and does not have it"


async def judge_header(work: OwnedTransaction, message: Message) -> str:
    """Why a header is not a duplicate; the empty text when it is."""
    header = read_header(message, work.id)
    if not isinstance(header, Header):
        return header
    stand = await work.retrier.until_done(lambda: work.context.store.stand(work.id))
    if wrong := header_contradiction(header, work.transaction.series, stand):
        return wrong
    if header.series in stand and stand[header.series].count == header.count:
        return ""
    return f"header came after the end; the transaction is {work.transaction.state.value} and does not have it"


async def remove_strays(work: OwnedTransaction) -> None:
    """Blobs that lost against others, unless the index names them after all."""
    store = work.context.store
    for path in await work.retrier.until_done(lambda: store.strays(work.id)):
        _, series, name = path.split("/")
        key = (series, int(name.partition("-")[0]))
        known = (await work.retrier.until_done(partial(store.find_parts, work.id, [key]))).get(key)
        if known is None or known.path != path:
            await work.retrier.until_done(partial(work.context.blobs.delete, path))


async def remove_blobs(work: OwnedTransaction) -> None:
    """Everything under the transaction's name."""
    blobs = work.context.blobs
    found = [stat.path async for stat in blobs.find(f"{work.id}/")]
    for path in found:
        await work.retrier.until_done(partial(blobs.delete, path))
