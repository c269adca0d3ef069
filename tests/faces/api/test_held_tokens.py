"""A token that is held to queues neither reads, names nor reaches another one, by any request that is declared.

`ATTEMPTS` has for each of them what such a token tries on a queue that is not its own. A request without an attempt,
and one whose fields say more than its declaration, fail here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import httpx2
import pytest
from msgspec import UnsetType, structs

from holdfast import NewItem, RetryItem
from holdfast.core.ledger import LedgerAct
from holdfast.core.plan import Place, Target
from holdfast.core.requests.declare import REQUESTS, Access, Declared, Request, Role, declare
from holdfast.core.requests.queue import QueueRequest
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.support.eventually import eventually

MINE, PAY = "mine", "pay"
MINE_DLQ, PAY_DLQ = "mine.dlq", "pay.dlq"
SECRET = "a-secret-of-theirs"

#: A verb's body, or path values, query and body of the others. Letter 1 is ours, letter 2 theirs; so are the plans,
#: the tasks and the results.
QUEUE = {"queue_name": PAY}
THEIR_LETTERS = {"selection": {"queue": PAY_DLQ}, "count": 1}
ALL_LETTERS = {"selection": {"state": "captured"}, "count": 1}
BY_ID = {"selection": {"ids": [2]}, "count": 1}
ITEM = {"payload": "eA==", "source_id": "1"}
HOME = {"selection": {"queue": MINE_DLQ}}
PLACES: list[dict[str, Any]] = [
    {"kind": "address", "routing_key": PAY},
    {"kind": "address", "exchange": "events", "routing_key": MINE},
    {"kind": "type", "routes": {"order": {"routing_key": PAY}}},
    {"kind": "type", "routes": {"order": {"routing_key": MINE}}, "redirect": {"routing_key": PAY}},
    {"kind": "type", "routes": {"order": {"exchange": "events", "routing_key": MINE}}},
]
START = {"producer": MINE, "series": ["rows"]}

ATTEMPTS: dict[str, list[dict[str, Any]]] = {
    "queue.produce": [{**QUEUE, "request_timeout": "1s", "items": [{"utf8": "x"}]}],
    "queue.lease": [{**QUEUE, "request_timeout": "1s", "client_id": "c", "batch_size": 1}],
    "queue.complete": [{**QUEUE, "request_timeout": "1s", "ids": ["1"]}],
    "queue.retry": [{**QUEUE, "items": [{"id": "1"}]}],
    "queue.extend": [{**QUEUE, "ids": ["1"]}],
    "queue.stats": [QUEUE],
    "queue.clear": [{**QUEUE, "queue": True}],
    "queue.pause": [QUEUE],
    "queue.resume": [QUEUE],
    "queue.reload": [QUEUE],
    "queue.redrive": [
        {"queue_name": PAY_DLQ, "source_queue": PAY, "ids": ["1"]},
        {"queue_name": MINE_DLQ, "source_queue": PAY, "ids": ["1"]},
    ],
    "queues.create": [
        {"queue_name": "pay2", "lease_timeout": "1s", "expire_timeout": "1m"},
        {"queue_name": "mine2", "lease_timeout": "1s", "expire_timeout": "1m", "dead_queue": PAY_DLQ},
    ],
    "queues.update": [{**QUEUE, "max_attempts": 1}, {"queue_name": MINE, "dead_queue": PAY_DLQ}],
    "queues.list": [{}, {"pivot": PAY}],
    "queues.depths": [{}, QUEUE, {"search": PAY}, {"sort": "depth"}],
    "queues.info": [QUEUE],
    "queues.delete": [{**QUEUE, "force": True}],
    "storage/items.list": [QUEUE],
    "storage/scheduled.list": [QUEUE],
    "storage/items.import": [
        {**QUEUE, "items": [ITEM]},
        {"queue_name": MINE_DLQ, "items": [ITEM, {**ITEM, "source_id": "2", "source_queue": PAY}]},
    ],
    "storage/items.delete": [{**QUEUE, "ids": ["1"]}],
    "results.list": [{}, {"limit": 1}],
    "results.start": [
        {**START, "producer": PAY},
        {**START, "notify": PAY},
        {**START, "notify": "mine/exchange"},
        {**START, "transaction_id": "theirs"},
        {"producer": ""},
    ],
    "results.gaps": [{"id": "theirs"}, {"id": "told"}],
    "results.missing": [{"id": "theirs"}, {"id": "told"}],
    "results.abandon": [{"id": "theirs"}, {"id": "told"}],
    "results.read": [{"id": "theirs", "series": "rows"}, {"id": "told", "series": "rows"}],
    "results.show": [{"id": "theirs"}, {"id": "told"}],
    "dlq.queues": [{}],
    "overview.read": [{}],
    "overview.hours": [{}, {"hours": 336}],
    "dlq.messages": [{"queue": PAY_DLQ}, {"queue": PAY_DLQ, "live": "true"}],
    "dlq.redrive": [{"queue": PAY_DLQ}],
    "captures.list": [{}],
    "captures.start": [{"queue": PAY_DLQ}, {"queue": PAY_DLQ, "continuous": True}],
    "imports.failed": [{}],
    "letters.search": [{}, {"queue": PAY_DLQ}, {"ids": "2"}, {"text": SECRET}],
    "letters.count": [{}, {"queue": PAY_DLQ}, {"ids": "2"}],
    "letters.values": [{}, {"queue": PAY_DLQ}],
    "letters.archive": [THEIR_LETTERS, ALL_LETTERS, BY_ID],
    "letters.restore": [THEIR_LETTERS, ALL_LETTERS, BY_ID],
    "letters.discard": [THEIR_LETTERS, ALL_LETTERS, BY_ID],
    "letters.resolve": [THEIR_LETTERS, ALL_LETTERS, BY_ID],
    "letters.show": [{"id": 2}],
    "letters.body": [{"id": 2}, {"id": 2, "original": "true"}],
    "letters.revisions": [{"id": 2}],
    "letters.edit": [{"id": 2, "revision": 0, "body": "eA=="}],
    "letters.history": [{"id": 2}],
    "letters.export": [{}, {"queue": PAY_DLQ}],
    "groups.list": [{}, {"hours": 24}],
    "groups.show": [{"key": "none"}],
    "groups.change": [{"key": "none", "status": "resolved"}],
    "plans.make": [
        {"selection": {"queue": PAY_DLQ}},
        {"selection": {"ids": [2]}},
        *({**HOME, "target": place} for place in PLACES),
    ],
    "plans.show": [{"hash": "PLAN"}],
    "redrives.list": [{}, {"plan": "PLAN"}, {"under_way": "false"}],
    "redrives.start": [{"plan": "PLAN"}, {"plan": "ELSEWHERE"}],
    "redrives.show": [{"id": 1}],
    "redrives.letters": [{"id": 1}, {"id": 1, "outcome": "redriven"}],
    "redrives.pause": [{"id": 1}],
    "redrives.resume": [{"id": 1}],
    "redrives.cancel": [{"id": 1}],
    "ledger.read": [{}, {"queue": PAY_DLQ}, {"letter": 2}],
    "ledger.export": [{}, {"queue": PAY_DLQ}],
    "ledger.head": [{}],
    "ledger.verify": [{}],
    "recoveries.list": [{}, {"limit": 1}],
    "recoveries.preflight": [
        {"queue": PAY_DLQ},
        {"queue": MINE_DLQ, "to": "address", "address": {"routing_key": PAY}},
        {"queue": MINE_DLQ, "routes": f"[routes]\norder = '{PAY}'"},
    ],
    "recoveries.start": [
        {"queue": PAY_DLQ},
        {"queue": PAY_DLQ, "dry_run": True},
        {"queue": MINE_DLQ, "to": "address", "address": {"routing_key": PAY}},
        {"queue": MINE_DLQ, "to": "address", "address": {"exchange": "events", "routing_key": MINE}},
        {"queue": MINE_DLQ, "routes": f"[routes]\norder = '{PAY}'"},
        {"queue": MINE_DLQ, "routes": f"redirect = '{PAY}'"},
        {"queue": MINE_DLQ, "source": PAY},
    ],
    "recoveries.show": [{"run": "RUN"}],
    "recoveries.stop": [{"run": "RUN"}],
    "topology.read": [{}, {"like": PAY}],
    "balance.read": [{}],
    "config.show": [{}],
    "tokens.list": [{}],
    "tokens.create": [{"name": "more", "role": "admin"}, {"name": "more", "role": "admin", "queues": [PAY]}],
    "tokens.revoke": [{"name": "all"}],
    "events.watch": [{}],
    "session.open": [{}],
    "session.show": [{}],
    "session.close": [{}],
    "session.link": [{}],
}
#: Fields that are called like a place and name none.
NO_PLACES = {
    ("queue.clear", "queue"): "whether queued items are meant",
    ("letters.search", "source_queue"): "which of its own dead queue's letters",
    ("letters.count", "source_queue"): "which of its own dead queue's letters",
    ("letters.export", "source_queue"): "which of its own dead queue's letters",
    **{
        (f"letters.{word}", "selection.source_queue"): "which of its own dead queue's letters"
        for word in ("archive", "restore", "discard", "resolve")
    },
    ("queues.depths", "queue_name"): "which one of its own: the others are left out",
    ("ledger.read", "queue"): "the ledger is for who is held to no queue",
    ("ledger.export", "queue"): "the ledger is for who is held to no queue",
    ("plans.make", "selection.source_queue"): "which of its own dead queue's letters",
    ("tokens.create", "queues"): "a token that is held to queues makes no tokens",
}
PLACE_WORDS = {
    "queue",
    "queues",
    "queue_name",
    "source_queue",
    "dead_queue",
    "producer",
    "notify",
    "exchange",
    "target",
}


class TwoOwners:
    """An installation with a queue of ours and one of theirs, and what each has in the vault."""

    def __init__(self, installation: AdminInstallation, token: str, plans: dict[str, str]) -> None:
        self.installation = installation
        self.token = token
        self.plans = plans

    async def ask(self, client: httpx2.AsyncClient, declared: Declared, given: dict[str, Any]) -> httpx2.Response:
        """Ask by HTTP what a request is given: in its path, its query or its body."""
        values = {
            key: self.plans.get(value, value) if isinstance(value, str) else value for key, value in given.items()
        }
        path = declared.path.format(**{name: values.pop(name) for name in declared.in_path})
        if declared.method == "GET":
            return await client.request("GET", path, params=values)
        return await client.request(declared.method, path, json=values)

    async def theirs(self) -> object:
        """Everything that a held token must leave as it is."""
        queues, app = self.installation.queues, self.installation.vault_app
        items = [await queues.storage_items_list(name) for name in (PAY, PAY_DLQ)]
        letter = await app.vault.letters.get(2)
        async with self.installation.client() as admin:
            infos = (await admin.post("/v1/queues.list", json={})).json()["items"]
            results = (await admin.get("/v1/results")).json()["items"]
            tasks = (await admin.get("/admin/redrives")).json()["redrives"]
            tokens = (await admin.get("/admin/tokens")).json()
        ended = [(one["id"], one["state"] in ("abandoned", "failed")) for one in results]
        mine = [info for info in infos if not info["queue_name"].startswith("transaction-")]
        return items, letter, mine, ended, [(one["id"], one["state"]) for one in tasks], tokens


async def _die(installation: AdminInstallation, queue: str, body: str) -> None:
    dead_queue = f"{queue}.dlq"
    await installation.queues.queues_create(dead_queue)
    await installation.queues.queues_create(queue, dead_queue=dead_queue)
    await installation.queues.queue_produce(queue, [NewItem(payload=body.encode(), kind="order")])
    leased = await installation.queues.queue_lease(queue)
    dead = [RetryItem(id=one.id, dead=True, reason="no") for one in leased.items]
    await installation.queues.queue_retry(queue, dead, partition=leased.partition)

    async def has_arrived() -> bool:
        return bool(await installation.queues.storage_items_list(dead_queue))

    await eventually(has_arrived)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[TwoOwners]:
    async with open_installation(tmp_path) as installation:
        for queue, body in ((MINE, "ours"), (PAY, SECRET)):
            await _die(installation, queue, body)
            await installation.queues.queue_produce(queue, [NewItem(payload=body.encode())])
        async with installation.client() as admin:
            for queue in (MINE_DLQ, PAY_DLQ):
                assert (await admin.post("/admin/captures", json={"queue": queue, "limit": 1})).json()["captured"] == 1
            slow = {"max_per_s": 100, "canary": None}
            plan = (await admin.post("/admin/plans", json={"selection": {"queue": PAY_DLQ}, **slow})).json()["hash"]
            wish = {"selection": {"queue": MINE_DLQ}, "target": PLACES[0]}
            elsewhere = (await admin.post("/admin/plans", json=wish)).json()["hash"]
            await _put_task(installation, plan)
            for name, more in (("theirs", {"producer": PAY}), ("told", {"producer": MINE, "notify": PAY})):
                begun = await admin.post("/v1/results", json={"transaction_id": name, "series": ["rows"], **more})
                assert begun.status_code == 200, begun.text

            async def have_asked() -> bool:
                return {one["state"] for one in (await admin.get("/v1/results")).json()["items"]} == {"awaiting"}

            await eventually(have_asked)
            run = await _run_recovery(admin, PAY_DLQ)
        await installation.token("all", Role.ADMIN)
        token = await installation.token("held", Role.ADMIN, ["mine*"])
        yield TwoOwners(installation, token, {"PLAN": plan, "ELSEWHERE": elsewhere, "RUN": run})


async def _put_task(installation: AdminInstallation, plan: str) -> None:
    """A task of theirs, as it stands in the vault: nobody works on it."""
    async with installation.client() as admin:
        task = (await admin.post("/admin/redrives", json={"plan": plan})).json()

        async def is_done() -> bool:
            return bool((await admin.get(f"/admin/redrives/{task['id']}")).json()["state"] == "done")

        await eventually(is_done)


async def _run_recovery(admin: httpx2.AsyncClient, queue: str) -> str:
    """A recovery of theirs that has ended; it only looked."""
    run = str((await admin.post("/admin/recoveries", json={"queue": queue, "dry_run": True})).json()["recovery"]["run"])

    async def has_ended() -> bool:
        return bool((await admin.get(f"/admin/recoveries/{run}")).json()["recovery"]["ended_at"])

    await eventually(has_ended)
    return run


CASES = [(name, number) for name, attempts in ATTEMPTS.items() for number in range(len(attempts))]


@pytest.mark.parametrize(("name", "number"), CASES)
async def test_a_held_token_does_nothing_to_a_queue_that_it_is_not_for(both: TwoOwners, name: str, number: int) -> None:
    declared, attempt = REQUESTS[name], ATTEMPTS[name][number]
    before = await both.theirs()
    async with both.installation.client(both.token) as held:
        answer = await both.ask(held, declared, attempt)
    if declared.path.startswith("/admin/session"):
        assert "mine*" in answer.text or answer.status_code in (200, 404)
    elif answer.status_code == 200:
        assert declared.method == "GET" or declared.about is Access.EACH, f"{name} did what was asked: {answer.text}"
        assert PAY not in answer.text.replace(MINE, ""), answer.text
    else:
        assert answer.status_code in (403, 404), answer.text
    assert SECRET not in answer.text
    assert await both.theirs() == before


def test_each_declared_request_has_an_attempt() -> None:
    assert sorted(ATTEMPTS) == sorted(REQUESTS)


def _leaves(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every field below a type, with its path."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind in (Place, Target):
        yield path, kind
    elif isinstance(kind, type) and hasattr(kind, "__struct_fields__"):
        for one in structs.fields(kind):
            yield from _leaves(one.type, f"{path}.{one.name}" if path else one.name)
    elif (args := [one for one in get_args(kind) if one not in (type(None), UnsetType)]) and get_origin(
        kind
    ) is not dict:
        for one in args:
            yield from _leaves(one, path)
    else:
        yield path, kind


@pytest.mark.parametrize("declared", REQUESTS.values(), ids=list(REQUESTS))
def test_every_field_that_names_a_place_is_in_the_declaration(declared: Declared) -> None:
    said = {declared.about, *declared.names}
    fields = dict(_leaves(declared.request, ""))
    places = {path for path, kind in fields.items() if kind in (Place, Target) or path.split(".")[-1] in PLACE_WORDS}
    silent = places - said - {path for name, path in NO_PLACES if name == declared.name}
    assert not silent, f"{declared.name} does not say that {silent} names queues"
    unknown = {one for one in said - set(fields) if isinstance(one, str) and not hasattr(declared.request, one)}
    assert not unknown, "it names fields that it does not have"


def test_a_request_that_does_not_say_what_it_is_about_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="about"):

        @declare("new.one", "GET /admin/new", role=Role.VIEWER)  # type: ignore[call-arg]
        class NewOne(Request[int], frozen=True, kw_only=True):
            """Something new."""

    assert "new.one" not in REQUESTS


OWN: list[tuple[str, dict[str, Any]]] = [
    ("queue.produce", {"queue_name": MINE, "request_timeout": "1s", "items": [{"utf8": "x"}]}),
    ("queues.create", {"queue_name": "mine2", "lease_timeout": "1s", "expire_timeout": "1m", "dead_queue": MINE_DLQ}),
    ("queues.update", {"queue_name": MINE, "dead_queue": ""}),
    ("storage/items.import", {"queue_name": MINE_DLQ, "items": [{**ITEM, "source_queue": MINE}]}),
    ("dlq.messages", {"queue": MINE_DLQ}),
    ("captures.start", {"queue": MINE_DLQ}),
    ("letters.body", {"id": 1}),
    ("plans.make", {**HOME, "target": {"kind": "address", "routing_key": MINE}}),
    ("dlq.redrive", {"queue": MINE_DLQ}),
    ("recoveries.preflight", {"queue": MINE_DLQ}),
    ("recoveries.start", {"queue": MINE_DLQ}),
    ("results.start", {**START, "notify": MINE, "transaction_id": "ours"}),
]


@pytest.mark.parametrize(("name", "given"), OWN)
async def test_what_is_of_its_own_queues_it_may_do(both: TwoOwners, name: str, given: dict[str, Any]) -> None:
    async with both.installation.client(both.token) as held:
        answer = await both.ask(held, REQUESTS[name], given)
    assert answer.status_code == 200, answer.text


async def test_its_results_are_listed_page_by_page_and_the_others_are_not(both: TwoOwners) -> None:
    async with both.installation.client(both.token) as held:
        for name in ("a", "x", "z"):
            assert (await held.post("/v1/results", json={**START, "transaction_id": name})).status_code == 200
        pages, after = [], ""
        while page := (await held.get("/v1/results", params={"limit": 2, "after": after})).json()["items"]:
            pages.append([one["id"] for one in page])
            after = page[-1]["id"]
        assert pages == [["a", "x"], ["z"]]
        assert (await held.post("/v1/results/z/abandon", json={})).json()["state"] == "abandoned"


async def test_its_redrives_are_listed_page_by_page_and_the_others_are_not(both: TwoOwners) -> None:
    async with both.installation.client(both.token) as held, both.installation.client() as admin:
        mine = (await held.post("/admin/plans", json=HOME)).json()["hash"]
        store, act = both.installation.vault_app.vault.redrives, LedgerAct(actor="test", action="redrives.start")
        for plan in (mine, both.plans["PLAN"], mine, both.plans["PLAN"]):
            made = await store.plan(plan)
            assert made is not None
            await store.start(plan=made, letters=[], wish=made.wish, name="", operation="", act=act)
        assert len((await admin.get("/admin/redrives")).json()["redrives"]) == 5
        listed, cursor = [], [""]
        while cursor:
            page = (await held.get("/admin/redrives", params={"limit": 1, "cursor": cursor[0]})).json()
            listed += [one["id"] for one in page["redrives"]]
            cursor = [page["next"]] if page["next"] else []
        assert listed == [4, 2]


async def test_a_refused_start_makes_no_queue(both: TwoOwners) -> None:
    before = {one.queue_name for one in await both.installation.queues.queues_list()}
    async with both.installation.client(both.token) as held:
        refused = await held.post("/v1/results", json={"producer": PAY, "transaction_id": "new"})
    assert refused.status_code == 403
    assert {one.queue_name for one in await both.installation.queues.queues_list()} == before


async def _forged(both: TwoOwners) -> None:
    """A letter in our dead queue that says it died in theirs: an item that was imported with that story."""
    item = {**ITEM, "source_id": "f", "source_queue": PAY, "death_reason": "attempts"}
    async with both.installation.client() as admin:
        done = await admin.post("/v1/storage/items.import", json={"queue_name": MINE_DLQ, "items": [item]})
        assert done.status_code == 200, done.text


async def test_a_letter_that_says_it_died_elsewhere_stays_and_its_neighbours_go(both: TwoOwners) -> None:
    await _forged(both)
    before = await both.installation.queues.storage_items_list(PAY)
    async with both.installation.client(both.token) as held:
        assert (await held.post("/admin/captures", json={"queue": MINE_DLQ})).json()["captured"] == 1
        plan = (await held.post("/admin/plans", json=HOME)).json()
        assert (plan["count"], plan["targets"]) == (1, {MINE: 1})
        assert "is for the queues mine* alone" in plan["left_out"][0]["why"]
        done = (await held.post(f"/admin/dlq/queues/{MINE_DLQ}/re-drive", json={"limit": 10})).json()
        assert (done["redriven"], done["kept"]) == (1, 1)
    assert await both.installation.queues.storage_items_list(PAY) == before


async def test_a_recovery_leaves_a_letter_that_says_it_died_elsewhere(both: TwoOwners) -> None:
    await _forged(both)
    before = await both.installation.queues.storage_items_list(PAY)
    async with both.installation.client(both.token) as held:
        run = (await held.post("/admin/recoveries", json={"queue": MINE_DLQ})).json()["recovery"]["run"]

        async def has_ended() -> Any:
            told = (await held.get(f"/admin/recoveries/{run}")).json()
            return told if told["recovery"]["ended_at"] else None

        told = await eventually(has_ended)
        assert told["summary"]["failed_by_queue"] == {"(of other queues)": 1}
        assert told["summary"]["reasons"] == {
            "its run may not send to where it would go": {"count": 1, "sample": None},
        }
    assert await both.installation.queues.storage_items_list(PAY) == before


async def test_a_plan_of_somebody_else_for_such_a_letter_is_not_carried_out(both: TwoOwners) -> None:
    await _forged(both)
    async with both.installation.client() as admin, both.installation.client(both.token) as held:
        await admin.post("/admin/captures", json={"queue": MINE_DLQ})
        plan = (await admin.post("/admin/plans", json=HOME)).json()
        assert plan["count"] == 2
        refused = await held.post("/admin/redrives", json={"plan": plan["hash"]})
        assert (refused.status_code, PAY in refused.json()["detail"]) == (403, True)
        assert (await admin.post("/admin/redrives", json={"plan": plan["hash"]})).status_code == 200


async def test_a_task_of_somebody_else_that_sends_elsewhere_is_not_resumed(both: TwoOwners) -> None:
    async with both.installation.client() as admin, both.installation.client(both.token) as held:
        task = (await admin.post("/admin/redrives", json={"plan": both.plans["ELSEWHERE"]})).json()["id"]
        refused = await held.post(f"/admin/redrives/{task}/resume", json={})
        assert (refused.status_code, PAY in refused.json()["detail"]) == (403, True)


async def test_a_redrive_in_a_queue_of_ours_names_a_queue_of_ours(both: TwoOwners) -> None:
    body = json.dumps({"queue_name": MINE_DLQ, "source_queue": PAY, "ids": ["1"]})
    async with both.installation.client(both.token) as held:
        refused = await held.post("/v1/queue.redrive", content=body)
    assert refused.json()["code_text"] == "Forbidden"
    assert "queue 'pay'" in refused.json()["message"]


async def test_a_refusal_does_not_name_the_queue_that_it_is_for(both: TwoOwners) -> None:
    queues = both.installation.queues
    other = {"queue_name": "mine.shared", "dead_queue": "mine.other"}
    for name in other.values():
        await queues.queues_create(name)
    await queues.queues_create("secret", dead_queue="mine.shared")
    admin = await both.installation.token("admin of mine", Role.ADMIN, ["mine*"])
    refused = []
    async with both.installation.client(admin) as held, both.installation.client() as anybody:
        for client in (held, anybody):
            delete = await client.post("/v1/queues.delete", json={"queue_name": "mine.shared"})
            update = await client.post("/v1/queues.update", json=other)
            refused.append([answer.json()["message"] for answer in (delete, update)])
        seen = (await held.get("/admin/dlq/queues")).text
    assert all("is the dead_queue of a queue that" in text for text in refused[0]), refused
    assert all("is the dead_queue of 'secret'" in text for text in refused[1])
    assert "secret" not in seen


def test_verbs_are_all_about_the_queue_that_they_name() -> None:
    verbs = [one for one in REQUESTS.values() if issubclass(one.request, QueueRequest)]
    assert {one.about for one in verbs if one.name not in ("queues.list", "queues.depths")} == {"queue_name"}
