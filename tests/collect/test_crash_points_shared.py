"""SIGKILL at every named crash point on PostgreSQL + RabbitMQ + S3: the next collector takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collect.shared import Bucket, check_shared, check_uploads, producing, shared_place
from tests.collect.test_crash_points import POINTS, passes_of
from tests.collect.worker import play
from tests.support.amqp import Admin
from tests.support.forking import forked_process

pytestmark = [pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.s3]


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_collector_is_taken_over(
    point: str, tmp_path: Path, postgres_url: str, admin: Admin, bucket: Bucket
) -> None:
    place = shared_place(postgres_url, admin, tmp_path, point.replace(".", "-"))
    async with producing(admin):
        crash = {"HOLDFAST_CRASH_AT": f"{point}:{passes_of(point)}"}
        async with forked_process(place.argv, env=crash) as child:
            assert await child.wait(timeout_s=60) == -9, child.stderr.tail
        await play(place)
    await check_shared(place, admin)
    check_uploads(place, kills=1)
