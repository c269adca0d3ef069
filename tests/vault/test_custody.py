"""Capture from RabbitMQ and redrive back to it, on a real broker: nothing is lost, nothing changes on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.core.ledger import LedgerAct
from holdfast.core.message import Delivery, Outgoing
from holdfast.core.moments import moment
from holdfast.core.plan import Canary, PlanOptions, RedriveState, RedriveTask, Target
from holdfast.core.requests.vault import ReadLetter
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.errors import Conflict, NotFound
from holdfast.proof.proxy import Proxy
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Secret, Settings, StorageSettings
from holdfast.wiring import open_vault_app
from tests.faces.api.conftest import open_installation
from tests.support.amqp import Admin, headers_of
from tests.support.eventually import eventually
from tests.support.postgres import emptied
from tests.vault.letters import ADMIN, DLQ, MAIN, bodies, dead, vault_app_on

pytestmark = pytest.mark.rabbitmq
S = LetterState
ACT = LedgerAct(actor="tester", action="redrives.start", reason="mended")


async def captured(vault_app: VaultApp) -> int:
    return (await vault_app.custody.capture(DLQ, ADMIN, idle_s=0.3)).captured


async def finished(vault_app: VaultApp, wish: PlanOptions) -> RedriveTask:
    plan = await vault_app.planner.plan(wish, ADMIN)
    redrive, _ = await vault_app.planner.execute(plan.hash, ADMIN, ACT)
    vault_app.redrives.begin(redrive)

    async def is_over() -> bool:
        return (await vault_app.redrives.find(redrive.id)).state is not RedriveState.RUNNING

    await eventually(is_over)
    return await vault_app.redrives.find(redrive.id)


async def check(vault_app: VaultApp) -> None:
    assert all(row.agrees for row in await vault_app.vault.ledger.balance())
    assert not (await vault_app.vault.seals.verify()).why


async def test_letters_go_into_the_vault_and_back_byte_for_byte(admin: Admin, tmp_path: Path) -> None:
    sizes = [b"", b"\x00\xff" * 50, b"text", bytes(2**21)]
    await admin.publish([dead(body, message_id=f"m{number}", extra=1.5) for number, body in enumerate(sizes)])
    async with vault_app_on(admin, tmp_path) as vault_app:
        assert await captured(vault_app) == 4
        assert await admin.count(DLQ) == 0
        assert await bodies(vault_app) == sizes
        (first, *_) = (await vault_app.vault.letters.find(Selection(), count_max=10)).letters
        assert (first.death.queue, first.death.reason, first.death.error_type) == (MAIN, "attempts", "ValueError")
        assert (first.acked, first.headers["extra"]) == (True, 1.5)
        redrive = await finished(vault_app, PlanOptions(selection=Selection(queue=DLQ)))
        assert (redrive.state, redrive.redriven, redrive.failed) == (RedriveState.DONE, 4, 0)
        assert (await vault_app.vault.letters.count(Selection(state=S.REDRIVEN))).count == 4
        await check(vault_app)
    found = await admin.drain(MAIN, 4)
    assert [delivery.body for delivery in found] == sizes
    headers = headers_of(found[0])
    assert "x-retry-count" not in headers
    assert (headers["x-redriven-count"], headers["x-redriven-from"], headers["extra"]) == (1, DLQ, 1.5)
    assert headers["x-redrive-run"] == f"task-{redrive.id}"


async def test_equal_twins_and_one_id_for_two_bodies_are_all_in_the_vault(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"twin"), dead(b"twin"), dead(b"other")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        assert await captured(vault_app) == 3
        assert await bodies(vault_app) == [b"twin", b"twin", b"other"]
        await check(vault_app)


async def test_a_redriven_letter_that_dies_again_is_a_new_one_and_the_old_came_back(
    admin: Admin, tmp_path: Path
) -> None:
    await admin.publish([dead(b"x"), dead(b"y")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        await finished(vault_app, PlanOptions(selection=Selection(ids=(1,))))
        (again,) = await admin.drain(MAIN, 1)
        await admin.publish([died_again(again)])
        assert await captured(vault_app) == 1
        old, new = [await vault_app.custody.letter(number, ADMIN) for number in (1, 3)]
        assert (old.state, new.state, new.came_from) == (S.CAME_BACK, S.CAPTURED, 1)
        assert (new.redriven_count, new.message_id) == (1, old.message_id)
        told = await vault_app.call(ReadLetter(id=1), ADMIN)
        assert (told.came_back_as, told.kinds.headers["x-retry-count"]) == ([3], "int64")
        guarded = await vault_app.planner.plan(PlanOptions(selection=Selection(ids=(3,)), redrives_max=1), ADMIN)
        assert (guarded.count, guarded.left_out_count) == (0, 1)
        assert (
            await vault_app.planner.plan(PlanOptions(selection=Selection(ids=(3,)), redrives_max=1, force=True), ADMIN)
        ).count
        await check(vault_app)


def died_again(delivery: Delivery) -> Outgoing:
    return Outgoing("", DLQ, delivery.properties, delivery.body)


async def test_what_does_not_route_is_left_out_and_said(admin: Admin, tmp_path: Path) -> None:
    names = {b"good": MAIN, b"bad": "nowhere", b"none": ""}
    told = {body: {"x-original-queue": name, "x-original-for": DLQ} for body, name in names.items()}
    await admin.publish([dead(body, **headers) for body, headers in told.items()])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        plan = await vault_app.planner.plan(PlanOptions(selection=Selection(queue=DLQ)), ADMIN)
        assert (plan.count, plan.targets, plan.left_out_count) == (1, {MAIN: 1}, 2)
        assert any("nowhere" in note for note in plan.notes)
        elsewhere = PlanOptions(selection=Selection(queue=DLQ), target=Target(kind="address", routing_key=MAIN))
        assert (await vault_app.planner.plan(elsewhere, ADMIN)).count == 3


@pytest.mark.parametrize(
    ("target", "arrives_in"),
    [
        (Target(kind="wait"), "orders.retry"),
        (Target(kind="original"), "audit"),
        (Target(kind="address", exchange="events", routing_key="a.b"), "audit"),
    ],
)
async def test_letters_go_to_the_target_that_was_asked_for(
    admin: Admin, tmp_path: Path, target: Target, arrives_in: str
) -> None:
    await admin.exchange("retry.orders")
    await admin.bind(await admin.queue("orders.retry"), "retry.orders", "retry")
    await admin.exchange("events", "topic")
    await admin.bind(await admin.queue("audit"), "events", "a.*")
    await admin.publish([dead(b"x", **{"x-original-exchange": "events", "x-original-routing-key": "a.b"})])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        assert (await finished(vault_app, PlanOptions(selection=Selection(queue=DLQ), target=target))).redriven == 1
    assert [one.body for one in await admin.drain(arrives_in, 1)] == [b"x"]


async def test_a_publish_that_comes_back_leaves_the_letter_captured(admin: Admin, tmp_path: Path) -> None:
    await admin.exchange("nobody")
    await admin.publish([dead(b"x")])
    async with vault_app_on(admin, tmp_path, management=None) as vault_app:  # without it only the publish tells
        await captured(vault_app)
        wish = PlanOptions(
            selection=Selection(queue=DLQ), target=Target(kind="address", exchange="nobody", routing_key="k")
        )
        redrive = await finished(vault_app, wish)
        assert (redrive.state, redrive.redriven, redrive.failed) == (RedriveState.DONE, 0, 1)
        assert (await vault_app.vault.letters.count(Selection(state=S.CAPTURED))).count == 1
        await check(vault_app)


async def test_a_changed_world_is_reported_and_two_clicks_make_one_task(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"1"), dead(b"2")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        wish = PlanOptions(selection=Selection(queue=DLQ))
        plan = await vault_app.planner.plan(wish, ADMIN)
        await vault_app.vault.letters.revise(1, revision=0, body=b"edited", put={}, drop=[], act=ACT)
        with pytest.raises(Conflict, match="letters have changed"):
            await vault_app.planner.execute(plan.hash, ADMIN, ACT)
        plan = await vault_app.planner.plan(wish, ADMIN)
        await admin.publish([dead(b"arrived since")])
        await captured(vault_app)
        first, made = await vault_app.planner.execute(plan.hash, ADMIN, ACT, operation="click")
        second, again = await vault_app.planner.execute(plan.hash, ADMIN, ACT, operation="click")
        assert (first.id, made, again) == (second.id, True, False)
        with pytest.raises(NotFound):
            await vault_app.planner.execute("none", ADMIN, ACT)
        paused = await vault_app.redrives.change(first.id, "pause", ACT)
        assert paused.state is RedriveState.PAUSED
        await vault_app.redrives.change(first.id, "resume", ACT)

        async def is_done() -> bool:
            return (await vault_app.redrives.find(first.id)).state is RedriveState.DONE

        await eventually(is_done)
        with pytest.raises(Conflict, match="is done"):
            await vault_app.redrives.change(first.id, "cancel", ACT)
        await check(vault_app)
    assert [one.body for one in await admin.drain(MAIN, 2)] == [b"edited", b"2"]


async def test_a_task_goes_on_after_a_restart(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"1"), dead(b"2")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        plan = await vault_app.planner.plan(PlanOptions(selection=Selection(queue=DLQ)), ADMIN)
        await vault_app.planner.execute(plan.hash, ADMIN, ACT)
    async with vault_app_on(admin, tmp_path) as vault_app:
        await vault_app.redrives.resume_all()

        async def is_done() -> bool:
            return (await vault_app.redrives.find(1)).state is RedriveState.DONE

        await eventually(is_done)
    assert len(await admin.drain(MAIN, 2)) == 2


@pytest.mark.postgres
async def test_a_task_is_not_taken_from_a_process_that_lives(admin: Admin, tmp_path: Path, postgres_url: str) -> None:
    emptied(postgres_url)
    await admin.publish([dead(b"1"), dead(b"2"), dead(b"3")])
    shared = {"vault": Secret(postgres_url), "ledger_key": Secret("k")}
    async with (
        vault_app_on(admin, tmp_path / "one", **shared) as one,
        vault_app_on(admin, tmp_path / "two", **shared) as two,
    ):
        await captured(one)
        plan = await one.planner.plan(PlanOptions(selection=Selection(queue=DLQ), max_per_s=1), ADMIN)
        redrive, _ = await one.planner.execute(plan.hash, ADMIN, ACT)
        one.redrives.begin(redrive)

        async def is_held() -> bool:
            return bool((await two.redrives.find(redrive.id)).held_by)

        await eventually(is_held)
        holder = (await two.redrives.find(redrive.id)).held_by
        with pytest.raises(Conflict, match="if that one is gone, try again in"):
            await two.redrives.change(redrive.id, "resume", ACT)
        await two.redrives.resume_all()  # it stands by, and takes over when the other falls silent
        await one.redrives.close()
        assert (await two.redrives.find(redrive.id)).held_by != holder

        async def is_done() -> bool:
            return (await two.redrives.find(redrive.id)).state is RedriveState.DONE

        await eventually(is_done)
        found = await two.redrives.find(redrive.id)
        assert (found.redriven, found.possible_duplicates) == (3, 0)
    assert len(await admin.drain(MAIN, 3)) == 3


async def test_a_letter_that_is_being_redriven_cannot_be_touched(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"1")])
    async with vault_app_on(admin, tmp_path) as vault_app:
        await captured(vault_app)
        plan = await vault_app.planner.plan(PlanOptions(selection=Selection(queue=DLQ)), ADMIN)
        redrive, _ = await vault_app.planner.execute(plan.hash, ADMIN, ACT)
        until = moment(vault_app.custody.clock.now_us() + 1_000_000_000)
        await vault_app.vault.redrives.lease(redrive.id, count_max=10, until=until, act=ACT)
        with pytest.raises(Conflict, match="redriving"):
            await vault_app.vault.letters.revise(1, revision=0, body=b"", put={}, drop=[], act=ACT)
        with pytest.raises(Conflict):
            await vault_app.custody.act("discard", Selection(ids=(1,)), expected=1, act=ACT, caller=ADMIN)


async def test_a_canary_stops_when_its_letters_come_back(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(f"{number}".encode()) for number in range(10)])
    async with vault_app_on(admin, tmp_path) as vault_app:
        canary = Canary(first=2, wait="3s", widen=2, stop_above=0.1)
        await captured(vault_app)
        wish = PlanOptions(selection=Selection(queue=DLQ, state=S.CAPTURED), canary=canary)
        with pytest.raises(Conflict, match="canary is blind"):
            await vault_app.planner.plan(wish, ADMIN)
        await vault_app.custody.start_capture(DLQ, ADMIN)
        plan = await vault_app.planner.plan(wish, ADMIN)
        redrive, _ = await vault_app.planner.execute(plan.hash, ADMIN, ACT)
        vault_app.redrives.begin(redrive)
        for delivery in await admin.drain(MAIN, 2):
            await admin.publish([died_again(delivery)])

        async def is_stopped() -> bool:
            return (await vault_app.redrives.find(redrive.id)).state is RedriveState.STOPPED

        await eventually(is_stopped)
        found = await vault_app.redrives.find(redrive.id)
        assert (found.redriven, "came back" in found.why) == (2, True)
    assert await admin.count(MAIN) == 0


async def test_only_known_queues_are_touched(admin: Admin, tmp_path: Path) -> None:
    async with vault_app_on(admin, tmp_path) as vault_app:
        for name in (MAIN, "missing.dlq"):
            with pytest.raises(NotFound):
                await vault_app.custody.capture(name, ADMIN)
        views = await vault_app.custody.dead_queues(ADMIN)
        assert [(view.queue, view.source_queue) for view in views] == [(DLQ, MAIN)]


async def test_a_capture_that_stands_still_and_a_silent_broker_are_shown(admin: Admin, tmp_path: Path) -> None:
    await admin.queue("images.dlq")
    await admin.publish([dead(b"1"), dead(b"2", queue="images.dlq")])
    async with Proxy("127.0.0.1", admin.node.port) as proxy:
        url = admin.node.url(admin.vhost).replace(f":{admin.node.port}/", f":{proxy.port}/")
        more = {"broker": Secret(url), "management": None, "dead_queues": f"{DLQ},images.dlq"}
        async with open_installation(tmp_path, **more) as installation, installation.client() as client:
            await installation.vault_app.custody.start_capture(DLQ, ADMIN)

            async def has_one() -> bool:
                return bool((await client.get("/admin/letters")).json()["count"] == 1)

            await eventually(has_one)
            images, orders = (await client.get("/admin/dlq/queues")).json()
            assert (images["source_queue"], images["ready"], images["captured"]) == (None, 1, 0)
            assert (orders["source_queue"], orders["ready"], orders["captured"]) == (MAIN, 0, 1)
            assert (await client.get("/health")).json()["status"] == "pass"
            await proxy.refuse()
            await proxy.cut()

            async def stands() -> bool:
                return bool((await client.get("/admin/captures")).json()[0]["state"] == "waiting")

            await eventually(stands)
            assert "cannot be reached" in (await client.get("/admin/captures")).json()[0]["why"]
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "warn")
            assert f"the capture of {DLQ} stands still" in health.json()["notes"][0]
            (queue,) = (await client.get("/admin/dlq/queues")).json()
            assert (queue["queue"], queue["ready"], queue["consumers"], queue["captured"]) == (DLQ, None, None, 1)
            assert (await client.get(f"/admin/dlq/queues/{DLQ}/messages")).json()["waiting"] is None
            proxy.accept()

            async def runs() -> bool:
                return bool((await client.get("/health")).json()["status"] == "pass")

            await eventually(runs)


async def test_a_limited_capture_takes_no_letter_that_it_gives_back(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(f"{number}".encode()) for number in range(6)])
    async with vault_app_on(admin, tmp_path) as vault_app:
        for _ in range(2):
            assert (await vault_app.custody.capture(DLQ, ADMIN, count_max=2, idle_s=0.3)).captured == 2
        assert await bodies(vault_app) == [b"0", b"1", b"2", b"3"]
    left = await admin.drain(DLQ, 2)
    assert [(one.body, one.redelivered) for one in left] == [(b"4", False), (b"5", False)]


async def test_looking_at_a_queue_leaves_it_as_it_was(admin: Admin, tmp_path: Path) -> None:
    await admin.publish([dead(b"1"), dead(b"2")])
    await admin.quorum_queue("quorum.dlq")
    async with vault_app_on(admin, tmp_path) as vault_app:
        found = await vault_app.custody.peek(DLQ, ADMIN, count_max=1, live=False)
        assert [one.body for one in found] == [b"1"]
        with pytest.raises(Conflict, match="capture it"):
            await vault_app.custody.peek("quorum.dlq", ADMIN, count_max=1, live=False)
    assert [one.body for one in await admin.drain(DLQ, 2)] == [b"1", b"2"]


async def test_an_embedded_dead_queue_is_captured_and_redriven(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/data"
    settings = Settings(storages=(StorageSettings(name="default", url=url),), data_folder=tmp_path)
    async with holdfast.open(url) as queues, open_vault_app(settings, queues) as vault_app:
        await queues.queues_create(DLQ)
        await queues.queues_create(MAIN, dead_queue=DLQ)
        await queues.queue_produce(MAIN, [holdfast.NewItem(payload=b"\xff1", kind="order", reference="r")])
        leased = await queues.queue_lease(MAIN)
        retry = [holdfast.RetryItem(id=item.id, dead=True, reason="ValueError: no") for item in leased.items]
        await queues.queue_retry(MAIN, retry)
        assert await captured(vault_app) == 1
        (letter,) = (await vault_app.vault.letters.find(Selection(), count_max=5)).letters
        assert (letter.origin, letter.type, letter.death.queue, letter.acked) == ("queue", "order", MAIN, True)
        assert (await vault_app.custody.dead_queues(ADMIN))[0].ready == 0
        redrive = await finished(vault_app, PlanOptions(selection=Selection(ids=(1,))))
        assert redrive.redriven == 1
        (item,) = (await queues.queue_lease(MAIN)).items
        assert (item.payload, item.kind, item.reference) == (b"\xff1", "order", "r")
        await check(vault_app)


@pytest.mark.parametrize("store", ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_an_item_that_dies_again_is_linked_and_its_redrives_are_counted(
    request: pytest.FixtureRequest, tmp_path: Path, store: str
) -> None:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/queues"}
    url = urls[store] if store in urls else str(request.getfixturevalue("postgres_url"))
    settings = Settings(storages=(StorageSettings(name="default", url=f"sqlite:///{tmp_path}/data"),))
    dlq, main = f"{store}.again.dlq", f"{store}.again"
    async with holdfast.open(url) as queues, open_vault_app(settings, queues) as vault_app:
        await queues.queues_create(dlq)
        await queues.queues_create(main, dead_queue=dlq)
        await queues.queue_produce(main, [holdfast.NewItem(payload=b"1"), holdfast.NewItem(payload=b"1")])
        for age in range(3):
            for dies in (False, True):  # it goes round once more first, and gets another id by that
                items = (await queues.queue_lease(main, batch_size=10)).items
                await queues.queue_retry(main, [holdfast.RetryItem(id=item.id, dead=dies) for item in items])
            await vault_app.custody.capture(dlq, ADMIN, idle_s=0.3)
            captured = Selection(queue=dlq, state=S.CAPTURED)
            for letter in (await vault_app.vault.letters.find(captured, count_max=10)).letters:
                assert (letter.redriven_count, bool(letter.came_from)) == (age, age > 0)
            guarded = await vault_app.planner.plan(PlanOptions(selection=captured, redrives_max=max(1, age)), ADMIN)
            assert guarded.count == (0 if age else 2)
            await finished(vault_app, PlanOptions(selection=captured))
        assert (await vault_app.vault.letters.count(Selection(queue=dlq, state=S.CAME_BACK))).count == 4
        await check(vault_app)


async def test_letters_of_a_cancelled_redrive_that_nobody_confirmed_are_captured_with_a_note(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.publish([dead(b"1"), dead(b"2")])
    wish = PlanOptions(selection=Selection(queue=DLQ))
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        vault_app_on(admin, tmp_path, broker=Secret(admin.node.url(admin.vhost, port=proxy.port))) as vault_app,
    ):
        await captured(vault_app)
        publisher = vault_app.custody.brokers[0].publisher  # it waits for a minute
        monkeypatch.setattr(publisher, "_timeout_s", 0.5)
        plan = await vault_app.planner.plan(wish, ADMIN)
        task, _ = await vault_app.planner.execute(plan.hash, ADMIN, ACT)
        proxy.pause("down")
        vault_app.redrives.begin(task)

        async def has_them() -> bool:
            return await admin.count(MAIN) >= 2

        await eventually(has_them)
        cancelled = await vault_app.redrives.change(task.id, "cancel", ACT)
        assert (cancelled.state, cancelled.redriven, cancelled.failed) == (RedriveState.CANCELLED, 0, 0)
        assert cancelled.unknown == 2
        page = await vault_app.vault.letters.find(Selection(), count_max=10)
        assert [one.state for one in page.letters] == [S.CAPTURED, S.CAPTURED]
        note = (await vault_app.vault.ledger.of_letter(1, count_max=10))[-1]
        assert "nobody knows whether it was published" in note.reason
        proxy.resume("down")
        await check(vault_app)
        again = await finished(vault_app, wish)
        assert (again.state, again.redriven, again.possible_duplicates) == (RedriveState.DONE, 2, 2)
        await check(vault_app)
    assert {one.body for one in await admin.drain(MAIN, await admin.count(MAIN))} == {b"1", b"2"}
