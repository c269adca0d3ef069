"""Prometheus text: what was counted by events, how requests went, and how the queues stand."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
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
