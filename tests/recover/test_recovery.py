"""`holdfast recover` against a real broker: what it moves, what it keeps, and what it says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from holdfast.core.message import Outgoing
from tests.engines.rabbitmq.raw import HEADERS, header_table
from tests.recover.dead_letter_queue import (
    EXCHANGE,
    DeadLetterQueue,
    ended_by_kill,
    essence,
    header,
    letter,
    noted,
    peak_mb,
    summary,
)
from tests.support.amqp import decoded, message_id_of, properties, raw_header, table
from tests.support.command import Ended
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq


async def test_all_go_back_to_their_queues(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "CacheGeneration")[n % 2]) for n in range(100))
    ended = await dlq.recover()
    assert ended.code == 0, ended
    told = summary(ended)
    assert told["recovered"] == 100
    assert told["by_queue"] == {"collection.scan": 50, "cache.generation": 50}
    assert (told["failed"], told["skipped"], told["possible_duplicates"], told["remaining"]) == (0, 0, 0, 0)
    assert told["stopped_by"] == "all_taken"
    seen = await dlq.found()
    dlq.books.check()
    assert [header(one, "x-redriven-count") for one in seen["collection.scan"]] == [1] * 50
    for target in ("collection.scan", "cache.generation"):
        numbers = [message_id_of(one) for one in seen[target]]
        assert numbers == sorted(set(numbers)), "the order is kept per target, and each comes once"


async def test_the_shape_of_119_762(dlq: DeadLetterQueue) -> None:
    """Most are good, the target of some refuses, some are unknown: each is counted, and those kept stay in order."""
    await dlq.fill([letter(9_999, kind="Refused", key="refusing.queue")], counted=False)  # now it is full
    kinds = ["CollectionScan"] * 95 + ["Refused"] * 4 + ["Strange"]
    await dlq.fill(letter(n, kind=kinds[n % 100]) for n in range(2_000))
    ended = await dlq.recover()
    told = summary(ended)
    assert ended.code == 3
    assert (told["recovered"], told["failed"], told["skipped"], told["remaining"]) == (1_900, 80, 20, 100)
    assert told["failed_by_queue"] == {"refusing.queue": 80}
    assert sum(reason["count"] for reason in told["reasons"].values()) == 100
    assert all(reason["sample"]["message_id"] for reason in told["reasons"].values())
    await dlq.admin.drain("refusing.queue", 1)
    seen = await dlq.found()
    dlq.books.check()
    kept = [message_id_of(one) for one in seen[dlq.name]]
    assert kept == sorted(kept)


async def test_people_see_the_lines_that_they_know(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(1_000))
    await dlq.fill([letter(5_000, kind=None, told={"x-death": []})])
    ended = await _text(dlq)
    assert ended.code == 3
    for line in (
        "Starting DLQ Recovery Service...",
        "Found 1001 messages in DLQ. Starting recovery...",
        "Started DLQ consumer with tag: amq.ctag-",
        "Recovered 1000 messages so far...",
        "Message has no MessageType or routing key. Keeping in DLQ for manual review.",
        "DLQ RECOVERY SUMMARY",
        "Total Recovered: 1000 messages",
        "Total Failed: 0 messages (kept in DLQ for retry)",
        "Skipped Messages: 1 (unknown type, kept in DLQ for manual review)",
        "Successfully Recovered By Queue:\n   collection.scan: 1000",
        "1 messages still in DLQ (will retry on next startup)",
    ):
        assert line in ended.text, line


async def test_every_header_and_property_survives_byte_by_byte(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    told = {**HEADERS, "MessageType": table.encode_value("CollectionScan"), "x-retry-count": table.encode_value(3)}
    raw = properties.encode(
        {"content_type": "x/y", "content_encoding": "br", "priority": 3, "reply_to": "r", "app_id": "app"}
    )
    raw = properties.splice(raw, put={"headers": header_table(told)})
    await dlq.fill([Outgoing("", "", raw, bytes(range(256)))])
    assert (await dlq.recover()).code == 0
    seen = await dlq.found()
    dlq.books.check()
    [arrived] = seen["collection.scan"]
    headers = properties.split(arrived.properties)["headers"]
    for name, value in HEADERS.items():
        assert raw_header(headers, name) == value, name
    assert raw_header(headers, "x-retry-count") is None
    assert header(arrived, "x-redriven-from") == dlq.name
    assert decoded(arrived)["delivery_mode"] == 2


async def test_what_would_make_the_publish_unsafe_is_taken_off_and_kept(dlq: DeadLetterQueue) -> None:
    raw = properties.encode(
        {
            "headers": {"MessageType": "CollectionScan", "CC": ["cache.generation"], "x-delay": 5},
            "expiration": "600000",
            "delivery_mode": 1,
        }
    )
    await dlq.fill([Outgoing("", "", raw, b"1")], counted=False)
    assert (await dlq.recover()).code == 0
    seen = await dlq.found()
    # CC sent one copy to the other queue when it was put here; the redrive must not send another.
    assert {place: len(found) for place, found in seen.items() if found} == {
        "collection.scan": 1,
        "cache.generation": 1,
    }
    [arrived] = seen["collection.scan"]
    told_by_it = decoded(arrived)
    assert "expiration" not in told_by_it
    assert told_by_it["delivery_mode"] == 2
    assert header(arrived, "x-kept-expiration") == "600000"
    assert header(arrived, "x-kept-cc") == ["cache.generation"]
    assert header(arrived, "CC") is None


async def test_a_letter_without_a_type_goes_where_it_came_from(dlq: DeadLetterQueue) -> None:
    own = noted(EXCHANGE, "cache.generation")
    wait = {"count": 1, "reason": "expired", "queue": "q.retry", "exchange": "", "routing-keys": ["q.retry"]}
    died = {
        "count": 1,
        "reason": "rejected",
        "queue": "q",
        "exchange": EXCHANGE,
        "routing-keys": ["library_scan_queue"],
    }
    await dlq.fill(
        [
            letter(1, kind=None, told=own),
            letter(2, kind=None, told={"x-death": [wait, died]}),
            letter(3, kind="Strange"),  # its x-death would lead somewhere, but somebody wrote a table
            letter(4, kind=None, told={"x-death": "nonsense"}),
        ]
    )
    told = summary(await dlq.recover())
    assert told["by_queue"] == {"cache.generation": 1, "library_scan_queue": 1}
    assert told["skipped"] == 2
    await dlq.check()


async def test_to_source_to_exchange_through_wait_and_to_one_place(dlq: DeadLetterQueue) -> None:
    for way, place in (
        (["--to-source"], "collection.scan"),
        (["--to-exchange"], "collection.scan"),
        (["--through-wait"], "waiting"),
        (["--to", "library_scan_queue"], "library_scan_queue"),
        (["--to", f"exchange={EXCHANGE},key=cache.generation"], "cache.generation"),
    ):
        if place == "waiting":
            await dlq.queue(place)
            await dlq.admin.exchange("retry.collection.scan")
            await dlq.admin.bind(place, "retry.collection.scan", "retry")
        await dlq.fill([letter(1, kind="Strange")], counted=False)
        ended = await dlq.recover(*way, routes=False)
        assert ended.code == 0, ended
        assert len(await dlq.admin.drain(place, 1)) == 1


async def test_an_unroutable_letter_is_kept(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(1, kind=None, told=noted(EXCHANGE, "nowhere"))])
    await dlq.fill(letter(n) for n in range(2, 50))
    told = summary(await dlq.recover())
    assert (told["recovered"], told["failed"], told["remaining"]) == (48, 1, 1)
    assert told["failed_by_queue"] == {"nowhere": 1}
    await dlq.check()


async def test_a_publish_that_is_refused_harms_no_neighbour(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    bad = letter(1, kind=None, told=noted("missing", "k"))
    await dlq.fill([*(letter(n) for n in range(2, 300)), bad, *(letter(n) for n in range(300, 600))])
    told = summary(await dlq.recover())
    assert (told["recovered"], told["failed"], told["remaining"]) == (598, 1, 1)
    await dlq.check(duplicates_max=told["possible_duplicates"])


async def test_twins_are_never_taken_for_one(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill([letter(7) for _ in range(20)], counted=False)
    told = summary(await dlq.recover())
    assert (told["recovered"], told["possible_duplicates"]) == (20, 0)
    assert await dlq.admin.count("collection.scan") == 20


async def test_a_letter_that_dies_again_is_not_chased(dlq: DeadLetterQueue) -> None:
    """The target dead-letters at once into the same queue: the run takes what was there, and no more."""
    await dlq.admin.delete("collection.scan")
    back: dict[str, int | str] = {
        "x-message-ttl": 0,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dlq.name,
    }
    await dlq.admin.queue("collection.scan", **back)
    await dlq.admin.bind("collection.scan", EXCHANGE, "collection.scan")
    await dlq.fill((letter(n) for n in range(300)), counted=False)
    told = summary(await dlq.recover())
    assert told["recovered"] == 300
    assert told["stopped_by"] == "all_taken"
    await eventually(lambda: _has(dlq, 300))
    again = summary(await dlq.recover())
    assert again["recovered"] == 300
    letters = await dlq.admin.drain(dlq.name, 300)
    assert {header(one, "x-redriven-count") for one in letters} == {2}


async def test_a_dry_run_takes_nothing_away(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 2]) for n in range(500))
    ended = await dlq.recover("--dry-run")
    told = summary(ended)
    assert ended.code == 3
    assert told["dry_run"]
    assert told["planned"] == {"CollectionScan": {f"exchange '{EXCHANGE}' with key 'collection.scan'": 250}}
    assert (told["recovered"], told["skipped"], told["remaining"], told["returned"]) == (0, 250, 500, 500)
    seen = await dlq.found()
    dlq.books.check()
    kept = [message_id_of(one) for one in seen[dlq.name]]
    assert kept == sorted(kept)


async def test_only_what_fits_the_filter_goes(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n, told={"tenant": ("acme", "zeta")[n % 2]}) for n in range(20))
    told = summary(await dlq.recover("--where", "header.tenant=zeta", "--where", 'body~"n": 1'))
    assert (told["recovered"], told["filtered"], told["remaining"]) == (6, 14, 14)
    await dlq.check()


async def test_a_limit_counts_letters(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(50))
    ended = await dlq.recover("--limit", "10")
    told = summary(ended)
    assert ended.code == 3
    assert (told["recovered"], told["remaining"], told["stopped_by"]) == (10, 40, "all_taken")
    await dlq.check()


@pytest.mark.parametrize(("limit", "window"), [(10, 4000), (600, 4000), (600, 50)])
async def test_no_letter_beyond_the_limit_is_touched(any_dlq: DeadLetterQueue, limit: int, window: int) -> None:
    """Given back, it would count as returned on a quorum queue, and lie behind newer ones on RabbitMQ 3."""
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(1000))
    told = summary(await dlq.recover("--limit", str(limit), "--window", str(window)))
    assert (told["recovered"], told["remaining"], told["returned"]) == (limit, 1000 - limit, 0)
    left = (await dlq.found())[dlq.name]
    assert [one.redelivered for one in left] == [False] * (1000 - limit)
    assert [message_id_of(one) for one in left] == [f"m-{n:06}" for n in range(limit, 1000)]
    dlq.books.check()


async def test_acks_between_letters_that_are_kept_take_effect(any_dlq: DeadLetterQueue) -> None:
    """Each is a frame of its own, and a channel that is closed forgets what it has not passed on to a quorum queue."""
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 2]) for n in range(1000))
    told = summary(await dlq.recover())
    assert (told["recovered"], told["skipped"], told["remaining"]) == (500, 500, 500)
    await dlq.check()


async def test_many_that_are_kept_among_many_that_go(any_dlq: DeadLetterQueue) -> None:
    """So many that consuming moves on to fresh channels: nothing is lost, and a classic queue keeps its order."""
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 4 == 3]) for n in range(4_000))
    told = summary(await dlq.recover("--window", "500"))
    counts = told["recovered"], told["skipped"], told["returned"], told["remaining"], told["possible_duplicates"]
    assert counts == (3_000, 1_000, 1_000, 1_000, 0)
    seen = await dlq.found()
    dlq.books.check()
    for place in ("collection.scan", *([dlq.name] if dlq.kind == "classic" else [])):
        numbers = [message_id_of(one) for one in seen[place]]
        assert numbers == sorted(numbers), place


async def test_letters_that_are_kept_count_toward_the_limit_and_nothing_else_is_touched(
    any_dlq: DeadLetterQueue,
) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 2]) for n in range(500))
    told = summary(await dlq.recover("--limit", "300", "--window", "20"))
    counts = told["recovered"], told["skipped"], told["returned"], told["remaining"]
    assert counts == (150, 150, 150, 350)
    left = (await dlq.found())[dlq.name]
    assert sum(one.redelivered for one in left) == 150
    dlq.books.check()


async def test_one_at_a_time(any_dlq: DeadLetterQueue) -> None:
    """Killed in the middle, it had one letter in hand, and no other was touched."""
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(20))
    assert summary(await dlq.recover("--one-at-a-time"))["recovered"] == 20
    await dlq.fill(letter(n) for n in range(20, 50))
    with dlq.start("--one-at-a-time", HOLDFAST_CRASH_AT="recover.after_publish:10") as killed:
        assert ended_by_kill(killed), killed.returncode
    await eventually(lambda: _has(dlq, 21))
    left = (await dlq.found())[dlq.name]
    assert sum(one.redelivered for one in left) == 1
    dlq.books.check(duplicates_max=1)


async def test_a_rate_is_kept(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(40))
    told = summary(await dlq.recover("--rate", "40/s"))
    assert told["recovered"] == 40
    assert told["duration_s"] > 0.8
    await dlq.check()


async def test_more_held_than_the_window(dlq: DeadLetterQueue) -> None:
    """Held letters use up the prefetch: those behind them come all the same."""
    kinds = ["Strange"] * 9 + ["CollectionScan"]
    await dlq.fill(letter(n, kind=kinds[n % 10]) for n in range(1_000))
    told = summary(await dlq.recover("--window", "50"))
    assert (told["recovered"], told["skipped"], told["remaining"]) == (100, 900, 900)
    seen = await dlq.found()
    dlq.books.check()
    kept = [message_id_of(one) for one in seen[dlq.name]]
    assert kept == sorted(kept)


async def test_a_backup_is_byte_exact_and_can_be_published(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(25))
    file = dlq.folder / "letters.jsonl"
    assert (await dlq.recover("--backup", file)).code == 0
    first = await dlq.admin.drain("collection.scan", 25)
    assert len(file.read_bytes().splitlines()) == 25
    ended = await dlq.recover("--from-backup", file)
    assert ended.code == 0, ended
    again = await dlq.admin.drain("collection.scan", 25)
    assert [essence(one) for one in again] == [essence(one) for one in first]
    # The same letter of the same queue, redriven a second time: its copies can be told.
    assert [header(one, "x-redrive-id") for one in again] == [header(one, "x-redrive-id") for one in first]


async def test_an_empty_queue_is_consumed_before_it_is_believed(dlq: DeadLetterQueue) -> None:
    ended = await dlq.recover("--empty-timeout", "300ms")
    assert ended.code == 0
    assert summary(ended)["stopped_by"] == "empty"


async def test_a_signal_stops_cleanly(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(3_000))
    with dlq.start("--rate", "500/s") as process:
        await dlq.arrived(101)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    told = json.loads(out.splitlines()[-1])
    assert told["stopped_by"] == "signal"
    assert told["recovered"] + told["remaining"] == 3_000
    assert (told["possible_duplicates"], told["perhaps_elsewhere"]) == (0, 0)
    await dlq.check()


async def test_the_other_queues_that_get_a_copy_are_named(dlq: DeadLetterQueue) -> None:
    await dlq.admin.bind("cache.generation", EXCHANGE, "collection.scan")
    await dlq.fill([letter(1)], counted=False)
    way = ("--to-exchange", "--allow-copies")
    ended = await dlq.recover(*way, "--management", dlq.admin.node.management_url, routes=False)
    [queues] = summary(ended)["copies"].values()
    assert queues == ["cache.generation", "collection.scan"]


async def test_a_queue_that_is_deleted_in_the_middle(dlq: DeadLetterQueue) -> None:
    await dlq.fill((letter(n) for n in range(3_000)), counted=False)
    # Of the rest, most are still in the queue.
    with dlq.start("--rate", "500/s", "--window", "500", "--stall-timeout", "1s") as process:
        await dlq.arrived(101)
        await dlq.admin.delete(dlq.name)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no queue" in json.loads(out.splitlines()[-1])["failure"]


async def test_a_queue_that_is_deleted_when_all_of_its_letters_are_in_hand(dlq: DeadLetterQueue) -> None:
    """Then none is lost: they go where they were to go. Nobody can say that nothing is left."""
    await dlq.fill(letter(n) for n in range(1_000))
    with dlq.start("--rate", "500/s") as process:
        await dlq.arrived(500)  # all were taken long ago
        await dlq.admin.delete(dlq.name)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    told = json.loads(out.splitlines()[-1])
    assert (told["recovered"], told["remaining"], told["stopped_by"]) == (1_000, None, "all_taken")
    assert any("could not be read" in note for note in told["notes"])
    await dlq.admin.queue(dlq.name)
    await dlq.check()


async def test_two_recoveries_at_once(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(2_000))
    with dlq.start("--rate", "100/s") as process:
        await dlq.arrived(101)
        second = await dlq.recover("--journal", dlq.folder / "second.journal")
        assert second.code == 1
        assert "another recovery" in second.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 3
    await dlq.check()


async def test_large_letters_within_bounds(dlq: DeadLetterQueue) -> None:
    """Sixteen MiB each: the window in bytes rules, not the one in letters."""
    size, window = 16 * 2**20 - 4096, 32 * 2**20
    big = [Outgoing("", "", letter(n).properties, os.urandom(16) + bytes(size)) for n in range(12)]
    await dlq.fill(big)
    del big
    with dlq.start("--report", dlq.folder / "report.json", "--window-bytes", str(window)) as process:
        peaking = asyncio.create_task(peak_mb(process))
        _, err = await asyncio.to_thread(process.communicate, timeout=60.0)
    assert process.returncode == 0, err
    assert (dlq.folder / "report.json").exists()
    # 56 for the program, the window, and what is being put together; all twelve would be 270.
    assert 50 < await peaking < 200
    await dlq.check()


async def _has(dlq: DeadLetterQueue, count: int) -> bool:
    return await dlq.admin.count(dlq.name) == count


async def _text(dlq: DeadLetterQueue, *more: str | Path) -> Ended:
    return await asyncio.to_thread(
        dlq.command(), "recover", dlq.url, dlq.name, "--routes", str(dlq.routes), *map(str, more)
    )
