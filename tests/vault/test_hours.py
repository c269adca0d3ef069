"""What happened in each hour, for charts: counted with every move, forgotten after a while, and made once from the
ledger where an older program kept none."""

from __future__ import annotations

from importlib import resources
from typing import Any

from holdfast.core.states import LetterState
from holdfast.ports.database import Tx
from holdfast.stores.ledger import HOURS_COUNT_MAX
from holdfast.stores.redrives import Settled
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.vault.letters import ACT, DLQ, act, letter
from tests.vault.test_redrives import lease, task_over

HOUR_S = 3600.0
S = LetterState


async def put(vault: Vault, *bodies: bytes, queue: str = DLQ, **more: Any) -> list[int]:
    return [one.letter for one in await vault.letters.put([letter(body, queue=queue, **more) for body in bodies], ACT)]


async def test_arrivals_are_counted_in_their_hour_by_queue_and_by_group(vault: Vault, clock: FrozenClock) -> None:
    await put(vault, b"1", b"2")
    await clock.advance(2 * HOUR_S)
    await put(vault, b"3")
    await put(vault, b"4", queue="other.dlq", error_type="OSError")
    told = await vault.ledger.hours(4)
    assert {one.queue: one.arrived for one in told.queues} == {DLQ: [0, 2, 0, 1], "other.dlq": [0, 0, 0, 1]}
    now_us = vault.ledger.writer.now_us()
    assert 0 < told.until.timestamp() * 1e6 - now_us <= HOUR_S * 1e6
    keys = {one.sample: one.key for one in await vault.groups.page(status=None, after=2**62, count_max=10)}
    hours = await vault.groups.hours([keys[3], keys[4], "none"], 3)
    assert hours == {keys[3]: [2, 0, 1], keys[4]: [0, 0, 1], "none": [0, 0, 0]}
    assert await vault.groups.hours([], 3) == {}


async def test_what_is_set_right_by_hand_is_no_arrival(vault: Vault) -> None:
    ids = await put(vault, b"1")
    for source, target in ((S.CAPTURED, S.ARCHIVED), (S.ARCHIVED, S.CAPTURED)):
        await vault.letters.move(ids, source=source, target=target, act=act("letters"), expected=1)
    (found,) = (await vault.ledger.hours(1)).queues
    assert (found.arrived, found.redriven, found.came_back) == ([1], [0], [0])


async def redriven_and_back(vault: Vault, clock: FrozenClock) -> None:
    """Two letters arrive and are redriven; one of them comes back an hour later."""
    redrive = await task_over(vault, await put(vault, b"1", b"2"))
    leased, until = await lease(vault, redrive, clock)
    done = [Settled(one.letter, "redriven") for one in leased]
    await vault.redrives.settle(redrive.id, done, act("settle"), until=until)
    await clock.advance(HOUR_S)
    await put(vault, b"1", redrive_id=leased[0].redrive_id)


async def test_redrives_and_what_comes_back_are_counted(vault: Vault, clock: FrozenClock) -> None:
    await redriven_and_back(vault, clock)
    (found,) = (await vault.ledger.hours(2)).queues
    assert (found.arrived, found.redriven, found.came_back) == ([2, 1], [2, 0], [0, 1])


async def test_hours_that_no_chart_shows_are_forgotten(vault: Vault, clock: FrozenClock) -> None:
    await put(vault, b"1")
    await clock.advance(HOURS_COUNT_MAX * HOUR_S)
    await vault.ledger.forget_hours()
    assert (await vault.ledger.hours(HOURS_COUNT_MAX + 1)).queues
    await clock.advance(HOUR_S)
    await vault.ledger.forget_hours()
    assert not (await vault.ledger.hours(HOURS_COUNT_MAX + 2)).queues


async def test_what_an_older_program_did_is_read_from_its_ledger(vault: Vault, clock: FrozenClock) -> None:
    await redriven_and_back(vault, clock)
    (group,) = await vault.groups.page(status=None, after=2**62, count_max=10)
    before = await vault.ledger.hours(5), await vault.groups.hours([group.key], 5)

    def renew(tx: Tx) -> None:
        engine = "postgres" if tx.dialect.shared else "sqlite"
        folder = resources.files("holdfast.engines") / engine / "migrations" / "vault"
        (text,) = [found for file in folder.iterdir() if "queue_hours" in (found := file.read_text("utf-8"))]
        for statement in ("DROP TABLE queue_hours", "DROP TABLE group_hours", *text.split(";\n")):
            if statement.strip():
                tx.rows(statement)

    await vault.ledger.writer.write(renew)
    assert (await vault.ledger.hours(5), await vault.groups.hours([group.key], 5)) == before
