"""A vault that an older program left: letters, tasks, tokens and the chain are as they were, and all of it goes on."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.upgrade import story
from tests.upgrade.broker import Broker
from tests.upgrade.conftest import OldInstallation
from tests.upgrade.server import Server, serving, wait_for

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def server(installation: OldInstallation, broker: Broker) -> Iterator[Server]:
    """Today's server on it, with a RabbitMQ that has the same queues."""
    for queue in (story.DLQ, story.LATE_DLQ, story.SCAN):
        broker.queue(queue)
    env = {"HOLDFAST_BROKER": broker.url, "HOLDFAST_MANAGEMENT": broker.node.management_url, **installation.env}
    with serving(installation.url, installation.folder, env=env) as made:
        yield made


def task_of(server: Server, operation: str) -> dict[str, Any]:
    (found,) = [one for one in server.get("/admin/redrives")["redrives"] if one["operation"] == operation]
    return dict(found)


def test_a_vault_is_as_it_was_and_goes_on(server: Server, installation: OldInstallation, broker: Broker) -> None:
    """One server for all of it: to start one takes longer than to ask it."""
    told = installation.told
    assert server.token == told["admin_token"]
    _letters_are_there(server, told)
    _the_chain_holds(server, told)
    _tokens_are_known(server, told)
    _the_killed_task_goes_on(server, told, broker)
    _the_paused_task_goes_on(server, told, broker)
    _a_capture_that_was_killed_makes_no_second_letter(server, broker)
    _a_redriven_letter_that_comes_back_is_known(server, told, broker)
    _the_chain_holds(server, told)
    assert all(row["ledger"] == row["vault"] for row in server.get("/admin/balance"))


def _letters_are_there(server: Server, told: dict[str, Any]) -> None:
    going = set(told["redriving"])  # a task has them
    now = {one["id"]: one for one in server.get("/admin/letters", limit=100)["letters"]}
    before = {one["id"]: one for one in told["letters"]}
    assert {number: now[number] for number in before if number not in going} == {
        number: one for number, one in before.items() if number not in going
    }
    assert {one["state"] for one in before.values()} == {
        "captured", "redriven", "resolved", "came_back", "archived", "discarded"
    }  # fmt: skip
    assert len(now) == len(before) + 2, "two whose capture was killed"
    for number, revisions in told["revisions"].items():
        assert server.get(f"/admin/letters/{number}/revisions") == revisions
    exported = {line["id"]: line for line in told["exported"]}
    for number, line in exported.items():
        body = server.http.get(f"/admin/letters/{number}/body").content
        assert body == (story.LARGE if not line["body"] else _decoded(line["body"]))
    keys = {(one["key"], one["status"], one["note"], one["title"]) for one in server.get("/admin/groups")["groups"]}
    assert keys == {(one["key"], one["status"], one["note"], one["title"]) for one in told["groups"]}
    assert server.get("/admin/imports/failed")["failed"] == told["failed"]
    assert server.get("/admin/letters", text="apple number 3")["count"] == 1
    assert server.get("/admin/letters", error="NoSuchOrder", state="discarded")["count"] == 0


def _the_chain_holds(server: Server, told: dict[str, Any]) -> None:
    verified = server.get("/admin/ledger/verify", anchor=told["anchor"])
    assert (verified["broken_at"], verified["rows"] > len(told["ledger"])) == (0, True), verified
    rows = server.get("/admin/ledger", limit=len(told["ledger"]))["rows"]
    assert rows == told["ledger"]
    for number, history in told["history"].items():
        assert server.get(f"/admin/letters/{number}/history")["rows"][: len(history)] == history


def _tokens_are_known(server: Server, told: dict[str, Any]) -> None:
    assert server.get("/admin/tokens") == told["token_list"]

    def code(name: str, path: str) -> int:
        headers = {"authorization": f"Bearer {told['tokens'][name]}"}
        return server.http.get(path, headers=headers).status_code

    first = f"/admin/letters/{told['exported'][0]['id']}"
    assert [code("reader", first), code("reader", f"{first}/body"), code("former", first)] == [200, 403, 401]
    assert [code("clerk", f"{first}/body"), code("clerk", "/admin/ledger")] == [200, 403]


def _the_killed_task_goes_on(server: Server, told: dict[str, Any], broker: Broker) -> None:
    """Its letters were published, and nobody had noted it: they go again, are counted, and carry the same id."""
    wait_for(lambda: task_of(server, "killed")["state"] == "done")
    task = task_of(server, "killed")
    assert (task["total"], task["redriven"], task["possible_duplicates"], task["failed"]) == (3, 3, 3, 0)
    arrived = {one.id: one for one in broker.drain(story.SCAN)}
    assert set(arrived) == set(told["arrived"]) == {"m-005", "m-010", "m-011"}
    assert arrived["m-011"].body == story.LARGE
    edited = arrived["m-005"]
    assert (edited.body, edited.headers["tenant"], edited.headers["new"]) == (b'{"n": 5, "text": "pear"}', "other", 7)
    assert "weight" not in edited.headers
    assert {name: one.headers["x-redrive-id"] for name, one in arrived.items()} == told["redrive_ids"]


def _the_paused_task_goes_on(server: Server, told: dict[str, Any], broker: Broker) -> None:
    task = server.post(f"/admin/redrives/{told['paused']}/resume")
    assert (task["state"], task["redriven"]) == ("running", 1)
    wait_for(lambda: task_of(server, "paused")["state"] == "done")
    assert task_of(server, "paused")["redriven"] == 2
    assert [one.id for one in broker.drain(story.SCAN)] == ["m-009"]


def _a_capture_that_was_killed_makes_no_second_letter(server: Server, broker: Broker) -> None:
    for number in (21, 22):
        broker.publish(story.LATE_DLQ, story.body(number), story.letter(number))
    broker.publish(story.LATE_DLQ, story.body(23), story.letter(23))
    assert broker.give_back(story.LATE_DLQ) == 3
    report = server.post("/admin/captures", {"queue": story.LATE_DLQ})
    assert (report["matched"], report["captured"]) == (2, 1)
    assert server.get("/admin/letters", queue=story.LATE_DLQ)["count"] == 3


def _a_redriven_letter_that_comes_back_is_known(server: Server, told: dict[str, Any], broker: Broker) -> None:
    """The old program published it, with an id that the vault still has."""
    (number,) = [one["id"] for one in told["letters"] if one["message_id"] == "m-010"]
    redrive_id = told["redrive_ids"]["m-010"]
    broker.publish(story.DLQ, story.body(10), story.letter(10, told={**story.PARKED, "x-redrive-id": redrive_id}))
    assert server.post("/admin/captures", {"queue": story.DLQ})["captured"] == 1
    newest = server.get("/admin/letters", limit=1)["letters"][0]
    assert (newest["message_id"], newest["came_from"]) == ("m-010", number)
    assert server.get(f"/admin/letters/{number}")["state"] == "came_back"


def test_a_plan_of_before_is_executed_and_nothing_else(installation: OldInstallation) -> None:
    """From a shell, on letters of the embedded queue; no task of RabbitMQ's goes on there."""
    plan = installation.told["plan"]
    run = installation.run
    task = run("redrive", "start", plan["hash"], "--json").document
    assert (task["state"], task["total"], task["redriven"]) == ("done", 3, 3)
    items = run("queue", "items", "list", story.SHOP, "--json").documents
    assert sorted(_decoded(one["payload"]) for one in items) == [b"captured 1", b"captured 2", b"captured 3"]
    assert {one["reference"] for one in items} == {"d-0", "d-1", "d-2"}
    assert run("ledger", "verify", "--anchor", installation.told["anchor"]).code == 0
    assert run("balance").code == 0


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
