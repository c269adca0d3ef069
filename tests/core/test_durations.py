"""How long handlers run is measured, by queue."""

from __future__ import annotations

import holdfast
from holdfast.faces.app import page
from tests.support.eventually import eventually


async def test_handlers_are_timed_whether_they_work_or_not() -> None:
    app, runs = holdfast.App("memory://"), list[int]()

    @app.consumer("timed", retry=holdfast.Retry(attempts=2, delay="1ms"))
    async def handle(message: holdfast.Message) -> None:
        runs.append(message.attempt)
        raise ValueError("no")

    async with app.running(declare=True):
        await app.queues.queue_produce("timed", [holdfast.NewItem(payload=b"x")])
        await eventually(lambda: runs == [1, 2])
        lines = page("/metrics", app.health)[2].decode().splitlines()
    assert 'holdfast_handler_seconds_count{queue="timed"} 2' in lines
    assert 'holdfast_handler_seconds_bucket{queue="timed",le="+Inf"} 2' in lines
    assert any(line.startswith('holdfast_handler_seconds_sum{queue="timed"} 0.') for line in lines)
