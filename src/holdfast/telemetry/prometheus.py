"""Prometheus text: what events counted, how requests went, how the queues stand, and the vault with its captures.

Queues of the vault are bounded: the ones with the most letters are named, the rest is one. What somebody may not
see is in that rest, too: `shown` gives the name that a queue is shown by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from holdfast.telemetry.events import counts

BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
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
NAMED_BY_SOURCE = {("redriving", "captured"): "failed", ("unknown", "captured"): "released"}


N = TypeVar("N", int, float)
Shown: TypeAlias = Callable[[str], str]


class Durations:
    """How long something took, by verb or queue. Their number bounds it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.buckets: dict[str, list[int]] = {}

    def count(self, name: str, seconds: float) -> None:
        """It took so long once more."""
        buckets = self.buckets.get(name)
        if buckets is None:
            buckets = self.buckets[name] = [0] * (len(BUCKETS_S) + 1)
        buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def under(self, shown: Shown) -> Durations:
        """The same by the names that are shown."""
        found = Durations()
        for name, buckets in self.buckets.items():
            before = found.buckets.get(shown(name), [0] * len(buckets))
            found.buckets[shown(name)] = [sum(both) for both in zip(before, buckets, strict=True)]
            found.seconds[shown(name)] = found.seconds.get(shown(name), 0.0) + self.seconds[name]
        return found


class Requests:
    """Requests by verb and code, with their durations. Bounded by the number of verbs and codes."""

    def __init__(self) -> None:
        self.codes: Counter[tuple[str, int]] = Counter()
        self.durations = Durations()

    def count(self, verb: str, code: int, seconds: float) -> None:
        """One request was answered."""
        self.codes[verb, code] += 1
        self.durations.count(verb, seconds)


class QueueGauge(NamedTuple):
    """How one queue stands."""

    queue: str
    state: str
    value: float


class CaptureGauge(NamedTuple):
    """How the capture of one queue goes."""

    queue: str
    running: bool
    lag_s: float  #: between the death of the letter that was captured last and its capture
    failed_imports: int


#: How long handlers ran in this process.
handler_seconds = Durations()


def render(requests: Requests, gauges: Iterable[QueueGauge], shown: Shown = str) -> str:
    """The whole page."""
    return "\n".join([*_requests(requests), *_gauges(gauges, shown), *_handlers(shown), *_events(shown)]) + "\n"


def render_vault(
    tallies: Mapping[tuple[str, str], int],
    moves: Mapping[tuple[str, str, str], int],
    captures: Iterable[CaptureGauge],
    shown: Shown = str,
) -> str:
    """The vault's part of the page. `tallies` by queue and state, `moves` by queue, source and target."""
    tallies, moves = _under(shown, tallies), _under(shown, moves)
    weights: Counter[str] = Counter()
    for (queue, _), count in tallies.items():
        weights[queue] += count
    named = {queue for queue, _ in weights.most_common(QUEUES_COUNT_MAX)}
    return "\n".join([*_letters(tallies, named), *_moves(moves, named), *_captures(captures, shown)]) + "\n"


def _requests(requests: Requests) -> Iterator[str]:
    yield from _about("requests_total", "counter", "Requests by verb and code.")
    for (verb, code), count in sorted(requests.codes.items()):
        yield f'holdfast_requests_total{{verb="{verb}",code="{code}"}} {count}'
    yield from _about("request_seconds", "histogram", "How long requests took, waiting included.")
    yield from _histogram("request_seconds", "verb", requests.durations)


def _under(shown: Shown, values: Mapping[Any, N]) -> dict[Any, N]:
    """Values by queue and more, by the names that are shown; what is of no queue stays so."""
    found: dict[Any, N] = {}
    for (queue, *more), value in values.items():
        key = (queue and shown(queue), *more)
        found[key] = found[key] + value if key in found else value
    return found


def _gauges(gauges: Iterable[QueueGauge], shown: Shown) -> Iterator[str]:
    yield from _about("queue_items", "gauge", "Items by queue and state, and requests that wait.")
    for (queue, state), value in _under(shown, {(one.queue, one.state): one.value for one in gauges}).items():
        yield f'holdfast_queue_items{{queue="{_quoted(queue)}",state="{state}"}} {value:g}'


def _handlers(shown: Shown) -> Iterator[str]:
    yield from _about("handler_seconds", "histogram", "How long handlers ran, by queue.")
    yield from _histogram("handler_seconds", "queue", handler_seconds.under(shown))


def _events(shown: Shown) -> Iterator[str]:
    yield from _about("events_total", "counter", "What happened, by event and queue.")
    found = _under(shown, {(queue, event): count for (event, queue), count in counts.items()})
    for event, queue, count in sorted((event, queue, count) for (queue, event), count in found.items()):
        yield f'holdfast_events_total{{event="{event}",queue="{_quoted(queue)}"}} {count}'


def _letters(tallies: Mapping[tuple[str, str], int], named: set[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for (queue, state), count in tallies.items():
        counts[queue if queue in named else OTHERS, state] += count
    yield from _about("letters", "gauge", "Letters in the vault by queue and state; deleted is what retention took.")
    for (queue, state), count in sorted(counts.items()):
        yield f'holdfast_letters{{queue="{_quoted(queue)}",state="{state}"}} {count}'


def _moves(moves: Mapping[tuple[str, str, str], int], named: set[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for (queue, source, target), count in moves.items():
        name = NAMED_BY_SOURCE.get((source, target), target)
        if name == "captured" and source:
            continue  # restored from the archive
        counts[name, queue if queue in named else OTHERS] += count
    for name, meaning in MOVES.items():
        yield from _about(f"letters_{name}_total", "counter", meaning)
        for (kind, queue), count in sorted(counts.items()):
            if kind == name:
                yield f'holdfast_letters_{name}_total{{queue="{_quoted(queue)}"}} {count}'


def _captures(captures: Iterable[CaptureGauge], shown: Shown) -> Iterator[str]:
    by_name: dict[str, CaptureGauge] = {}
    for one in captures:
        name = shown(one.queue)
        other = by_name.get(name, CaptureGauge(name, running=True, lag_s=0.0, failed_imports=0))
        running, lag_s = one.running and other.running, max(one.lag_s, other.lag_s)
        by_name[name] = CaptureGauge(name, running, lag_s, one.failed_imports + other.failed_imports)
    found = sorted(by_name.values())[:QUEUES_COUNT_MAX]
    for name, kind, meaning in (
        ("capture_running", "gauge", "Whether this process captures the queue."),
        ("capture_lag_seconds", "gauge", "From the death of the letter captured last to its capture."),
        ("failed_imports_total", "counter", "Messages that could be no letter, by this process."),
    ):
        yield from _about(name, kind, meaning)
        for one in found:
            value = {"capture_running": one.running, "capture_lag_seconds": one.lag_s}.get(name, one.failed_imports)
            yield f'holdfast_{name}{{queue="{_quoted(one.queue)}"}} {value:g}'


def _histogram(name: str, label_name: str, durations: Durations) -> Iterator[str]:
    for value, buckets in sorted(durations.buckets.items()):
        label, total = f'{label_name}="{_quoted(value)}"', 0
        for limit_s, count in zip((*map(str, BUCKETS_S), "+Inf"), buckets, strict=True):
            total += count
            yield f'holdfast_{name}_bucket{{{label},le="{limit_s}"}} {total}'
        yield f"holdfast_{name}_sum{{{label}}} {durations.seconds[value]:.6f}"
        yield f"holdfast_{name}_count{{{label}}} {total}"


def _about(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP holdfast_{name} {meaning}"
    yield f"# TYPE holdfast_{name} {kind}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
