"""SIGKILL at every named crash point on PostgreSQL + RabbitMQ + S3: the next collector takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.proof.process import python_argv
from tests.collect.shared import BUCKET, Bucket, Place, check_place, producing, rows_of
from tests.collect.shared_worker import play
from tests.collect.test_crash_points import POINTS, passes_of
from tests.collect.worker import SHAPE
from tests.support.amqp import Admin
from tests.support.forking import forked_process

pytestmark = [pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.s3]


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_collector_is_taken_over(
    point: str, tmp_path: Path, postgres_url: str, admin: Admin, bucket: Bucket
) -> None:
    transaction = point.replace(".", "-")
    place = Place(postgres_url, admin.node.url(admin.vhost), f"s3://{BUCKET}/{transaction}")
    env = {**place.env, **bucket.env, "TEST_FOLDER": str(tmp_path), "TEST_TRANSACTION": transaction}
    argv = python_argv("tests.collect.shared_worker")
    async with producing(admin):
        crash = {"HOLDFAST_CRASH_AT": f"{point}:{passes_of(point)}"}
        async with forked_process(argv, env={**env, **crash}) as child:
            assert await child.wait(timeout_s=60) == -9, child.stderr.tail
        await play(env)
    await check_place(place, admin, transaction=transaction)
    total = sum(SHAPE.values())
    assert rows_of(postgres_url, transaction) == total
    uploads = [line for line in (tmp_path / "uploads").read_text().splitlines() if "manifest-" not in line]
    assert len(uploads) - total <= 4, "re-uploads"
