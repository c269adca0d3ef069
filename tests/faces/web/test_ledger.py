"""The pages of the ledger: rows by filter, the table for a spreadsheet, whether the chain holds, and the balance."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.declare import Role
from holdfast.core.states import LetterState
from holdfast.faces.web.ledger import PAGE_COUNT
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.web.visiting import notice_of, text_of, visiting
from tests.vault.letters import letter

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "plain"]


def act(actor: str, action: str, **more: str) -> LedgerAct:
    return LedgerAct(actor=actor, action=action, **more)


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def move(installation: AdminInstallation, actor: str, action: str, ids: list[int], target: LetterState) -> None:
    letters = installation.vault_app.vault.letters
    told = act(actor, action, reason=f"because <b>{actor}</b>")
    await letters.move(ids, source=LetterState.CAPTURED, target=target, act=told, expected=len(ids))


@pytest.fixture
async def told(installation: AdminInstallation) -> AdminInstallation:
    """Letters 1 to 4, of two queues; two were archived by ada, and one discarded by bob."""
    ours = [letter(b"1"), letter(b"2"), letter(b"3"), letter(b"4", queue="pay.dlq")]
    await installation.vault_app.vault.letters.put(ours, act("server", "capture"))
    await move(installation, "ada", "letters.archive", [1, 3], LetterState.ARCHIVED)
    await move(installation, "bob", "letters.discard", [2], LetterState.DISCARDED)
    return installation


def rows(page: str) -> list[str]:
    """Who did what, of each row that is shown."""
    found = re.findall(r"<tr>\s*<td class=\"number\">.*?</tr>", page, flags=re.DOTALL)
    return [" ".join(re.findall(r'title="Only these">([^<]*)<', row)[:2]) for row in found]


async def test_rows_are_shown_newest_first_and_found_by_what_stands_in_the_address(told: AdminInstallation) -> None:
    async with visiting(told) as tab:
        page = await tab.get("/ledger")
        assert rows(page)[1:4] == ["bob letters.discard", "ada letters.archive", "server capture"]
        assert "because &lt;b&gt;ada&lt;/b&gt;" in page
        assert "<b>ada" not in page
        often = re.findall(r'href="/ledger\?(action=letters.discard|outcome=denied)"(?! class)', page)
        assert set(often) == {"action=letters.discard", "outcome=denied"}, "a click away, also behind a long redrive"
        for query, expected in (
            ("actor=ada", ["ada letters.archive"]),
            ("action=letters.discard", ["bob letters.discard"]),
            ("letter=3", ["ada letters.archive", "server capture"]),
            ("queue=pay.dlq", ["server capture"]),
            ("outcome=denied", []),
            ("done_before=2000-01-01T00:00", []),
            ("done_after=2000-01-01T00:00&actor=bob", ["bob letters.discard"]),
        ):
            assert rows(await tab.get(f"/ledger?{query}")) == expected, query
        assert "No row fits" in await tab.get("/ledger?actor=nobody")
        for query in ("letter=x", "outcome=maybe", "done_after=yesterday", "cursor=x"):
            await tab.get(f"/ledger?{query}", status=400)


async def test_many_rows_come_a_page_at_a_time(installation: AdminInstallation) -> None:
    ledger = installation.vault_app.vault.ledger
    for number in range(2 * PAGE_COUNT):
        await ledger.append(act("ada" if number % 2 else "bob", "test", detail=f"n{number}."), outcome="done")
    async with visiting(installation) as tab:
        seen: list[str] = []
        path = "/ledger?action=test"
        while path:
            page = await tab.get(path)
            shown = re.findall(r"n(\d+)\.", page)
            assert len(shown) <= PAGE_COUNT
            seen += shown
            found = re.search(r'href="([^"]+)" rel="next"', page)
            path = found.group(1).replace("&amp;", "&") if found else ""
        assert seen == [str(number) for number in reversed(range(2 * PAGE_COUNT))]


async def test_the_table_is_safe_to_open_in_a_spreadsheet(installation: AdminInstallation) -> None:
    ledger = installation.vault_app.vault.ledger
    for text in FORMULAS:
        await ledger.append(act(text, "test", reason=text, detail='a "quoted", ümlaut\nline'), outcome="done")
    async with visiting(installation) as tab:
        page = await tab.get("/ledger?action=test")
        (link,) = re.findall(r'href="(/admin/ledger/export[^"]*)"', page)
        answer = await tab.http.get(link.replace("&amp;", "&"))
        assert answer.headers["content-type"].startswith("text/csv")
        assert answer.headers["content-disposition"].startswith("attachment")
        table = list(csv.DictReader(io.StringIO(answer.text, newline="")))
        assert [one["reason"] for one in table] == [f"'{text}" for text in FORMULAS[:-1]] + ["plain"]
        assert {one["detail"] for one in table} == {'a "quoted", ümlaut\nline'}
        assert all(one["at"].endswith("+00:00") for one in table)
        whole = await tab.http.get("/admin/ledger/export")
        assert len(list(csv.reader(io.StringIO(whole.text, newline="")))) > len(table) + 1


async def test_a_table_of_many_rows_is_whole(installation: AdminInstallation) -> None:
    ledger = installation.vault_app.vault.ledger
    for number in range(1_100):
        await ledger.append(act("ada", "test", detail=str(number)), outcome="done")
    async with visiting(installation) as tab:
        answer = await tab.http.get("/admin/ledger/export?actor=ada")
    table = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [one["detail"] for one in table] == [str(number) for number in range(1_100)]


async def test_the_chain_is_verified_when_it_is_asked_for(told: AdminInstallation, tmp_path: Path) -> None:
    async with visiting(told) as tab:
        before = await tab.get("/ledger/verify")
        assert "chain holds" not in before
        (head,) = re.findall(r'<code id="head">([^<]+)</code>', before)
        assert "The chain holds." in await tab.get("/ledger/verify?verify=true")
        assert "The anchor is in it." in await tab.get(f"/ledger/verify?anchor={head}&verify=true")
        slip = await tab.get("/ledger/verify?verify=true&anchor=nonsense", status=400)
        assert 'value="nonsense"' in slip
        assert notice_of(slip)
        cut = await tab.get(f"/ledger/verify?verify=true&anchor=999:{'0' * 64}")
        assert "The chain does not hold." in cut
    with_database = apsw.Connection(str(tmp_path / "data" / "vault.db"))
    with_database.execute("DROP TRIGGER ledger_is_not_changed")
    with_database.execute("UPDATE ledger SET actor = 'mallory' WHERE number = 2")
    with_database.close()
    async with visiting(told) as tab:
        broken = await tab.get("/ledger/verify?verify=true")
        assert "The chain does not hold." in broken
        assert "row 2 was changed" in broken


async def test_the_balance_says_whether_both_counts_agree(told: AdminInstallation, tmp_path: Path) -> None:
    async with visiting(told) as tab:
        page = text_of(await tab.get("/ledger/balance"))
        assert "They agree. 4 letters of 2 queues." in page
        database = apsw.Connection(str(tmp_path / "data" / "vault.db"))
        database.execute("UPDATE letters SET state = 'archived' WHERE id = 4")
        database.close()
        page = text_of(await tab.get("/ledger/balance"))
        assert "They differ in 1 of 2 queues: pay.dlq." in page
        assert "archived 0 1 +1" in page
        assert "captured 1 0 -1" in page


async def test_without_letters_there_is_nothing_to_count(installation: AdminInstallation) -> None:
    async with visiting(installation) as tab:
        assert "No letter was ever captured here." in await tab.get("/ledger/balance")


async def test_who_may_not_read_the_ledger_is_led_to_the_balance_of_his_queues(told: AdminInstallation) -> None:
    viewer = await told.token("viewer", Role.VIEWER)
    held = await told.token("held", Role.ADMIN, ["orders*"])
    for token in (viewer, held):
        async with visiting(told, token) as tab:
            page = await tab.get("/ledger/balance")
            assert "/ledger/verify" not in page
            sent = await tab.http.get("/ledger", headers={"accept": "text/html"})
            assert (sent.status_code, sent.headers["location"]) == (303, "/ledger/balance")
            await tab.get("/ledger/verify?verify=true", status=403)
            assert (await tab.http.get("/admin/ledger/export")).status_code == 403
    async with visiting(told, held) as tab:
        page = text_of(await tab.get("/ledger/balance"))
        assert "orders.dlq" in page
        assert "pay" not in page
