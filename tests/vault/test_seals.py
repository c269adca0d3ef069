"""What the ledger vouches for: whoever changes a vault in its database, and has no key, is found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from msgspec.structs import replace

from holdfast.core.requests import vault as requests
from holdfast.core.requests.vault import Verified
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.engines.postgres.database import SCHEMA
from holdfast.errors import CannotStart
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Secret, Settings, StorageSettings
from holdfast.stores.seals import _counter
from holdfast.testing import FrozenClock
from holdfast.wiring import open_vault_app, vault_at_work
from tests.support.eventually import eventually
from tests.vault.letters import ACT, ADMIN, DLQ, act, letter

BLOB = b"large " * 300_000


class Place:
    """Where a vault is, its key elsewhere; and what somebody does there with the database's own tools."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    @asynccontextmanager
    async def opened(self, key: str = "kept elsewhere") -> AsyncIterator[VaultApp]:
        settings = Settings(
            storages=(StorageSettings(name="default", url=f"sqlite:///{self.folder}"),),
            vault=Secret(self.url),
            vault_blobs=str(self.folder / "vault-blobs"),
            ledger_key=Secret(key),
            data_folder=self.folder,
        )
        async with open_vault_app(settings, None) as app:
            yield app

    async def verify(self, anchor: str = "") -> Verified:
        async with self.opened() as app:
            return await app.call(requests.VerifyLedger(anchor=anchor), ADMIN)

    def change(self, *statements: str) -> list[tuple[Any, ...]]:
        """With all rights, and without a care for triggers. The rows of the last one."""
        if self.url.startswith("postgresql"):
            with psycopg.connect(self.url) as connection:
                connection.execute(f"SET search_path = {SCHEMA}; SET session_replication_role = replica")
                found = [connection.execute(text.replace("x'00'", r"'\x00'").encode()) for text in statements][-1]
                return found.fetchall() if found.description else []
        with closing(apsw.Connection(str(self.folder / "vault.db"))) as connection:
            connection.execute(
                "DROP TRIGGER IF EXISTS ledger_is_not_changed; DROP TRIGGER IF EXISTS ledger_is_not_deleted"
            )
            return [list(connection.execute(text)) for text in statements][-1]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A vault with letters of two queues, one large, two edits, a failed import and two tokens, one of them revoked."""
    url = f"sqlite:///{tmp_path}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    made = Place(tmp_path, url)
    async with made.opened() as app:
        letters = app.vault.letters
        await letters.put([letter(b"one"), letter(b"two", queue="other.dlq"), letter(b"three")], ACT)
        await letters.put([await _large(app), letter(b"five"), letter(b"six")], ACT)
        await letters.put_failed(DLQ, body=b"bad", properties=b"?", reason="no letter", act=ACT)
        for number in range(2):
            await letters.revise(
                1, revision=number, body=b"%d" % number, put={"a": 1}, drop=["b"], act=act("letters.edit")
            )
        await letters.move(
            [3, 5], source=LetterState.CAPTURED, target=LetterState.DISCARDED, act=act("letters.discard"), expected=2
        )
        for name in ("reader", "former"):
            await app.call(requests.CreateToken(name=name, role="viewer"), ADMIN)
        await app.call(requests.RevokeToken(name="former"), ADMIN)
    return made


async def _large(app: VaultApp) -> Any:
    assert app.retention._blobs is not None  # as a capture puts them
    await app.vault.unclaimed.announce(["letters/large"], for_s=60)
    await app.retention._blobs.put("letters/large", BLOB)
    return replace(letter(BLOB), blob="letters/large", body_bytes=len(BLOB))


async def test_what_nobody_touched_holds(place: Place) -> None:
    found = await place.verify()
    assert (found.why, found.broken, found.broken_at, found.letters, found.sealed_from) == ("", [], 0, 6, 1)
    assert ["cut off" in text for text in found.unknown] == [True]
    assert (await place.verify(found.head)).unknown == []


@pytest.mark.parametrize(
    ("statements", "why"),
    [
        (["UPDATE contents SET body = 'ONE' WHERE letter = 1"], "letter 1 was changed"),
        (["UPDATE contents SET headers = '{}', shown = '{\"a\":1}' WHERE letter = 2"], "letter 2 was changed"),
        (["UPDATE letters SET source_queue = 'elsewhere' WHERE id = 2"], "letter 2 was changed"),
        (["UPDATE letters SET exchange = 'elsewhere' WHERE id = 6"], "letter 6 was changed"),
        (["DELETE FROM contents WHERE letter = 2"], "letter 2 was changed"),
        (["UPDATE letters SET state = 'archived' WHERE id = 6"], "letter 6 is archived"),
        (
            [
                "UPDATE letters SET state = 'captured' WHERE id = 3",
                "UPDATE letters SET state = 'discarded' WHERE id = 6",
            ],
            "letter 3 is captured",
        ),
        (["DELETE FROM letters WHERE id = 2", "DELETE FROM contents WHERE letter = 2"], "letter 2 is not there"),
        (["UPDATE revisions SET body = 'changed' WHERE letter = 1 AND number = 2"], "revision 2 of letter 1"),
        (["UPDATE revisions SET actor = 'somebody' WHERE letter = 1 AND number = 1"], "revision 1 of letter 1"),
        (["DELETE FROM revisions WHERE letter = 1 AND number = 2"], "has lost a revision"),
        (["UPDATE letters SET revision = 0 WHERE id = 1"], "has one too many"),
        (["DELETE FROM revisions WHERE number = 2", "UPDATE letters SET revision = 1 WHERE id = 1"], "was removed"),
        (["UPDATE tokens SET document = replace(document, '\"role\":1', '\"role\":3')"], "token 'former' was changed"),
        (['UPDATE tokens SET document = replace(document, \'"queues":[]\', \'"queues":["a"]\')'], "token"),
        (["UPDATE tokens SET revoked_at = 0"], "token 'former' was changed"),
        (["DELETE FROM tokens WHERE name = 'reader'"], "was removed"),
        (["DELETE FROM failed_imports"], "was removed"),
        (["UPDATE failed_imports SET body = 'good'"], "failed import 1 was changed"),
        (["UPDATE ledger SET first_letter = 5 WHERE number = 3"], "row 3 was changed"),
        (["UPDATE ledger SET last_letter = 9 WHERE number = 2"], "row 2 was changed"),
        (["UPDATE ledger SET digest = x'00' WHERE number = 2"], "row 2 was changed"),
        (["DELETE FROM ledger WHERE number = 2"], "row 2 is missing"),
        (["DELETE FROM ledger WHERE number > 2"], "letters up to 6 were captured"),
        (["DELETE FROM ledger"], "the ledger is empty and the vault is not"),
        (
            ["DELETE FROM ledger", "DELETE FROM letters", "DELETE FROM contents", "DELETE FROM tokens"],
            "the ledger is empty and the vault is not",
        ),
    ],
)
async def test_a_change_behind_the_ledger_is_found(place: Place, statements: list[str], why: str) -> None:
    place.change(*statements)
    found = await place.verify()
    assert why in found.why
    assert found.broken_at > 0
    assert found.broken[0].why == found.why


async def test_a_token_that_is_put_back_as_it_was_is_found(place: Place) -> None:
    """Its seal is good: it was valid like this once."""
    async with place.opened() as app:
        await app.call(requests.CreateToken(name="third", role="admin"), ADMIN)
    ((seal,),) = place.change("SELECT seal FROM tokens WHERE name = 'third'")
    async with place.opened() as app:
        await app.call(requests.RevokeToken(name="third"), ADMIN)
    assert not (await place.verify()).broken
    literal = f"'\\x{bytes(seal).hex()}'" if place.url.startswith("postgresql") else f"x'{bytes(seal).hex()}'"
    place.change(f"UPDATE tokens SET revoked_at = 0, seal = {literal} WHERE name = 'third'")  # noqa: S608
    assert "put back as it was before" in (await place.verify()).why


async def test_a_changed_blob_is_found_and_a_missing_one(place: Place) -> None:
    blob = place.folder / "vault-blobs" / "letters" / "large"
    assert blob.exists()
    blob.write_bytes(BLOB[:-1] + b"!")
    assert "the body of letter 4 was changed" in (await place.verify()).why
    blob.unlink()
    assert "is gone" in (await place.verify()).why


async def test_a_tail_that_was_cut_off_with_all_it_did_shows_by_the_anchor_alone(place: Place) -> None:
    async with place.opened() as app:
        await app.call(requests.ArchiveLetters(selection=requests.Filter(ids=(6,)), count=1), ADMIN)
    anchor = (await place.verify()).head
    place.change(
        "UPDATE letters SET state = 'captured' WHERE id = 6",
        "DELETE FROM ledger WHERE number = (SELECT max(number) FROM ledger)",
    )
    found = await place.verify()
    assert (found.broken, ["cut off" in text for text in found.unknown]) == ([], [True])
    assert "the anchor is not in the chain" in (await place.verify(anchor)).why


async def test_what_retention_deletes_is_no_break(place: Place) -> None:
    async with place.opened() as app:
        await app.custody.act("discard", Selection(ids=(1, 4)), expected=2, act=act("letters.discard"), caller=ADMIN)
        await app.retention.run(resolve_after_s=1.0, retention_s={LetterState.DISCARDED: -1.0})
    found = await place.verify()
    assert (found.broken, found.letters) == ([], 2)


async def test_a_look_is_of_one_moment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters arrive, move and go between its pages."""
    monkeypatch.setattr("holdfast.stores.seals.LETTERS_COUNT_MAX", 1)
    monkeypatch.setattr("holdfast.stores.seals.ROWS_COUNT_MAX", 1)
    async with place.opened() as app, app.vault.seals.writer.look() as look:
        assert await look(_counter) == 6
        await app.vault.letters.put([letter(b"seven")], ACT)
        assert await look(_counter) == 6
        found = await app.call(requests.VerifyLedger(), ADMIN)
        assert (found.broken, found.letters) == ([], 7)


def test_a_program_that_knows_of_no_seals_can_add_no_row(place: Place) -> None:
    columns = "at, actor, action, origin, outcome, queue, from_state, to_state, count, letters, reason, detail, mac"
    values = "0, '', '', '', '', '', '', '', 0, '', '', '', ''"
    with pytest.raises((apsw.ConstraintError, psycopg.errors.NotNullViolation)):
        place.change(
            f"INSERT INTO ledger (number, {columns}, first_letter, last_letter) VALUES (99, {values}, 0, 0)"  # noqa: S608
        )


@pytest.mark.parametrize("is_elsewhere", [True, False])
async def test_the_key_can_be_kept_elsewhere_and_beside_the_vault_the_server_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_elsewhere: bool
) -> None:
    folder, keys = tmp_path / "data", tmp_path / "keys"
    keys.mkdir()
    settings = Settings(
        storages=(StorageSettings(name="default", url=f"sqlite:///{folder}"),),
        ledger_key_file=keys / "key" if is_elsewhere else None,
    )
    caplog.set_level("INFO", logger="holdfast")
    async with open_vault_app(settings, None) as app, vault_at_work(app, settings):
        await app.vault.letters.put([letter(b"one")], ACT)
    file = keys / "key" if is_elsewhere else folder / "ledger-key"
    assert (file.stat().st_mode & 0o777, (folder / "ledger-key").exists()) == (0o600, not is_elsewhere)
    assert (f"'{file}', lies beside the vault" in caplog.text) is not is_elsewhere
    file.unlink()
    with pytest.raises(CannotStart, match="key of the ledger is missing"):
        async with open_vault_app(settings, None):
            pass


@pytest.mark.parametrize("accepts", [True, False])
async def test_after_a_long_gap_retention_waits_ten_minutes_and_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, accepts: bool
) -> None:
    monkeypatch.setattr("holdfast.services.vault.admin.UPKEEP_S", 0.01)
    clock = FrozenClock()
    settings = Settings(
        storages=(StorageSettings(name="default", url=f"sqlite:///{tmp_path}"),),
        ledger_key=Secret("k"),
        retention="discarded=1h",
        accept_clock=accepts,
    )

    async def is_left(app: VaultApp) -> bool:
        return (await app.vault.letters.count(Selection())).count == 1

    async with open_vault_app(settings, None, clock=clock) as app:
        await app.vault.letters.put([letter(b"one")], ACT)
        await app.custody.act("discard", Selection(ids=(1,)), expected=1, act=act("letters.discard"), caller=ADMIN)
    await clock.advance(7 * 3600)
    async with open_vault_app(settings, None, clock=clock) as app, vault_at_work(app, settings):
        if not accepts:
            await eventually(lambda: "1 letters are past their retention" in caplog.text)
            await clock.advance(300)
            await app.vault.letters.put_failed(DLQ, body=b"", properties=b"", reason="", act=ACT)  # it is served
            assert await is_left(app)
    async with open_vault_app(settings, None, clock=clock) as app, vault_at_work(app, settings):
        if not accepts:
            assert await app.vault.ledger.spared_until_us() == clock.now_us() + 600_000_000  # from that write on
            assert await is_left(app)
            await clock.advance(601)

        async def gone() -> bool:
            return not await is_left(app)

        await eventually(gone)
