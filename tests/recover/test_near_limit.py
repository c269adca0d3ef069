"""Letters that cannot bear another return, on a queue with a delivery limit: they go back by a publish, and at once."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.message import Outgoing
from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import DeadLetterQueue, letter, summary
from tests.support.amqp import Admin
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

FRAME_BYTES_MAX = 131_064


@pytest.fixture
async def limited(admin: Admin, tmp_path: Path) -> DeadLetterQueue:
    """A queue whose letters cannot bear a single return."""
    dlq = DeadLetterQueue(admin, tmp_path, name="limited.dlq")
    await admin.quorum_queue(dlq.name, **{"x-delivery-limit": 5})
    return await dlq.make(declare_it=False)


def just_fits(number: int) -> Outgoing:
    """Its headers fill a frame: with those of a redrive there is no room for them."""
    rest = len(letter(number, told={"pad": ""}).properties) + 112
    return letter(number, told={"pad": "p" * (FRAME_BYTES_MAX - rest)})


async def test_one_whose_copy_cannot_be_sent_takes_nobodys_confirm(limited: DeadLetterQueue) -> None:
    """It is put back while its neighbours are being packed, some of which the target refuses."""
    dlq = limited
    await dlq.fill([letter(9_999, kind="Refused", key="refusing.queue")], counted=False)
    for start in range(0, 2_000, 100):
        refused = [letter(start + n, kind="Refused") for n in range(10)]
        await dlq.fill([*refused, just_fits(start + 10), *(letter(start + n) for n in range(11, 21))])
    told = summary(await dlq.recover("--management", dlq.admin.node.management_url))
    assert (told["recovered"], told["failed"], told["put_back"]) == (200, 220, 220)
    assert told["by_queue"] == {"collection.scan": 200}
    assert len(await dlq.admin.drain("refusing.queue", 1)) == 1
    await dlq.check(duplicates_max=told["possible_duplicates"])


async def test_a_signal_stops_at_once_also_with_more_than_the_window_on_its_way(admin: Admin, tmp_path: Path) -> None:
    dlq = DeadLetterQueue(admin, tmp_path, name="limited.dlq")
    await admin.quorum_queue(dlq.name, **{"x-delivery-limit": 100})
    await dlq.make(declare_it=False)
    await dlq.fill(Outgoing("", "", letter(n).properties, b"%08d" % n + bytes(200_000)) for n in range(60))
    management = dlq.admin.node.management_url
    with dlq.start("--rate", "1/s", "--window-bytes", "1000000", "--management", management) as process:
        await eventually(partial(dlq.admin.count, "collection.scan"))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=25)
    assert process.returncode == 3, err
    told = json.loads(out.splitlines()[-1])
    assert told["stopped_by"] == "signal"
    assert told["recovered"] + told["remaining"] == 60
    assert not [note for note in told["notes"] if "answer" in note]
    await dlq.check()


async def test_it_ends_rather_than_have_a_letter_returned_too_often(admin: Admin, tmp_path: Path) -> None:
    """With a limit of 7, two returns are all that a letter may bear; each connection that is lost is one."""
    dlq = DeadLetterQueue(admin, tmp_path, name="limited.dlq")
    await admin.quorum_queue(dlq.name, **{"x-delivery-limit": 7})
    await dlq.make(declare_it=False)
    await dlq.fill(letter(n) for n in range(120))
    async with Proxy("127.0.0.1", admin.node.port) as proxy:
        url = admin.node.url(admin.vhost, port=proxy.port)
        given = ("recover", url, dlq.name, "--json", "--routes", dlq.routes)
        more = ("--rate", "10/s", "--management", admin.node.management_url)
        # At this pace those that the first cut returned are in hand when the second one comes, however late.
        with dlq.command().start(*given, *more) as process:
            for sign in (b"Started DLQ consumer", b"Connected again"):
                await asyncio.wait_for(asyncio.to_thread(_says, process, sign), 60.0)
                arrived = await admin.count("collection.scan")
                await dlq.arrived(arrived + 1)
                await proxy.cut()
            out, err = await asyncio.to_thread(process.communicate, timeout=60.0)
        again = summary(await asyncio.to_thread(dlq.command(), *given))
    assert process.returncode == 3, err
    told = json.loads(out.splitlines()[-1])
    assert (told["interruptions"], told["stopped_by"]) == (2, "stall")
    assert any("ended instead of reconnecting" in note for note in told["notes"])
    assert again["remaining"] == 0
    # Acks that were lost with the connection are known to nobody: the next run counts what may have been published.
    await dlq.check(duplicates_max=told["possible_duplicates"] + again["possible_duplicates"])


def _says(process: subprocess.Popen[bytes], sign: bytes) -> None:
    assert process.stderr is not None
    assert any(sign in line for line in process.stderr), "it ended before"
