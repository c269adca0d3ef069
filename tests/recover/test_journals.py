"""Journals that killed runs left: whoever finishes the queue ends them, and nobody ends them before that.

An entry whose letter has left the queue would take a later letter of the same bytes for it, and lose that one.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from holdfast.proof.proxy import Proxy
from holdfast.stores.journal import RECORD_BYTES
from tests.faults.serving import Serving
from tests.recover.dead_letter_queue import DeadLetterQueue, ended_by_kill, letter, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq


def journals(dlq: DeadLetterQueue) -> list[Path]:
    """Those at the usual place, and the links to others."""
    return sorted((dlq.folder / "state" / "holdfast" / "recover").glob("*"))


def kill(dlq: DeadLetterQueue, point: str, *more: str | Path) -> None:
    """A run that ends there."""
    with dlq.start(*more, HOLDFAST_CRASH_AT=point) as killed:
        assert ended_by_kill(killed), killed.returncode


async def is_published_again(dlq: DeadLetterQueue, *more: str | Path) -> None:
    """A new letter like the one before, redelivered, goes out like any other."""
    await dlq.fill([letter(1)], counted=False)
    before = await dlq.admin.count("collection.scan")
    assert summary(await dlq.recover("--dry-run"))["returned"] == 1  # from now on it is marked as redelivered
    told = summary(await dlq.recover(*more))
    assert (told["recovered"], told["recognised"], told["possible_duplicates"]) == (1, 0, 0)
    assert await dlq.admin.count("collection.scan") == before + 1


async def serve(dlq: DeadLetterQueue, *, crash_at: str = "") -> None:
    """A server that recovers the queue at its start, until it is empty or the server is killed."""
    toml = f'[recover."{dlq.name}"]\non_start = true\nroutes = "routes.toml"\n'
    (dlq.folder / "holdfast.toml").write_text(toml)
    env = {"HOLDFAST_BROKER_URL": dlq.url, **({"HOLDFAST_CRASH_AT": crash_at} if crash_at else {})}
    async with Serving(f"sqlite:///{dlq.folder}/work", dlq.folder, env=env) as server:
        child = await server.launch()
        if crash_at:
            assert await child.wait(timeout_s=60) == -signal.SIGKILL, child.stderr.tail
        else:
            await eventually(lambda: "recovery.ended" in child.stderr.tail or not journals(dlq))
            child.signal(signal.SIGTERM)
            assert await child.wait(timeout_s=25) == 0, child.stderr.tail
    (dlq.folder / "holdfast.toml").unlink()


# --- an entry whose letter has left the queue ---------------------------------------------------------------------


@pytest.mark.parametrize("finishing", [("--no-journal",), ("--journal", "another.journal")])
async def test_whoever_finishes_the_queue_ends_its_journal(dlq: DeadLetterQueue, finishing: tuple[str, ...]) -> None:
    await dlq.fill([letter(1)], counted=False)
    kill(dlq, "recover.after_journal:1")
    assert len(journals(dlq)) == 1
    told = summary(await dlq.recover(*finishing))
    assert (told["recovered"], told["remaining"]) == (1, 0)
    assert told["recognised"] + told["possible_duplicates"] == 1, "without a journal it is published again, and counted"
    assert not journals(dlq)
    await is_published_again(dlq)


async def test_a_journal_elsewhere_is_ended_too(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(1)], counted=False)
    kill(dlq, "recover.after_journal:1", "--journal", "elsewhere.journal")
    told = summary(await dlq.recover())
    assert (told["recovered"], told["recognised"]) == (1, 1)
    assert not (dlq.folder / "elsewhere.journal").exists()
    assert not journals(dlq)
    await is_published_again(dlq, "--journal", "elsewhere.journal")


async def test_a_server_and_the_shell_have_one_journal(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(1)], counted=False)
    await serve(dlq, crash_at="recover.after_journal:1")
    assert len(journals(dlq)) == 1
    told = summary(await dlq.recover())
    assert (told["recovered"], told["recognised"]) == (1, 1)
    assert not journals(dlq)
    await dlq.fill([letter(1)], counted=False)
    kill(dlq, "recover.after_journal:1")
    await serve(dlq)
    assert await dlq.admin.count(dlq.name) == 0
    assert not journals(dlq)
    await is_published_again(dlq)


async def test_a_server_that_cannot_write_to_the_usual_place_keeps_it_with_its_data(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(1)], counted=False)
    (dlq.folder / "state").write_text("not a folder")
    await serve(dlq, crash_at="recover.after_journal:1")
    (dlq.folder / "state").unlink()
    [kept] = (dlq.folder / "holdfast-data" / "recover").iterdir()
    assert summary(await dlq.recover())["recognised"] == 1
    assert not kept.exists()
    await is_published_again(dlq)


@pytest.mark.parametrize("more", [("--limit", "1"), ()])
async def test_a_letter_that_is_published_again_ends_its_entry_at_once(
    dlq: DeadLetterQueue, more: tuple[str, ...]
) -> None:
    """By a run that recognises nothing, and does not come to the end of the queue."""
    await dlq.fill([letter(1), letter(2), letter(3)], counted=False)
    kill(dlq, "recover.after_journal:1", "--one-at-a-time")
    if more:
        assert summary(await dlq.recover("--no-journal", *more))["recovered"] == 1
    else:
        kill(dlq, "recover.after_ack:1", "--no-journal", "--one-at-a-time")
    assert len(journals(dlq)) == 1
    await dlq.fill([letter(1)], counted=False)
    assert summary(await dlq.recover("--dry-run"))["returned"] == 3
    told = summary(await dlq.recover())
    assert (told["recovered"], told["recognised"]) == (3, 0)
    assert await dlq.admin.count("collection.scan") == 5


async def test_what_takes_nothing_away_ends_nothing(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(1)], counted=False)
    kill(dlq, "recover.after_journal:1")
    [journal] = journals(dlq)
    before = journal.read_bytes()
    assert (await dlq.recover("--dry-run")).code == 0
    for refused in (("--journal", "another.journal"), ("--no-journal",)):
        routes = dlq.folder / "nowhere.toml"
        routes.write_text('[routes]\nCollectionScan = { exchange = "", key = "no.such.queue" }\n')
        ended = await dlq.recover(*refused, "--routes", routes, routes=False)
        assert (ended.code, "nothing was taken" in ended.stderr) == (1, True), ended
    assert journals(dlq) == [journal]
    assert journal.read_bytes() == before
    assert summary(await dlq.recover())["recognised"] == 1


# --- letters that are still there ---------------------------------------------------------------------------------

SHORT = [("--limit", "1"), ("--limit", "1", "--no-journal"), ("--limit", "1", "--journal", "another.journal")]


@pytest.mark.parametrize("short", SHORT)
async def test_a_short_run_after_a_killed_one_ends_nothing_that_it_has_not_seen(
    any_dlq: DeadLetterQueue, short: tuple[str, ...]
) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(300))
    kill(dlq, "recover.after_confirm:1", "--window", "100")
    first = summary(await dlq.recover(*short))
    assert first["recovered"] == 1
    second = summary(await dlq.recover())
    assert not journals(dlq)
    await dlq.check(duplicates_max=first["possible_duplicates"] + second["possible_duplicates"])


@pytest.mark.parametrize("short", SHORT)
async def test_entries_of_letters_that_a_short_run_has_not_seen_are_used_by_the_next(
    dlq: DeadLetterQueue, short: tuple[str, ...]
) -> None:
    await dlq.fill(letter(n) for n in range(100))
    kill(dlq, "recover.after_journal:1", "--window", "100")
    [journal] = journals(dlq)
    entries = len(journal.read_bytes().partition(b"\n")[2]) // RECORD_BYTES
    first = summary(await dlq.recover(*short))
    second = summary(await dlq.recover())
    assert first["recovered"] == 1
    assert first["recognised"] + second["recognised"] >= entries - 1
    await dlq.check(duplicates_max=first["possible_duplicates"] + second["possible_duplicates"])


async def test_a_run_that_leaves_letters_out_does_not_make_the_killed_one_forgotten(any_dlq: DeadLetterQueue) -> None:
    """They were looked at, and may have been published by the killed run: who publishes them counts them."""
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(300))
    kill(dlq, "recover.after_confirm:1", "--window", "100")
    first = summary(await dlq.recover("--where", "type=Nothing"))
    assert first["filtered"] == 300
    second = summary(await dlq.recover())
    assert second["recovered"] == 300
    assert not journals(dlq)
    await dlq.check(duplicates_max=second["possible_duplicates"])


async def test_a_run_that_ends_without_a_broker_ends_nothing(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(100))
    node = dlq.admin.node
    async with Proxy("127.0.0.1", node.port) as proxy:
        url = node.url(dlq.admin.vhost, port=proxy.port, more="?heartbeat=5")

        async def run(*more: str, **variables: str) -> tuple[int, bytes]:
            arguments = ("recover", url, dlq.name, "--json", "--routes", str(dlq.routes), *more)
            with dlq.command().start(*arguments, **variables) as process:
                if "--rate" in more:
                    await eventually(is_moved)
                    await proxy.refuse()
                    await proxy.cut()
                    process.send_signal(signal.SIGINT)
                out, _ = await asyncio.to_thread(process.communicate, timeout=60)
            return process.returncode, out

        async def is_moved() -> bool:
            return await dlq.admin.count("collection.scan") > moved

        code, _ = await run("--window", "50", HOLDFAST_CRASH_AT="recover.after_confirm:1")
        assert code == -signal.SIGKILL
        moved = await dlq.admin.count("collection.scan")
        _, out = await run("--rate", "5/s")
        first = json.loads(out.splitlines()[-1])
        assert len(journals(dlq)) == 1
        proxy.accept()
        _, out = await run()
        second = json.loads(out.splitlines()[-1])
    assert second["recovered"]
    assert not journals(dlq)
    await dlq.check(duplicates_max=first["possible_duplicates"] + second["possible_duplicates"])
