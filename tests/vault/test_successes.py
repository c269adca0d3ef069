"""A consumer of ours that has done a redriven message resolves its letter, beside its work and never in its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.plan import PlanOptions
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Secret
from holdfast.stores.redrives import Settled
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.postgres import emptied
from tests.support.rabbitmq import Node, vhost_name
from tests.vault.letters import ADMIN, DLQ, MAIN, act, dead, vault_app_on
from tests.vault.test_redrives import lease, states, task

S = LetterState


async def test_only_what_is_redriven_is_resolved(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1", b"2", b"3"])
    leased, until = await lease(vault, redrive, clock)
    ids = [one.redrive_id for one in leased]
    done = [Settled(1, "redriven"), Settled(3, "failed")]
    await vault.redrives.settle(redrive.id, done, act("settle"), until=until)
    early = await vault.redrives.succeeded([*ids, ids[0], "of somebody else"], act("resolve"))
    assert early == [ids[1]]
    assert await states(vault) == [S.RESOLVED, S.REDRIVING, S.CAPTURED]
    assert await vault.redrives.succeeded(ids[:1], act("resolve")) == []
    rows = await vault.ledger.of_letter(1, count_max=10)
    assert (rows[-1].action, rows[-1].from_state, rows[-1].to_state) == ("resolve", "redriven", "resolved")


@pytest.fixture
async def admin(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Admin]:
    async with Admin.open(node, vhost_name(request.node.name)) as admin:
        yield admin


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def vault_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/data"
    return emptied(request.getfixturevalue("postgres_url"))


def consuming(admin: Admin, vault: str) -> tuple[holdfast.App, list[bytes]]:
    app, seen = holdfast.App(admin.node.url(admin.vhost), vault=vault), list[bytes]()

    @app.consumer(MAIN, retry=holdfast.Retry(attempts=1, delay="1s"))
    async def handle(message: holdfast.Message) -> None:
        seen.append(message.body)
        if message.body == b"bad":
            raise ValueError("no")

    return app, seen


async def redriven(vault_app: VaultApp) -> None:
    await vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3)
    plan = await vault_app.planner.plan(PlanOptions(selection=Selection(queue=DLQ)), ADMIN)
    redrive, _ = await vault_app.planner.execute(plan.hash, ADMIN, act("redrives.start"))
    vault_app.redrives.begin(redrive)


@pytest.mark.rabbitmq
async def test_a_message_that_is_done_resolves_its_letter(
    admin: Admin, tmp_path: Path, vault_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LEDGER_KEY", "k" * 32)
    app, seen = consuming(admin, vault_url)
    vault, key = Secret(vault_url), Secret("k" * 32)
    async with vault_app_on(admin, tmp_path, vault=vault, ledger_key=key) as vault_app, app.running(declare=True):
        await admin.publish([dead(b"good"), dead(b"bad")])
        await redriven(vault_app)

        async def is_resolved() -> bool:
            letters = (await vault_app.vault.letters.find(Selection(), count_max=10)).letters
            return [one.state for one in letters] == [S.REDRIVEN, S.RESOLVED]

        await eventually(is_resolved)
        assert sorted(seen) == [b"bad", b"good"]
        assert all(row.agrees for row in await vault_app.vault.ledger.balance())
        assert not (await vault_app.vault.seals.verify()).why


@pytest.mark.rabbitmq
async def test_a_vault_that_is_away_holds_nothing_up(admin: Admin, tmp_path: Path) -> None:
    app, seen = consuming(admin, "postgresql://nobody@127.0.0.1:1/nothing")
    async with app.running(declare=True):
        fresh: dict[str, Any] = {"x-redrive-id": "r", "x-retry-count": 0}
        await admin.publish([dead(b"good", queue=MAIN, **fresh)])

        async def is_done() -> bool:
            return seen == [b"good"]

        await eventually(is_done)
        async with asyncio.timeout(60):
            while await admin.count(MAIN):  # noqa: ASYNC110 - a broker has to be asked
                await asyncio.sleep(0.05)
