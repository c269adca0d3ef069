"""The pages of results: how far each series is, what is missing, asked for again, downloaded, given up."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from holdfast.core.requests.declare import Role
from holdfast.core.requests.results import GapView
from holdfast.errors import BrokerUnreachable, CannotStart
from holdfast.faces.api.authenticator import token_hash
from holdfast.faces.api.endpoints import LazyCollector
from holdfast.faces.api.server import make_server
from holdfast.faces.web.results import CELLS_COUNT, PAGE_COUNT, SERIES_COUNT, gap_map
from holdfast.services.collect.service import CollectService
from holdfast.services.queue.queues import Queues
from holdfast.settings import Settings, StorageSettings
from holdfast.wiring import open_service, open_vault_app
from tests.collect.producing import body_of, header, make_queues, payload, produce, take_request
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.faces.web.visiting import notice_of, text_of, visiting
from tests.queue.installation import listening
from tests.support.browser import Chromium
from tests.support.eventually import eventually


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        await make_queues(installation.queues)
        yield installation


async def begin(installation: AdminInstallation, name: str, series: Sequence[str], *, producer: str = "") -> None:
    """Ask for a result, and take the request in the producer's place."""
    async with installation.client() as client:
        wanted = {"producer": producer or "producer", "transaction_id": name, "series": series}
        answer = await client.post("/v1/results", json=wanted)
        assert answer.status_code == 200, answer.text
    if not producer:
        await take_request(installation.queues)


async def stored(installation: AdminInstallation, name: str, count: int) -> None:
    """Wait until so many parts are stored."""
    async with installation.client() as client:

        async def is_there() -> bool:
            found = (await client.get(f"/v1/results/{name}")).json()
            return bool(count == sum(one["stored_count"] for one in found["series"]))

        await eventually(is_there)


async def half(installation: AdminInstallation) -> None:
    """A result with a whole series, and one with a gap."""
    await begin(installation, "may", ["rows", "lines"])
    await produce(installation.queues, "may", "header", [header("may", "rows", 6), header("may", "lines", 2)])
    parts = [("rows", 0), ("rows", 1), ("rows", 4), ("lines", 0), ("lines", 1)]
    await produce(installation.queues, "may", "payload", [payload("may", name, number) for name, number in parts])
    await stored(installation, "may", len(parts))


async def test_a_result_is_shown_with_its_gaps_and_its_series_are_downloaded(installation: AdminInstallation) -> None:
    await half(installation)
    async with visiting(installation) as tab:
        listed = await tab.get("/results")
        assert "3 of 6" in text_of(listed)
        assert "2 of 2" in text_of(listed)
        page = await tab.get("/results/may")
        assert 'aria-label="rows: missing 2 to 3, 5"' in page
        assert "lines: missing nothing" in page
        links = re.findall(r'href="(/v1/results/may/\w+)"', page)
        assert links == ["/v1/results/may/lines", "/v1/results/may/rows"]
        whole, first = [await tab.http.get(link) for link in links]
        assert whole.content == body_of("lines", 0) + body_of("lines", 1)
        assert first.content == body_of("rows", 0) + body_of("rows", 1), "up to the first gap"
        assert first.headers["content-disposition"].startswith("attachment")
        assert "There is no &#39;june&#39;" in await tab.get("/results/june", status=404)
        await tab.get("/results/.x", status=404)


async def test_the_producer_is_asked_again_and_a_result_is_given_up_with_a_reason(
    installation: AdminInstallation,
) -> None:
    await half(installation)
    async with visiting(installation) as tab:
        await tab.get("/results/may")
        asked = await tab.post("/results/may", {"do": "ask"})
        assert notice_of(asked).startswith("The producer was asked again: 2 ranges are missing")
        body, _ = await take_request(installation.queues)
        assert b'"rows":[[2,3],[5,5]]' in body
        silent = await tab.post("/results/may", {"do": "abandon", "reason": "  "}, status=400)
        assert "Reason is missing" in notice_of(silent)
        gone = await tab.post("/results/may", {"do": "abandon", "reason": "<i>rebuilt</i>"})
        assert "&lt;i&gt;rebuilt&lt;/i&gt;" in gone
        assert "<i>rebuilt" not in gone
        assert "Give it up" not in gone
        late = await tab.post("/results/may", {"do": "ask"}, status=400)
        assert "not awaiting" in notice_of(late)
        assert "/results/may" not in await eventually_without(installation)


async def eventually_without(installation: AdminInstallation) -> str:
    """The page of unfinished results, once there is none."""
    async with visiting(installation) as tab:

        async def is_empty() -> bool:
            return "No result is being collected." in await tab.get("/results?unfinished=true")

        await eventually(is_empty)
        return await tab.get("/results?unfinished=true")


async def test_many_results_and_many_series_come_a_page_at_a_time(installation: AdminInstallation) -> None:
    await begin(installation, "wide", [f"s{number:03}" for number in range(SERIES_COUNT + 7)])
    async with installation.client() as client:
        for number in range(PAGE_COUNT):
            wanted = {"producer": "producer", "transaction_id": f"t{number:02}", "series": ["a"]}
            assert (await client.post("/v1/results", json=wanted)).status_code == 200
    async with visiting(installation) as tab:
        first = await tab.get("/results")
        assert len(re.findall(r'<th scope="row">', first)) == PAGE_COUNT
        (link,) = re.findall(r'href="([^"]+)" rel="next"', first)
        second = await tab.get(link.replace("&amp;", "&"))
        assert re.findall(r'<th scope="row"><a href="/results/(\w+)"', second) == ["wide"]
        series = await tab.get("/results/wide")
        assert len(re.findall(r'<th scope="row">', series)) == SERIES_COUNT
        (link,) = re.findall(r'href="([^"]+)" rel="next"', series)
        rest = await tab.get(link.replace("&amp;", "&"))
        assert re.findall(r'<th scope="row">(\w+)', rest) == [f"s{number:03}" for number in range(50, 57)]


async def test_each_sees_and_does_what_he_may(installation: AdminInstallation) -> None:
    await half(installation)
    viewer = await installation.token("viewer", Role.VIEWER)
    held = await installation.token("held", Role.ADMIN, ["mine*"])
    async with visiting(installation, viewer) as tab:
        page = await tab.get("/results/may")
        assert "Download" not in page
        assert 'name="do"' not in page
        for word in ("ask", "abandon"):
            await tab.post("/results/may", {"do": word, "reason": "x"}, status=403)
    await installation.queues.queues_create("mine")
    await begin(installation, "ours", ["a"], producer="mine")
    async with visiting(installation, held) as tab:
        listed = await tab.get("/results")
        assert "ours" in listed
        assert "may" not in text_of(listed)
        await tab.get("/results/may", status=403)
        await tab.post("/results/may", {"do": "abandon", "reason": "x"}, status=403)


@asynccontextmanager
async def without_collector(folder: Path, error: Exception) -> AsyncIterator[AdminInstallation]:
    """An installation whose collector cannot be opened."""

    def refuse() -> AbstractAsyncContextManager[CollectService]:
        raise error

    url = f"sqlite:///{folder}/data"
    settings = Settings(storages=(StorageSettings(name="default", url=url),), data_folder=folder)
    async with open_service({"default": url}) as service, open_vault_app(settings, Queues(service)) as vault_app:
        server = make_server(
            service,
            admin_token_hash=token_hash(TOKEN),
            version="0",
            results=LazyCollector(refuse),
            vault_app=vault_app,
        )
        async with listening(server) as address:
            yield AdminInstallation(address, vault_app, Queues(service))


async def test_without_a_collector_the_page_says_what_to_configure(tmp_path: Path) -> None:
    why = "blobs are not configured; with 'postgresql://x' say where: a folder, s3://, az:// or gs://"
    async with without_collector(tmp_path, CannotStart(why)) as installation, visiting(installation) as tab:
        page = text_of(await tab.get("/results"))
        assert "no collector is configured" in page
        assert "say where: a folder" in page


async def test_while_the_broker_is_away_the_page_says_that_nothing_is_lost(tmp_path: Path) -> None:
    error = BrokerUnreachable("broker cannot be reached; 127.0.0.1:5672: refused")
    async with without_collector(tmp_path, error) as installation, visiting(installation) as tab:
        page = text_of(await tab.get("/results"))
        assert "cannot be reached at present" in page
        assert "Nothing is lost" in page
        assert "5672" in await tab.get("/results/may", status=502)


def gap(count: int | None, stored: int, *missing: tuple[int, int]) -> GapView:
    return GapView(series="s<", count=count, stored_count=stored, missing=list(missing), is_open=count is None)


def drawn(one: GapView) -> list[tuple[str, int]]:
    """The fields of a map, with how many cells each has."""
    found = re.findall(r'<rect class="(\w+)" x="[\d.]+" y="0" width="([\d.]+)"', gap_map(one))
    return [(word, round(float(width) * CELLS_COUNT / 480)) for word, width in found]


def test_a_map_shows_what_is_there_and_what_is_not() -> None:
    assert drawn(gap(10, 10)) == [("stored", 240)]
    assert drawn(gap(10, 0, (0, 9))) == [("missing", 240)]
    assert drawn(gap(240, 238, (0, 0), (239, 239))) == [("missing", 1), ("stored", 238), ("missing", 1)]
    assert drawn(gap(2_400, 2_399, (5, 5))) == [("part", 1), ("stored", 239)]
    assert drawn(gap(2**53, 2**53 - 1, (7, 7)))[0] == ("part", 1)
    assert drawn(gap(0, 0)) == [("stored", 240)]
    open_one = drawn(gap(None, 5, (3, 4)))
    assert [word for word, _ in open_one][-1] == "unknown"
    assert drawn(gap(None, 0)) == [("unknown", 240)]
    cut = drawn(gap(1_000, 100, (0, 99)))
    assert cut == [("missing", 24), ("unknown", 216)], "behind the last range that was looked at nobody knows"
    assert "s&lt;: missing" in gap_map(gap(1, 0, (0, 0)))


def test_a_map_of_many_ranges_is_small() -> None:
    ranges = [(number * 4, number * 4 + 1) for number in range(1_000)]
    assert len(gap_map(gap(4_000, 2_000, *ranges))) < 30_000


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_a_result_grows_before_the_eyes(chromium: Chromium, tmp_path: Path) -> None:
    async with open_installation(tmp_path) as installation, chromium.visitor(installation.url) as visitor:
        await make_queues(installation.queues)
        await half(installation)
        await visitor.open("/sign-in?next=/results/may")
        await visitor.write(TOKEN)
        await visitor.press("Enter")
        await visitor.sees("missing: 2 to 3, 5")
        assert await visitor.axe() == []
        more = [payload("may", "rows", number) for number in (2, 3, 5)]
        await produce(installation.queues, "may", "payload", more)
        await visitor.sees("completed")
        await visitor.open("/results")
        assert await visitor.axe() == []
