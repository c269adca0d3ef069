"""Publish the letters of a backup to where they belong. There is nothing to settle: the file stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from holdfast.core.recovery import Limits, StoppedBy, Summary
from holdfast.ports.recovery import DeadLetters, Exported, Taken, Verdict, address_text
from holdfast.services.recover.notices import Notices, sample

BATCH_COUNT_MAX = 500


async def publish_backup(
    letters: DeadLetters, backup: Iterable[Exported], summary: Summary, limits: Limits, notices: Notices
) -> Summary:
    """Batch by batch; each letter has its own outcome. A copy carries the id that its redrive from the queue had."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    source = iter(backup)
    while batch := list(islice(source, BATCH_COUNT_MAX)):
        summary.found += len(batch)
        going: list[Taken] = []
        for letter in (letters.restored(one) for one in batch):
            if letter.address is None:
                summary.skipped += 1
                _keep(letters, letter, summary, letter.route.why, notices, failed=False)
            else:
                going.append(letter)
        await _send(letters, going, summary, limits, notices)
        if loop.time() - began_s > limits.total_timeout_s:
            summary.stopped_by = StoppedBy.TOTAL
            break
    summary.possible_duplicates += letters.sent_again_count
    summary.duration_s = round(loop.time() - began_s, 3)
    summary.rate_per_s = round(summary.recovered / summary.duration_s, 1) if summary.duration_s else 0.0
    return summary


async def _send(letters: DeadLetters, going: list[Taken], summary: Summary, limits: Limits, notices: Notices) -> None:
    if not going:
        return
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    missing = len(going)

    def on_outcome(letter: Taken, verdict: Verdict, code: int, text: str) -> None:
        nonlocal missing
        missing -= 1
        key = address_text(letter.address)
        if verdict is Verdict.CONFIRMED:
            summary.recovered += 1
            summary.by_queue[key] += 1
        else:
            summary.failed += 1
            summary.unknown += verdict is Verdict.UNKNOWN
            summary.possible_duplicates += verdict is Verdict.UNKNOWN
            summary.failed_by_queue[key] += 1
            _keep(letters, letter, summary, f"{verdict.value}: {text or code}", notices, failed=True)
        if not missing and not done.done():
            done.set_result(None)

    before = summary.recovered
    letters.send(going, on_outcome, timeout_s=limits.stall_timeout_s)
    await done
    notices.progressed(summary, before)


def _keep(letters: DeadLetters, letter: Taken, summary: Summary, why: str, notices: Notices, *, failed: bool) -> None:
    reason = summary.reason(why)
    reason.count += 1
    if reason.sample is None:
        reason.sample = sample(letters.read(letter), letter.route.type)
    notices.kept(summary, why, letter.route.type, count=reason.count, failed=failed)
