"""The pages of groups: which need somebody, what is known of each, and who may say something of it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.core.requests.declare import Role
from holdfast.faces.web.groups import PAGE_COUNT, PART_COUNT
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.web.visiting import notice_of, text_of, visiting
from tests.vault.letters import ACT, DLQ, letter

EVIL = "<script>alert(1)</script>"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def died(installation: AdminInstallation, error: str, count: int = 1, *, message: str = "no") -> None:
    """Letters of one cause."""
    letters = [letter(b"%d" % number, error_type=error, error_message=message) for number in range(count)]
    await installation.vault_app.vault.letters.put(letters, ACT)


def titles(page: str) -> list[str]:
    """Of the groups on a page, in order."""
    return re.findall(r'<a href="/groups/[^"]+">([^<]+) in order</a>', page)


def headings(page: str) -> list[str]:
    return re.findall(r'<h2 id="part-[^"]*">(\w+)', page)


def key_of(page: str, title: str) -> str:
    found = re.search(rf'<a href="/groups/([^"]+)">{title} in order</a>', page)
    assert found, page
    return found.group(1)


async def test_where_nothing_died_the_page_says_so(installation: AdminInstallation) -> None:
    async with visiting(installation) as tab:
        assert "No letters wait for somebody" in text_of(await tab.get("/groups"))
        assert "No group is resolved" in text_of(await tab.get("/groups?show=resolved"))
        assert "has “x” in its title" in text_of(await tab.get("/groups?text=x"))
        assert "is none of" in text_of(await tab.get("/groups?show=odd", status=400))


async def test_what_has_regressed_is_on_top_and_what_was_dealt_with_is_aside(installation: AdminInstallation) -> None:
    for error in ("Mended", "Known", "Fresh"):
        await died(installation, error, 2, message=f"{error} {EVIL}")
    async with visiting(installation) as tab:
        page = await tab.get("/groups")
        assert headings(page) == ["New"]
        assert titles(page) == ["Fresh", "Known", "Mended"]
        assert EVIL not in page
        assert "Known &lt;script&gt;" in page, "what the newest letter says stands beside it"
        mended, known = key_of(page, "Mended"), key_of(page, "Known")
        said = await tab.post("/groups?text=order", {"key": mended, "status": "resolved"})
        assert notice_of(said) == "Mended in order is resolved."
        assert titles(said) == ["Fresh", "Known"], "the list that was looked at is shown again"
        await tab.post("/groups", {"key": known, "status": "ignored"})
        assert titles(await tab.get("/groups?show=ignored")) == ["Known"]
        await died(installation, "Mended")
        page = await tab.get("/groups")
        assert (headings(page), titles(page)) == (["Regressed", "New"], ["Mended", "Fresh"])
        await tab.post("/groups", {"key": known, "status": "open"})
        assert titles(await tab.get("/groups?show=new&text=KNO")) == ["Known"]
        assert titles(await tab.get("/groups?show=all")) == ["Mended", "Fresh", "Known"]


async def test_a_group_leads_to_its_letters_and_to_a_plan(installation: AdminInstallation) -> None:
    await died(installation, "KeyError", 3)
    async with visiting(installation) as tab:
        page = await tab.get("/groups")
        key = key_of(page, "KeyError")
        for place in (page, await tab.get(f"/groups/{key}")):
            assert f'href="/letters?group={key}&amp;state=captured"' in place
            assert f'href="/plans/new?group={key}&amp;state=captured"' in place
            assert "/letters/3" in place, "the newest letter is the sample"
            assert "3 letters in the last" in place
        plan = text_of(await tab.get(f"/plans/new?group={key}&state=captured"))
        assert "3 letters group KeyError in order" in plan


async def test_what_is_known_of_a_group_is_kept(installation: AdminInstallation) -> None:
    await died(installation, "KeyError")
    async with visiting(installation) as tab:
        key = key_of(await tab.get("/groups"), "KeyError")
        kept = await tab.post(f"/groups/{key}", {"note": f"the cache is cold {EVIL}"})
        assert notice_of(kept) == "KeyError in order has your note."
        assert EVIL not in kept
        assert "the cache is cold" in text_of(await tab.get("/groups"))
        resolved = await tab.post(f"/groups/{key}", {"status": "resolved"})
        assert "the cache is cold" in resolved, "a status leaves the note"
        long = await tab.post(f"/groups/{key}", {"note": "x" * 2_001}, status=400)
        assert "x" * 2_001 in long, "what was written stays"
        assert "there is no group" in text_of(await tab.get("/groups/nothing", status=404)).lower()
        odd = await tab.post(f"/groups/{key}", {"status": "gone"}, status=400)
        assert "is none of" in notice_of(odd)


@pytest.mark.parametrize("key", ["a/b", "späte", "a b?c#d&e", "50%", "%41", '"><script>'])
async def test_a_key_of_ones_own_may_be_anything(installation: AdminInstallation, key: str) -> None:
    own = replace(letter(b"x"), group=key, group_title="ours in order")
    await installation.vault_app.vault.letters.put([own], ACT)
    async with visiting(installation) as tab:
        path = f"/groups/{key_of(await tab.get('/groups'), 'ours')}"
        assert "has your note" in notice_of(await tab.post(path, {"note": "kept"}))
        assert "kept" in await tab.get(path)
        plan = re.search(r'href="(/plans/new[^"]+)"', await tab.get(path))
        assert plan
        assert "1 letter " in text_of(await tab.get(unescape(plan.group(1))))


async def test_many_groups_come_page_by_page(installation: AdminInstallation) -> None:
    for number in range(PAGE_COUNT + 3):
        await died(installation, f"Error{number}")
    async with visiting(installation) as tab:
        first = await tab.get("/groups")
        assert len(titles(first)) == PART_COUNT
        found = re.search(r'href="(/groups\?show=new)"', first)
        assert found
        seen, path = [], found.group(1)
        while path:
            page = await tab.get(path)
            seen += titles(page)
            more = re.search(r'href="(/groups\?show=new&amp;cursor=[^"]+)"', page)
            path = more.group(1).replace("&amp;", "&") if more else ""
        assert seen == [f"Error{number}" for number in reversed(range(PAGE_COUNT + 3))]


async def test_a_viewer_looks_and_is_refused_and_recorded(installation: AdminInstallation) -> None:
    await died(installation, "KeyError")
    viewer = await installation.token("eve", Role.VIEWER)
    async with visiting(installation, viewer) as tab:
        page = await tab.get("/groups")
        key = key_of(page, "KeyError")
        one = await tab.get(f"/groups/{key}")
        for place in (page, one):
            assert 'name="status"' not in place
            assert "/plans/new" not in place
        assert "needs the role operator" in await tab.post("/groups", {"key": key, "status": "resolved"}, status=403)
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
    assert [(row.actor, row.action) for row in rows if row.outcome == "denied"] == [("token:eve", "groups.change")]


async def test_a_token_held_to_queues_is_told_why_it_sees_no_groups(installation: AdminInstallation) -> None:
    await died(installation, "KeyError")
    await installation.vault_app.vault.letters.put([letter(b"x", queue="mine.dlq", error_type="Mine")], ACT)
    held = await installation.token("held", Role.ADMIN, ["mine*"])
    async with visiting(installation, held) as tab:
        page = await tab.get("/groups", status=403)
        assert "a token that" not in page
        assert "mine.dlq" in page
        assert DLQ not in page
        assert "KeyError" not in page
        assert 'href="/groups"' not in page, "the bar does not lead there"
