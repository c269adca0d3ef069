"""Recoveries that a server runs: asked for over HTTP, followed, stopped; and the server is killed meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.faults.serving import Serving
from tests.recover.dead_letter_queue import EXCHANGE, ROUTES, DeadLetterQueue, header, letter, noted
from tests.support.amqp import Admin
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

DLQ = "imageviewer.dlq"
COUNT = 300
WISH: dict[str, Any] = {"queue": DLQ, "routes": ROUTES}


@pytest.fixture
async def server(dlq: DeadLetterQueue) -> AsyncIterator[Serving]:
    """A server beside the dead-letter queue, with its broker."""
    env = {"HOLDFAST_BROKER_URL": dlq.url, "HOLDFAST_MANAGEMENT_URL": dlq.admin.node.management_url}
    async with Serving(f"sqlite:///{dlq.folder}/data", dlq.folder, env=env) as server:
        await server.start()
        yield server


async def ended(server: Serving, run: str) -> dict[str, Any]:
    """A recovery at its end."""

    async def has_ended() -> Any:
        told = await asyncio.to_thread(server.ask, f"/admin/recoveries/{run}")
        return told if told["recovery"]["ended_at"] else None

    found: dict[str, Any] = await eventually(has_ended, timeout_s=60.0)
    return found


def start(server: Serving, **more: Any) -> str:
    return str(server.ask("/admin/recoveries", {**WISH, **more})["recovery"]["run"])


async def recover(server: Serving, **more: Any) -> dict[str, Any]:
    return await ended(server, start(server, **more))


async def test_before_dry_and_for_real(server: Serving, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n, kind=("CollectionScan", "CacheGeneration", "Strange")[n % 3]) for n in range(COUNT))
    before = server.ask("/admin/recoveries/preflight", WISH)
    assert (before["ready"], before["queue_type"], before["refused"]) == (COUNT, "classic", "")
    dry = await recover(server, dry_run=True)
    assert dry["summary"]["planned"]["CollectionScan"] == {"exchange 'imageviewer' with key 'collection.scan'": 100}
    assert (dry["recovery"]["recovered"], dry["recovery"]["remaining"]) == (0, COUNT)
    told = await recover(server)
    assert told["recovery"]["state"] == "partly_done"
    assert told["summary"]["by_queue"] == {"collection.scan": 100, "cache.generation": 100}
    assert told["summary"]["reasons"]["type 'Strange' is not in the route table"]["count"] == 100
    assert told["summary"]["reasons"]["type 'Strange' is not in the route table"]["sample"]["body"] == ""
    listed = server.ask("/admin/recoveries")["recoveries"]
    assert [(one["dry_run"], one["recovered"], one["by"]) for one in listed] == [
        (False, 200, "admin"),
        (True, 0, "admin"),
    ]
    ledger = server.ask("/admin/ledger")["rows"]
    assert [row["detail"] for row in ledger if row["action"] == "recoveries.start"] == [
        f"recovery {dry['recovery']['run']} (dry run)",
        f"recovery {told['recovery']['run']}",
    ]
    rows = [row for row in ledger if row["action"] == "recovery"]
    assert [(row["queue"], row["outcome"], row["count"]) for row in rows] == [
        (DLQ, "partly_done", 0),
        (DLQ, "partly_done", 200),
    ]
    (seen, *_) = (await dlq.found())["collection.scan"]
    assert header(seen, "x-redriven-by") == "admin"
    assert header(seen, "x-redrive-run") == told["recovery"]["run"]
    dlq.books.check(duplicates_max=0)
    assert list((dlq.folder / "state" / "holdfast" / "recover").glob("*")) == [], "its journal ended with it"


async def test_what_could_not_be_safe_takes_nothing_and_says_why(server: Serving, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3))
    for more, status, why in (
        ({"routes": "[routes]\nA = 'gone'"}, 400, "queue 'gone' does not exist"),
        ({"routes": f"[routes]\nA = '{DLQ}'"}, 400, "route is cyclic"),
        ({"routes": "[routes]\nA = 'os:system'\nhandler = 1"}, 400, "routes"),
        ({"routes": "[routes]\nA = 'x'\n[code]\nimport = 'os'"}, 400, "unknown field `code`"),
        ({"routes": "/etc/passwd"}, 400, "is not TOML"),
        ({"routes": "a" + ".a" * 30_000 + " = 1"}, 400, "a line with more than 16 dots"),
        ({"routes": "a = 1" + "1" * 5_000}, 400, "is not TOML"),
        ({"routes": "a" * 64_001}, 400, "length <= 64000"),
        ({"to": "address"}, 400, "address is invalid"),
        ({"where": ["colour=red"]}, 400, "filter is invalid"),
        ({"total_timeout": "soon"}, 400, "total_timeout"),
        ({"queue": "orders"}, 404, "queue is unknown"),
    ):
        refused = server.answer("POST", "/admin/recoveries", json={**WISH, **more})
        assert (refused.status_code, why in refused.json()["detail"]) == (status, True), refused.text
    assert await dlq.admin.count(DLQ) == 3


async def test_one_queue_is_recovered_by_one_at_a_time(server: Serving, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    run = start(server, rate=20)
    refused = server.answer("POST", "/admin/recoveries", json=WISH)
    assert (refused.status_code, "recovery runs already" in refused.text) == (409, True)
    shell = await dlq.recover()
    assert shell.code == 1, "the command line finds the same lock and journal"
    server.ask(f"/admin/recoveries/{run}/stop", {})
    told = await ended(server, run)
    assert told["recovery"]["stopped_by"] == "signal"
    with dlq.start("--rate", "20/s") as command:
        await dlq.arrived(told["recovery"]["recovered"] + 2)
        late = server.answer("POST", "/admin/recoveries", json=WISH)
        assert late.status_code in (400, 409), late.text
        command.send_signal(signal.SIGTERM)
        command.communicate(timeout=60)
    assert (await recover(server))["recovery"]["remaining"] == 0
    await dlq.check(duplicates_max=0)
    too_late = server.answer("POST", f"/admin/recoveries/{run}/stop", json={})
    assert (too_late.status_code, "recovery is over" in too_late.text) == (409, True)


async def test_runs_of_a_shell_are_listed_as_well(server: Serving, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3))
    config = dlq.folder / "holdfast.toml"
    config.write_text(f'vault = "sqlite:///{dlq.folder}/data"\n')
    config.chmod(0o600)
    assert (await dlq.recover()).code == 0
    (row,) = server.ask("/admin/recoveries")["recoveries"]
    assert (row["queue"], row["recovered"], row["state"]) == (DLQ, 3, "done")


async def test_a_server_that_stops_gives_everything_back(server: Serving, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    run = start(server, rate=50)
    await dlq.arrived(10)
    assert await server.child.terminate() == 0
    left = await dlq.admin.count(DLQ)
    assert 0 < left < COUNT
    await server.start()
    told = server.ask(f"/admin/recoveries/{run}")["recovery"]
    assert (told["stopped_by"], told["recovered"], told["remaining"]) == ("signal", COUNT - left, left)
    assert (await recover(server))["recovery"]["remaining"] == 0
    await dlq.check(duplicates_max=0)


@pytest.mark.parametrize("point", ["recover.after_publish", "recover.after_confirm", "recover.after_journal"])
async def test_a_server_that_is_killed_loses_nothing(server: Serving, dlq: DeadLetterQueue, point: str) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    child = await server.start(HOLDFAST_CRASH_AT=f"{point}:2")
    asked = await asyncio.to_thread(_ask_unless_killed, server)
    assert await child.wait() == -signal.SIGKILL, asked
    await server.start()
    told = await recover(server)
    assert told["recovery"]["remaining"] == 0
    seen = await dlq.found()
    report = dlq.books.check(duplicates_max=told["summary"]["possible_duplicates"])
    for name in report.duplicated:
        copies = [one for one in seen["collection.scan"] if dlq.name_of(one) == name]
        assert len({header(one, "x-redrive-id") for one in copies}) == 1, "a duplicate can be told by its redrive id"
    if point == "recover.after_journal":
        assert told["summary"]["recognised"] > 0


def _ask_unless_killed(server: Serving) -> str:
    try:
        return server.answer("POST", "/admin/recoveries", json={**WISH, "rate": 200}).text
    except Exception as error:  # noqa: BLE001 - it may be killed before it has answered
        return repr(error)


async def _token(server: Serving, role: str, *queues: str) -> str:
    made = server.ask("/admin/tokens", {"name": f"{role} of {len(queues)}", "role": role, "queues": list(queues)})
    return str(made["token"])


async def test_a_token_that_is_held_to_queues_sends_to_these_alone(server: Serving, dlq: DeadLetterQueue) -> None:
    """Also where the letters themselves say that they died elsewhere."""
    await dlq.fill([letter(0, told=noted("", "collection.scan"))])
    elsewhere = noted("", "cache.generation", queue="cache.generation")
    await dlq.fill([letter(1, told=elsewhere), letter(2, told=noted(EXCHANGE, "cache.generation"))])
    held = await _token(server, "operator", "imageviewer*", "collection.*")

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        return server.answer("GET" if body is None else "POST", path, token=held, json=body)

    for more in (
        {"routes": '[routes]\nA = "cache.generation"'},
        {"routes": '[routes]\nA = "collection.scan"', "source": "cache.generation"},
        {"routes": 'redirect = "cache.generation"'},
        {"routes": ROUTES},
        {"to": "address", "address": {"routing_key": "cache.generation"}},
        {"to": "address", "address": {"exchange": EXCHANGE, "routing_key": "collection.scan"}},
        {"queue": "other.dlq"},
    ):
        for path in ("/admin/recoveries", "/admin/recoveries/preflight"):
            refused = ask(path, {"queue": DLQ, **more})
            assert refused.status_code == 403, refused.text
    assert ask("/admin/recoveries/preflight", {"queue": DLQ}).json()["refused"] == ""
    assert ask("/admin/topology").status_code == 403
    done = await ended(server, ask("/admin/recoveries", {"queue": DLQ, "to": "source"}).json()["recovery"]["run"])
    assert done["summary"]["by_queue"] == {"collection.scan": 2}
    assert done["summary"]["reasons"]["its run may not send to where it would go"]["count"] == 1
    exchange = await ended(server, ask("/admin/recoveries", {"queue": DLQ, "to": "exchange"}).json()["recovery"]["run"])
    assert exchange["recovery"]["recovered"] == 0, "an exchange may lead anywhere"
    whole = await recover(server, to="source", routes="")
    assert whole["summary"]["by_queue"] == {"cache.generation": 1}
    seen = ask(f"/admin/recoveries/{whole['recovery']['run']}").text + ask("/admin/recoveries").text
    assert "cache.generation" not in seen
    assert "(of other queues)" in seen
    await dlq.check(duplicates_max=0)


async def test_roles_see_try_and_start(server: Serving, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3))
    viewer, operator = await _token(server, "viewer"), await _token(server, "operator")
    assert server.answer("GET", "/admin/recoveries", token=viewer).status_code == 200
    assert server.answer("POST", "/admin/recoveries", token=viewer, json=WISH).status_code == 403
    denied = [row for row in server.ask("/admin/ledger")["rows"] if row["outcome"] == "denied"]
    assert [(row["action"], row["queue"]) for row in denied] == [("recoveries.start", "")]
    assert server.answer("POST", "/admin/recoveries", token=operator, json=WISH).status_code == 200
    await server.start(HOLDFAST_REDRIVE_ROLE="admin")
    assert server.answer("POST", "/admin/recoveries", token=operator, json=WISH).status_code == 403
    assert server.answer("POST", "/admin/recoveries/preflight", token=operator, json=WISH).status_code == 403


async def test_what_a_schedule_runs_is_seen_and_can_be_stopped(admin: Admin, dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    config = dlq.folder / "holdfast.toml"
    config.write_text(f'[recover."{DLQ}"]\non_start = true\nto = "source"\nrate = 20\n')
    config.chmod(0o600)
    async with Serving(f"sqlite:///{dlq.folder}/data", dlq.folder, env={"HOLDFAST_BROKER_URL": admin.url}) as server:
        await server.start()

        async def runs() -> Any:
            found = server.ask("/admin/recoveries")["recoveries"]
            return found if found and found[0]["recovered"] else None

        (row,) = await eventually(runs, timeout_s=30.0)
        assert (row["state"], row["queue"], row["expected"]) == ("running", DLQ, COUNT)
        refused = server.answer("POST", "/admin/recoveries", json={"queue": DLQ})
        assert refused.status_code == 409
        server.ask(f"/admin/recoveries/{row['run']}/stop", {})
        told = await ended(server, row["run"])
        assert told["recovery"]["stopped_by"] == "signal"
    await dlq.check(duplicates_max=0)
