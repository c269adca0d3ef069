"""SIGKILL of the real process around capture and redrive, on both stores: no letter is in no place."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import load_settings
from holdfast.wiring import open_vault_app
from tests.support.amqp import Admin, headers_of
from tests.support.postgres import emptied
from tests.vault.letters import DLQ, MAIN, bodies, dead
from tests.vault.worker import work

pytestmark = [pytest.mark.rabbitmq, pytest.mark.postgres]
CAPTURE = ["capture.before_put", "vault.after_put", "capture.before_ack", "capture.after_ack"]
REDRIVE = ["vault.after_lease", "redrive.before_publish", "redrive.after_confirm", "vault.after_settle"]
#: Equal twins among them, and one id for all.
BODIES = [f"{number // 2}".encode() for number in range(20)]


def both(points: list[str], *shared: str) -> list[tuple[str, str]]:
    """Every point on SQLite; on PostgreSQL, whose commit is another, those around the commit. The soak has all."""
    return [("sqlite", point) for point in points] + [("postgres", point) for point in shared]


@pytest.fixture
def environment(request: pytest.FixtureRequest, admin: Admin, tmp_path: Path, store: str) -> dict[str, str]:
    """Where the vault is, and the broker."""
    vault = f"sqlite:///{tmp_path}/data"
    if store == "postgres":
        vault = emptied(request.getfixturevalue("postgres_url"))
    return {
        "HOLDFAST_VAULT": vault,
        "HOLDFAST_DATA_FOLDER": str(tmp_path),
        "HOLDFAST_BROKER": admin.node.url(admin.vhost),
        "HOLDFAST_DEAD_QUEUES": DLQ,
    }


async def check_ledger(vault_app: VaultApp) -> None:
    assert all(row.agrees for row in await vault_app.vault.ledger.balance())
    assert not (await vault_app.vault.seals.verify()).why


@pytest.mark.parametrize(("store", "point"), both(CAPTURE, "vault.after_put", "capture.before_ack"))
async def test_a_kill_of_a_capture_loses_no_letter_and_stores_none_twice(
    point: str, environment: dict[str, str], admin: Admin
) -> None:
    await admin.publish([dead(body) for body in BODIES])
    assert await work("capture", environment, f"{point}:1") == -9
    assert await work("capture", environment) == 0
    assert await admin.count(DLQ) == 0
    async with open_vault_app(load_settings(environment=environment, serving=False), None) as vault_app:
        found = Counter(await bodies(vault_app))
        assert found >= Counter(BODIES)
        # Noted as acked and then killed before the ack: nobody can tell a redelivery from a twin that was never stored.
        assert point == "capture.before_ack" or found == Counter(BODIES)
        await check_ledger(vault_app)


@pytest.mark.parametrize(("store", "point"), both(REDRIVE, "vault.after_lease", "redrive.after_confirm"))
async def test_a_kill_of_a_redrive_loses_no_letter_and_its_copies_can_be_told(
    point: str, environment: dict[str, str], admin: Admin
) -> None:
    await admin.publish([dead(body) for body in BODIES])
    await work("capture", environment)
    assert await work("redrive", environment, f"{point}:1") == -9
    environment = {**environment, "HOLDFAST_CLOCK_OFFSET_S": "1000"}  # the leases of the killed one have run out
    assert await work("redrive", environment) == 0
    found = await admin.drain(MAIN, await admin.count(MAIN))
    ids = Counter(str(headers_of(delivery)["x-redrive-id"]) for delivery in found)
    by_id = {str(headers_of(delivery)["x-redrive-id"]): delivery.body for delivery in found}
    assert Counter(by_id.values()) == Counter(BODIES)
    assert len(found) - len(ids) <= len(BODIES) if point == "redrive.after_confirm" else len(found) == len(ids)
    async with open_vault_app(load_settings(environment=environment, serving=False), None) as vault_app:
        redriven = await vault_app.vault.letters.count(Selection(state=LetterState.REDRIVEN))
        assert redriven.count == len(BODIES)
        await check_ledger(vault_app)
