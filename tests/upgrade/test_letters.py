"""A vault that an older program left: letters, tasks, tokens and the chain are as they were, and all of it goes on."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.faults.serving import Serving
from tests.support.amqp import Admin, headers_of, message_id_of
from tests.support.eventually import eventually
from tests.upgrade import story
from tests.upgrade.conftest import OldInstallation

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
async def server(installation: OldInstallation, broker: Admin) -> AsyncIterator[Serving]:
    """Today's server on it, with a RabbitMQ that has the same queues."""
    for queue in (story.DLQ, story.LATE_DLQ, story.SCAN):
        await broker.queue(queue)
    env = {
        "HOLDFAST_BROKER": broker.url,
        "HOLDFAST_MANAGEMENT": broker.node.management_url,
        "HOLDFAST_ADMIN_TOKEN": "",  # the one in the data folder
        **installation.env,
    }
    async with Serving(installation.url, installation.folder.parent, env=env) as made:
        await made.start()
        made.token = (installation.folder / "admin-token").read_text().strip()
        yield made


def task_of(server: Serving, operation: str) -> dict[str, Any]:
    (found,) = [one for one in server.ask("/admin/redrives")["redrives"] if one["operation"] == operation]
    return dict(found)


async def test_a_vault_is_as_it_was_and_goes_on(server: Serving, installation: OldInstallation, broker: Admin) -> None:
    """One server for all of it: to start one takes longer than to ask it."""
    told = installation.told
    assert server.token == told["admin_token"]
    _letters_are_there(server, told)
    _the_chain_holds(server, told)
    _tokens_are_known(server, told)
    await _the_killed_task_goes_on(server, told, broker)
    await _the_paused_task_goes_on(server, told, broker)
    await _a_capture_that_was_killed_makes_no_second_letter(server, broker)
    await _a_redriven_letter_that_comes_back_is_known(server, told, broker)
    _the_chain_holds(server, told)
    assert all(row["ledger"] == row["vault"] for row in server.ask("/admin/balance"))


def _letters_are_there(server: Serving, told: dict[str, Any]) -> None:
    going = set(told["redriving"])  # a task has them
    now = {one["id"]: one for one in server.ask("/admin/letters", limit=100)["letters"]}
    before = {one["id"]: one for one in told["letters"]}
    assert {number: now[number] for number in before if number not in going} == {
        number: one for number, one in before.items() if number not in going
    }
    assert {one["state"] for one in before.values()} == {
        "captured", "redriven", "resolved", "came_back", "archived", "discarded"
    }  # fmt: skip
    assert len(now) == len(before) + 2, "two whose capture was killed"
    for number, revisions in told["revisions"].items():
        assert server.ask(f"/admin/letters/{number}/revisions") == revisions
    exported = {line["id"]: line for line in told["exported"]}
    for number, line in exported.items():
        body = server.answer("GET", f"/admin/letters/{number}/body").content
        assert body == (story.LARGE if not line["body"] else _decoded(line["body"]))
    keys = {(one["key"], one["status"], one["note"], one["title"]) for one in server.ask("/admin/groups")["groups"]}
    assert keys == {(one["key"], one["status"], one["note"], one["title"]) for one in told["groups"]}
    assert server.ask("/admin/imports/failed")["failed"] == told["failed"]
    assert server.ask("/admin/letters", text="apple number 3")["count"] == 1
    assert server.ask("/admin/letters", error="NoSuchOrder", state="discarded")["count"] == 0


def _the_chain_holds(server: Serving, told: dict[str, Any]) -> None:
    verified = server.ask("/admin/ledger/verify", anchor=told["anchor"])
    assert (verified["broken_at"], verified["rows"] > len(told["ledger"])) == (0, True), verified
    rows = server.ask("/admin/ledger", limit=500)["rows"]
    (sealed_from,) = [row["number"] for row in rows if row["action"] == "ledger.sealed"]
    assert verified["sealed_from"] == sealed_from
    assert any("before row" in one for one in verified["unknown"])
    assert rows[: len(told["ledger"])] == told["ledger"]
    for number, history in told["history"].items():
        assert server.ask(f"/admin/letters/{number}/history")["rows"][: len(history)] == history


def _tokens_are_known(server: Serving, told: dict[str, Any]) -> None:
    assert server.ask("/admin/tokens") == told["token_list"]

    def code(name: str, path: str) -> int:
        return server.answer("GET", path, token=told["tokens"][name]).status_code

    first = f"/admin/letters/{told['exported'][0]['id']}"
    assert [code("reader", first), code("reader", f"{first}/body"), code("former", first)] == [200, 403, 401]
    assert [code("clerk", f"{first}/body"), code("clerk", "/admin/ledger")] == [200, 403]


async def _the_killed_task_goes_on(server: Serving, told: dict[str, Any], broker: Admin) -> None:
    """Its letters were published, and nobody had noted it: they go again, are counted, and carry the same id."""
    await eventually(lambda: task_of(server, "killed")["state"] == "done")
    task = task_of(server, "killed")
    assert (task["total"], task["redriven"], task["possible_duplicates"], task["failed"]) == (3, 3, 3, 0)
    arrived = {message_id_of(one): one for one in await broker.drain(story.SCAN, 3)}
    assert set(arrived) == set(told["arrived"]) == {"m-005", "m-010", "m-011"}
    assert arrived["m-011"].body == story.LARGE
    edited = arrived["m-005"]
    headers = headers_of(edited)
    assert (edited.body, headers["tenant"], headers["new"]) == (b'{"n": 5, "text": "pear"}', "other", 7)
    assert "weight" not in headers
    assert {name: headers_of(one)["x-redrive-id"] for name, one in arrived.items()} == told["redrive_ids"]


async def _the_paused_task_goes_on(server: Serving, told: dict[str, Any], broker: Admin) -> None:
    task = server.ask(f"/admin/redrives/{told['paused']}/resume", {})
    assert (task["state"], task["redriven"]) == ("running", 1)
    await eventually(lambda: task_of(server, "paused")["state"] == "done")
    assert task_of(server, "paused")["redriven"] == 2
    assert [message_id_of(one) for one in await broker.drain(story.SCAN, 1)] == ["m-009"]


async def _a_capture_that_was_killed_makes_no_second_letter(server: Serving, broker: Admin) -> None:
    story.send(broker, story.LATE_DLQ, 21, 22, 23)
    assert len(await broker.look(story.LATE_DLQ)) == 3
    report = server.ask("/admin/captures", {"queue": story.LATE_DLQ})
    assert (report["matched"], report["captured"]) == (2, 1)
    assert server.ask("/admin/letters", queue=story.LATE_DLQ)["count"] == 3


async def _a_redriven_letter_that_comes_back_is_known(server: Serving, told: dict[str, Any], broker: Admin) -> None:
    """The old program published it, with an id that the vault still has."""
    (number,) = [one["id"] for one in told["letters"] if one["message_id"] == "m-010"]
    redrive_id = told["redrive_ids"]["m-010"]
    story.send(broker, story.DLQ, 10, told={**story.PARKED, "x-redrive-id": redrive_id})
    assert server.ask("/admin/captures", {"queue": story.DLQ})["captured"] == 1
    newest = server.ask("/admin/letters", limit=1)["letters"][0]
    assert (newest["message_id"], newest["came_from"]) == ("m-010", number)
    assert server.ask(f"/admin/letters/{number}")["state"] == "came_back"


def test_a_plan_of_before_is_executed_and_nothing_else(installation: OldInstallation) -> None:
    """From a shell, on letters of the embedded queue; no task of RabbitMQ's goes on there."""
    plan = installation.told["plan"]
    run = installation.run
    task = run("redrive", "start", plan["hash"], "--json").document
    assert (task["state"], task["total"], task["redriven"]) == ("done", 3, 3)
    items = run("queue", "items", "list", story.SHOP, "--json").documents
    assert sorted(_decoded(one["payload"]) for one in items) == [b"captured 1", b"captured 2", b"captured 3"]
    assert {one["reference"] for one in items} == {"d-0", "d-1", "d-2"}
    verified = run("ledger", "verify", "--anchor", installation.told["anchor"])
    assert (verified.code, "not known: what became of bodies" in verified.stderr) == (0, True)
    assert run("balance").code == 0


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
