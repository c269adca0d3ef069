"""Letters that cannot bear another return, on a queue with a delivery limit: they go back by a publish, and at once."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest

from holdfast.engines.rabbitmq.lane import Outgoing
from tests.engines.rabbitmq.admin import Admin
from tests.recover.world import World, letter, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

FRAME_BYTES_MAX = 131_064


@pytest.fixture
async def limited(admin: Admin, tmp_path: Path) -> World:
    """A queue whose letters cannot bear a single return."""
    world = World(admin, tmp_path, dlq="limited.dlq")
    await admin.quorum_queue(world.dlq, **{"x-delivery-limit": 5})
    return await world.make(declare_dlq=False)


def just_fits(number: int) -> Outgoing:
    """Its headers fill a frame: with those of a redrive there is no room for them."""
    rest = len(letter(number, told={"pad": ""}).properties) + 112
    return letter(number, told={"pad": "p" * (FRAME_BYTES_MAX - rest)})


async def test_one_whose_copy_cannot_be_sent_takes_nobodys_confirm(limited: World) -> None:
    """It is put back while its neighbours are being packed, some of which the target refuses."""
    world = limited
    await world.fill([letter(9_999, kind="Refused", key="refusing.queue")], counted=False)
    for start in range(0, 2_000, 100):
        refused = [letter(start + n, kind="Refused") for n in range(10)]
        await world.fill([*refused, just_fits(start + 10), *(letter(start + n) for n in range(11, 21))])
    told = summary(await world.recover("--management", world.admin.node.management_url))
    assert (told["recovered"], told["failed"], told["put_back"]) == (200, 220, 220)
    assert told["by_queue"] == {"collection.scan": 200}
    assert len(await world.admin.drain("refusing.queue", 1)) == 1
    await world.check(duplicates_max=told["possible_duplicates"])


async def test_a_signal_stops_at_once_also_with_more_than_the_window_on_its_way(admin: Admin, tmp_path: Path) -> None:
    world = World(admin, tmp_path, dlq="limited.dlq")
    await admin.quorum_queue(world.dlq, **{"x-delivery-limit": 100})
    await world.make(declare_dlq=False)
    await world.fill(Outgoing("", "", letter(n).properties, b"%08d" % n + bytes(200_000)) for n in range(60))
    management = world.admin.node.management_url
    with world.start("--rate", "1/s", "--window-bytes", "1000000", "--management", management) as process:
        await eventually(partial(world.admin.count, "collection.scan"), timeout_s=30.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 3, err
    told = json.loads(out.splitlines()[-1])
    assert told["stopped_by"] == "signal"
    assert told["recovered"] + told["remaining"] == 60
    assert not [note for note in told["notes"] if "answer" in note]
    await world.check()
