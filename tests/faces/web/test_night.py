"""The night story, in a browser, on the embedded queue and on RabbitMQ: from what died to what is done again."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

import holdfast
from holdfast import NewItem
from holdfast.core.message import Message
from holdfast.core.requests.declare import Role
from holdfast.settings import Secret
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.support.amqp import Admin, outgoing
from tests.support.browser import Chromium, Visitor
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node, vhost_name

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]
ENGINES = ["embedded", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)]
#: At one a second so many take longer than what is done meanwhile, on a busy machine too.
SLOWLY_COUNT = 200
MAIN, DLQ = "orders", "orders.dlq"


class NightShift:
    """A consumer with a world around it that is broken, and mended when somebody says so."""

    def __init__(self, installation: AdminInstallation, admin: Admin | None) -> None:
        self.installation = installation
        self.admin = admin
        self.is_mended = False
        self.handled: list[bytes] = []

    async def order(self, message: Message) -> None:
        if b"@@" in message.body:
            raise ValueError("bo@@mail.example is no address")
        if not self.is_mended:
            raise TimeoutError("pay.example did not answer")
        self.handled.append(message.body)

    async def send(self, *bodies: bytes) -> None:
        """Messages, each of which dies into custody."""
        before = await self.captured()
        if self.admin is None:
            await self.installation.queues.queue_produce(MAIN, [NewItem(payload=body, kind="order") for body in bodies])
        else:
            told = [outgoing(MAIN, body, message_id=f"id {body!r}", type="order") for body in bodies]
            await self.admin.publish(told)

        async def are_captured() -> bool:
            return await self.captured() == before + len(bodies)

        await eventually(are_captured)

    async def captured(self) -> int:
        async with self.installation.client() as client:
            found = (await client.get("/admin/dlq/queues")).json()
        return sum(one["captured"] for one in found if one["queue"] == DLQ)


@asynccontextmanager
async def open_night(engine: str, folder: Path, nodes: dict[str, Node]) -> AsyncIterator[NightShift]:
    """A night on one engine, with its server, whose dead queue is captured."""
    async with AsyncExitStack() as stack:
        admin, more = None, dict[str, Any]()
        if engine == "rabbitmq":
            node = nodes["3.10"]
            admin = await stack.enter_async_context(Admin.open(node, vhost_name(folder.name)))
            more = {"broker": Secret(admin.url), "management": Secret(node.management_url)}
        installation = await stack.enter_async_context(open_installation(folder, **more))
        night = NightShift(installation, admin)
        if admin is None:
            app = holdfast.App(installation.url, token=TOKEN)
        else:
            app = holdfast.App(admin.url, management=admin.node.management_url)
        app.consumer(MAIN, permanent=(ValueError, TimeoutError))(night.order)
        await stack.enter_async_context(app.running(declare=True))
        async with installation.client() as client:
            started = await client.post("/admin/captures", json={"queue": DLQ, "continuous": True})
            assert started.status_code == 200, started.text
        yield night


async def sign_in(visitor: Visitor, token: str = TOKEN) -> Page:
    await visitor.open("/sign-in")
    await visitor.page.get_by_label("Token").fill(token)
    await visitor.page.get_by_role("button", name="Sign in").click()
    await visitor.page.wait_for_url(re.compile(r"/$"))
    return visitor.page


async def plan(page: Page, *, first: str = "", wait: str = "1s", per_s: str = "") -> None:
    """Fill the form of a plan in, and make it."""
    canary = page.get_by_label("Send a few first")
    await (canary.check if first else canary.uncheck)()
    if first:
        await page.get_by_label("How many first").fill(first)
        await page.get_by_label("Watch for").fill(wait)
        await page.get_by_label("Then times as many").fill("50")
    await page.get_by_label("Letters a second").fill(per_s)
    await page.get_by_role("button", name="Make the plan").click()
    await page.wait_for_url(re.compile(r"/plans/[0-9a-f]{64}$"))


async def start(page: Page, name: str, count: int) -> None:
    await page.get_by_label("Name").fill(name)
    await page.get_by_label("Reason").fill("pay.example is back")
    await page.get_by_role("button", name=re.compile(f"^Redrive {count} letters?$")).click()
    await page.wait_for_url(re.compile(r"/redrives/\d+$"))


async def to_plan_of_group(page: Page, title: str) -> None:
    """From anywhere to the form for the letters of a group."""
    await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Groups").click()
    await page.get_by_role("link", name=title, exact=True).click()
    await page.get_by_role("link", name=re.compile("^Plan a redrive of")).click()


async def edit_one(visitor: Visitor) -> None:
    """From the group of the wrong address to its letter, which is put right and sent alone."""
    page = visitor.page
    await page.get_by_role("link", name="ValueError in test_night.py:order", exact=True).click()
    await visitor.sees("What is known of it", "bo@@mail.example is no address")
    await page.get_by_label("Note").fill("the form lets two @ through")
    await page.get_by_role("button", name="Keep the note").click()
    await visitor.sees("ValueError in test_night.py:order has your note.")
    await page.get_by_role("link", name="26", exact=True).click()
    await visitor.sees("Letter 26", "ValueError")
    await page.get_by_role("link", name="Edit").click()
    await page.get_by_label("Body").fill('{"mail": "bo@mail.example"}')
    await page.get_by_label("Why, for the ledger").fill("asked the customer")
    await page.get_by_role("button", name="Save as revision 1").click()
    await visitor.sees("Revision 1 is made; the original stays.")
    await page.get_by_role("link", name="Redrive this one").click()
    await plan(page)
    await start(page, "one that was put right", 1)
    await visitor.sees("1 of 1 letters", "done")


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_story_of_a_night(engine: str, tmp_path: Path, nodes: dict[str, Node], chromium: Chromium) -> None:
    async with open_night(engine, tmp_path, nodes) as night:
        await night.send(*(b'{"order": %d}' % number for number in range(25)))
        await night.send(b'{"mail": "bo@@mail.example"}')
        async with chromium.visitor(night.installation.url) as visitor:
            page = await sign_in(visitor)
            await visitor.sees(DLQ)
            await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Groups").click()
            await visitor.sees("TimeoutError", "ValueError", "pay.example did not answer")
            night.is_mended = True
            await edit_one(visitor)
            await eventually(lambda: night.handled == [b'{"mail": "bo@mail.example"}'])
            await to_plan_of_group(page, "TimeoutError in test_night.py:order")
            await plan(page, first="10")
            await visitor.sees("25 letters would be redriven", "None: every letter of the selection goes", "10 first")
            await start(page, "night shift", 25)
            # From here on the page tells by itself.
            await visitor.sees(re.compile("watched until|It let all letters through"))
            await visitor.sees("25 of 25 letters", "It let all letters through")
            await visitor.sees("pay.example is back", f"Went to\n{MAIN}: 25")
            await eventually(lambda: len(night.handled) == 26)
            assert await night.captured() == 0
            await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Groups").click()
            await page.get_by_role("button", name="Resolve TimeoutError in test_night.py:order").click()
            await visitor.sees("TimeoutError in test_night.py:order is resolved.")
            assert await visitor.axe() == []
            night.is_mended = False
            await night.send(b'{"order": "again"}')
            await visitor.sees("Regressed")


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_canary_stops_what_would_come_back(
    engine: str, tmp_path: Path, nodes: dict[str, Node], chromium: Chromium
) -> None:
    async with open_night(engine, tmp_path, nodes) as night:
        await night.send(*(b'{"order": %d}' % number for number in range(12)))
        async with chromium.visitor(night.installation.url) as visitor:
            page = await sign_in(visitor)
            await to_plan_of_group(page, "TimeoutError in test_night.py:order")
            await plan(page, first="3", wait="50s")
            await start(page, "too early", 12)
            await visitor.sees("stopped", "of 3 came back; it allows 5 %. The other 9 letters were not sent.")
            await visitor.sees("Letters: came back", "again as letter")
            await visitor.sees("resumed, it would count the same letters and stop again")
            again = page.get_by_role("link", name="Plan it again")
            assert "first=3" in (await again.get_attribute("href") or "")
            assert await visitor.axe() == []
            assert not night.handled
            await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Redrives").click()
            await visitor.sees("too early", "stopped", "3 of 12")


async def test_two_browsers_pause_resume_and_cancel_and_the_slower_one_is_told(
    tmp_path: Path, nodes: dict[str, Node], chromium: Chromium
) -> None:
    async with open_night("embedded", tmp_path, nodes) as night:
        await night.send(*(b'{"order": %d}' % number for number in range(SLOWLY_COUNT)))
        night.is_mended = True
        bo = await night.installation.token("bo", Role.OPERATOR)
        eve = await night.installation.token("eve", Role.VIEWER)
        url = night.installation.url
        async with (
            chromium.visitor(url) as first,
            chromium.visitor(url, javascript=False) as second,
            chromium.visitor(url, width=390, scheme="dark") as third,
        ):
            page, other, viewer = await sign_in(first), await sign_in(second, bo), await sign_in(third, eve)
            await to_plan_of_group(page, "TimeoutError in test_night.py:order")
            await plan(page, per_s="1")
            await start(page, "slowly", SLOWLY_COUNT)
            path = page.url
            for one in (other, viewer):
                await one.goto(path)
            await page.get_by_role("button", name="Pause").click()
            await first.sees("Redrive 1 is paused.", "no letter is sent until somebody resumes it")
            await third.sees("paused")  # by itself
            await expect(viewer.get_by_role("button", name=re.compile("Pause|Resume|Cancel"))).to_have_count(0)
            assert await third.axe() == []
            second.expects("409")
            await other.get_by_role("button", name="Pause").click()
            await second.sees("Redrive cannot pause. Redrive 1 is paused, by admin.")
            await other.get_by_role("button", name="Resume").click()
            await second.sees("Redrive 1 goes on.")
            await first.sees("running")  # by itself
            await page.get_by_text("Cancel…").click()
            await page.get_by_role("button", name="Cancel this redrive").click()
            await first.sees("is cancelled; what was not redriven is captured", "cancelled")
            await expect(page.get_by_role("button", name=re.compile("Pause|Resume|Cancel"))).to_have_count(0)
            second.expects("409")
            await other.get_by_role("button", name="Pause").click()
            await second.sees("Redrive cannot pause. Redrive 1 is cancelled, by admin.")


async def test_by_the_keyboard_alone_a_group_is_planned_started_and_cancelled(
    tmp_path: Path, nodes: dict[str, Node], chromium: Chromium
) -> None:
    async with open_night("embedded", tmp_path, nodes) as night:
        await night.send(*(b'{"order": %d}' % number for number in range(18)))
        async with chromium.visitor(night.installation.url) as visitor:
            await sign_in(visitor)
            await visitor.open("/groups")
            await visitor.tab_to("Plan a redrive of TimeoutError")
            await visitor.press("Enter")
            await visitor.sees("Where they go")
            await visitor.tab_to("Each to the queue it died in", tag="input")
            await visitor.tab_to("Letters a second")
            await visitor.write("1")
            await visitor.tab_to("Make the plan")
            await visitor.press("Enter")
            await visitor.sees("18 letters would be redriven")
            await visitor.tab_to("Redrive 18 letters")
            await visitor.press("Enter")
            await visitor.sees("Letters", "of 18 letters")
            await visitor.tab_to("Cancel…")
            await visitor.press("Enter")
            await visitor.tab_to("Cancel this redrive")
            assert await visitor.axe() == []
