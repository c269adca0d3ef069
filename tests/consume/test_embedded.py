"""Consumers on the embedded queue alone: what only it can do, and its failures."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import App, Message, Retry
from holdfast.core.item import Item
from holdfast.errors import CannotStart, QueueMissing, StorageFailed
from holdfast.services.queue.queues import Queues, UnsettledItems
from tests.consume.brokers import count_of
from tests.support.eventually import eventually


def make_app(*, stop_timeout: str = "5s", **options: object) -> tuple[App, list[Message]]:
    app, seen = App("memory://", stop_timeout=stop_timeout), list[Message]()

    @app.consumer("work", retry=Retry(attempts=2, delay="100ms"))
    async def handle(message: Message) -> None:
        seen.append(message)
        if message.body == b"bad":
            raise holdfast.Permanent("bad")

    return app, seen


async def every_item(queues: Queues, name: str) -> list[Item]:
    found = await queues.storage_items_list(name, limit=1_000)
    while page := await queues.storage_items_list(name, limit=1_000, pivot=found[-1].id):
        found += page[1:]
        if len(page) < 1_000:
            break
    return found


async def test_what_would_be_deleted_or_die_too_early_is_refused(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await queues.queues_create("work", max_attempts=1)
    app = App(url)

    @app.consumer("work", retry=Retry(attempts=2))
    async def handle(message: Message) -> None: ...

    with pytest.raises(CannotStart, match=r"no dead_queue.*max_attempts = 1"):
        await app.run()
    with pytest.raises(CannotStart, match="max_attempts = 1") as caught:
        await app.run(declare=True)
    assert "no dead_queue" not in caught.value.message


async def test_a_message_that_ended_its_process_too_often_is_parked_before_it_runs() -> None:
    app, seen = make_app()
    async with app.running(declare=True, only=["work"]):
        queues = app.queues
        (worker,) = app._workers
        worker.stop()
        await eventually(lambda: app.health[0].state == "stopped")
        await queues.queue_produce("work", [b"poison"])
        await queues.queues_update("work", lease_timeout="10ms")
        for attempt in (1, 2):
            reply = await queues.queue_lease("work")
            assert reply.items[0].attempts == attempt

            async def ran_out() -> bool:
                return not any(item.is_leased for item in await queues.storage_items_list("work"))

            await eventually(ran_out)
        again = holdfast.services.consume.worker.Worker(worker.plan, app._broker, stop_timeout_s=1)  # type: ignore[attr-defined]
        running = asyncio.create_task(again.run())

        async def is_parked() -> bool:
            return [item.death_reason.partition(";")[0] for item in await queues.storage_items_list("work.dlq")] == [
                "poison"
            ]

        await eventually(is_parked)
        again.stop()
        await running
    assert seen == []


async def test_without_a_dead_queue_a_parking_waits_and_says_so() -> None:
    app, _ = make_app()
    async with app.running(declare=True):
        await app.queues.queues_update("work", dead_queue="")
        await app.queues.queue_produce("work", [b"bad"])
        await eventually(lambda: "no dead_queue" in app.health[0].trouble)
        assert await count_of(app.queues, "work") == 1
        await app.queues.queues_update("work", dead_queue="work.dlq")

        async def is_parked() -> bool:
            return len(await app.queues.storage_items_list("work.dlq")) == 1

        await eventually(is_parked)
        assert app.health[0].is_well


async def test_at_a_stop_what_cannot_be_parked_goes_back() -> None:
    app, _ = make_app()
    async with app.running(declare=True):
        await app.queues.queues_update("work", dead_queue="")
        await app.queues.queue_produce("work", [b"bad"])
        await eventually(lambda: app.health[0].trouble)
        app._workers[0].stop()
        await eventually(lambda: app.health[0].state == "stopped")
        (item,) = await app.queues.storage_items_list("work")
        assert not item.is_leased


async def test_a_store_that_fails_for_a_while_loses_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    app, seen = make_app()
    failures = 3
    complete = Queues.queue_complete

    async def failing(self: Queues, *arguments: object, **more: object) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise StorageFailed("storage failed; disk full")
        await complete(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Queues, "queue_complete", failing)
    async with app.running(declare=True):
        await app.queues.queue_produce("work", [b"x"])
        await eventually(lambda: app.health[0].trouble == "storage failed; disk full")

        async def is_done() -> bool:
            return await count_of(app.queues, "work") == 0

        await eventually(is_done)
        assert app.health[0].is_well
    assert len(seen) == 1


async def test_all_that_is_leased_is_kept_alive_however_many_requests_that_takes() -> None:
    async with holdfast.open("memory://") as queues:
        await queues.queues_create("work", lease_timeout="1m")
        held = UnsettledItems(queues, "work")
        for _ in range(2):
            await queues.queue_produce("work", [b"x"] * 1_000)
            held.add((await queues.queue_lease("work", batch_size=1_000)).items, 0)
        (gone,) = await queues.storage_items_list("work", limit=1)
        await queues.queue_complete("work", [gone.id])
        before = {item.lease_deadline for item in await every_item(queues, "work")}
        await held.extend(0)
        left = await every_item(queues, "work")
        assert len(left) == 1_999
        assert before.isdisjoint(item.lease_deadline for item in left)
        assert gone.id not in held
        assert await held.complete([item.id for item in left[-1_000:]], partition=0) == []
        assert await count_of(queues, "work") == 999


async def test_a_lease_is_kept_alive_while_its_handler_runs() -> None:
    app, go_on, runs = App("memory://"), asyncio.Event(), list[int]()

    @app.consumer("work")
    async def handle(message: Message) -> None:
        runs.append(message.attempt)
        await go_on.wait()

    queues_made = asyncio.Event()

    async def watch(queues: Queues) -> None:
        await queues.queue_produce("work", [b"x"])
        (first,) = await eventually(lambda: queues.storage_items_list("work"))
        seen = {first.lease_deadline}

        async def extended_twice() -> bool:
            (item,) = await queues.storage_items_list("work")
            seen.add(item.lease_deadline)
            return len(seen - {None}) >= 3

        await eventually(extended_twice)
        queues_made.set()

    async with app.running(declare=True):
        app._workers[0].stop()
        await eventually(lambda: app.health[0].state == "stopped")
        await app.queues.queues_update("work", lease_timeout="1s")
        worker = holdfast.services.consume.worker.Worker(app.consumers[0], app._broker, stop_timeout_s=5)  # type: ignore[attr-defined]
        running = asyncio.create_task(worker.run())
        await watch(app.queues)
        go_on.set()

        async def is_done() -> bool:
            return await count_of(app.queues, "work") == 0

        await eventually(is_done)
        worker.stop()
        await running
    assert runs == [1]


async def test_a_queue_that_is_deleted_ends_the_app_loudly() -> None:
    app, _ = make_app()

    async def run_and_delete() -> None:
        async with app.running(declare=True):
            await eventually(lambda: app.health[0].state == "consuming")
            await app.queues.queues_delete("work", force=True)
            await asyncio.wait_for(app._ends.wait(), 60.0)

    with pytest.raises(QueueMissing):
        await run_and_delete()


async def test_the_traceback_of_a_failure_is_in_the_log_and_in_the_letter(caplog: pytest.LogCaptureFixture) -> None:
    app = App("memory://")
    text = "first line\nsecond; line " + "x" * 3_000

    @app.consumer("work", retry=Retry(attempts=1))
    async def charge(message: Message) -> None:
        raise ValueError(text)

    async with app.running(declare=True):
        await app.queues.queue_produce("work", "x")

        async def dead() -> list[Item]:
            return await app.queues.storage_items_list("work.dlq")

        (letter,) = await eventually(dead)
        assert app._broker is not None
        (captured,) = await app._broker.peek("work.dlq", count_max=1)
    assert letter.death_reason.startswith("attempts; ValueError: first line\nsecond; line xxx")
    assert len(letter.death_reason) <= 2_000
    assert letter.death_reason.endswith("in charge\n    raise ValueError(text)")
    death = captured.death
    assert (death.reason, death.error_type) == ("attempts", "ValueError")
    assert death.error_message.startswith("first line\nsecond; line xxx")
    assert death.error_stack.startswith("Traceback (most recent call last):\n")
    assert captured.group_title == "ValueError in test_embedded.py:charge"
    (failed,) = [record for record in caplog.records if getattr(record, "event", "") == "message.failed"]
    assert failed.exc_info is not None


async def test_the_ids_of_a_message_are_the_same_at_every_attempt(caplog: pytest.LogCaptureFixture) -> None:
    app, seen = App("memory://"), list[Message]()

    @app.consumer("work", retry=Retry(attempts=3, delay="10ms"))
    async def handle(message: Message) -> None:
        seen.append(message)
        if message.attempt < 3:
            raise ValueError("again")

    async with app.running(declare=True):
        (placed,) = (await app.queues.queue_produce("work", "x")).items
        await eventually(lambda: len(seen) == 3)
    assert [message.id for message in seen] == [placed.id] * 3
    fields = [vars(record)["fields"] for record in caplog.records if getattr(record, "event", "") == "message.failed"]
    assert {(one["messageId"], one["correlationId"]) for one in fields} == {(placed.id, placed.id)}
