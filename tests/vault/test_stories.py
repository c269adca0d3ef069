"""How a letter of RabbitMQ died, as the vault tells it: in which queue, why, and after how many attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

import holdfast
from holdfast import Message, Retry
from holdfast.core.death import QueueNames
from holdfast.core.letter import NewLetter, fingerprint
from holdfast.core.message import Delivery
from holdfast.core.plan import PlanOptions
from holdfast.core.selection import Selection
from holdfast.engines.rabbitmq.letters import new_letter
from tests.support.amqp import Admin, outgoing, properties
from tests.support.eventually import eventually
from tests.vault.letters import ACT, ADMIN, vault_app_on

PARKED = {"x-original-queue": "q", "x-original-for": "q.dlq", "x-parked-at": "2026-01-02T03:04:05+00:00"}


def entry(queue: str, reason: str, count: int) -> dict[str, object]:
    return {"queue": queue, "reason": reason, "count": count, "exchange": "", "routing-keys": [queue]}


REJECTED, MOVED = entry("q", "rejected", 1), [entry("q.dlq", "expired", 1)]
ELSEWHERE = {"x-original-queue": "b", "x-original-for": "b.dlq"}
WAITED = [entry("q.retry", "expired", 2), entry("q", "rejected", 2)]


@pytest.mark.parametrize(
    ("headers", "story"),
    [
        ({"x-death": WAITED}, ("q", "rejected", 3)),
        ({"x-death": [entry("q", "rejected", 3), entry("q.retry", "expired", 2)]}, ("q", "rejected", 3)),
        ({"x-retry-count": 2, "x-death": [REJECTED, entry("q.retry", "expired", 1)]}, ("q", "rejected", 3)),
        ({**PARKED, "x-parked-reason": "attempts", "x-retry-count": 2}, ("q", "attempts", 3)),
        ({**PARKED, "x-parked-reason": "permanent", "x-retry-count": 0}, ("q", "permanent", 1)),
        ({**PARKED, "x-parked-reason": "poison", "x-retry-count": 3}, ("q", "poison", 3)),
        ({**PARKED, "x-parked-reason": "attempts", "x-retry-count": 2, "x-death": MOVED}, ("q", "attempts", 3)),
        ({**PARKED, "x-parked-reason": "attempts", "x-death": [REJECTED], **ELSEWHERE}, ("q", "rejected", 1)),
        ({"x-death": [entry("q.dlq", "expired", 1), entry("q", "maxlen", 1)]}, ("q", "maxlen", 1)),
        ({"x-death": [entry("q.retry", "expired", 1)]}, ("", "expired", 1)),
        ({}, ("", "", 0)),
    ],
)  # fmt: skip
def test_what_is_read_of_its_headers(headers: dict[str, Any], story: tuple[str, str, int]) -> None:
    raw = properties.encode({"headers": headers})
    letter = new_letter(Delivery(1, 1, False, "", "", "", raw, b""), "q.dlq", fingerprint, QueueNames())
    assert (letter.death.queue, letter.death.reason, letter.death.count) == story


@pytest.mark.rabbitmq
@pytest.mark.parametrize("by", ["publish", "broker"])
async def test_three_runs_are_three_attempts(admin: Admin, tmp_path: Path, by: Literal["publish", "broker"]) -> None:
    app, runs = holdfast.App(admin.url, management=admin.node.management_url), list[int]()

    @app.consumer("q", retry=Retry(attempts=3, delay="50ms", by=by))
    async def handle(message: Message) -> None:
        runs.append(message.attempt)
        raise ValueError("no")

    async with app.running(declare=True):
        await admin.publish([outgoing("q")])
        await eventually(lambda: admin.count("q.dlq"))
    async with vault_app_on(admin, tmp_path) as vault_app:
        await vault_app.custody.capture("q.dlq", ADMIN, idle_s=0.3)
        found = await vault_app.vault.letters.get(1)
    assert found is not None
    assert (found.death.queue, found.death.reason, found.death.count, runs) == ("q", "attempts", 3, [1, 2, 3])


@pytest.mark.rabbitmq
async def test_to_look_at_an_empty_queue_takes_a_moment(admin: Admin, tmp_path: Path) -> None:
    await admin.queue("q.dlq")
    async with vault_app_on(admin, tmp_path) as vault_app, asyncio.timeout(3.0):
        assert await vault_app.custody.peek("q.dlq", ADMIN, count_max=10, live=True) == []


@pytest.mark.rabbitmq
async def test_letters_that_an_older_program_captured_are_judged_anew(admin: Admin, tmp_path: Path) -> None:
    """It believed x-original-queue first, and wrote down that the letter died there; the headers are all there."""
    foreign = {"x-original-queue": "a", "x-original-exchange": "events", "x-original-routing-key": "order.new"}
    parked = {**foreign, "x-parked-at": "2026-01-02T03:04:05+00:00"}
    died = {"x-death": [entry("b.retry", "expired", 1), entry("b", "rejected", 2), entry("a", "rejected", 1)]}
    for queue in ("a", "b", "b.dlq"):
        await admin.queue(queue)
    await admin.exchange("dlq.b")
    await admin.bind("b.dlq", "dlq.b", "parking")
    letters: list[NewLetter] = []
    for headers in ({**foreign, **died}, parked, {**foreign, "x-original-for": "a.dlq"}):
        raw = properties.encode({"headers": headers, "message_id": str(len(letters))})  # type: ignore[dict-item]
        made = new_letter(Delivery(1, 1, False, "", "", "", raw, b""), "b.dlq", fingerprint, QueueNames())
        letters.append(replace(made, death=replace(made.death, queue="a")))
    async with vault_app_on(admin, tmp_path) as vault_app:
        await vault_app.vault.letters.put(letters, ACT)
        plan = await vault_app.planner.plan(PlanOptions(selection=Selection(queue="b.dlq")), ADMIN)
    assert (plan.targets, plan.left_out_count) == ({"b": 2}, 1)
    assert [one.why for one in plan.left_out] == ["it was parked into 'a.dlq', and nothing says how it came here"]


@pytest.mark.rabbitmq
@pytest.mark.parametrize("dead_queues", ["*", "q*,graves", "*.dead,graves,q.dlq"])
async def test_the_queues_that_may_be_touched_are_not_all_dead_queues(
    admin: Admin, tmp_path: Path, dead_queues: str
) -> None:
    x_death = [entry("graves", "expired", 1), entry("q.dlq", "expired", 1), entry("q", "rejected", 1)]
    told = x_death if "graves" in dead_queues else x_death[1:]
    for queue in ("q", "q.dlq"):
        await admin.queue(queue)
    await admin.publish([outgoing("q.dlq", headers={"x-death": told})])
    async with vault_app_on(admin, tmp_path, dead_queues=dead_queues) as vault_app:
        await vault_app.custody.capture("q.dlq", ADMIN, idle_s=0.3)
        plan = await vault_app.planner.plan(PlanOptions(selection=Selection(queue="q.dlq")), ADMIN)
    assert plan.targets == {"q": 1}
