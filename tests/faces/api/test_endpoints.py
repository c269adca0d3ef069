"""/admin over HTTP: what each endpoint answers, who may call it, and how it says no."""

from __future__ import annotations

import base64
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from holdfast import Client, NewItem, RetryItem
from holdfast.core.death import DROPPED_HEADERS, STORY_HEADERS
from holdfast.core.requests.declare import Declared, Role, declared_under
from holdfast.core.requests.vault import ExportLetters, SearchLetters
from tests.faces.api.conftest import TOKEN, AdminInstallation
from tests.support.eventually import eventually
from tests.vault.letters import DLQ

PATHS = {"queue": "orders.dlq", "id": "1", "key": "none", "hash": "none", "name": "none", "run": "none"}
ENDPOINTS = list(declared_under("/admin/").values())


async def dead_item(installation: AdminInstallation, body: bytes = b"\xff1") -> None:
    """One item that died in `orders`, and lies in its dead queue."""
    await dying_item(installation, body)

    async def has_arrived() -> bool:
        return bool(await installation.queues.storage_items_list(DLQ))

    await eventually(has_arrived)


async def dying_item(installation: AdminInstallation, body: bytes = b"\xff1") -> None:
    """One item that dies in `orders`, on its way to its dead queue; whoever captures may have it before it is seen."""
    await installation.queues.queues_create(DLQ)
    await installation.queues.queues_create("orders", dead_queue=DLQ)
    await installation.queues.queue_produce("orders", [NewItem(payload=body, kind="order")])
    leased = await installation.queues.queue_lease("orders")
    await installation.queues.queue_retry(
        "orders", [RetryItem(id=one.id, dead=True, reason="no") for one in leased.items]
    )


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=[endpoint.name for endpoint in ENDPOINTS])
async def test_without_a_token_it_is_401_and_with_a_role_too_low_403(
    installation: AdminInstallation, endpoint: Declared
) -> None:
    path = endpoint.path.format(**PATHS)
    async with installation.client("") as nobody, installation.client("wrong") as stranger:
        for client in (nobody, stranger):
            answer = await client.request(endpoint.method, path)
            assert answer.status_code == 401, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
    need = endpoint.role
    if need is Role.VIEWER:
        return
    lower = Role(need - 1)
    token = await installation.token("low", lower)
    async with installation.client(token) as client:
        answer = await client.request(endpoint.method, path)
        assert answer.status_code == 403, answer.text
        assert need.word in answer.json()["detail"]
    newest = (await installation.vault_app.vault.ledger.rows(after=0, count_max=10_000))[-1]
    assert (newest.outcome == "denied") == endpoint.is_change
    if endpoint.is_change:
        assert (newest.actor, newest.action) == ("token:low", endpoint.name)
        assert newest.queue == ("orders.dlq" if "{queue}" in endpoint.path else "")
        assert newest.letters == ("1" if endpoint.path.startswith("/admin/letters/{id}") else "")


async def test_the_endpoints_of_the_seed_on_an_embedded_dead_queue(installation: AdminInstallation) -> None:
    await dead_item(installation)
    async with installation.client() as client:
        (queue,) = (await client.get("/admin/dlq/queues")).json()
        assert (queue["queue"], queue["source_queue"], queue["ready"], queue["captured"]) == (DLQ, "orders", 1, 0)
        assert set(queue) == {"queue", "source_queue", "ready", "captured", "oldest_at", "consumers"}
        live = (await client.get(f"/admin/dlq/queues/{DLQ}/messages?limit=5")).json()
        assert live["source"] == "live"
        assert base64.b64decode(live["messages"][0]["body"]) == b"\xff1"
        assert (await client.post("/admin/captures", json={"queue": DLQ})).json()["captured"] == 1
        kept = (await client.get(f"/admin/dlq/queues/{DLQ}/messages")).json()
        assert (kept["source"], kept["messages"][0]["id"], kept["messages"][0]["type"]) == ("vault", "1", "order")
        done = (await client.post(f"/admin/dlq/queues/{DLQ}/re-drive", json={"limit": 10})).json()
        counts = {"redriven": 1, "kept": 0, "possible_duplicates": 0, "reasons": {}}
        assert done == {**counts, "kept_in": "", "kept_ids": []}
        (item,) = (await installation.queues.queue_lease("orders")).items
        assert item.payload == b"\xff1"
        assert (await client.get("/admin/dlq/queues/nowhere.dlq/messages")).status_code == 404
        assert (await client.post("/admin/dlq/queues/nowhere.dlq/re-drive", json={})).status_code == 404
        balance = (await client.get("/admin/balance")).json()
        assert balance[0]["ledger"] == balance[0]["vault"] == {"redriven": 1}


async def test_letters_that_cannot_go_are_in_nobodys_way(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2", b"3")  # of a broker that this installation does not have
    await dead_item(installation)
    async with installation.client() as client:
        seen = (await client.get(f"/admin/dlq/queues/{DLQ}/messages")).json()
        assert (seen["source"], len(seen["messages"]), seen["waiting"]) == ("vault", 3, 1)
        url = f"/admin/dlq/queues/{DLQ}/re-drive"
        kept = {"possible_duplicates": 0, "reasons": {"its broker is not configured here": 3}, "kept_ids": [1, 2, 3]}
        kept["kept_in"] = f"/admin/letters?queue={DLQ}&state=captured"
        done = (await client.post(url, json={"limit": 1})).json()
        assert done == {"redriven": 1, "kept": 3, **kept}
        again = (await client.post(url, json={"limit": 1})).json()
        assert again == {"redriven": 0, "kept": 3, **kept}
        plan = (await client.post("/admin/plans", json={"selection": {"ids": [1, 2, 3]}})).json()
        assert plan["reasons"] == [{"why": "its broker is not configured here", "count": 3, "sample": 1}]


async def test_letters_are_found_page_by_page_and_looked_at(installation: AdminInstallation) -> None:
    await installation.put(*(f"body {number}".encode() for number in range(5)))
    async with installation.client() as client:
        seen, cursor = [], ""
        while True:
            page = (await client.get("/admin/letters", params={"limit": 2, "cursor": cursor, "queue": DLQ})).json()
            seen += [one["id"] for one in page["letters"]]
            assert (page["count"], page["count_is_exact"]) == (5, True)
            if not (cursor := page["next"]):
                break
        assert seen == [5, 4, 3, 2, 1]
        found = (await client.get("/admin/letters", params={"text": "body 3"})).json()
        assert [one["id"] for one in found["letters"]] == [4]
        body = await client.get("/admin/letters/4/body")
        assert (body.content, body.headers["content-type"]) == (b"body 3", "application/octet-stream")
        lines = [json.loads(line) for line in (await client.get("/admin/export")).text.splitlines()]
        assert [base64.b64decode(line["body"]) for line in lines][::-1] == [f"body {n}".encode() for n in range(5)]
        (group,) = (await client.get("/admin/groups")).json()["groups"]
        assert (group["count"], group["status"]) == (5, "open")
        changed = await client.post(f"/admin/groups/{group['key']}", json={"status": "resolved", "note": "mended"})
        assert changed.json()["status"] == "resolved"


async def test_an_action_needs_the_count_that_was_seen(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2", b"3")
    async with installation.client() as client:
        wrong = await client.post("/admin/letters/archive", json={"selection": {"queue": DLQ}, "count": 2})
        assert (wrong.status_code, "3 fit" in wrong.json()["detail"]) == (409, True)
        empty = await client.post("/admin/letters/discard", json={"selection": {}, "count": 3})
        assert empty.status_code == 400
        done = await client.post("/admin/letters/archive", json={"selection": {"queue": DLQ}, "count": 3})
        assert done.json() == {"count": 3}
        history = (await client.get("/admin/letters/1/history")).json()["rows"]
        assert [row["action"] for row in history] == ["capture", "letters.archive"]
        assert history[1]["actor"] == "admin"
        back = {"selection": {"ids": [1, 2], "state": "archived"}, "count": 2}
        assert (await client.post("/admin/letters/restore", json=back)).json() == {"count": 2}


async def test_an_edit_keeps_the_original_and_refuses_locked_headers(installation: AdminInstallation) -> None:
    await installation.put(b"bad")
    async with installation.client() as client:
        url = "/admin/letters/1/revisions"
        edit = {"revision": 0, "body": base64.b64encode(b"good").decode(), "put": {"tenant": 7}}
        assert (await client.post(url, json=edit)).json() == {"revision": 1}
        assert (await client.post(url, json=edit)).status_code == 409
        assert (await client.get("/admin/letters/1/body")).content == b"good"
        assert (await client.get("/admin/letters/1/body?original=1")).content == b"bad"
        for bad in ({"put": {"x-redrive-id": "1"}}, {"put": {"x-kept-cc": "x"}}, {"drop": [""]}, {"revision": -1}, {}):
            answer = await client.post(url, json={"revision": 1, **bad})
            assert answer.status_code == 400, bad
        kept = {"revision": 1, "put": {"x-kept-cc": "x"}, "sensitive": True}
        assert (await client.post(url, json=kept)).status_code == 200
        assert (await client.post(url, json={"revision": 2, "restore": True})).json() == {"revision": 3}
        assert (await client.get("/admin/letters/1/body")).content == b"bad"
        assert [one["number"] for one in (await client.get(url)).json()] == [1, 2, 3]


@pytest.mark.parametrize("name", [*DROPPED_HEADERS, *STORY_HEADERS])
@pytest.mark.parametrize("is_put", [True, False])
async def test_a_header_that_a_redrive_takes_off_or_writes_cannot_be_edited(
    installation: AdminInstallation, name: str, is_put: bool
) -> None:
    await installation.put(b"x")
    async with installation.client() as client:
        edit = {"revision": 0, "sensitive": True, **({"put": {name: "1"}} if is_put else {"drop": [name]})}
        answer = await client.post("/admin/letters/1/revisions", json=edit)
        assert (answer.status_code, "is locked" in answer.json()["detail"]) == (400, True)


async def test_a_plan_that_was_put_in_the_place_of_another_is_not_carried_out(
    installation: AdminInstallation, tmp_path: Path
) -> None:
    await dead_item(installation)
    await installation.queues.queues_create("elsewhere")
    async with installation.client() as client:
        await client.post("/admin/captures", json={"queue": DLQ})
        wish: dict[str, Any] = {"selection": {"queue": DLQ}}
        seen, other = [
            (await client.post("/admin/plans", json=wish | more)).json()["hash"]
            for more in ({}, {"target": {"kind": "queue", "source": "elsewhere"}})
        ]
        with closing(apsw.Connection(str(tmp_path / "data" / "vault.db"))) as connection:
            put = "UPDATE plans SET document = (SELECT document FROM plans WHERE hash = ?) WHERE hash = ?"
            connection.execute(put, (other, seen))
            assert connection.changes() == 1
        assert (await client.post("/admin/redrives", json={"plan": seen})).status_code == 404
        assert (await client.post("/admin/redrives", json={"plan": other})).status_code == 200


async def test_a_plan_is_executed_once_and_its_task_is_seen(installation: AdminInstallation) -> None:
    await dead_item(installation)
    async with installation.client() as client:
        await client.post("/admin/captures", json={"queue": DLQ})
        plan = (await client.post("/admin/plans", json={"selection": {"queue": DLQ}})).json()
        assert (plan["count"], plan["targets"], plan["left_out_count"]) == (1, {"orders": 1}, 0)
        start = {"plan": plan["hash"], "operation": "one", "reason": "mended"}
        tasks = [(await client.post("/admin/redrives", json=start)).json() for _ in range(2)]
        assert tasks[0]["id"] == tasks[1]["id"]

        async def is_done() -> bool:
            return bool((await client.get(f"/admin/redrives/{tasks[0]['id']}")).json()["state"] == "done")

        await eventually(is_done)
        refused = await client.post(f"/admin/redrives/{tasks[0]['id']}/pause")
        assert (refused.status_code, refused.json()["detail"]) == (
            409,
            "redrive cannot pause; redrive 1 is done",
        )
        told = (await client.get("/admin/redrives/1/letters", params={"outcome": "redriven"})).json()
        assert [(one["letter"], one["target"]) for one in told["letters"]] == [(1, "orders")]
        for query, ids in (({}, [1]), ({"under_way": "true"}, []), ({"plan": plan["hash"]}, [1])):
            found = (await client.get("/admin/redrives", params=query)).json()["redrives"]
            assert [one["id"] for one in found] == ids, query
        (group,) = (await client.get("/admin/groups", params={"text": "orders"})).json()["groups"]
        assert (await client.get(f"/admin/groups/{group['key']}")).json() == group
        assert (await client.get("/admin/groups/none")).status_code == 404
        assert (await client.post("/admin/redrives", json={"plan": "0" * 64})).status_code == 404


async def test_tokens_are_shown_once_and_end_when_they_are_revoked(installation: AdminInstallation) -> None:
    await installation.put(b"1")
    async with installation.client() as client:
        made = (
            await client.post("/admin/tokens", json={"name": "ci", "role": "operator", "queues": ["other.*"]})
        ).json()
        assert (await client.post("/admin/tokens", json={"name": "ci", "role": "viewer"})).status_code == 409
        (listed,) = (await client.get("/admin/tokens")).json()
        assert made["token"] not in json.dumps(listed)
        async with installation.client(made["token"]) as limited:
            assert (await limited.get("/admin/letters", params={"queue": DLQ})).status_code == 403
            assert (await limited.get("/admin/letters", params={"queue": "other.dlq"})).status_code == 200
            assert (await limited.get("/admin/letters/1")).status_code == 404
            produce = {"queue_name": "orders", "request_timeout": "1s", "items": [{"utf8": "x"}]}
            assert (await limited.post("/v1/queue.produce", json=produce)).status_code == 403
            assert (await limited.post("/v1/queues.create", json={"queue_name": "other.x"})).status_code == 403
        assert (await client.request("DELETE", "/admin/tokens/ci")).status_code == 200
        async with installation.client(made["token"]) as gone:
            assert (await gone.get("/admin/letters", params={"queue": "other.dlq"})).status_code == 401
        assert (await client.request("DELETE", "/admin/tokens/ci")).status_code == 404


async def test_a_token_held_to_queues_sends_letters_to_no_other_place_that_it_names(
    installation: AdminInstallation,
) -> None:
    await dead_item(installation)
    await installation.queues.queues_create("other")
    async with installation.client() as client:
        await client.post("/admin/captures", json={"queue": DLQ})
        wanted = {"name": "ci", "role": "operator", "queues": [DLQ]}
        token = (await client.post("/admin/tokens", json=wanted)).json()["token"]
        places: list[dict[str, object]] = [
            {"kind": "address", "routing_key": "other"},
            {"kind": "address", "exchange": "events", "routing_key": DLQ},
            {"kind": "type", "routes": {"order": {"routing_key": "other"}}},
            {"kind": "type", "routes": {"order": {"routing_key": DLQ}}, "redirect": {"routing_key": "other"}},
        ]
        async with installation.client(token) as limited:
            for place in places:
                refused = await limited.post("/admin/plans", json={"selection": {"queue": DLQ}, "target": place})
                assert (refused.status_code, "cannot send letters to" in refused.text) == (403, True), place
            home = await limited.post("/admin/plans", json={"selection": {"queue": DLQ}})
            assert (home.status_code, home.json()["count"]) == (200, 1)
            wish = {"selection": {"queue": DLQ}, "target": places[0]}
            theirs = (await client.post("/admin/plans", json=wish)).json()
            assert theirs["count"] == 1
            assert (await limited.post("/admin/redrives", json={"plan": theirs["hash"]})).status_code == 403
        assert not await installation.queues.storage_items_list("other")


async def test_what_is_of_all_queues_says_that_it_needs_a_token_for_all(installation: AdminInstallation) -> None:
    token = await installation.token("held", Role.ADMIN, ["orders*"])
    async with installation.client(token) as client:
        for path in ("groups", "ledger", "tokens", "events", "imports/failed"):
            answer = await client.get(f"/admin/{path}")
            assert (answer.status_code, "needs a token for all queues" in answer.json()["detail"]) == (403, True), path
        assert "name one of them" in (await client.get("/admin/letters")).json()["detail"]


async def test_the_ledger_is_read_and_verified(installation: AdminInstallation) -> None:
    await installation.put(b"1")
    async with installation.client() as client:
        head = (await client.get("/admin/ledger/head")).json()["head"]
        assert (await client.get("/admin/ledger/verify", params={"anchor": head})).json()["why"] == ""
        cut = (await client.get("/admin/ledger/verify", params={"anchor": f"7:{'0' * 64}"})).json()
        assert "cut off" in cut["why"]
        rows = (await client.get("/admin/ledger")).json()["rows"]
        assert [(row["action"], row["count"]) for row in rows] == [("capture", 1)]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/admin/nothing", b"", 404),
        ("PUT", "/admin/letters", b"", 405),
        ("OPTIONS", "/admin/letters", b"", 405),
        ("PROPFIND", "/admin/letters/1", b"", 405),
        ("PROPFIND", "/admin/nothing", b"", 404),
        ("GET", "/admin/letters/99", b"", 404),
        ("GET", "/admin/no%0Athing", b"", 404),
        ("DELETE", "/admin/tokens/a%0A%2Fb", b"", 404),
        ("POST", "/admin/dlq/queues/a%0A%2Fb/re-drive", b"{}", 404),
        ("GET", "/admin/letters/0", b"", 404),
        ("GET", "/admin/letters/x", b"", 404),
        ("GET", "/admin/letters/99999999999999999999", b"", 404),
        ("GET", "/admin/letters?limit=0", b"", 400),
        ("GET", "/admin/letters?limit=1&limit=2", b"", 400),
        ("GET", "/admin/letters?cursor=%00", b"", 400),
        ("GET", "/admin/letters?cursor=W10", b"", 400),
        ("GET", "/admin/letters?what=1", b"", 400),
        ("GET", "/admin/letters?queue=%00", b"", 400),
        ("GET", "/admin/letters?older_than=soon", b"", 400),
        ("GET", "/admin/letters?died_after=soon", b"", 400),
        ("GET", "/admin/letters?text=%22%29%28", b"", 400),
        ("GET", "/admin/letters?queue=nothing-fits", b"", 200),
        ("GET", "/admin/letters?ids=1,2,x", b"", 400),
        ("GET", "/admin/letters?ids=", b"", 400),
        ("GET", "/admin/letters?ids=,", b"", 400),
        ("GET", "/admin/export?ids=", b"", 400),
        ("POST", "/admin/letters/discard", b'{"selection": {"ids": [], "queue": "orders.dlq"}, "count": 0}', 400),
        ("POST", "/admin/plans", b'{"selection": {"ids": [], "queue": "orders.dlq"}}', 400),
        ("POST", "/admin/plans", b"", 400),
        ("POST", "/admin/plans", b"\xff", 400),
        ("POST", "/admin/plans", b"[" * 100_000, 400),
        ("POST", "/admin/plans", b'{"selection": {"queue": 7}}', 400),
        ("POST", "/admin/plans", b'{"selection": {}}', 400),
        ("POST", "/admin/plans", b'{"selection": {"queue": "x"}, "target": {"kind": "address"}}', 400),
        ("POST", "/admin/redrives", b'{"plan": ""}', 404),
        ("POST", "/admin/captures", b'{"queue": ""}', 404),
        ("POST", "/admin/groups/%00", b"{}", 404),
        ("POST", "/admin/tokens", b'{"name": "", "role": "admin"}', 400),
    ],
)
async def test_bad_input_is_told_and_no_stack_trace_leaves(
    installation: AdminInstallation, method: str, path: str, content: bytes, status: int
) -> None:
    async with installation.client() as client:
        answer = await client.request(method, path, content=content)
        assert answer.status_code == status, answer.text
        if status >= 400:
            problem = answer.json()
            assert (problem["status"], "Traceback" in answer.text) == (status, False)
            assert problem["detail"]
            assert answer.headers["content-type"] == "application/problem+json"


async def test_a_cursor_from_elsewhere_is_refused(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2")
    async with installation.client() as client:
        cursor = (await client.get("/admin/letters?limit=1")).json()["next"]
        for path in ("groups", "ledger", "redrives", "imports/failed"):
            assert (await client.get(f"/admin/{path}", params={"cursor": cursor})).status_code == 400


async def test_the_document_describes_every_endpoint(installation: AdminInstallation) -> None:
    async with installation.client() as client:
        document = (await client.get("/openapi.json")).json()
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert {(endpoint.path, endpoint.method) for endpoint in ENDPOINTS} <= described


async def test_more_ids_than_a_url_takes_go_by_post(installation: AdminInstallation) -> None:
    letters = await installation.put(b"1", b"2", b"3")
    ids = ",".join(map(str, [*letters[:2], *range(100_000, 103_000)]))
    async with installation.client() as client:
        assert (await client.get("/admin/letters", params={"ids": ids})).status_code == 414
        found = (await client.post("/admin/letters", data={"ids": ids})).json()
        assert sorted(one["id"] for one in found["letters"]) == letters[:2]
        assert len((await client.post("/admin/export", data={"ids": ids})).text.splitlines()) == 2
        assert len((await client.get("/admin/letters", params={"ids": "1,2"})).json()["letters"]) == 2
        assert (await client.post("/admin/groups", data={"ids": ids})).status_code == 405
    async with Client(installation.url, TOKEN) as server:
        page = await server.call(SearchLetters(ids=(*letters[:2], *range(100_000, 103_000))))
        assert len(page.letters) == 2
        one = ExportLetters(ids=(letters[0], *range(100_000, 103_000)))
        lines = [line async for line in await server.call(one)]
        assert len(lines) == 1


@pytest.mark.parametrize(
    ("method", "path", "bytes_max"),
    [
        ("GET", "/admin/letters", 65_536),
        ("POST", "/admin/letters/archive", 3_000_000),
        ("POST", "/admin/redrives", 512_000),
        ("POST", "/admin/nothing", 512_000),
        ("POST", "/admin/letters/1/revisions", 96 * 1024 * 1024),
    ],
)
async def test_a_body_may_be_as_large_as_its_endpoint_needs(
    installation: AdminInstallation, method: str, path: str, bytes_max: int
) -> None:
    if method == "POST" and path != "/admin/nothing":
        async with installation.client() as client:
            answer = await client.post(path, content=b" " * (bytes_max + 1))
            told = f"body is too large; {bytes_max} bytes is the maximum"
            assert (answer.status_code, answer.json()["detail"]) == (400, told)
    viewer = await installation.token("viewer", Role.VIEWER)
    async with installation.client(viewer) as client:
        answer = await client.request(method, path, content=b" " * 600_000)
        assert answer.status_code in (200, 400, 403, 404)
