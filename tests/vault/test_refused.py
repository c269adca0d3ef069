"""A vault that refuses: what it will never take is kept apart, its neighbours become letters; trouble is no reason."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from holdfast.core.moments import Backoff
from holdfast.engines.postgres.database import SCHEMA
from holdfast.errors import StorageFailed
from holdfast.services.vault import capture
from holdfast.settings import Secret
from tests.support.amqp import Admin
from tests.support.postgres import emptied
from tests.vault.letters import ADMIN, DLQ, bodies, dead, vault_app_on

pytestmark = [pytest.mark.rabbitmq, pytest.mark.postgres]
TRIGGER = """
CREATE FUNCTION {schema}.refusing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.message_id = 'refused' THEN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refusing BEFORE INSERT ON {schema}.letters FOR EACH ROW EXECUTE FUNCTION {schema}.refusing();
"""


@pytest.mark.parametrize(("state", "is_its_fault"), [("54000", True), ("22021", True), ("53100", False)])
async def test_only_what_can_never_be_stored_is_kept_apart(
    admin: Admin, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch, state: str, is_its_fault: bool
) -> None:
    monkeypatch.setattr(capture, "WAITS", Backoff(first_s=0.001, delay_s_max=0.001))
    emptied(postgres_url)
    await admin.publish([dead(b"1"), dead(b"\xff too big", message_id="refused"), dead(b"3")])
    async with vault_app_on(admin, tmp_path, vault=Secret(postgres_url), ledger_key=Secret("k")) as vault_app:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(TRIGGER.format(schema=SCHEMA, state=state).encode())
        if not is_its_fault:
            with pytest.raises(StorageFailed, match="the disk is full"):
                await vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3)
            assert await bodies(vault_app) == []
            assert await vault_app.vault.letters.failed(after=0, count_max=10) == []
        else:
            report = await vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3)
            assert (report.captured, report.failed_imports) == (2, 1)
            assert await bodies(vault_app) == [b"1", b"3"]
            (failed,) = await vault_app.vault.letters.failed(after=0, count_max=10)
            assert (failed.queue, failed.body) == (DLQ, b"\xff too big")
        assert all(row.agrees for row in await vault_app.vault.ledger.balance())
    if is_its_fault:
        assert await admin.count(DLQ) == 0
    else:
        assert len(await admin.drain(DLQ, 3)) == 3
