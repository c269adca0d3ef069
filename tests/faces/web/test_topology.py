"""The page with the topology of the broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from holdfast.settings import Secret
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.web.test_sessions import HTML, signed_in
from tests.support.amqp import Admin, outgoing

FILE = '[queues.orders]\nretry_delay = "15s"\n'


async def page_of(installation: AdminInstallation, path: str = "/topology") -> str:
    async with installation.client("") as browser:
        await signed_in(browser)
        page = await browser.get(path, headers=HTML)
        assert page.status_code == 200
        return page.text


def picture_in(page: str) -> str:
    (found,) = re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL)
    ET.fromstring(found)  # noqa: S314 - made by us
    return str(found)


async def test_without_a_broker_it_says_what_to_set(tmp_path: Path) -> None:
    async with open_installation(tmp_path) as installation:
        page = await page_of(installation)
        assert "No RabbitMQ is configured here" in page
        assert "<svg xmlns" not in page


async def test_the_file_of_the_settings_is_drawn_where_no_broker_is(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text(FILE)
    async with open_installation(tmp_path, topology=tmp_path / "topology.toml") as installation:
        page = await page_of(installation)
        assert "not what stands at a broker" in page
        assert "orders.retry" in picture_in(page)
        (tmp_path / "topology.toml").write_text("[queues.orders]\nunknown = 1\n")
        assert "Topology file has an unknown key" in await page_of(installation)
        (tmp_path / "topology.toml").unlink()
        assert "Topology file cannot be read" in await page_of(installation)


async def test_what_is_too_much_for_a_picture_is_narrowed_by_a_name(tmp_path: Path) -> None:
    file = "\n".join(f'[queues.q{number}]\nretry_delay = "15s"' for number in range(60))
    (tmp_path / "topology.toml").write_text(file)
    async with open_installation(tmp_path, topology=tmp_path / "topology.toml") as installation:
        assert "too many for a picture" in await page_of(installation)
        page = await page_of(installation, "/topology?like=q59")
        assert set(re.findall(r">(q\d+)<", picture_in(page))) == {"q59"}
        assert "Nothing has this in its name" in await page_of(installation, "/topology?like=nothing")


@pytest.mark.rabbitmq
async def test_the_live_broker_is_drawn_with_its_depths(admin: Admin, tmp_path: Path) -> None:
    hostile = '"><script>alert(1)</script>.dlq'
    await admin.exchange("orders")
    await admin.queue("orders.dlq")
    await admin.queue(hostile)
    await admin.queue("orders", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dlq"})
    nowhere: dict[str, int | str] = {"x-dead-letter-exchange": "gone", "x-expires": 600_000}
    await admin.queue("nowhere", **nowhere)
    await admin.bind("orders", "orders", "new")
    await admin.publish([outgoing("orders.dlq", b"x") for _ in range(3)])
    (tmp_path / "topology.toml").write_text(FILE)
    settings: dict[str, Any] = {"broker": Secret(admin.url), "topology": tmp_path / "topology.toml"}
    async with open_installation(tmp_path, **settings) as installation:
        assert "by its management API alone" in await page_of(installation)
    settings["management"] = Secret(admin.node.management_url)
    async with open_installation(tmp_path, **settings) as installation:
        page = await page_of(installation)
        picture = picture_in(page)
        assert "<script>" not in page.replace("<script src", "")
        assert "style=" not in page
        assert 'href="/letters?queue=orders.dlq"' in picture
        assert 'href="/topology?like=orders"' in picture
        assert "go to exchange &#39;gone&#39;, which is not there" in page
        assert "loses messages" in page
        assert "Against the topology file" in page
        assert "is missing" in page
        async with installation.client() as client:
            told = (await client.get("/admin/topology", params={"like": "dlq"})).json()
    assert (told["state"], told["is_file"]) == ("broker", False)
    assert {one["name"] for one in told["topology"]["queues"]} == {"orders.dlq", hostile}
    assert told["depths"]["orders.dlq"]["consumers"] in (0, None)


@pytest.mark.rabbitmq
async def test_a_management_api_that_says_no_is_told_of(admin: Admin, tmp_path: Path) -> None:
    wrong = Secret(admin.node.management_url.replace("guest:guest", "guest:wrong"))
    async with open_installation(tmp_path, broker=Secret(admin.url), management=wrong) as installation:
        page = await page_of(installation)
        assert "The broker cannot be read." in page
        assert "wrong" not in page
