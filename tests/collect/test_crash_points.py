"""SIGKILL of the collector's process at every named crash point: it goes on where it was, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.proof import crash_points
from tests.collect.shared import check_embedded, check_uploads
from tests.collect.worker import Place, play
from tests.support.forking import forked_process

pytestmark = pytest.mark.slow

POINTS = [
    "collect.before_create",
    "collect.after_create",
    "collect.before_forward",
    "collect.after_forward",
    "collect.before_persist_awaiting",
    "collect.after_persist_awaiting",
    "collect.before_header",
    "collect.after_header",
    "collect.before_upload",
    "collect.after_upload",
    "collect.before_index",
    "collect.after_index",
    "collect.before_ack",
    "collect.after_ack",
    "collect.before_persist_sending",
    "collect.after_persist_sending",
    "collect.before_manifest",
    "collect.after_manifest",
    "collect.before_notice",
    "collect.after_notice",
    "collect.before_complete",
    "collect.after_complete",
    "collect.before_queue_delete",
    "collect.after_queue_delete",
    "collect.before_clean",
    "collect.after_clean",
]
#: Passed once per transaction, or once per message: there the second kill is in the middle of the work.
MANY = {"header": 2, "upload": 9, "index": 9, "ack": 12, "queue_delete": 2}


def test_every_crash_point_of_the_collector_is_killed_at() -> None:
    assert {name for name in crash_points() if name.startswith("collect.")} == set(POINTS)


def passes_of(point: str) -> int:
    kind = point.removeprefix("collect.").partition("_")[2]
    return MANY.get(kind, 1)


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_collector_goes_on_where_it_was(point: str, tmp_path: Path) -> None:
    place = Place.embedded(tmp_path)
    crash = {"HOLDFAST_CRASH_AT": f"{point}:{passes_of(point)}"}
    async with forked_process(place.argv, env=crash) as child:
        assert await child.wait(timeout_s=60) == -9, child.stderr.tail
    await play(place)
    await check_embedded(place)
    check_uploads(place, kills=1)
