"""SIGKILL of the consumer process at each of its crash points: every message is done or parked, none is in no place."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.proof.process import python_argv
from tests.consume.brokers import QUEUE, count_of
from tests.consume.killed_app import make_app
from tests.support.eventually import eventually
from tests.support.forking import forked_process

POINTS = [
    "consume.before_handler",
    "consume.after_handler",
    "consume.before_ack",
    "consume.after_ack",
    "consume.before_wait",
    "consume.after_wait",
    "consume.before_park",
    "consume.after_park",
]
BODIES = [f"{kind}-{number}".encode() for number in range(4) for kind in ("ok", "again", "bad", "fail")]
WORKING = {body for body in BODIES if body.startswith((b"ok", b"again"))}


def argv() -> list[str]:
    return python_argv("holdfast", "run", "tests.consume.killed_app:app")


def done_in(file: Path) -> list[bytes]:
    return file.read_bytes().split() if file.exists() else []


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_of_the_consumer_loses_nothing(point: str, tmp_path: Path) -> None:
    url, done = f"sqlite:///{tmp_path}/data", tmp_path / "done"
    async with holdfast.open(url) as queues:
        await queues.queues_create(f"{QUEUE}.dlq")
        await queues.queues_create(QUEUE, lease_timeout="400ms", dead_queue=f"{QUEUE}.dlq")
        await queues.queue_produce(QUEUE, BODIES)
    env = {"TEST_URL": url, "TEST_DONE": str(done), "HOLDFAST_CRASH_AT": f"{point}:3"}
    async with forked_process(argv(), env=env) as child:
        assert await child.wait() == -9, child.stderr.tail
    async with make_app(url, done).running() as app:

        async def is_settled() -> bool:
            return await count_of(app.queues, QUEUE) == 0

        await eventually(is_settled)
        parked = [item.payload for item in await app.queues.storage_items_list(f"{QUEUE}.dlq")]
    assert sorted(parked) == sorted(set(BODIES) - WORKING)
    assert set(done_in(done)) == WORKING
    assert len(done_in(done)) <= len(WORKING) + 2, "one process of two handlers ended: two at the most ran twice"
