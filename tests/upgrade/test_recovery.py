"""What a recovery and a consumer of before left when they were killed: journal, backup, and the starts of messages."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

import holdfast
from tests.support.amqp import Admin, decoded, headers_of, message_id_of
from tests.support.command import Forked
from tests.support.eventually import eventually
from tests.upgrade import story
from tests.upgrade.conftest import clock_offset, unpack

pytestmark = pytest.mark.rabbitmq

RECORD_BYTES = 17
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@pytest.fixture
async def filled(broker: Admin) -> Admin:
    """The dead-letter queue as the killed run left it: every letter of it has been delivered before."""
    await broker.queue(story.DLQ)
    await broker.queue(story.SCAN)
    await broker.exchange(story.EXCHANGE)
    await broker.bind(story.SCAN, story.EXCHANGE, story.SCAN)
    left = story.told_of("recovery")["left"]
    story.send(broker, story.DLQ, *(int(name.removeprefix("m-")) for name in left))
    assert len(await broker.look(story.DLQ)) == len(left)
    return broker


def journal_of(broker: Admin) -> tuple[str, bytes]:
    """The journal of the fixture as if it had been kept here, since the last start of this machine; and its source."""
    head, _, records = (story.FIXTURES / "recovery.journal").read_bytes().partition(b"\n")
    first = json.loads(head)
    assert first["source"] == f"queue '{story.DLQ}' in '{story.VHOST}' at 127.0.0.1:5672"
    source = first["source"].replace("5672", str(broker.node.port))
    first |= {"source": source, "boot": BOOT_ID.read_text().strip()}
    return source, json.dumps(first).encode() + b"\n" + records


def noted() -> int:
    """How many letters the journal has as published and not acked."""
    records = (story.FIXTURES / "recovery.journal").read_bytes().partition(b"\n")[2]
    entries: Counter[bytes] = Counter()
    for start in range(0, len(records), RECORD_BYTES):
        kind, digest = records[start : start + 1], records[start + 1 : start + RECORD_BYTES]
        if kind in b"CA":
            entries[digest] += 1 if kind == b"C" else -1
    return sum(entries.values())


@pytest.mark.parametrize("place", ["usual", "given"])
async def test_letters_that_a_killed_run_had_noted_are_not_sent_twice(
    filled: Admin, tmp_path: Path, place: str
) -> None:
    told = story.told_of("recovery")
    source, journal = journal_of(filled)
    mark = hashlib.sha256(source.encode()).hexdigest()[:12]
    usual = tmp_path / "state" / "holdfast" / "recover" / f"{story.DLQ}-{mark}.journal"
    file = usual if place == "usual" else tmp_path / "some.journal"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(journal)
    more = () if place == "usual" else ("--journal", str(file))
    ended = Forked(tmp_path, "memory://")("recover", filled.url, story.DLQ, "--json", *more)
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert ended.code == 0, ended
    assert (summary["recovered"], summary["recognised"], summary["remaining"]) == (len(told["left"]), noted(), 0)
    assert summary["possible_duplicates"] == len(told["left"]) - noted(), "those that came again and are in no entry"
    arrived = {message_id_of(one) for one in await filled.look(story.SCAN)}
    assert arrived | set(told["arrived"]) == {f"m-{number:03}" for number in range(1, story.RECOVERED + 1)}, (
        "none is lost"
    )
    assert len(arrived) == len(told["left"]) - noted()
    assert not file.exists(), "it has ended with the queue"


async def test_a_journal_of_before_the_machine_was_started_is_not_believed(filled: Admin, tmp_path: Path) -> None:
    file = tmp_path / "some.journal"
    head, _, records = journal_of(filled)[1].partition(b"\n")
    file.write_bytes(json.dumps({**json.loads(head), "boot": "another"}).encode() + b"\n" + records)
    ended = Forked(tmp_path, "memory://")("recover", filled.url, story.DLQ, "--json", "--journal", str(file))
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert (summary["recovered"], summary["recognised"]) == (len(story.told_of("recovery")["left"]), 0)


async def test_the_letters_of_a_backup_of_before_are_published_byte_for_byte(broker: Admin, tmp_path: Path) -> None:
    await broker.queue(story.SCAN)
    file = story.FIXTURES / "recovery.backup.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ended = Forked(tmp_path, "memory://")(
        "recover", broker.url, story.DLQ, "--from-backup", file, "--to", story.SCAN, "--json"
    )
    assert json.loads(ended.stdout.splitlines()[-1])["recovered"] == len(lines), ended
    found = await broker.drain(story.SCAN, len(lines))
    assert [(message_id_of(one), one.body) for one in found] == [
        (line["message_id"], base64.b64decode(line["body"])) for line in lines
    ]
    for one in found:
        sent = story.letter(int(message_id_of(one).removeprefix("m-")))
        wanted = {name: value for name, value in sent["headers"].items() if name != "x-death"}
        assert {name: value for name, value in headers_of(one).items() if name in wanted} == wanted
        assert decoded(one)["correlation_id"] == sent["correlation_id"]


async def test_a_start_of_before_is_charged_to_its_message(
    broker: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CLOCK_OFFSET_S", clock_offset(story.told_of("starts")["made_at"]))
    unpack("starts", tmp_path)
    app = holdfast.App(broker.url, store=f"sqlite:///{tmp_path}/starts", management=broker.node.management_url)
    begun: list[tuple[str, int]] = []

    @app.consumer("work", retry=holdfast.Retry(attempts=3, delay="100ms"))
    async def handle(message: holdfast.Message) -> None:
        begun.append((message.id, message.attempt))

    await broker.queue("work")
    story.send(broker, "work", 31, 32)
    assert len(await broker.look("work")) == 2
    async with app.running(declare=True):
        await eventually(lambda: len(begun) == 2)
    assert sorted(begun) == [("m-031", 2), ("m-032", 1)]
