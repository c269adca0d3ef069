"""What programs watch: /admin/events and the vault's part of /metrics; and what the settings change of custody."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.letter import DeathStory, Fingerprint, fingerprint
from holdfast.core.moments import Backoff
from holdfast.core.requests.declare import REQUESTS, Caller, Role
from holdfast.core.states import LetterState
from holdfast.errors import CannotStart
from holdfast.ports.broker import Broker, QueueFacts
from holdfast.services.vault import admin, capture
from holdfast.services.vault.admin import SERVER
from holdfast.services.vault.capture import load_fingerprint
from holdfast.telemetry.prometheus import OTHERS, QUEUES_COUNT_MAX, CaptureGauge, render_vault
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.api.test_endpoints import dead_item, dying_item
from tests.support.eventually import eventually
from tests.vault.letters import DLQ, act


async def test_events_tell_of_arrivals_and_of_progress_as_they_happen(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "EVENTS_STEP_S", 0.01)
    stream = admin.watch(installation.vault_app.vault)  # what a client reads, without a server between
    seen = [await anext(stream), await anext(stream)]
    assert [_event(chunk) for chunk in seen] == [("tallies", []), ("redrives", [])]
    await installation.put(b"1", b"2")
    name, tallies = _event(await anext(stream))
    assert (name, tallies) == ("tallies", [{"queue": DLQ, "state": "captured", "count": 2}])
    await installation.vault_app.vault.letters.move(
        [1], source=LetterState.CAPTURED, target=LetterState.ARCHIVED, act=act("archive"), expected=1
    )
    name, tallies = _event(await anext(stream))
    assert {(one["state"], one["count"]) for one in tallies} == {("captured", 1), ("archived", 1)}
    await stream.aclose()


async def test_events_are_served_as_server_sent_events(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "EVENTS_COUNT_MAX", 1)
    monkeypatch.setattr(admin, "EVENTS_STEP_S", 0.0)
    await dead_item(installation)
    async with installation.client() as client:
        await client.post("/admin/captures", json={"queue": DLQ})
        plan = (await client.post("/admin/plans", json={"selection": {"queue": DLQ}})).json()
        await client.post("/admin/redrives", json={"plan": plan["hash"], "name": "mended"})
        answer = await client.get("/admin/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = dict(_event(chunk + b"\n\n") for chunk in answer.content.split(b"\n\n") if chunk)
    assert found["tallies"][0]["queue"] == DLQ
    (redrive,) = found["redrives"]
    assert (redrive["name"], redrive["total"]) == ("mended", 1)


def _event(chunk: bytes) -> tuple[str, Any]:
    name, data = chunk.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_metrics_tell_of_letters_and_captures(installation: AdminInstallation) -> None:
    await dead_item(installation)
    async with installation.client() as client:
        await client.post("/admin/captures", json={"queue": DLQ})
        await client.post(f"/admin/dlq/queues/{DLQ}/re-drive", json={"limit": 1})
        await installation.put(b"1", b"2")
        page = (await client.get("/metrics")).text.splitlines()
    assert f'holdfast_letters{{queue="{DLQ}",state="captured"}} 2' in page
    assert f'holdfast_letters{{queue="{DLQ}",state="redriven"}} 1' in page
    assert f'holdfast_letters_captured_total{{queue="{DLQ}"}} 3' in page
    assert f'holdfast_letters_redriven_total{{queue="{DLQ}"}} 1' in page
    assert f'holdfast_failed_imports_total{{queue="{DLQ}"}} 0' in page
    lag = next(line for line in page if line.startswith(f'holdfast_capture_lag_seconds{{queue="{DLQ}"}}'))
    assert 0 <= float(lag.rpartition(" ")[2]) < 60


async def test_a_capture_of_a_queue_that_is_not_there_yet_is_tried_again_and_told_once(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "WAITS", Backoff(first_s=0.02, delay_s_max=0.02))
    caplog.set_level(logging.INFO)
    tries = 0
    find = installation.vault_app.custody.known

    async def counted(queue: str, caller: Caller) -> tuple[Broker, QueueFacts]:
        nonlocal tries
        tries += 1
        return await find(queue, caller)

    monkeypatch.setattr(installation.vault_app.custody, "known", counted)
    report = installation.vault_app.custody.keep_capturing(DLQ, SERVER)
    assert installation.vault_app.custody.keep_capturing(DLQ, SERVER) is report
    await eventually(lambda: tries >= 5)
    assert (report.state, "queue is unknown" in report.why) == ("waiting", True)
    async with installation.client() as client:
        assert (await client.post("/admin/captures", json={"queue": DLQ})).status_code == 404
    await dying_item(installation)
    await eventually(lambda: report.captured == 1)
    assert (report.state, report.why) == ("running", "")
    told = [record.message for record in caplog.records if f"the capture of '{DLQ}'" in record.message]
    assert [line.partition(";")[0] for line in told] == [
        f"the capture of '{DLQ}' waits and tries again",
        f"the capture of '{DLQ}' runs",
    ]


def test_the_labels_of_the_vaults_metrics_are_bounded() -> None:
    queues = [f"q{number}" for number in range(QUEUES_COUNT_MAX + 50)]
    tallies = {(queue, "captured"): number + 1 for number, queue in enumerate(queues)}
    moves = {(queue, "", "captured"): 1 for queue in queues} | {("q1", "redriving", "captured"): 2}
    captures = [CaptureGauge(queue, running=True, lag_s=0.5, failed_imports=0) for queue in queues]
    page = render_vault(tallies, moves, captures).splitlines()
    for name in ("holdfast_letters{", "holdfast_letters_captured_total{", "holdfast_capture_lag_seconds{"):
        assert len([line for line in page if line.startswith(name)]) <= QUEUES_COUNT_MAX + 1
    assert f'holdfast_letters{{queue="{OTHERS}",state="captured"}} {sum(range(1, 51))}' in page
    assert f'holdfast_letters_failed_total{{queue="{OTHERS}"}} 2' in page


async def test_a_move_that_was_not_committed_is_not_counted(installation: AdminInstallation) -> None:
    await installation.put(b"1")
    moves = dict(installation.vault_app.vault.moves)
    with pytest.raises(Exception, match="have changed"):
        await installation.vault_app.vault.letters.move(
            [1, 99], source=LetterState.CAPTURED, target=LetterState.ARCHIVED, act=act("archive"), expected=2
        )
    assert installation.vault_app.vault.moves == moves == {(DLQ, "", "captured"): 1}


REDRIVES = {
    "queue.redrive",
    "dlq.redrive",
    "plans.make",
    "plans.show",
    "redrives.start",
    "redrives.pause",
    "redrives.resume",
    "redrives.cancel",
    "recoveries.preflight",
    "recoveries.start",
    "recoveries.stop",
}


def test_redriving_can_be_left_to_admins_and_nothing_else_changes() -> None:
    assert {name: one.needs() for name, one in REQUESTS.items()} == {name: one.role for name, one in REQUESTS.items()}
    changed = {name for name, one in REQUESTS.items() if one.needs(Role.ADMIN) is not one.role}
    assert changed == {name for name, one in REQUESTS.items() if one.redrives} == REDRIVES
    assert {REQUESTS[name].needs(Role.ADMIN) for name in REDRIVES} == {Role.ADMIN}


async def test_an_operator_may_not_redrive_where_the_settings_say_so(tmp_path: Path) -> None:
    async with open_installation(tmp_path, redrive_role="admin") as installation:
        await installation.put(b"1")
        token = await installation.token("op", Role.OPERATOR)
        async with installation.client(token) as client:
            for path in (f"dlq/queues/{DLQ}/re-drive", "plans", "redrives", "redrives/1/pause"):
                answer = await client.post(f"/admin/{path}", json={})
                assert (answer.status_code, "role admin" in answer.json()["detail"]) == (403, True), path
            redrive = {"queue_name": "q", "ids": []}
            assert (await client.post("/v1/queue.redrive", json=redrive)).status_code == 403
            assert (await client.get("/admin/letters/1/body")).status_code == 200


MODULE = """
from holdfast.core.groups import Fingerprint

def by_queue(message_type, death):
    if death.reason == "bug":
        raise ValueError("no")
    return Fingerprint(death.queue or "none", "all of " + death.queue)

def by_tenant(message_type, death, headers, queue):
    return Fingerprint(headers["tenant"] + " in " + queue, "")

def by_names(message_type, death, *, queue, headers):
    return by_tenant(message_type, death, {"tenant": "acme", **headers}, queue)

def wrong(message_type, death):
    return "text"

def failing(message_type, death):
    raise KeyError("x")

number = 7
"""


def test_a_fingerprint_function_can_be_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_groups.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_fingerprint(None) is fingerprint
    grouped = load_fingerprint("own_groups:by_queue")
    assert grouped("t", DeathStory(queue="orders"), {}, "dlq") == Fingerprint("orders", "all of orders")
    buggy = DeathStory(queue="orders", reason="bug")
    assert grouped("t", buggy, {}, "dlq") == fingerprint("t", buggy, {}, "dlq"), (
        "a letter is grouped whatever the function does"
    )
    told = load_fingerprint("own_groups:by_names")
    assert told("t", buggy, {"tenant": "zeta"}, "dlq").key == "zeta in dlq"
    for target, why in (
        ("own_groups:by_tenant", "raised KeyError"),
        ("own_groups", "is not MODULE:FUNCTION"),
        ("own_groups:", "is not MODULE:FUNCTION"),
        ("nowhere_to_be_found:f", "ModuleNotFoundError"),
        ("own_groups:missing", "is not there"),
        ("own_groups:number", "is a int"),
        ("own_groups:wrong", "answered 'text'"),
        ("own_groups:failing", "raised KeyError"),
    ):
        with pytest.raises(CannotStart, match=why):
            load_fingerprint(target)


def test_letters_of_which_nothing_is_known_are_grouped_by_queue_and_type() -> None:
    groups = [fingerprint(kind, DeathStory(), {}, queue) for kind in ("t", "") for queue in ("a.dlq", "b.dlq")]
    assert len({group.key for group in groups}) == 4
    assert [group.title for group in groups] == ["t in a.dlq", "t in b.dlq", "unknown in a.dlq", "unknown in b.dlq"]
    known = DeathStory(queue="q", reason="rejected")
    assert fingerprint("t", known, {}, "a.dlq") == fingerprint("u", known, {"x": 1}, "b.dlq")


async def test_letters_are_grouped_by_the_function_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_groups.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    async with open_installation(tmp_path, fingerprint="other_groups:by_queue") as installation:
        await dead_item(installation)
        async with installation.client() as client:
            await client.post("/admin/captures", json={"queue": DLQ})
            (group,) = (await client.get("/admin/groups")).json()["groups"]
    assert (group["key"], group["title"]) == ("orders", "all of orders")
