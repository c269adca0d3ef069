"""/admin/overview: every dead-letter queue at a glance, also while a broker says nothing."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.requests.declare import Role
from holdfast.errors import BrokerUnreachable
from holdfast.ports.broker import QueueFacts
from holdfast.services.vault import overview
from tests.faces.api.conftest import AdminInstallation
from tests.faces.api.test_endpoints import dead_item
from tests.faults.serving import Serving
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.vault.letters import ACT, DLQ, letter


async def seen(installation: AdminInstallation, token: str = "") -> dict[str, Any]:
    async with installation.client(token) if token else installation.client() as client:
        answer = await client.get("/admin/overview")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_the_overview_has_every_dead_queue_with_its_letters_by_state(stored: AdminInstallation) -> None:
    assert (await seen(stored))["queues"] == []
    await dead_item(stored)
    await stored.vault_app.vault.letters.put(
        [letter(b"1", last_at_us=7_000_000), letter(b"2", last_at_us=9_000_000), letter(b"3", queue="other.dlq")], ACT
    )
    async with stored.client() as client:
        done = await client.post("/admin/letters/archive", json={"selection": {"ids": [3]}, "count": 1})
        assert done.status_code == 200

    async def is_told() -> dict[str, Any]:
        found = await seen(stored)
        assert found["queues"][0]["ready"] == 1
        return found

    found = await eventually(is_told)  # what a broker said may be a moment old
    orders, other = found["queues"]
    assert orders == {
        "queue": DLQ,
        "source_queue": "orders",
        "broker": "queue",
        "ready": 1,
        "consumers": orders["consumers"],
        "states": {"captured": 2},
        "oldest_at": "1970-01-01T00:00:07Z",
        "capture": None,
    }
    assert (other["queue"], other["states"], other["oldest_at"]) == ("other.dlq", {"archived": 1}, None)
    assert (other["broker"], other["ready"], other["source_queue"]) == (None, None, None)
    (broker,) = found["brokers"]
    assert (broker["broker"], broker["reachable"], broker["why"], broker["redrives_wait"]) == ("queue", True, "", False)


async def test_a_capture_and_why_it_waits_are_seen(installation: AdminInstallation) -> None:
    async with installation.client() as client:
        await dead_item(installation)
        await client.post("/admin/captures", json={"queue": DLQ, "continuous": True})

        async def is_captured() -> bool:
            (queue,) = (await seen(installation))["queues"]
            return bool(queue["states"] == {"captured": 1} and queue["capture"]["state"] == "running")

        await eventually(is_captured)


async def test_a_token_held_to_queues_sees_its_own_and_no_reasons(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> list[QueueFacts]:
        raise BrokerUnreachable("management API cannot be reached; http://secret-host:15672: refused")

    monkeypatch.setattr(installation.vault_app.custody.brokers[0].inspector, "queues", away)
    await installation.vault_app.vault.letters.put([letter(b"1"), letter(b"2", queue="pay.dlq")], ACT)
    token = await installation.token("held", Role.VIEWER, ["orders*"])
    found = await seen(installation, token)
    assert [queue["queue"] for queue in found["queues"]] == [DLQ]
    assert [(one["reachable"], one["why"]) for one in found["brokers"]] == [(False, "")]
    assert "secret-host" in (await seen(installation))["brokers"][0]["why"]


async def test_a_broker_that_does_not_answer_is_said_to_be_away_and_holds_nobody_up(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = 0, asyncio.Event()

    async def hanging() -> list[QueueFacts]:
        nonlocal asked
        asked += 1
        await answers.wait()
        return [QueueFacts(queue=DLQ, ready=5)]

    monkeypatch.setattr(overview, "SILENT_S", 0.1)
    monkeypatch.setattr(overview, "PATIENCE_S", 0.05)
    monkeypatch.setattr(installation.vault_app.custody.brokers[0].inspector, "queues", hanging)
    await installation.put(b"1")
    assert (await seen(installation))["brokers"][0]["reachable"] is None

    async def is_away() -> bool:
        return bool((await seen(installation))["brokers"][0]["reachable"] is False)

    await eventually(is_away)
    many = await asyncio.gather(*(seen(installation) for _ in range(20)))
    assert {one["queues"][0]["ready"] for one in many} == {None}
    assert "has not answered" in many[0]["brokers"][0]["why"]
    assert asked == 1, "one question for all who look"
    answers.set()

    async def is_back() -> bool:
        found = await seen(installation)
        return bool(found["brokers"][0]["reachable"] and found["queues"][0]["ready"] == 5)

    await eventually(is_back)


async def test_a_question_that_hangs_ends_with_the_server(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "PATIENCE_S", 0.0)
    monkeypatch.setattr(installation.vault_app.custody.brokers[0].inspector, "queues", asyncio.Event().wait)
    await seen(installation)
    assert [task for task in asyncio.all_tasks() if "dead-letter queues of" in task.get_name()]
    await installation.vault_app.close()
    assert not [task for task in asyncio.all_tasks() if "dead-letter queues of" in task.get_name()]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "refused"])
async def test_a_rabbitmq_that_is_away_is_said_at_once(tmp_path: Path, silent_port: int, *, is_silent: bool) -> None:
    """The real server, whose broker was never there."""
    port = silent_port if is_silent else free_port()
    env = {
        "HOLDFAST_BROKER": f"amqp://127.0.0.1:{port}",
        "HOLDFAST_MANAGEMENT": f"http://127.0.0.1:{port}",
        "HOLDFAST_DATA_FOLDER": str(tmp_path),
    }
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
        await server.start()

        def is_away() -> bool:
            began_s = time.monotonic()
            found = server.ask("/admin/overview")
            assert time.monotonic() - began_s < 5.0
            rabbit, embedded = found["brokers"]
            assert embedded["reachable"] is True
            return bool(rabbit["reachable"] is False and rabbit["why"] and rabbit["redrives_wait"])

        await eventually(is_away)
