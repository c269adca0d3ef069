"""What a run says when it cannot know, what it takes when it cannot send, and whom one letter may harm: nobody."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import EXCHANGE, DeadLetterQueue, ended, letter, noted, summary
from tests.support.amqp import Admin

pytestmark = pytest.mark.rabbitmq


def _through(dlq: DeadLetterQueue, proxy: Proxy, *more: str) -> subprocess.Popen[bytes]:
    return dlq.start(*more, url=dlq.admin.node.url(dlq.admin.vhost, port=proxy.port))


async def test_a_depth_that_nobody_can_read_is_not_zero(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(200))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        process = _through(dlq, proxy, "--rate", "20/s")
        await dlq.arrived(5)
        await proxy.refuse()
        await proxy.cut()
        process.send_signal(signal.SIGINT)
        told = await ended(process)
    assert process.returncode == 3
    assert told["remaining"] is None
    assert told["unseen"] == 200 - told["recovered"] - told["failed"]
    assert any("could not be read" in note for note in told["notes"])


async def test_the_total_limit_holds_whatever_the_pace(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(60))
    told = summary(await dlq.recover("--rate", "2/s", "--total-timeout", "1s"))
    assert told["stopped_by"] == "total"
    assert told["recovered"] < 10
    assert told["recovered"] + told["remaining"] == 60
    await dlq.check()


async def test_letters_that_wait_for_their_pace_are_not_sent_twice_after_a_cut(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(100))
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        process = _through(dlq, proxy, "--rate", "20/s")
        for count in (10, 30, 50):
            await dlq.arrived(count)
            await proxy.cut()
        told = await ended(process)
    assert told["stopped_by"] == "all_taken"
    assert told["recovered"] - told["possible_duplicates"] <= 100 <= told["recovered"]
    assert told["possible_duplicates"] < 30, "those that were under way when a connection was cut, not all that waited"
    await dlq.check(duplicates_max=told["possible_duplicates"])


async def test_letters_that_wait_for_their_pace_may_be_near_their_limit(admin: Admin, tmp_path: Path) -> None:
    """With a limit of 7, two returns are all that a letter may bear."""
    await admin.quorum_queue("limited.dlq", **{"x-delivery-limit": 7})
    dlq = await DeadLetterQueue(admin, tmp_path, name="limited.dlq").make(declare_it=False)
    await dlq.fill(letter(n) for n in range(20))
    put_back = []
    for _ in range(3):
        arrived = await admin.count("collection.scan")
        process = dlq.start("--rate", "1/s", "--management", admin.node.management_url)
        await dlq.arrived(arrived + 1)
        process.send_signal(signal.SIGINT)
        put_back.append((await ended(process))["put_back"])
    assert put_back[:2] == [0, 0]
    assert put_back[2] > 10
    await dlq.check()


async def test_equal_letters_that_came_back_before_count_toward_the_limit(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(7) for _ in range(100)], counted=False)
    await dlq.recover("--dry-run")
    told = summary(await dlq.recover("--limit", "10", "--window", "5"))
    assert (told["recovered"], told["possible_duplicates"], told["remaining"]) == (10, 0, 90)


async def test_a_limit_above_the_depth_does_not_chase_letters_that_die_again(dlq: DeadLetterQueue) -> None:
    await dlq.admin.delete("collection.scan")
    back: dict[str, int | str] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dlq.name}
    await dlq.admin.queue("collection.scan", **{"x-message-ttl": 0}, **back)
    await dlq.admin.bind("collection.scan", EXCHANGE, "collection.scan")
    await dlq.fill([letter(1)], counted=False)
    assert summary(await dlq.recover("--limit", "50"))["recovered"] == 1


async def test_an_exchange_that_is_gone_harms_no_other_letter(dlq: DeadLetterQueue) -> None:
    gone = noted("gone", "k")
    await dlq.fill(letter(n, kind=None if n == 500 else "CollectionScan", told=gone) for n in range(1_000))
    ended = await dlq.recover()
    told = summary(ended)
    assert (told["recovered"], told["failed"], told["possible_duplicates"]) == (999, 1, 0)
    assert any("404" in reason for reason in told["reasons"]), told["reasons"]
    await dlq.check()


async def test_a_key_that_may_not_be_used_harms_no_other_key(dlq: DeadLetterQueue) -> None:
    node, vhost = dlq.admin.node, dlq.admin.vhost
    await dlq.admin.exchange("shop", "topic")
    for key in ("good", "bad"):
        await dlq.admin.queue(key)
        await dlq.admin.bind(key, "shop", key)
    node.api("PUT", "/users/topical", {"password": "topical", "tags": ""})
    node.api("PUT", f"/permissions/{vhost}/topical", {"configure": ".*", "write": ".*", "read": ".*"})
    node.api("PUT", f"/topic-permissions/{vhost}/topical", {"exchange": "shop", "write": "^good$", "read": ".*"})
    dlq.routes.write_text('exchange = "shop"\n[routes]\nGood = "good"\nBad = "bad"\n')
    await dlq.fill((letter(n, kind="Bad" if n == 0 else "Good") for n in range(300)), counted=False)
    url = node.url(vhost, user="topical:topical")
    ended = await asyncio.to_thread(dlq.command(), "recover", url, dlq.name, "--json", "--routes", str(dlq.routes))
    told = summary(ended)
    assert (told["recovered"], told["failed_by_queue"]) == (299, {"bad": 1})
    assert await dlq.admin.count("good") >= 299


@pytest.mark.parametrize("way", [(), ("--to-exchange",)], ids=["routes", "exchange"])
async def test_a_way_back_into_the_queue_itself_is_not_taken(dlq: DeadLetterQueue, way: tuple[str, ...]) -> None:
    await dlq.admin.bind(dlq.name, EXCHANGE, "back")
    there = noted(EXCHANGE, "back")
    await dlq.fill(letter(n, kind=None, told=there) for n in range(10))
    ended = await dlq.recover("--management", dlq.admin.node.management_url, *way, routes=not way)
    told = summary(ended)
    assert (ended.code, told["recovered"], told["failed"], told["remaining"]) == (3, 0, 10, 10)
    assert any("dead-letter queue itself" in reason for reason in told["reasons"])
    await dlq.check()


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_copy_that_another_queue_has_is_counted(dlq: DeadLetterQueue, is_seen: bool) -> None:
    """The letter is nacked because one queue is full; the other one has it, and gets it again with the next run."""
    asked = ["--management", dlq.admin.node.management_url if is_seen else "http://127.0.0.1:1"]
    await dlq.fill([letter(9_999, kind="Refused", key="refusing.queue")], counted=False)
    await dlq.admin.bind("cache.generation", EXCHANGE, "refusing.queue")
    await dlq.fill((letter(n, kind="Refused") for n in range(10)), counted=False)
    told = summary(await dlq.recover(*asked))
    counted = (told["possible_duplicates"], told["perhaps_elsewhere"])
    assert (told["failed"], *counted) == ((10, 10, 0) if is_seen else (10, 0, 10))
    assert await dlq.admin.count("cache.generation") == 10


@pytest.mark.parametrize("way", [(), ("--to", "refusing.queue")], ids=["seen", "straight"])
async def test_a_nack_where_one_queue_alone_gets_it_is_no_duplicate(dlq: DeadLetterQueue, way: tuple[str, ...]) -> None:
    await dlq.fill([letter(9_999, kind="Refused", key="refusing.queue")], counted=False)
    await dlq.fill((letter(n, kind="Refused") for n in range(10)), counted=False)
    asked = ["--management", "http://127.0.0.1:1" if way else dlq.admin.node.management_url]
    told = summary(await dlq.recover(*asked, *way, routes=not way))
    assert (told["failed"], told["possible_duplicates"], told["perhaps_elsewhere"]) == (10, 0, 0)


async def test_a_backup_that_cannot_be_written_ends_the_run_in_order(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(50))
    ended = await dlq.recover("--backup", "/dev/full")
    told = summary(ended)
    assert ended.code == 1
    assert "backup cannot be written" in told["failure"]
    assert (told["recovered"], told["remaining"], told["unseen"]) == (0, 50, 50)
    await dlq.check()
