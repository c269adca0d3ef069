"""What a plan says of its targets, on a real broker: what routes, who gets a copy, and how long a canary watches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pamqp import commands as amqp

from holdfast.core.death import RedriveStamp
from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import Content
from holdfast.core.moments import moment
from holdfast.core.plan import Canary, Place, Plan, PlanOptions, RedriveState, Retries, Target
from holdfast.core.selection import Selection
from holdfast.engines.rabbitmq.redriver import Rewriter
from holdfast.errors import Conflict, Invalid
from holdfast.services.vault.admin import VaultApp
from tests.support.amqp import Admin, properties
from tests.support.eventually import eventually
from tests.vault.letters import ADMIN, DLQ, MAIN, dead, vault_app_on

ACT = LedgerAct(actor="tester", action="redrives.start", reason="mended")
ALL = Selection(queue=DLQ)


async def captured(vault_app: VaultApp) -> None:
    await vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3)


async def plan(vault_app: VaultApp, target: Target, canary: Canary | None = None) -> Plan:
    return await vault_app.planner.plan(PlanOptions(selection=ALL, target=target, canary=canary), ADMIN)


@pytest.mark.rabbitmq
async def test_an_exchange_that_routes_nowhere_is_seen_and_copies_are_named(admin: Admin, tmp_path: Path) -> None:
    await admin.exchange("events", "topic")
    await admin.bind(MAIN, "events", "order.*")
    await admin.bind(await admin.queue("audit"), "events", "order.#")
    await admin.bind(DLQ, "events", "loop")
    keys = {b"good": "order.new", b"nowhere": "invoice.new", b"loop": "loop"}
    origin = "x-original-exchange", "x-original-routing-key"
    await admin.publish([dead(body, **{origin[0]: "events", origin[1]: key}) for body, key in keys.items()])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        made = await plan(vault_app, Target(kind="original"))
        good = "exchange 'events' with key 'order.new'"
        assert (made.count, made.targets, made.ids) == (1, {good: 1}, "1")
        assert made.copies[good] == ["audit", MAIN]
        assert f"{good} also gives a copy to audit" in made.notes
        assert [one.why.rpartition("'")[2] for one in made.left_out] == [
            " does not route",
            " leads back to the dead-letter queue",
        ]
        assert any("to no queue" in note for note in made.notes)
    async with vault_app_on(admin, tmp_path, management=None) as vault_app:
        blind = await plan(vault_app, Target(kind="original"))
        assert (blind.count, blind.copies) == (3, {})
        assert any("seen only when letters are published" in note for note in blind.notes)


@pytest.mark.rabbitmq
async def test_a_target_that_only_an_alternate_exchange_takes_is_left_out(admin: Admin, tmp_path: Path) -> None:
    await admin.exchange("unrouted", "fanout")
    await admin.bind(await admin.queue("unrouted"), "unrouted")
    await admin.exchange("shop", "topic", **{"alternate-exchange": "unrouted"})
    await admin.bind(MAIN, "shop", "good")
    headers = [{"x-original-exchange": "shop", "x-original-routing-key": key} for key in ("good", "old")]
    await admin.publish([dead(b"%d" % place, **each) for place, each in enumerate(headers)])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        made = await plan(vault_app, Target(kind="original"))
        assert (made.count, made.copies) == (1, {"exchange 'shop' with key 'good'": [MAIN]})
        assert [one.why for one in made.left_out] == ["exchange 'shop' with key 'old' does not route"]
        assert any("only the alternate exchange 'unrouted' takes it" in note for note in made.notes)
        # A binding that is gone since the plan makes the alternate exchange take it: that is a change too.
        await admin.channel.call(amqp.Queue.Unbind(queue=MAIN, exchange="shop", routing_key="good"))
        with pytest.raises(Conflict, match="targets have changed; 1 of 1 letters"):
            await vault_app.planner.execute(made.hash, ADMIN, ACT)


@pytest.mark.rabbitmq
async def test_a_target_that_is_gone_since_the_plan_is_reported(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"x")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        made = await plan(vault_app, Target())
        await admin.delete(MAIN)
        with pytest.raises(Conflict, match="targets have changed; 1 of 1 letters"):
            await vault_app.planner.execute(made.hash, ADMIN, ACT)
        await admin.queue(MAIN)
        first, _ = await vault_app.planner.execute(made.hash, ADMIN, ACT, operation="once")
        await admin.queue("other")
        other = await plan(vault_app, Target(kind="address", routing_key="other"))
        with pytest.raises(Conflict, match=f"operation id is taken; it started redrive {first.id}"):
            await vault_app.planner.execute(other.hash, ADMIN, ACT, operation="once")


@pytest.mark.rabbitmq
async def test_two_clicks_at_once_make_one_task_and_send_each_letter_once(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(f"{number}".encode()) for number in range(20)])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        made = await plan(vault_app, Target())
        click = [vault_app.planner.execute(made.hash, ADMIN, ACT, operation="click") for _ in range(2)]
        (one, _), (other, _) = await asyncio.gather(*click)
        assert one.id == other.id
        # A third one without the id is another task, which finds its letters taken.
        third, _ = await vault_app.planner.execute(made.hash, ADMIN, ACT)
        for redrive in (one, other, third):
            vault_app.redrives.begin(redrive)

        async def are_done() -> bool:
            found = [await vault_app.redrives.find(redrive.id) for redrive in (one, third)]
            return all(redrive.state is RedriveState.DONE for redrive in found)

        await eventually(are_done)
        found = [await vault_app.redrives.find(redrive.id) for redrive in (one, third)]
        assert sum(redrive.redriven for redrive in found) == 20
        assert sum(redrive.skipped for redrive in found) == 20
    assert await admin.count(MAIN) == 20


@pytest.mark.rabbitmq
async def test_a_canary_widens_while_nothing_comes_back_and_a_rate_is_kept(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(f"{number}".encode()) for number in range(7)])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        await vault_app.custody.start_capture(DLQ, ADMIN)
        canary = Canary(first=1, wait="200ms", widen=3)
        wish = PlanOptions(selection=Selection(queue=DLQ), canary=canary, max_per_s=50)
        made = await vault_app.planner.plan(wish, ADMIN)
        assert made.estimated_s == 7 / 50 + 2 * 0.2
        redrive, _ = await vault_app.planner.execute(made.hash, ADMIN, ACT)
        began_s = asyncio.get_running_loop().time()
        await vault_app.redrives.run(redrive.id)
        # Three may be out after the first look and nine after the second; six of seven keep to 20 ms each.
        assert asyncio.get_running_loop().time() - began_s >= 0.4 + 6 * 0.02
        found = await vault_app.redrives.find(redrive.id)
        assert (found.state, found.redriven) == (RedriveState.DONE, 7)


@pytest.mark.rabbitmq
async def test_letters_go_by_their_type(admin: Admin, tmp_path: Path) -> None:
    for queue in ("new", "paid", "rest"):
        await admin.queue(queue)
    types = {b"1": "order.new", b"2": "order.paid", b"3": "order.odd"}
    await admin.publish([dead(body, MessageType=kind) for body, kind in types.items()])
    routes = {"order.new": Place(routing_key="new"), "order.paid": Place(routing_key="paid")}
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        made = await plan(vault_app, Target(kind="type", routes=routes, redirect=Place(routing_key="rest")))
        assert made.targets == {"new": 1, "paid": 1}
        assert [one.why for one in made.left_out] == ["type 'order.odd' is not in the route table"]
        by_property = Target(kind="type", routes={"order": Place(routing_key="rest")}, type_header="kind")
        assert (await plan(vault_app, by_property)).targets == {"rest": 3}
        redrive, _ = await vault_app.planner.execute(made.hash, ADMIN, ACT)
        vault_app.redrives.begin(redrive)

        async def is_done() -> bool:
            return (await vault_app.redrives.find(redrive.id)).state is RedriveState.DONE

        await eventually(is_done)
    assert [one.body for one in await admin.drain("new", 1) + await admin.drain("paid", 1)] == [b"1", b"2"]


@pytest.mark.rabbitmq
async def test_a_canary_watches_for_the_whole_ladder(admin: Admin, tmp_path: Path) -> None:
    for name, ttl in (("orders.retry", 15_000), ("orders.retry.2", 60_000)):
        arguments: dict[str, int | str] = {"x-message-ttl": ttl, "x-dead-letter-exchange": ""}
        await admin.queue(name, **arguments, **{"x-dead-letter-routing-key": MAIN})
    await admin.bind("orders.retry", await admin.exchange("retry.orders"), "retry")
    await admin.publish([dead(b"x")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        await vault_app.custody.start_capture(DLQ, ADMIN)
        assert (await plan(vault_app, Target(), Canary())).canary_wait == "2m45s"  # 15 s + 60 s + 60 s + 30 s
        assert (
            await plan(vault_app, Target(kind="wait"), Canary())
        ).canary_wait == "3m"  # 15 s before the first attempt
        assert (await plan(vault_app, Target(), Canary(wait="7s"))).canary_wait == "7s"
        redrive, _ = await vault_app.planner.execute((await plan(vault_app, Target(), Canary())).hash, ADMIN, ACT)
        assert redrive.wish.canary is not None
        assert redrive.wish.canary.wait == "2m45s"
    async with vault_app_on(admin, tmp_path, retry_attempts=2) as vault_app:
        await vault_app.custody.start_capture(DLQ, ADMIN)
        assert (await plan(vault_app, Target(), Canary())).canary_wait == "1m45s"


@pytest.mark.rabbitmq
async def test_a_canary_that_knows_nothing_is_refused(admin: Admin, tmp_path: Path) -> None:
    await admin.queue("other")
    await admin.publish([dead(b"x")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        await vault_app.custody.start_capture(DLQ, ADMIN)
        with pytest.raises(Conflict, match="give the duration"):
            await plan(vault_app, Target(), Canary())
        assert (await plan(vault_app, Target(), Canary(wait="5s"))).canary_wait == "5s"
        with pytest.raises(Conflict, match="nothing says where letters that die in 'other' come back"):
            await plan(vault_app, Target(kind="address", routing_key="other"), Canary(wait="5s"))
        await admin.queue("other.dlq")
        with pytest.raises(Conflict, match="nothing captures 'other"):
            await plan(vault_app, Target(kind="address", routing_key="other"), Canary(wait="5s"))
    async with vault_app_on(admin, tmp_path, management=None, retry_delay="1s,10s", retry_attempts=4) as vault_app:
        await vault_app.custody.start_capture(DLQ, ADMIN)
        assert (await plan(vault_app, Target(), Canary())).canary_wait == "1m1s"


@pytest.mark.parametrize(
    "target",
    [
        Target(kind="queue", routing_key="x"),
        Target(kind="address"),
        Target(kind="type"),
        Target(kind="original", routes={"a": Place(routing_key="x")}),
        Target(kind="type", routes={"a": Place()}),
        Target(kind="type", routes={"a": Place(routing_key="x" * 256)}),
        Target(kind="type", routes={f"{n}": Place(routing_key="x") for n in range(1_001)}),
    ],
)
@pytest.mark.rabbitmq
async def test_a_target_that_makes_no_sense_is_refused(admin: Admin, tmp_path: Path, target: Target) -> None:
    async with vault_app_on(admin, tmp_path) as vault_app:
        with pytest.raises(Invalid, match="plan is invalid"):
            await plan(vault_app, target)


def test_a_ladder_is_attempts_times_delay() -> None:
    assert Retries(attempts=3).ladder_s() is None
    assert Retries(attempts=3, delays_s=(15,)).ladder_s() == 45
    assert Retries(attempts=3, delays_s=(15,)).ladder_s([1, 2]) == 5
    assert Retries(attempts=3, delays_s=(15,)).ladder_s(attempts=1) == 15


HEADERS: list[dict[str, object]] = [
    {},
    {"a": 1, "x-retry-count": 3, "x-redrive-id": "old", "x-redriven-count": 2, "x-redriven-at": "then"},
    {
        "x-death": [{"queue": "q", "reason": "rejected", "exchange": "e", "routing-keys": ["k"], "count": 1}],
        "CC": ["c"],
    },
    {"x-original-queue": "q", "x-kept-death": "[]", "nested": {"deep": [1, None, True, b"\xff"]}},
]


def test_a_letter_that_would_expire_does_not_expire_where_it_is_sent() -> None:
    raw = properties.encode({"expiration": "1000", "headers": {"a": 1}})
    stamp = RedriveStamp(run="task-1", by="me", dead_queue=DLQ)
    told = properties.decode(
        Rewriter("guest").properties(Content(body=b"b", properties=raw), stamp, "id", at=moment(1))
    )
    assert "expiration" not in told
    assert isinstance(told["headers"], dict)
    assert told["headers"]["x-kept-expiration"] == "1000"


@pytest.mark.parametrize("headers", HEADERS)
def test_what_is_remembered_of_headers_is_what_is_made_of_them_one_by_one(headers: dict[str, object]) -> None:
    raw = properties.encode({"message_id": "m", "headers": headers} if headers else {"message_id": "m"})  # type: ignore[dict-item]

    rewriter, stamp = Rewriter("guest"), RedriveStamp(run="task-1", by="me", dead_queue=DLQ)

    def rewritten(number: int, *drop: str) -> bytes:
        content = Content(body=b"b", properties=raw, drop=drop)
        return rewriter.properties(content, stamp, f"id-{number}", at=moment(1))

    quick = [rewritten(number) for number in range(3)]
    slow = [rewritten(number, "not there") for number in range(3)]
    assert [properties.canonical(one) for one in quick] == [properties.canonical(one) for one in slow]
    told = properties.decode(quick[2])["headers"]
    assert isinstance(told, dict)
    assert (told["x-redrive-id"], told["x-redriven-from"]) == ("id-2", DLQ)
    assert not {"x-death", "CC", "x-retry-count"} & told.keys()
