"""Letters in the vault, on every store: never dropped, found by every filter, moved as the table of states says."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.letter import GroupStatus
from holdfast.core.moments import moment
from holdfast.core.selection import ID_MAX, WALK_COUNT_MAX, Selection
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import Conflict, Invalid
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.vault.letters import ACT, DLQ, act, letter

S = LetterState


async def stored(vault: Vault, *bodies: bytes) -> list[int]:
    return [one.letter for one in await vault.letters.put([letter(body) for body in bodies], ACT)]


async def check_ledger(vault: Vault) -> None:
    """The tallies are what is counted, and the chain holds."""
    counted = {(one.queue, state): count for one in await vault.ledger.balance() for state, count in one.vault.items()}
    kept = {(one.queue, one.state): one.count for one in await vault.ledger.tallies()}
    assert counted == kept
    found = await vault.seals.verify()
    assert (found.broken, found.letters) == (
        [],
        sum(count for (_, state), count in counted.items() if state != "deleted"),
    )


async def test_a_letter_is_kept_with_everything(vault: Vault) -> None:
    body = bytes(range(256)) * 10
    new = letter(body, headers={"n": 2**63 - 1, "t": {"deep": [1, None, True]}, "ключ": "значение"})
    ((number, matched),) = [(one.letter, one.matched) for one in await vault.letters.put([new], ACT)]
    assert not matched
    found = await vault.letters.get(number)
    assert found is not None
    assert (found.state, found.acked, found.revision, found.queue) == (S.CAPTURED, False, 0, DLQ)
    assert found.headers == new.headers
    assert found.death == new.death
    content = await vault.letters.content(number)
    assert content is not None
    assert (content.body, content.properties) == (body, b"\0\0")
    await check_ledger(vault)


async def test_an_unacked_row_is_used_up_once_and_only_by_a_redelivery(vault: Vault) -> None:
    first, twin = await stored(vault, b"same", b"same")
    again = letter(b"same", redelivered=True)
    results = await vault.letters.put([again, again, again, letter(b"same")], ACT)
    assert [one.matched for one in results] == [True, True, False, False]
    assert {one.letter for one in results[:2]} == {first, twin}
    assert (await vault.letters.count(Selection())).count == 4
    await check_ledger(vault)


async def test_an_acked_row_is_never_matched(vault: Vault) -> None:
    ids = await stored(vault, b"one")
    await vault.letters.acking(ids)
    (result,) = await vault.letters.put([letter(b"one", redelivered=True)], ACT)
    assert not result.matched
    (other,) = await vault.letters.put([letter(b"one", queue="other.dlq", redelivered=True)], ACT)
    assert not other.matched
    assert (await vault.letters.count(Selection())).count == 3
    await vault.letters.acking(ids, sent=False)
    (again,) = await vault.letters.put([letter(b"one", redelivered=True)], ACT)
    assert (again.letter, again.matched) == (ids[0], True)


async def test_what_cannot_be_a_letter_is_kept_apart(vault: Vault) -> None:
    for number in range(3):
        await vault.letters.put_failed(DLQ, body=b"\xff" * 5, properties=b"?", reason=f"bad {number}", act=ACT)
    found = await vault.letters.failed(after=1, count_max=10)
    assert [(one.id, one.reason, one.body) for one in found] == [(2, "bad 1", b"\xff" * 5), (3, "bad 2", b"\xff" * 5)]
    assert (await vault.letters.count(Selection())).count == 0


@pytest.mark.parametrize(
    ("selection", "bodies"),
    [
        (Selection(), [b"c orange", b"b apple", b"a apple pie"]),
        (Selection(queue="other.dlq"), [b"b apple"]),
        (Selection(type="invoice"), [b"c orange"]),
        (Selection(reason="expired"), [b"c orange"]),
        (Selection(error="WENT wr"), [b"a apple pie"]),
        (Selection(error="100%"), [b"b apple"]),
        (Selection(error="%"), [b"b apple"]),
        (Selection(error="_"), []),
        (Selection(header="tenant"), [b"b apple", b"a apple pie"]),
        (Selection(header="tenant", header_value="7"), [b"a apple pie"]),
        (Selection(header="tenant", header_value="x"), [b"b apple"]),
        (Selection(text="apple"), [b"b apple", b"a apple pie"]),
        (Selection(text="apple PIE"), [b"a apple pie"]),
        (Selection(text="wrong"), [b"a apple pie"]),
        (Selection(text="apple", queue="other.dlq"), [b"b apple"]),
        (Selection(text="don't \" AND ( * :"), []),
        (Selection(died_after_us=50), [b"c orange"]),
        (Selection(died_before_us=50), [b"b apple", b"a apple pie"]),
        (Selection(state=S.CAPTURED, queue=DLQ), [b"c orange", b"a apple pie"]),
        (Selection(state=S.ARCHIVED), []),
        (Selection(ids=(2, 99)), [b"b apple"]),
        (Selection(source_queue="orders", ids=(3,)), [b"c orange"]),
    ],
)
async def test_every_filter_finds_and_counts_the_same(vault: Vault, selection: Selection, bodies: list[bytes]) -> None:
    await vault.letters.put(
        [
            letter(b"a apple pie", error_message="it went wrong", headers={"tenant": 7}),
            letter(b"b apple", queue="other.dlq", error_message="100%", headers={"tenant": "x"}),
            letter(b"c orange", type="invoice", reason="expired", last_at_us=100),
        ],
        ACT,
    )
    page = await vault.letters.find(selection, count_max=10)
    found = [content.body for one in page.letters if (content := await vault.letters.content(one.id))]
    assert found == bodies
    assert (await vault.letters.count(selection)).count == len(bodies)
    assert len(await vault.letters.ids(selection, count_max=10)) == len(bodies)


async def test_pages_give_every_letter_once_while_others_arrive(vault: Vault) -> None:
    await stored(vault, *(f"{number}".encode() for number in range(25)))
    seen: list[int] = []
    before = 0
    while True:
        page = await vault.letters.find(Selection(queue=DLQ), before=before, count_max=10)
        seen += [one.id for one in page.letters]
        await stored(vault, b"new")
        if not page.after:
            break
        before = page.after
    assert seen == list(range(25, 0, -1))


async def test_a_search_that_stops_early_says_where(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WALK_COUNT_MAX > 10
    monkeypatch.setattr("holdfast.stores.letters.WALK_COUNT_MAX", 10)
    await stored(vault, *(f"{number}".encode() for number in range(25)))
    page = await vault.letters.find(Selection(error="nothing like it"), count_max=5)
    assert (page.letters, page.after, page.stopped) == ([], 16, True)
    page = await vault.letters.find(Selection(error="nothing like it"), before=page.after, count_max=5)
    assert (page.after, page.stopped) == (6, True)
    page = await vault.letters.find(Selection(error="nothing like it"), before=page.after, count_max=5)
    assert (page.after, page.stopped) == (0, False)
    assert not (await vault.letters.count(Selection(error="no"))).exact


async def test_a_selection_that_is_too_large_is_refused(vault: Vault) -> None:
    await stored(vault, b"1", b"2", b"3")
    with pytest.raises(Invalid, match="more than 2 letters"):
        await vault.letters.ids(Selection(), count_max=2)
    for bad in (Selection(ids=(0,)), Selection(text="..."), Selection(header_value="x"), Selection(queue="x" * 501)):
        with pytest.raises(Invalid):
            await vault.letters.find(bad, count_max=1)
    assert await vault.letters.get(ID_MAX) is None


async def test_letters_move_all_or_none_and_only_as_the_table_says(vault: Vault) -> None:
    ids = await stored(vault, b"1", b"2", b"3")
    archived = act("letters.archive")
    assert await vault.letters.move(ids[:2], source=S.CAPTURED, target=S.ARCHIVED, act=archived, expected=2) == 2
    with pytest.raises(Conflict, match="letter 1 is archived"):
        await vault.letters.move(ids, source=S.CAPTURED, target=S.DISCARDED, act=archived, expected=3)
    assert (await vault.letters.count(Selection(state=S.CAPTURED))).count == 1
    with pytest.raises(Invalid):
        await vault.letters.move(ids, source=S.DISCARDED, target=S.CAPTURED, act=archived, expected=3)
    await check_ledger(vault)
    history = await vault.ledger.of_letter(ids[0], count_max=10)
    assert [(row.action, row.to_state) for row in history] == [("capture", "captured"), ("letters.archive", "archived")]
    assert [row.action for row in await vault.ledger.of_letter(ids[2], count_max=10)] == ["capture"]


async def test_an_edit_is_a_revision_and_the_original_stays(vault: Vault) -> None:
    (number,) = await stored(vault, b"original")
    edit = act("letters.edit")
    assert await vault.letters.revise(number, revision=0, body=b"better", put={"a": 1}, drop=["b"], act=edit) == 1
    assert await vault.letters.revise(number, revision=1, body=None, put={"a": 2}, drop=[], act=edit) == 2
    with pytest.raises(Conflict, match="newest revision is 2"):
        await vault.letters.revise(number, revision=1, body=b"late", put={}, drop=[], act=edit)
    newest, first, original = [await vault.letters.content(number, revision=one) for one in (None, 1, 0)]
    assert newest is not None
    assert first is not None
    assert original is not None
    assert (newest.body, newest.put, newest.drop) == (b"better", {"a": 2}, ())
    assert (first.body, first.put, first.drop) == (b"better", {"a": 1}, ("b",))
    assert (original.body, original.put) == (b"original", {})
    assert [one.number for one in await vault.letters.revisions(number)] == [1, 2]
    await vault.letters.move([number], source=S.CAPTURED, target=S.ARCHIVED, act=act("archive"), expected=1)
    with pytest.raises(Conflict, match="archived"):
        await vault.letters.revise(number, revision=2, body=b"", put={}, drop=[], act=edit)


async def test_a_resolved_group_that_gets_a_letter_is_regressed(vault: Vault) -> None:
    await vault.letters.put([letter(b"1"), letter(b"2"), letter(b"3", error_type="KeyError")], ACT)
    groups = await vault.groups.page(status=None, after=ID_MAX, count_max=10)
    assert [(group.title, group.count, group.sample) for group in groups] == [
        ("KeyError in order", 1, 3),
        ("ValueError in order", 2, 2),
    ]
    key = groups[1].key
    changed = await vault.groups.change(key, status=GroupStatus.RESOLVED, note="mended", act=act("groups.change"))
    assert changed is not None
    assert (changed.status, changed.note) == (GroupStatus.RESOLVED, "mended")
    await vault.letters.put([letter(b"4")], ACT)
    (regressed,) = await vault.groups.page(status=GroupStatus.REGRESSED, after=ID_MAX, count_max=10)
    assert (regressed.key, regressed.count, regressed.note) == (key, 3, "mended")
    assert await vault.groups.change("none", status=None, note="", act=act("groups.change")) is None


async def test_groups_are_found_by_words_and_by_when_they_were_new(vault: Vault, clock: FrozenClock) -> None:
    await vault.letters.put([letter(b"1", error_type="Old_Error"), letter(b"2", error_type="Old_Error")], ACT)
    await clock.advance(60)
    between = moment(clock.now_us())
    await clock.advance(60)
    await vault.letters.put([letter(b"3", error_type="NewXError"), letter(b"4", error_type="Old_Error")], ACT)

    async def titles(**more: Any) -> list[str]:
        found = await vault.groups.page(status=None, after=ID_MAX, count_max=10, **more)
        return [one.title.partition(" ")[0] for one in found]

    assert await titles() == ["Old_Error", "NewXError"]
    assert await titles(first_after=between) == ["NewXError"]
    assert await titles(first_before=between) == ["Old_Error"]
    assert await titles(text="OLD_e") == ["Old_Error"], "an underline is no pattern"
    assert await titles(text="order") == ["Old_Error", "NewXError"]
    (old, _) = await vault.groups.page(status=None, after=ID_MAX, count_max=10)
    assert await vault.groups.find("none") is None
    await vault.letters.move([1], source=S.CAPTURED, target=S.ARCHIVED, act=act("archive"), expected=1)
    found = await vault.groups.find(old.key)
    assert found is not None
    assert (found.count, found.captured, found.captured_is_exact) == (3, 2, True)


async def test_retention_deletes_only_what_is_settled_and_leaves_its_count(vault: Vault, clock: FrozenClock) -> None:
    ids = await stored(vault, b"1 word", b"2 word", b"3 word")
    await vault.letters.move(ids[:2], source=S.CAPTURED, target=S.DISCARDED, act=act("letters.discard"), expected=2)
    await clock.advance(100)
    now = moment(clock.now_us())
    for state in (S.CAPTURED, S.REDRIVING, S.REDRIVEN, S.ARCHIVED):
        with pytest.raises(Invalid, match="never deleted"):
            await vault.letters.expire(state, before=now, count_max=10, act=act("retention"))
    before = now - timedelta(seconds=200)
    assert await vault.letters.expire(S.DISCARDED, before=before, count_max=10, act=act("retention")) == 0
    assert await vault.letters.expire(S.DISCARDED, before=now, count_max=10, act=act("retention")) == 2
    assert [one.id for one in (await vault.letters.find(Selection(text="word"), count_max=10)).letters] == [3]
    (row,) = await vault.ledger.balance()
    assert row.vault == {"captured": 1, "deleted": 2}
    await check_ledger(vault)
    assert [one.letter for one in await vault.letters.put([letter(b"4")], ACT)] == [4], "an id is never used again"


async def test_the_balance_holds_while_letters_arrive(vault: Vault) -> None:
    async def arrive() -> None:
        for number in range(30):
            await stored(vault, f"{number}".encode(), b"twin")

    arriving = asyncio.create_task(arrive())
    looks = 0
    while not arriving.done() or not looks:
        assert all(row.agrees for row in await vault.ledger.balance())
        looks += 1
    await arriving
    (row,) = await vault.ledger.balance()
    assert (row.agrees, row.captured_ever, looks > 1) == (True, 60, True)


def test_every_letter_state_can_be_reached_and_left() -> None:
    for state in LetterState:
        assert state is S.DISCARDED or any(source is state for source, _ in LETTER_MOVES), state
        assert any(target is state for _, target in LETTER_MOVES), state
