"""Custody from a shell: the commands on an embedded vault, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.testing import assert_dead
from tests.support.command import Command, Inside
from tests.support.eventually import eventually
from tests.vault.letters import DLQ

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Inside:
    """A folder with two items that died in `orders`."""
    url = f"sqlite:///{tmp_path}/data"
    asyncio.run(_prepare(url))
    return Inside(tmp_path, url)


async def _prepare(url: str) -> None:
    async with holdfast.open(url) as queues:
        await queues.queues_create(DLQ)
        await queues.queues_create("orders", dead_queue=DLQ)
        await queues.queue_produce("orders", [b"one apple", b"two"])
        leased = await queues.queue_lease("orders", batch_size=2)
        dead = [holdfast.RetryItem(id=item.id, dead=True, reason="ValueError: no") for item in leased.items]
        await queues.queue_retry("orders", dead)

        async def arrived() -> bool:
            return len(await assert_dead(queues, DLQ, source_queue="orders")) == 2

        await eventually(arrived)


def test_letters_are_captured_found_edited_and_redriven(run: Inside) -> None:
    assert run.done("capture", DLQ, "--json").document["captured"] == 2
    assert [one["id"] for one in run.done("letters", "list", "--queue", DLQ, "--json").documents] == [2, 1]
    assert [one["id"] for one in run.done("letters", "search", "apple", "--json").documents] == [1]
    assert run.done("letters", "show", "1", "--body").stdout == b"one apple"
    assert "orders.dlq" in run.done("letters", "show", "1").text
    body = run.folder / "body"
    body.write_bytes(b"one pear")
    edit = ("letters", "edit", "1", "--revision", "0", "--body-file", body, "--set", "tenant=7", "--json")
    assert run.done(*edit).document == {"revision": 1}
    conflict = run(*edit)
    assert (conflict.code, conflict.error["code"], conflict.error["code_text"]) == (1, 409, "Conflict")
    sensitive = run("letters", "edit", "1", "--revision", "1", "--set", "x-kept-cc=1")
    assert sensitive.stderr.endswith("say --sensitive\n"), sensitive.stderr
    changed = run.done("letters", "diff", "1", "--json").document
    assert changed["put"] == {"tenant": 7}
    assert "+one pear" in changed["body"]
    exported = run.done("letters", "export", "--queue", DLQ).documents
    assert [one["id"] for one in exported] == [2, 1]
    plan = run.done("plan", "--queue", DLQ, "--json").document
    assert (plan["count"], plan["targets"]) == (2, {"orders": 2})
    task = run.done("redrive", "start", plan["hash"], "--reason", "mended", "--json").document
    assert (task["state"], task["redriven"]) == ("done", 2)
    assert run("redrive", "pause", "1").code == 1
    assert len(run.done("redrive", "list", "--json").documents) == 1
    items = run.done("queue", "items", "list", "orders", "--json").documents
    assert len(items) == 2
    assert run.done("balance", "--json").document[0]["ledger"] == {"redriven": 2}


def test_a_queue_that_only_a_broker_could_have_says_how_to_name_one(run: Inside) -> None:
    unknown = run("capture", "nowhere.dlq")
    assert unknown.code == 1
    assert "no broker is configured: for a queue of RabbitMQ set HOLDFAST_BROKER_URL" in unknown.stderr


def test_actions_name_their_count_and_the_ledger_tells_of_them(run: Inside) -> None:
    run.done("capture", DLQ)
    assert run("letters", "archive", "--count", "2").code == 2, "no selection"
    asked = run("letters", "archive", "--queue", DLQ, "--json")
    assert (asked.code, asked.document["count"], asked.document["done"]) == (2, 2, False)
    assert run("letters", "archive", "--queue", DLQ, "--count", "1").code == 1
    assert run.done("letters", "archive", "--queue", DLQ, "--count", "2", "--json").document == {"count": 2}
    assert run.done("letters", "restore", "--ids", "1", "--count", "1", "--json").document == {"count": 1}
    assert run.done("letters", "discard", "--ids", "1", "--count", "1", "--json").document == {"count": 1}
    (group,) = run.done("groups", "list", "--json").documents
    assert run.done("groups", "change", group["key"], "--status", "ignored", "--json").document["status"] == "ignored"
    head = run.done("ledger", "head", "--json").document["head"]
    assert run.done("ledger", "verify", "--anchor", head).code == 0
    assert run("ledger", "verify", "--anchor", f"9999:{'0' * 64}").code == 1
    assert run("ledger", "verify", "--anchor", "9999:00").code == 2, "a slip of the pen is no tampering"
    rows = run.done("ledger", "show", "--json").document["rows"]
    discarded = run.done("ledger", "export", "--action", "letters.discard").text.splitlines()
    assert [discarded[0].partition(",")[0], len(discarded)] == ["number", 2]
    assert {row["actor"].partition(":")[0] for row in rows} == {"cli"}


def test_an_interrupted_redrive_is_paused_and_can_be_resumed(run: Inside) -> None:
    run.done("capture", DLQ)
    plan = run.done("plan", "--queue", DLQ, "--max-per-s", "1", "--json").document
    command = Command(run.folder, run.url)
    with command.start("redrive", "start", plan["hash"], "--json") as process:
        # What the database says is all that can be seen from outside: the first letter is on its way.
        asyncio.run(eventually(lambda: _has_redriven(run.folder / "data" / "vault.db")))
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    assert (json.loads(stdout)["state"], json.loads(stdout)["redriven"]) == ("paused", 1)
    told = run("redrive", "watch", "1").text
    assert "redrive 1 is paused: 1 of 2 redriven\n" in told
    assert "go on with: holdfast redrive resume 1" in told
    assert run.done("redrive", "resume", "1", "--json").document["redriven"] == 2


def test_a_task_whose_process_was_killed_is_taken_over_and_tells_what_may_be_there_twice(run: Inside) -> None:
    run.done("capture", DLQ)
    plan = run.done("plan", "--queue", DLQ, "--json").document
    command = Command(run.folder, run.url)
    killed = command("redrive", "start", plan["hash"], HOLDFAST_CRASH_AT="redrive.after_confirm:1")
    assert killed.code == -9, killed
    held = run("redrive", "resume", "1")
    assert (held.code, "if that one is gone, try again in" in " ".join(held.stderr.split())) == (1, True), held
    later = "1000"  # its hold and its leases have run out
    watched = run("redrive", "watch", "1", HOLDFAST_CLOCK_OFFSET_S=later)
    assert watched.code == 1
    assert "nobody seems to run it" in watched.text
    assert "go on with: holdfast redrive resume 1" in watched.text
    task = run.done("redrive", "resume", "1", "--json", HOLDFAST_CLOCK_OFFSET_S=later).document
    assert (task["state"], task["redriven"], task["unknown"], task["possible_duplicates"]) == ("done", 2, 0, 2)
    assert "2 of them maybe twice" in run("redrive", "watch", "1").text


def test_a_cancelled_task_of_a_killed_process_gives_its_letters_back_and_says_what_may_be_there_twice(
    run: Inside,
) -> None:
    run.done("capture", DLQ)
    plan = run.done("plan", "--queue", DLQ, "--json").document
    killed = Command(run.folder, run.url)("redrive", "start", plan["hash"], HOLDFAST_CRASH_AT="redrive.after_confirm:1")
    assert killed.code == -9, killed
    told = " ".join(run.done("redrive", "cancel", "1").text.split())
    assert "2 letters may have been published; captured again now, or within 3 minutes" in told
    assert len(run.done("letters", "list", "--state", "redriving", "--json").documents) == 2, "its lease runs"
    later = "1000"
    task = run.done("redrive", "cancel", "1", "--json", HOLDFAST_CLOCK_OFFSET_S=later).document
    assert (task["state"], task["redriven"], task["failed"], task["unknown"]) == ("cancelled", 0, 0, 2)
    assert "nobody knows whether it was published" in " ".join(run.done("letters", "show", "1").text.split())
    run.done("letters", "discard", "--ids", "1", "--count", "1")
    plan = run.done("plan", "--queue", DLQ, "--json").document
    again = run.done("redrive", "start", plan["hash"], "--json").document
    assert (again["redriven"], again["possible_duplicates"]) == (1, 1)
    assert run.done("balance").code == 0


def test_a_plan_says_how_long_it_takes_and_why_letters_are_left_out(run: Inside) -> None:
    run.done("capture", DLQ)
    told = run.done("plan", "--queue", DLQ).text
    assert "it takes about 1s" in told
    assert "execute it: holdfast redrive start" in told
    run.done("letters", "archive", "--queue", DLQ, "--count", "2")
    empty = run("plan", "--queue", DLQ)
    assert (empty.code, "2 letters are left out, 1 for one: it is archived" in empty.text) == (1, True), empty.text
    assert "there is nothing to execute" in empty.text
    assert "redrive start" not in empty.text


def _has_redriven(path: Path) -> bool:
    database = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return bool(database.execute("SELECT id FROM letters WHERE state = 'redriven'").fetchall())
    except apsw.Error:
        return False
    finally:
        database.close()


def test_what_would_change_nothing_is_refused_with_the_reason(run: Inside) -> None:
    run.done("capture", DLQ)
    unchanged = run("letters", "edit", "1", "--revision", "0")
    assert (unchanged.code, "nothing is changed" in unchanged.stderr) == (1, True), unchanged
    assert run.done("letters", "diff", "1", "--json").document["revision"] == 0
    run.done("letters", "discard", "--ids", "1", "--count", "1")
    gone = run("letters", "restore", "--ids", "1")
    assert (gone.code, "discarded letters cannot be restored" in gone.text) == (1, True), gone
    assert "--count 0" not in gone.text
    assert "cannot be restored" in run("letters", "restore", "--ids", "1", "--state", "discarded").stderr
    assert (
        run("letters", "restore", "--ids", "2").text == "no letter that is archived fits; there is nothing to restore\n"
    )


def test_no_key_is_made_for_a_ledger_that_has_another(run: Inside) -> None:
    run.done("capture", DLQ)
    key = run.folder / "data" / "ledger-key"
    kept = key.read_bytes()
    key.unlink()
    missing = run("letters", "list")
    assert (missing.code, "bring back the file" in missing.stderr) == (1, True), missing
    assert not key.exists()
    key.write_bytes(kept)
    run.done("letters", "list")


def test_tokens_are_made_listed_and_revoked(run: Inside) -> None:
    token = run.done("token", "create", "ci", "--role", "operator", "--json").document["token"]
    assert token not in json.dumps(run.done("token", "list", "--json").documents)
    assert run("token", "create", "ci").code == 1
    run.done("token", "revoke", "ci")
    assert run("token", "revoke", "ci").code == 1


def test_a_changed_ledger_is_found(run: Inside) -> None:
    run.done("capture", DLQ)
    run.done("token", "create", "ci")
    database = apsw.Connection(str(run.folder / "data" / "vault.db"))
    database.execute("DROP TRIGGER ledger_is_not_changed")
    database.execute("UPDATE ledger SET actor = 'somebody else' WHERE number = 2")
    database.close()
    broken = run("ledger", "verify", "--json")
    assert (broken.code, broken.document["broken_at"]) == (1, 2)
