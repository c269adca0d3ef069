"""State 2: the manifest is written, and the notice that names it is published with confirm.

Both are made from the index alone, which no longer changes, so that a second try after a crash makes the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import msgspec

from holdfast.core.collect import known_set, manifest_path
from holdfast.proof import crash_point
from holdfast.services.collect.work import OwnedTransaction

PAGE_COUNT_MAX = 1_000

_encode = msgspec.json.Encoder(order="deterministic").encode


async def manifest_lines(work: OwnedTransaction) -> AsyncIterator[bytes]:
    """JSON Lines: first the transaction, then one line per part, by series and ordinal."""
    stand = await work.tools.store.stand(work.id)
    names = sorted(known_set(work.transaction.series, stand) or ())
    counts = {name: stand[name].count for name in names}
    yield _encode({"transaction-id": work.id, "series": counts}) + b"\n"
    for name in names:
        first = 0
        while page := await work.tools.store.parts(work.id, name, first=first, count_max=PAGE_COUNT_MAX):
            yield b"".join(_encode(part) + b"\n" for part in page)
            first = page[-1].ordinal + 1


async def send_completion(work: OwnedTransaction) -> None:
    """Write the manifest and publish the notice."""
    manifest = await work.patience.until_done(lambda: put_manifest(work))
    if not work.transaction.notify:
        return
    body = await work.patience.until_done(lambda: notice(work, manifest))
    attributes = {"transaction-id": work.id, "kind": "completed"}
    crash_point("collect.before_notice")
    await work.patience.until_done(
        lambda: work.tools.transport.send(work.transaction.notify, body, message_id=work.id, attributes=attributes)
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
    await work.tools.blobs.put(path, manifest_lines(work))
    crash_point("collect.after_manifest")
    return {"path": path, "sha256": sha256.hexdigest(), "size_bytes": size_bytes}


async def notice(work: OwnedTransaction, manifest: dict[str, object]) -> bytes:
    """Counts, bytes and the manifest; the parts themselves only while they are few."""
    counts = await work.tools.store.count(work.id)
    stand = await work.tools.store.stand(work.id)
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
    limit = work.tools.limits.inline_bytes_max
    if int(str(manifest["size_bytes"])) < limit:
        text = b"".join([lines async for lines in manifest_lines(work)])
        told["parts"] = [msgspec.Raw(line) for line in text.splitlines()[1:]]
    return _encode(told)
