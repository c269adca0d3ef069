"""Prometheus text of the vault: letters by queue and state, what this process did with them, and how captures go.

Queues are bounded: the ones with the most letters are named, the rest is one.

Prometheus text: what was counted by events, how requests went, and how the queues stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from holdfast.telemetry.events import counts

BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)


class Requests:
    """Requests by verb and code, with their durations. Bounded by the number of verbs and codes."""

    def __init__(self) -> None:
        self.codes: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, float] = {}
        self.buckets: dict[str, list[int]] = {}

    def count(self, verb: str, code: int, seconds: float) -> None:
        """One request was answered."""
        self.codes[verb, code] += 1
        self.seconds[verb] = self.seconds.get(verb, 0.0) + seconds
        buckets = self.buckets.get(verb)
        if buckets is None:
            buckets = self.buckets[verb] = [0] * (len(BUCKETS_S) + 1)
        buckets[bisect_left(BUCKETS_S, seconds)] += 1


class Durations:
    """How long something took, by queue. The number of queues bounds it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.buckets: dict[str, list[int]] = {}

    def count(self, queue: str, seconds: float) -> None:
        """It took so long once more."""
        buckets = self.buckets.get(queue)
        if buckets is None:
            buckets = self.buckets[queue] = [0] * (len(BUCKETS_S) + 1)
        buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds[queue] = self.seconds.get(queue, 0.0) + seconds


#: How long handlers ran in this process.
handler_seconds = Durations()


class QueueGauge(NamedTuple):
    """How one queue stands."""

    queue: str
    state: str
    value: float


def render(requests: Requests, gauges: Iterable[QueueGauge]) -> str:
    """The whole page."""
    return "\n".join([*_requests(requests), *_gauges(gauges), *_handlers(), *_events()]) + "\n"


def _requests(requests: Requests) -> Iterator[str]:
    yield "# HELP holdfast_requests_total Requests by verb and code."
    yield "# TYPE holdfast_requests_total counter"
    for (verb, code), count in sorted(requests.codes.items()):
        yield f'holdfast_requests_total{{verb="{verb}",code="{code}"}} {count}'
    yield "# HELP holdfast_request_seconds How long requests took, waiting included."
    yield "# TYPE holdfast_request_seconds histogram"
    for verb, buckets in sorted(requests.buckets.items()):
        total = 0
        for limit_s, count in zip((*map(str, BUCKETS_S), "+Inf"), buckets, strict=True):
            total += count
            yield f'holdfast_request_seconds_bucket{{verb="{verb}",le="{limit_s}"}} {total}'
        yield f'holdfast_request_seconds_sum{{verb="{verb}"}} {requests.seconds[verb]:.6f}'
        yield f'holdfast_request_seconds_count{{verb="{verb}"}} {total}'


def _gauges(gauges: Iterable[QueueGauge]) -> Iterator[str]:
    yield "# HELP holdfast_queue_items Items by queue and state, and requests that wait."
    yield "# TYPE holdfast_queue_items gauge"
    for gauge in gauges:
        yield f'holdfast_queue_items{{queue="{_quoted(gauge.queue)}",state="{gauge.state}"}} {gauge.value:g}'


def _handlers() -> Iterator[str]:
    yield "# HELP holdfast_handler_seconds How long handlers ran, by queue."
    yield "# TYPE holdfast_handler_seconds histogram"
    for queue, buckets in sorted(handler_seconds.buckets.items()):
        label, total = f'queue="{_quoted(queue)}"', 0
        for limit_s, count in zip((*map(str, BUCKETS_S), "+Inf"), buckets, strict=True):
            total += count
            yield f'holdfast_handler_seconds_bucket{{{label},le="{limit_s}"}} {total}'
        yield f"holdfast_handler_seconds_sum{{{label}}} {handler_seconds.seconds[queue]:.6f}"
        yield f"holdfast_handler_seconds_count{{{label}}} {total}"


def _events() -> Iterator[str]:
    yield "# HELP holdfast_events_total What happened, by event and queue."
    yield "# TYPE holdfast_events_total counter"
    for (event, queue), count in sorted(counts.items()):
        yield f'holdfast_events_total{{event="{event}",queue="{_quoted(queue)}"}} {count}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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
