"""Prometheus text of the vault: letters by queue and state, what this process did with them, and how captures go.

Queues are bounded: the ones with the most letters are named, the rest is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

QUEUES_COUNT_MAX = 200
OTHERS = "(others)"
MOVES = {
    "captured": "Letters captured by this process.",
    "redriven": "Letters redriven by this process.",
    "failed": "Letters of which a redrive by this process is known to have failed.",
    "released": "Letters of cancelled redrives that this process captured again; if they were published is unknown.",
    "came_back": "Redriven letters that were captured again by this process.",
    "deleted": "Letters deleted by retention in this process.",
}
#: Moves that are named by where they come from.
RETURNS = {("redriving", "captured"): "failed", ("unknown", "captured"): "released"}


class CaptureGauge(NamedTuple):
    """How the capture of one queue goes."""

    queue: str
    running: bool
    lag_s: float  #: between the death of the letter that was captured last and its capture
    failed_imports: int


def render_vault(
    tallies: Mapping[tuple[str, str], int],
    moves: Mapping[tuple[str, str, str], int],
    captures: Iterable[CaptureGauge],
) -> str:
    """The vault's part of the page. `tallies` by queue and state, `moves` by queue, source and target."""
    weights: Counter[str] = Counter()
    for (queue, _), count in tallies.items():
        weights[queue] += count
    named = {queue for queue, _ in weights.most_common(QUEUES_COUNT_MAX)}
    return "\n".join([*_letters(tallies, named), *_moves(moves, named), *_captures(captures)]) + "\n"


def _letters(tallies: Mapping[tuple[str, str], int], named: set[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for (queue, state), count in tallies.items():
        counts[queue if queue in named else OTHERS, state] += count
    yield "# HELP holdfast_letters Letters in the vault by queue and state; deleted is what retention took."
    yield "# TYPE holdfast_letters gauge"
    for (queue, state), count in sorted(counts.items()):
        yield f'holdfast_letters{{queue="{quoted(queue)}",state="{state}"}} {count}'


def _moves(moves: Mapping[tuple[str, str, str], int], named: set[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for (queue, source, target), count in moves.items():
        name = RETURNS.get((source, target), target)
        if name == "captured" and source:
            continue  # restored from the archive
        counts[name, queue if queue in named else OTHERS] += count
    for name, meaning in MOVES.items():
        yield f"# HELP holdfast_letters_{name}_total {meaning}"
        yield f"# TYPE holdfast_letters_{name}_total counter"
        for (kind, queue), count in sorted(counts.items()):
            if kind == name:
                yield f'holdfast_letters_{name}_total{{queue="{quoted(queue)}"}} {count}'


def _captures(captures: Iterable[CaptureGauge]) -> Iterator[str]:
    found = sorted(captures)[:QUEUES_COUNT_MAX]
    for name, kind, meaning in (
        ("capture_running", "gauge", "Whether this process captures the queue."),
        ("capture_lag_seconds", "gauge", "From the death of the letter captured last to its capture."),
        ("failed_imports_total", "counter", "Messages that could be no letter, by this process."),
    ):
        yield f"# HELP holdfast_{name} {meaning}"
        yield f"# TYPE holdfast_{name} {kind}"
        for one in found:
            value = {"capture_running": one.running, "capture_lag_seconds": one.lag_s}.get(name, one.failed_imports)
            yield f'holdfast_{name}{{queue="{quoted(one.queue)}"}} {value:g}'


def quoted(text: str) -> str:
    """A label's value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
