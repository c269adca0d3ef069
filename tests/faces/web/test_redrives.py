"""Plans and redrives as pages: what will happen, what happens, what became of it, and who was faster."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from holdfast import NewItem, RetryItem
from holdfast.core.ledger import LedgerAct
from holdfast.core.message import Address
from holdfast.core.plan import Canary, PlanOptions, RedriveState, Target
from holdfast.core.requests.declare import Role
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.faces.web.redrives import form_values
from holdfast.services.vault.admin import SERVER
from holdfast.stores.redrives import Settled, pack
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.web.visiting import Tab, notice_of, text_of, visiting
from tests.support.eventually import eventually

DLQ, MAIN = "orders.dlq", "orders"
EVIL = "<script>alert(1)</script>"
MAKE = {"make": "yes", "to": "home", "redrives_max": "5", "queue": DLQ, "state": "captured"}
ACT = LedgerAct(actor="test", action="redrives.start")


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        await installation.queues.queues_create(DLQ)
        await installation.queues.queues_create(MAIN, dead_queue=DLQ)
        yield installation


async def died(installation: AdminInstallation, count: int) -> None:
    """Letters of the embedded dead queue, in the vault."""
    queues = installation.queues
    await queues.queue_produce(MAIN, [NewItem(payload=b"%d" % number, kind="order") for number in range(count)])
    items = (await queues.queue_lease(MAIN, batch_size=count)).items
    await queues.queue_retry(MAIN, [RetryItem(id=one.id, dead=True, reason="ValueError: no") for one in items])

    async def have_arrived() -> bool:
        return len(await queues.storage_items_list(DLQ)) == count

    await eventually(have_arrived)
    async with installation.client() as client:
        captured = await client.post("/admin/captures", json={"queue": DLQ, "limit": count})
        assert captured.json()["captured"] == count


async def planned(tab: Tab, **more: str) -> str:
    """A plan of all letters, made on the page; its path."""
    await tab.get(f"/plans/new?queue={DLQ}")
    answer = await tab.http.post("/plans/new", data={"csrf": tab.csrf, **MAKE, **more})
    assert answer.status_code == 303, text_of(answer.text)
    return str(answer.headers["location"])


def hidden(page: str, name: str) -> str:
    found = re.search(rf'type="hidden" name="{name}" value="([^"]*)"', page)
    assert found, page
    return unescape(found.group(1))


async def task_in(installation: AdminInstallation, state: RedriveState, ids: list[int], **more: Any) -> int:
    """A task as it stands in the vault, which nobody runs."""
    store = installation.vault_app.vault.redrives
    wish = PlanOptions(selection=Selection(queue=DLQ), **more)
    plan = await installation.vault_app.planner.plan(PlanOptions(selection=Selection(queue=DLQ)), SERVER)
    letters = [(one, pack(Address(routing_key=MAIN))) for one in ids]
    task, _ = await store.start(plan=plan, letters=letters, wish=wish, name="", operation="", act=ACT)
    if state is not RedriveState.RUNNING:
        await store.set_state(task.id, state, sources=[RedriveState.RUNNING], act=ACT)
    return task.id


# --- the plan -------------------------------------------------------------------------------------------------


async def test_the_form_says_which_letters_and_offers_a_canary_for_many(installation: AdminInstallation) -> None:
    async with visiting(installation) as tab:
        assert "Which letters?" in text_of(await tab.get("/plans/new"))
        assert "No letter fits any more" in text_of(await tab.get("/plans/new?group=none"))
        await died(installation, 25)
        many = await tab.get(f"/plans/new?queue={DLQ}&state=captured")
        assert "25 letters queue orders.dlq state captured" in text_of(many)
        assert 'name="canary" checked' in many
        few = await tab.get("/plans/new?ids=1,2,3")
        assert "3 letters" in text_of(few)
        assert 'name="canary" checked' not in few
        wrong = await tab.get("/plans/new?ids=1,x", status=400)
        assert "is invalid" in notice_of(wrong)


async def test_more_letters_than_an_address_holds_are_planned_by_post(installation: AdminInstallation) -> None:
    await died(installation, 2)
    ids = ",".join(map(str, range(1, 100_001)))
    async with visiting(installation) as tab:
        await tab.get("/plans/new")
        form = await tab.post("/plans/new", {"ids": ids}, status=200)
        assert "2 letters ids 100 000 ids" in text_of(form)
        plan = await tab.post("/plans/new", {**MAKE, "ids": hidden(form, "ids")})
        assert "2 letters would be redriven" in text_of(plan)
        again = await tab.post("/plans/new", {"ids": hidden(plan, "ids")}, status=200)
        assert hidden(again, "ids") == ids
        two = await tab.http.post("/plans/new", data={"csrf": tab.csrf, "ids": ["1", "2"]})
        assert hidden(two.text, "ids") == "1,2", "rows that were selected are a field each"


async def test_a_plan_says_what_will_happen_before_it_happens(installation: AdminInstallation) -> None:
    await died(installation, 5)
    letters = installation.vault_app.vault.letters
    captured, archived = LetterState.CAPTURED, LetterState.ARCHIVED
    await letters.move([2], source=captured, target=archived, act=ACT, expected=1)
    async with visiting(installation) as tab:
        path = await planned(tab, state="", max_per_s="2")
        page = await tab.get(path)
        said = text_of(page)
        assert "4 letters would be redriven" in said
        assert "orders 4 orders" in said, "the target, how many, and which queues get a copy"
        assert "Left out: 1" in said
        assert "It is archived 1 letter 2" in said
        assert "at most 2 a second Takes about 2 s" in said
        assert "0 of them; 5 times or more are left out" in said
        assert "Redrive 4 letters" in page
        assert not (await tab.http.get("/admin/redrives")).json().get("redrives"), "nothing was started"


async def test_what_a_plan_cannot_do_is_said_and_what_was_written_stays(installation: AdminInstallation) -> None:
    await died(installation, 2)
    async with visiting(installation) as tab:
        await tab.get("/plans/new")
        for wrong, why in (
            ({"max_per_s": "fast"}, "'fast' is not a whole number"),
            ({"max_per_s": "999999"}, "max_per_s is from 0 to 100000"),
            ({"redrives_max": "0"}, "redrives_max is from 1 to 1000"),
            ({"to": "queue"}, "name the queue"),
            ({"to": "exchange", "routing_key": "x"}, "name the exchange"),
            ({"to": "moon"}, "is none of"),
            ({"canary": "on", "first": "10", "wait": "soon"}, "is not a duration"),
            ({"canary": "on", "first": "10", "wait": "1s", "stop_above": "x"}, "is not a number"),
            ({"canary": "on", "first": "10", "wait": "1s"}, "nothing captures 'orders.dlq'"),
            ({"queue": "x" * 501}, "is invalid"),
        ):
            given = {**MAKE, "source": f"keep {EVIL}", **wrong}
            answer = await tab.http.post("/plans/new", data={"csrf": tab.csrf, **given})
            assert answer.status_code in (400, 409), (wrong, answer.status_code)
            assert why.lower() in notice_of(answer.text).lower(), (wrong, notice_of(answer.text))
            assert EVIL not in answer.text
            if "queue" not in wrong:
                assert "keep &lt;script&gt;" in answer.text, wrong


async def test_letters_go_to_one_queue_or_exchange_and_the_plan_is_made_again(installation: AdminInstallation) -> None:
    await died(installation, 2)
    await installation.queues.queues_create("side")
    async with visiting(installation) as tab:
        said = text_of(await tab.get(await planned(tab, to="queue", to_queue="side", force="on", max_per_s="7")))
        assert "side 2 side" in said
        assert "sent however often that was" in said
        page = await tab.get(await planned(tab, to="queue", to_queue="side", force="on", max_per_s="7"))
        again = re.search(r'href="(/plans/new\?[^"]*)">Plan again', page)
        assert again
        given = dict(parse_qsl(urlsplit(unescape(again.group(1))).query))
        assert given == {
            "queue": DLQ, "state": "captured", "to": "queue", "to_queue": "side", "force": "on", "max_per_s": "7",
            "redrives_max": "5",
        }  # fmt: skip
        form = await tab.get(unescape(again.group(1)))
        assert 'value="side"' in form
        assert 'name="force" checked' in form
        nowhere = text_of(await tab.get(await planned(tab, to="queue", to_queue="nowhere")))
        assert "No letter of the selection can go" in nowhere
        assert "There is nothing to start" in nowhere


def test_the_form_of_a_wish_asks_for_the_same_wish() -> None:
    wish = PlanOptions(
        selection=Selection(ids=(1, 2), state=LetterState.CAPTURED, died_after_us=1_000_000, text="words"),
        target=Target(kind="address", exchange="shop", routing_key="new"),
        max_per_s=3,
        force=True,
        canary=Canary(first=3, wait="9s", widen=1.5, stop_above=0.25),
    )
    assert form_values(wish) == {
        "ids": "1,2", "state": "captured", "text": "words", "died_after": "1970-01-01T00:00:01+00:00", "to": "exchange",
        "exchange": "shop", "routing_key": "new", "max_per_s": "3", "redrives_max": "5", "force": "on", "canary": "on",
        "first": "3", "wait": "9s", "widen": "1.5", "stop_above": "25",
    }  # fmt: skip


# --- the task -------------------------------------------------------------------------------------------------


async def test_two_presses_start_one_redrive_and_its_report_stays(installation: AdminInstallation) -> None:
    await died(installation, 3)
    async with visiting(installation) as tab:
        assert "Nothing is being redriven" in text_of(await tab.get("/redrives"))
        path = await planned(tab)
        start = {"operation": hidden(await tab.get(path), "operation"), "name": f"night {EVIL}", "reason": "mended"}
        answers = [await tab.http.post(path, data={"csrf": tab.csrf, **start}) for _ in range(2)]
        assert [one.headers["location"] for one in answers] == ["/redrives/1"] * 2

        async def is_done() -> bool:
            return "done" in text_of(await tab.get("/redrives/1"))

        await eventually(is_done)
        report = await tab.get("/redrives/1")
        said = text_of(report)
        assert "3 of 3 letters" in said
        assert "Went to orders: 3" in said
        assert "by admin" in said
        assert EVIL not in report
        assert "data-print" in report
        assert 'name="do"' not in report, "nothing can be said to what is over"
        assert "letter 1 redriven orders" in text_of(await tab.get("/redrives/1?outcome=redriven"))
        assert "This plan was carried out already" in text_of(await tab.get(path))
        listed = await tab.get("/redrives")
        assert "night &lt;script&gt;" in listed
        assert EVIL not in listed
        assert len(await installation.queues.storage_items_list(MAIN)) == 3


async def test_who_was_slower_stays_on_the_plan_and_is_told_what_changed(installation: AdminInstallation) -> None:
    await died(installation, 2)
    async with visiting(installation) as tab, visiting(installation) as other:
        path = await planned(tab)
        page = await tab.get(path)
        theirs = await other.get(path)
        await other.post(path, {"operation": hidden(theirs, "operation"), "name": "theirs"})

        async def is_done() -> bool:
            return "done" in text_of(await other.get("/redrives/1"))

        await eventually(is_done)
        start = {"operation": hidden(page, "operation"), "reason": "keep me"}
        late = await tab.post(path, start, status=409)
        assert "Of 2 letters of the plan 0 can still go" in notice_of(late)
        assert 'value="keep me"' in late
        assert "This plan was carried out already: theirs done by admin" in text_of(late)
        gone = await tab.get("/plans/" + "0" * 64, status=404)
        assert "there is no plan" in text_of(gone).lower()


async def test_what_failed_is_listed_with_reasons_and_links(installation: AdminInstallation) -> None:
    await died(installation, 4)
    number = await task_in(installation, RedriveState.RUNNING, [1, 2, 3])
    store = installation.vault_app.vault.redrives
    task = await store.find(number)
    assert task is not None
    until = task.started_at
    await store.lease(number, count_max=3, until=until, act=ACT)
    failed = [Settled(1, "failed", f"returned: {EVIL}"), Settled(2, "failed", "returned: no route")]
    await store.settle(number, [*failed, Settled(3, "redriven")], ACT, until=until)
    async with visiting(installation) as tab:
        page = await tab.get(f"/redrives/{number}")
        said = text_of(page)
        assert "Letters: failed" in said, "what went wrong is shown first"
        assert "returned: no route 1 letter 2" in said
        assert "letter 2 failed orders returned: no route" in said
        assert 'href="/letters/1"' in page
        assert EVIL not in page
        assert "letter 3 redriven" in text_of(await tab.get(f"/redrives/{number}?outcome=all"))
        assert "is none of" in text_of(await tab.get(f"/redrives/{number}?outcome=odd", status=400))
        await tab.get("/redrives/999", status=404)
        await tab.get("/redrives/x", status=404)


async def test_a_redrive_is_paused_resumed_and_cancelled_and_who_was_slower_is_told(
    installation: AdminInstallation,
) -> None:
    await died(installation, 3)
    number = await task_in(installation, RedriveState.RUNNING, [1, 2, 3])
    path = f"/redrives/{number}"
    bo = await installation.token("bo", Role.OPERATOR)
    async with visiting(installation) as tab, visiting(installation, bo) as other:
        page = await tab.get(path)
        assert "is about to begin" in text_of(page)
        assert 'value="pause"' in await other.get(path)
        assert notice_of(await other.post(path, {"do": "pause"})) == f"Redrive {number} is paused."
        late = await tab.post(path, {"do": "pause"}, status=409)
        assert notice_of(late) == f"Redrive cannot pause. Redrive {number} is paused, by token:bo."
        assert "by token:bo; no letter is sent until somebody resumes it" in text_of(late)
        assert 'value="resume"' in late, "the page is of what is true now"
        assert "is cancelled" in notice_of(await tab.post(path, {"do": "cancel"}))
        slow = await other.post(path, {"do": "resume"}, status=409)
        assert notice_of(slow) == f"Redrive cannot resume. Redrive {number} is cancelled, by admin."
        assert "what was not redriven is captured again" in text_of(slow)
        odd = await tab.post(path, {"do": "explode"}, status=400)
        assert "is none of pause, resume, cancel" in notice_of(odd)


async def test_a_paused_redrive_goes_on(installation: AdminInstallation) -> None:
    await died(installation, 3)
    number = await task_in(installation, RedriveState.PAUSED, [1, 2, 3])
    async with visiting(installation) as tab:
        assert "Now" in text_of(await tab.get("/redrives"))
        assert "goes on" in notice_of(await tab.post(f"/redrives/{number}", {"do": "resume"}))

        async def is_done() -> bool:
            return "3 of 3 letters" in text_of(await tab.get(f"/redrives/{number}"))

        await eventually(is_done)


async def test_the_canary_says_until_when_it_watches_and_why_it_stopped(installation: AdminInstallation) -> None:
    await died(installation, 4)
    number = await task_in(installation, RedriveState.RUNNING, [1, 2, 3, 4], canary=Canary(first=2, wait="1h"))
    store = installation.vault_app.vault.redrives
    async with visiting(installation) as tab:
        path = f"/redrives/{number}"
        assert "Up to 2 letters may go, then it watches for 1h" in text_of(await tab.get(path))
        task = await store.find(number)
        assert task is not None
        await store.watch(number, until=task.started_at.replace(year=task.started_at.year + 1))
        assert "letters are out; watched until" in text_of(await tab.get(path))
        act = LedgerAct(actor="holdfast", action="redrives.stopped", detail="2 of 2 letters came back")
        await store.set_state(number, RedriveState.STOPPED, sources=[RedriveState.RUNNING], act=act)
        said = text_of(await tab.get(path))
        assert "2 of 2 letters came back." in said
        assert "it allows 5 %. The other 4 letters were not sent." in said


async def test_all_redrives_are_listed_page_by_page(installation: AdminInstallation) -> None:
    await died(installation, 1)
    for _ in range(53):
        await task_in(installation, RedriveState.DONE, [])
    running = await task_in(installation, RedriveState.PAUSED, [1])
    async with visiting(installation) as tab:
        page = await tab.get("/redrives")
        assert re.findall(r'href="/redrives/(\d+)">Redrive', page)[:3] == [str(running), "53", "52"]
        older = re.search(r'href="(/redrives\?cursor=[^"]+)"', page)
        assert older
        assert re.findall(r'href="/redrives/(\d+)">Redrive', await tab.get(older.group(1))) == ["3", "2", "1"]


async def test_a_viewer_has_no_buttons_and_is_refused_and_recorded(installation: AdminInstallation) -> None:
    await died(installation, 1)
    number = await task_in(installation, RedriveState.PAUSED, [1])
    viewer = await installation.token("eve", Role.VIEWER)
    async with visiting(installation) as admin:
        plan = await planned(admin)
    async with visiting(installation, viewer) as tab:
        page = await tab.get(f"/redrives/{number}")
        assert 'name="do"' not in page
        assert "/plans/" not in page
        assert "needs the role operator" in await tab.get("/plans/new?ids=1", status=403)
        assert "needs the role operator" in await tab.get(plan, status=403)
        for path, fields in (
            (plan, {"operation": "x"}),
            *((f"/redrives/{number}", {"do": word}) for word in ("pause", "resume", "cancel")),
        ):
            assert "needs the role operator" in await tab.post(path, fields, status=403)
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=200)
    denied = [row.action for row in rows if row.outcome == "denied" and row.actor == "token:eve"]
    assert denied == ["redrives.start", "redrives.pause", "redrives.resume"], "the fourth is in the sum"
    task = await installation.vault_app.vault.redrives.find(number)
    assert task is not None
    assert task.state is RedriveState.PAUSED


async def test_a_token_held_to_queues_plans_and_sees_its_own(installation: AdminInstallation) -> None:
    await died(installation, 1)
    number = await task_in(installation, RedriveState.PAUSED, [1])
    other = await installation.token("other", Role.ADMIN, ["pay*"])
    own = await installation.token("own", Role.ADMIN, ["orders*"])
    async with visiting(installation, other) as tab:
        assert MAIN not in text_of(await tab.get("/redrives"))
        await tab.get(f"/redrives/{number}", status=403)
        assert "name one of them" in notice_of(await tab.get("/plans/new?ids=1", status=403))
    async with visiting(installation, own) as tab:
        assert f"/redrives/{number}" in await tab.get("/redrives")
        assert "1 letter would be redriven" in text_of(await tab.get(await planned(tab)))
