"""The pages of queues: the list, one queue with its items, its settings, and what is done to it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest

from holdfast import NewItem
from holdfast.core.requests.declare import Role
from holdfast.faces.web.queues import PAGE_COUNT, SHOWN_BYTES_MAX
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.faces.web.visiting import notice_of, text_of, visiting
from tests.support.browser import Chromium

SCRIPT = b"<script>alert(1)</script><img src=x onerror=alert(2)>"
#: Names may hold anything but spaces, `~` and control characters.
STRANGE = ["a/b", "a?b=c", "50%", "a#b", '"><script>x', "new", "späte/ünicode", "a/../b"]
NEW = {
    "queue_name": "orders",
    "lease_timeout": "1m",
    "expire_timeout": "24h",
    "max_attempts": "3",
    "dead_queue": "",
    "requested_partitions": "1",
    "dead_retention": "",
    "reference": "",
}


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def test_without_queues_the_page_says_what_to_do(installation: AdminInstallation) -> None:
    viewer = await installation.token("eve", Role.VIEWER)
    async with visiting(installation) as tab, visiting(installation, viewer) as other:
        assert "no queues of its own yet" in await tab.get("/queues")
        assert "/new-queue" in await tab.get("/queues")
        assert "/new-queue" not in await other.get("/queues"), "who may not make one is shown no way to"


async def test_a_queue_is_made_changed_paused_resumed_and_deleted(installation: AdminInstallation) -> None:
    queues = installation.queues
    await queues.queues_create("orders.dlq")
    async with visiting(installation) as tab:
        form = await tab.get("/new-queue")
        assert "<option>orders.dlq</option>" in form
        made = await tab.post("/new-queue", {**NEW, "dead_queue": "orders.dlq"})
        assert notice_of(made) == "Queue orders was created."
        edit = await tab.get("/queues/orders?edit=true")
        assert "<option selected>orders.dlq</option>" in edit
        assert "<option>orders</option>" not in edit, "not its own dead queue"
        assert "<option>" not in await tab.get("/queues/orders.dlq?edit=true"), "a dead queue has none"
        changed = {**NEW, "do": "update", "dead_queue": "orders.dlq", "max_attempts": "7", "requested_partitions": "2"}
        assert notice_of(await tab.post("/queues/orders", changed)) == "The settings were changed."
        info = await queues.queues_info("orders")
        assert (info.max_attempts, len(info.partitions), info.dead_queue) == (7, 2, "orders.dlq")
        assert "gives none out" in notice_of(await tab.post("/queues/orders", {"do": "pause"}))
        assert (await queues.queues_info("orders")).paused
        assert "paused" in text_of(await tab.get("/queues?paused=true"))
        await tab.post("/queues/orders", {"do": "resume"})
        assert not (await queues.queues_info("orders")).paused
        used = await tab.post("/queues/orders.dlq", {"do": "delete", "count": "0"}, status=400)
        assert "is the dead_queue of 'orders'" in text_of(used)
        assert "it is one itself" in text_of(used)
        gone = await tab.post("/queues/orders", {"do": "delete", "count": "0"})
        assert notice_of(gone) == "Queue orders was deleted."
        assert [one.queue_name for one in await queues.queues_list()] == ["orders.dlq"]
        assert "No such queue named" in text_of(await tab.get("/queues/orders", status=404))


async def test_what_is_refused_is_said_and_what_was_written_stays(installation: AdminInstallation) -> None:
    await installation.queues.queues_create("orders")
    async with visiting(installation) as tab:
        await tab.get("/new-queue")
        for wrong, why in (
            ({"queue_name": "orders"}, "already exists"),
            ({"queue_name": "a b"}, "whitespace"),
            ({"lease_timeout": "soon"}, "Lease timeout is invalid"),
            ({"max_attempts": "many"}, "not a whole number"),
            ({"dead_queue": "nowhere"}, "was not found, create it first"),
        ):
            given = {**NEW, "queue_name": "fresh", "reference": "keep <me>", **wrong}
            page = await tab.post("/new-queue", given, status=400)
            assert why in notice_of(page)
            assert "keep &lt;me&gt;" in page
        page = await tab.post("/queues/orders", {**NEW, "do": "update", "max_attempts": "70000"}, status=400)
        assert 'value="70000"' in page
        assert "405" in await tab.post("/queues/orders", {"do": "explode"}, status=405)
    assert len(await installation.queues.queues_list()) == 1


async def test_messages_are_sent_and_looked_at_and_stay_what_they_are(installation: AdminInstallation) -> None:
    queues = installation.queues
    await queues.queues_create("orders", requested_partitions=2)
    await queues.queue_produce(
        "orders", [NewItem(payload=SCRIPT), NewItem(payload=b"\x00\xff binary"), NewItem(payload=b"\xc3\xa9" * 9_000)]
    )
    await queues.queue_lease("orders")
    async with visiting(installation) as tab:
        await tab.get("/queues/orders")
        sent = await tab.post("/queues/orders", {"do": "send", "body": '{"a": 1.50,\r\n "b": []}', "kind": "<b>"})
        item_id = notice_of(sent).rpartition(" ")[2].rstrip(".")
        later = await tab.post("/queues/orders", {"do": "send", "body": "later", "delay": "2h"})
        assert notice_of(later).endswith("for in 2h.")
        pages = [await tab.get(f"/queues/orders?partition={number}") for number in (0, 1)]
        both = "".join(pages)
        assert "<script>alert" not in both
        assert "&lt;script&gt;alert(1)" in both
        assert "<b>" not in both
        assert "00 ff 20 62" in both
        assert f"The first {SHOWN_BYTES_MAX // 1024}.0 KiB of 17.6 KiB are shown" in both
        assert "1.50" in both, "pretty, and not another number"
        assert "leased" in both
        partition = int(item_id.rpartition("-")[2], 16)
        file = await tab.http.get(f"/queue-payload/orders?id={item_id}&partition={partition}")
        assert (file.status_code, file.content) == (200, b'{"a": 1.50,\n "b": []}')
        assert file.headers["content-disposition"].startswith("attachment")
        assert file.headers["content-type"] == "application/octet-stream"
        gone = await tab.http.get(f"/queue-payload/orders?id={item_id}&partition={partition}&scheduled=true")
        assert gone.status_code == 404
        scheduled = "".join([await tab.get(f"/queues/orders?partition={n}&scheduled=true") for n in (0, 1)])
        assert "later" in scheduled
        assert "in 1 h" in scheduled
        wrong = await tab.post("/queues/orders", {"do": "send", "body": "keep me", "delay": "soon"}, status=400)
        assert "keep me</textarea>" in wrong


async def test_items_come_a_page_at_a_time(installation: AdminInstallation) -> None:
    await installation.queues.queues_create("orders")
    await installation.queues.queue_produce("orders", [NewItem(payload=b"number %02d" % n) for n in range(45)])
    async with visiting(installation) as tab:
        seen, path = [], "/queues/orders"
        while path:
            page = await tab.get(path)
            seen.append(re.findall(r"<pre tabindex=\"0\">number (\d+)</pre>", page))
            found = re.search(r'href="([^"]+)#items" rel="next"', page)
            path = found.group(1).replace("&amp;", "&") if found else ""
        assert [len(one) for one in seen] == [20, 20, 5]
        assert [one for page in seen for one in page] == [f"{n:02d}" for n in range(45)]


async def test_a_page_of_large_payloads_has_fewer_items(installation: AdminInstallation) -> None:
    await installation.queues.queues_create("orders")
    for _ in range(12):
        await installation.queues.queue_produce("orders", [NewItem(payload=b"x" * 3 * 2**20)])
    async with visiting(installation) as tab:
        page = await tab.get("/queues/orders")
        assert page.count("of 3.0 MiB are shown") == 8
        (link,) = re.findall(r'href="([^"]+)#items" rel="next"', page)
        assert (await tab.get(link.replace("&amp;", "&"))).count("of 3.0 MiB are shown") == 4


async def test_what_is_deleted_is_counted_before(installation: AdminInstallation) -> None:
    queues = installation.queues
    await queues.queues_create("orders")
    at = datetime.now(UTC) + timedelta(hours=1)
    await queues.queue_produce("orders", [NewItem(payload=b"x")] * 5 + [NewItem(payload=b"y", enqueue_at=at)] * 2)
    await queues.queue_lease("orders")
    async with visiting(installation) as tab:
        page = await tab.get("/queues/orders")
        assert "queued (4)" in page
        assert "queued and leased (5)" in page
        assert "scheduled (2)" in page
        other = await tab.post("/queues/orders", {"do": "clear", "which": "queued", "count": "5"}, status=409)
        assert "5 was typed and it is 4 now, nothing was deleted" in notice_of(other)
        assert len(await queues.storage_items_list("orders")) == 5
        no_choice = await tab.post("/queues/orders", {"do": "clear", "count": "5"}, status=400)
        assert "Choice is missing" in notice_of(no_choice)
        done = await tab.post("/queues/orders", {"do": "clear", "which": "queued", "count": "4"})
        assert notice_of(done) == "4 items were deleted."
        assert len(await queues.storage_items_list("orders")) == 1
        await tab.post("/queues/orders", {"do": "clear", "which": "scheduled", "count": "2"})
        await tab.post("/queues/orders", {"do": "delete", "count": "0"}, status=409)
        await tab.post("/queues/orders", {"do": "delete", "count": "1"})
    assert await queues.queues_list() == []


@pytest.mark.parametrize("name", STRANGE)
async def test_a_queue_may_be_called_anything(installation: AdminInstallation, name: str) -> None:
    await installation.queues.queues_create(name)
    await installation.queues.queue_produce(name, [b"in it"])
    async with visiting(installation) as tab:
        listed = await tab.get("/queues")
        (path,) = re.findall(r'<th scope="row"><a href="([^"]+)"', listed)
        assert path == f"/queues/{quote(name, safe='')}"
        page = await tab.get(path)
        assert name in text_of(page)
        assert "in it" in page
        assert "<script>x" not in page + listed
        await tab.post(path, {"do": "pause"})
        assert (await installation.queues.queues_info(name)).paused
        await tab.post(path, {**NEW, "do": "update", "max_attempts": "9"})
        assert (await installation.queues.queues_info(name)).max_attempts == 9


async def test_each_role_sees_and_does_what_it_may(installation: AdminInstallation) -> None:
    await installation.queues.queues_create("orders")
    await installation.queues.queue_produce("orders", [b"a secret body"])
    viewer = await installation.token("viewer", Role.VIEWER)
    operator = await installation.token("operator", Role.OPERATOR)
    async with visiting(installation, viewer) as tab:
        page = await tab.get("/queues/orders")
        assert "a secret body" not in page
        assert not {"pause", "send", "clear", "delete"} & set(re.findall(r'name="do" value="(\w+)"', page))
        assert "Edit" not in text_of(page)
        for word in ("pause", "resume", "update", "send", "clear", "delete"):
            fields = {**NEW, "do": word, "count": "1", "which": "queued", "body": "x"}
            assert "needs the role" in await tab.post("/queues/orders", fields, status=403)
        async with visiting(installation) as admin:
            denied = text_of(await admin.get("/ledger?outcome=denied&queue=orders"))
            assert "token:viewer" in denied
            assert "queue.pause" in denied
        await tab.post("/new-queue", NEW, status=403)
        await tab.get("/queue-payload/orders?id=1", status=403)
    async with visiting(installation, operator) as tab:
        page = await tab.get("/queues/orders")
        assert "a secret body" in page
        assert set(re.findall(r'name="do" value="(\w+)"', page)) == {"send"}


async def test_who_is_held_to_some_queues_sees_no_other(installation: AdminInstallation) -> None:
    queues = installation.queues
    for name in ("pay.dlq", "mine.dlq"):
        await queues.queues_create(name)
    await queues.queues_create("pay", dead_queue="pay.dlq")
    await queues.queues_create("mine", dead_queue="mine.dlq")
    held = await installation.token("held", Role.ADMIN, ["mine*"])
    nothing = await installation.token("nothing", Role.ADMIN, ["none*"])
    async with visiting(installation, held) as tab:
        for path in ("/queues", "/queues?sort=depth", "/queues?search=", "/new-queue", "/queues/mine?edit=true"):
            page = await tab.get(path)
            assert "pay" not in text_of(page), path
        assert "2 shown, 2 match" in text_of(await tab.get("/queues"))
        for path in ("/queues/pay", "/queues/pay?edit=true", "/queue-payload/pay?id=1"):
            assert "pay.dlq" not in await tab.get(path, status=403)
        await tab.post("/queues/pay", {"do": "delete", "count": "0"}, status=403)
        await tab.post("/queues/mine", {**NEW, "do": "update", "dead_queue": "pay.dlq"}, status=403)
    async with visiting(installation, nothing) as tab:
        assert "no queue that this token is for" in text_of(await tab.get("/queues"))
    assert len(await queues.queues_list()) == 4


async def test_many_queues_are_shown_page_by_page(tmp_path: Path) -> None:
    async with open_installation(tmp_path) as installation:
        queues = installation.queues
        for name in range(120):
            await queues.queues_create(f"q{name:04}")
        await queues.queue_produce("q0077", [b"x"] * 3)
        async with visiting(installation) as tab:
            seen, path = [], "/queues"
            while path:
                page = await tab.get(path)
                names = re.findall(r'<th scope="row"><a href="/queues/(q\d+)"', page)
                assert len(names) <= PAGE_COUNT
                assert "120 match" in page
                seen += names
                found = re.search(r'href="([^"]+)" rel="next"', page)
                path = found.group(1).replace("&amp;", "&") if found else ""
            assert seen == [f"q{name:04}" for name in range(120)]
            fullest = await tab.get("/queues?sort=depth")
            assert re.findall(r'<th scope="row"><a href="/queues/(q\d+)"', fullest)[:2] == ["q0077", "q0000"]
            one = text_of(await tab.get("/queues?search=077"))
            assert "1 shown, 1 match" in one
            assert "No queue fits" in text_of(await tab.get("/queues?search=nothing"))
            await tab.get("/queues?cursor=nonsense", status=400)
            await tab.get("/queues?sort=size", status=400)


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_by_the_keyboard_a_queue_is_made_written_to_looked_at_and_paused(
    chromium: Chromium, tmp_path: Path
) -> None:
    async with open_installation(tmp_path) as installation, chromium.visitor(installation.url) as visitor:
        await visitor.open("/sign-in?next=/queues")
        await visitor.write(TOKEN)
        await visitor.press("Enter")
        await visitor.sees("no queues of its own yet")
        await visitor.tab_to("New queue", tag="a")
        await visitor.press("Enter")
        await visitor.sees("Lease timeout")
        await visitor.write("orders")
        await visitor.press("Enter")
        await visitor.sees("Queue orders was created.")
        await visitor.tab_to("Send a test message", tag="summary")
        await visitor.press("Enter")
        await visitor.tab_to("Body", tag="textarea")
        await visitor.write("<b>hello</b>")
        await visitor.tab_to("Send", tag="button")
        await visitor.press("Enter")
        await visitor.sees("The message was stored as item")
        await visitor.tab_to("<b>hello</b>", tag="summary")
        await visitor.press("Enter")
        await visitor.sees("12 B.", "Copy id")
        assert await visitor.axe() == []
        await visitor.tab_to("Pause", tag="button")
        await visitor.press("Enter")
        await visitor.sees("it takes items in and gives none out")
        assert (await installation.queues.queues_info("orders")).paused
        # What another does is counted without being asked for; what one looks at stays.
        await installation.queues.queue_produce("orders", [b"from elsewhere"])
        await visitor.sees(re.compile(r"Queued\s+2\b"))
        await visitor.sees_no("from elsewhere")
        await visitor.page.get_by_role("button", name="Look again").click()
        await visitor.sees("from elsewhere")
