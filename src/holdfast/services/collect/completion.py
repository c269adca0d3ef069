"""What the index tells, parts in order with their digests verified and gaps; then state 2 and what follows.

That is the manifest and the notice that names it; then queues, stray blobs and index are cleared. Manifest and notice
are made from the index alone, which no longer changes, so that a second try after a crash makes the same bytes.
Draining the queues loses nothing: a leftover is a known duplicate, or it is parked. A queue is deleted only when it is
empty.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice

import msgspec
from msgspec import Struct

from holdfast.core.collect import (
    SERIES_COUNT_MAX,
    Header,
    Part,
    Payload,
    Range,
    SeriesState,
    Transaction,
    digest,
    header_contradiction,
    known_set,
    manifest_path,
    ranges,
    read_header,
    read_payload,
)
from holdfast.core.message import Delivery, Message
from holdfast.core.requests.results import GapView
from holdfast.core.states import TransactionState
from holdfast.errors import MessageRefused, QueueMissing, StorageFailed, TryAgain
from holdfast.ports.blobs import Blobs
from holdfast.ports.broker import Consumer
from holdfast.proof import crash_point
from holdfast.services.collect.transaction import BACKOFF, FOR_NOW, OwnedTransaction, address_of, publish
from holdfast.stores.collect import CollectStore
from holdfast.telemetry.events import emit

PAGE_COUNT_MAX = 1_000
READ_COUNT_MAX = 500
RANGES_COUNT_MAX = 1_000

_encode = msgspec.json.Encoder(order="deterministic").encode
DRAIN_IDLE_S = 0.05
DELETE_TRIES_MAX = 40
NOTICE_TRIES_MAX = 40
FORGET_COUNT_MAX = 1_000


class StoredPart(Struct, frozen=True, kw_only=True):
    """One ordinal with its bytes."""

    series: str
    ordinal: int
    sha256: str
    body: bytes


async def read_part(blobs: Blobs, part: Part) -> bytes:
    """The bytes of a part. Raises StorageFailed when they are not those of the index."""
    async with aclosing(blobs.get(part.path)) as chunks:
        body = b"".join([chunk async for chunk in chunks])
    if digest(body) != part.sha256:
        raise StorageFailed(f"blob is damaged; '{part.path}' is not what was stored, restore it from a backup")
    return body


async def parts_in_order(index: CollectStore, blobs: Blobs, transaction: str, series: str) -> AsyncIterator[StoredPart]:
    """From ordinal 0 up to the first gap."""
    wanted = 0
    while page := await index.parts(transaction, series, first=wanted, count_max=READ_COUNT_MAX):
        for part in page:
            if part.ordinal != wanted:
                return
            body = await read_part(blobs, part)
            yield StoredPart(series=series, ordinal=wanted, sha256=part.sha256, body=body)
            wanted += 1


async def gaps_of(
    index: CollectStore, transaction: Transaction, *, after: str = "", count_max: int = SERIES_COUNT_MAX
) -> list[GapView]:
    """For each series of the set, and each that has come, what is missing; by name, after the given one."""
    stand = await index.stand(transaction.id)
    known = known_set(transaction.series, stand)
    found = []
    for name in islice((one for one in sorted({*stand, *(known or ())}) if one > after), count_max):
        series = stand.get(name) or SeriesState(series=name)
        stored: Sequence[Range] = ()
        if series.stored_count and not series.is_complete:
            stored = await index.stored(transaction.id, name, count_max=RANGES_COUNT_MAX)
        highest = stored[-1][1] + 1 if stored else 0
        missing: list[Range] = []
        if not series.is_complete:
            # Past the last range that was read nothing is known, unless all of them were.
            is_cut = len(stored) == RANGES_COUNT_MAX
            missing = ranges(stored, count=highest if is_cut or series.count is None else series.count)
        found.append(
            GapView(
                series=name,
                count=series.count,
                stored_count=series.stored_count,
                missing=missing,
                is_open=series.count is None,
            )
        )
    return found


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
    manifest = await work.until_done(lambda: put_manifest(work))
    if not work.transaction.notify:
        return
    body = await work.until_done(lambda: notice(work, manifest))
    attributes = {"transaction-id": work.id, "kind": "completed"}
    crash_point("collect.before_notice")
    await work.send(work.transaction.notify, body, message_id=work.id, attributes=attributes)
    crash_point("collect.after_notice")


async def send_end(work: OwnedTransaction) -> None:
    """Say that no result will come. Where nobody takes that it is given up, and said: the state tells it as well."""
    ended, broker = work.transaction, work.context.broker
    if not ended.notify:
        return
    kind = ended.state.value
    body = _encode({"transaction-id": work.id, "state": kind, "reason": ended.reason})
    # An id of its own: a notice that it is complete may have been sent before the state was lost.
    message = Message(body=body, id=f"{work.id}-{kind}", headers={"transaction-id": work.id, "kind": kind})
    outgoing = broker.write(message, address_of(ended.notify, broker))
    why = ""
    for failures in range(NOTICE_TRIES_MAX):
        try:
            await publish(broker, outgoing)
            return
        except MessageRefused as error:
            why = error.message
            break
        except (*FOR_NOW, QueueMissing) as error:
            why = str(error)
            await work.wait(error, failures)
    emit("collect.troubled", error=f"that '{work.id}' is {kind} was told to nobody; {why}")


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
        while await work.ask(context.store.forget, fence=work.fence, count_max=FORGET_COUNT_MAX):
            pass
        await send_end(work)
    crash_point("collect.before_clean")
    await work.ask(context.store.set_clean, fence=work.fence)
    crash_point("collect.after_clean")


async def remove_left(work: OwnedTransaction) -> None:
    """Its queues, if they are there after all; what is in them is settled first."""
    for queue in (work.header_queue, work.payload_queue):
        if not await work.until_done(partial(work.context.broker.delete_empty, queue)):
            await delete_queue(work, queue)


async def delete_queue(work: OwnedTransaction, queue: str) -> None:
    """Drain and delete, until a delete finds nothing left. Raises TryAgain when that never happens."""
    for failures in range(DELETE_TRIES_MAX):
        try:
            await drain(work, queue)
        except QueueMissing:
            return
        crash_point("collect.before_queue_delete")
        if await work.until_done(lambda: work.context.broker.delete_empty(queue)):
            crash_point("collect.after_queue_delete")
            return
        await asyncio.sleep(min(1.0, BACKOFF.delay_s(failures, spread=1.0)))
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
        await work.park_delivery(consumer, delivery, why)
    else:
        await work.ack(consumer, delivery)


async def judge_payload(work: OwnedTransaction, message: Message) -> str:
    """Why a payload is not a duplicate; the empty text when it is."""
    payload = read_payload(message, work.id)
    if not isinstance(payload, Payload):
        return payload
    key = (payload.series, payload.ordinal)
    known = (await work.ask(work.context.store.find_parts, [key])).get(key)
    if known is not None and known.sha256 == digest(message.body):
        return ""
    return f"payload came after the end; the transaction is {work.transaction.state.value} and does not have it"


async def judge_header(work: OwnedTransaction, message: Message) -> str:
    """Why a header is not a duplicate; the empty text when it is."""
    header = read_header(message, work.id)
    if not isinstance(header, Header):
        return header
    stand = await work.ask(work.context.store.stand)
    if wrong := header_contradiction(header, work.transaction.series, stand):
        return wrong
    if header.series in stand and stand[header.series].count == header.count:
        return ""
    return f"header came after the end; the transaction is {work.transaction.state.value} and does not have it"


async def remove_strays(work: OwnedTransaction) -> None:
    """Blobs that lost against others, unless the index names them after all."""
    store = work.context.store
    for path in await work.ask(store.strays):
        _, series, name = path.split("/")
        key = (series, int(name.partition("-")[0]))
        known = (await work.ask(store.find_parts, [key])).get(key)
        if known is None or known.path != path:
            await work.until_done(partial(work.context.blobs.delete, path))


async def remove_blobs(work: OwnedTransaction) -> None:
    """Everything under the transaction's name."""
    blobs = work.context.blobs
    found = [stat.path async for stat in blobs.find(f"{work.id}/")]
    for path in found:
        await work.until_done(partial(blobs.delete, path))
