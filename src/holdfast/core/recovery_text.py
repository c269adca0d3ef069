"""The summary of a recovery for people, line by line."""

from __future__ import annotations

from collections import Counter

from holdfast.core.moments import SECOND_US, format_duration
from holdfast.core.recovery import Summary

RULE = "=" * 32


def summary_lines(summary: Summary) -> list[str]:
    """The block at the end of a run."""
    place = "backup" if summary.from_backup else "DLQ"
    lines = [
        RULE,
        "DLQ RECOVERY SUMMARY" + (" (DRY RUN)" if summary.dry_run else ""),
        RULE,
        f"Total Recovered: {summary.recovered} messages",
        f"Total Failed: {summary.failed} messages (kept in {place} for retry)",
        f"Skipped Messages: {summary.skipped} (unknown type, kept in {place} for manual review)",
    ]
    if summary.filtered:
        lines.append(f"Left Out: {summary.filtered} (by --where, kept in {place})")
    if summary.unseen:
        lines.append(f"Not Looked At: {summary.unseen} (behind the limit, or the run ended before)")
    if summary.possible_duplicates:
        lines.append(f"Possible Duplicates: {summary.possible_duplicates} (same x-redrive-id)")
    lines += _counts("Successfully Recovered By Queue:", summary.by_queue)
    lines += _counts("Failed Recoveries By Queue:", summary.failed_by_queue)
    if summary.dry_run:
        lines += ["", "Would be recovered:" + ("" if summary.planned else " nothing")]
        for kind, addresses in summary.planned.items():
            lines += [f"   {kind} -> {address}: {count}" for address, count in addresses.most_common()]
        if summary.returned:
            lines.append(f"This cost {summary.returned} returns; on a queue with a delivery limit each of them counts.")
    if summary.reasons:
        lines += ["", "Kept, by reason:"]
        for text, reason in summary.reasons.items():
            lines.append(f"   {text}: {reason.count}")
            if reason.sample is not None:
                one = reason.sample
                lines.append(f"      for example message_id={one.message_id!r} type={one.type!r} body={one.body!r}")
    duration = format_duration(round(summary.duration_s * 10) * SECOND_US // 10)
    lines += ["", f"Took {duration}, {summary.rate_per_s:g} messages/s, stopped by {summary.stopped_by}."]
    lines += [f"Copies of {address} go to: {', '.join(queues)}" for address, queues in summary.copies.items()]
    lines += [f"Note: {note}" for note in summary.notes]
    if summary.failure:
        lines.append(f"Ended early: {summary.failure}")
    lines.append(RULE)
    if summary.remaining:
        lines.append(f"{summary.remaining} messages still in DLQ (will retry on next startup)")
    elif summary.remaining is not None:
        lines.append("DLQ Empty")
    elif not summary.from_backup:
        lines.append("How many messages are still in DLQ could not be read: look at the queue")
    return lines


def _counts(title: str, counts: Counter[str]) -> list[str]:
    return ["", title, *(f"   {key}: {count}" for key, count in counts.most_common())] if counts else []
