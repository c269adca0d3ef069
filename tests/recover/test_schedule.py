"""`[recover."NAME"]` in holdfast.toml: recoveries that a server and an app run by themselves."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest

import holdfast
from holdfast.core.ledger import LedgerRow
from holdfast.core.recovery import RecoveryOrder, Summary
from holdfast.errors import StorageFailed
from holdfast.proof.process import Child, python_argv
from holdfast.services.recover.limits import LimitedRun
from holdfast.services.recover.service import OnBegin, RecoverySchedule, ScheduledRecovery
from holdfast.settings import load_settings
from holdfast.wiring import SystemClock, open_vault
from tests.faults.serving import TOKEN, Serving
from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.recover.test_embedded import filled, items, kill
from tests.support.command import Command
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

APP = """
import holdfast

app = holdfast.App("{url}")


@app.consumer("other")
async def handle(message: holdfast.Message) -> None: ...
"""


async def rows(folder: Path) -> list[LedgerRow]:
    """The rows of the ledger in a data folder, whose chain holds."""
    settings = load_settings(environment={}, serving=False)
    async with open_vault(settings, f"sqlite:///{folder}", clock=SystemClock()) as vault:
        found = await vault.ledger.rows(after=0, count_max=100)
        assert not (await vault.seals.verify()).broken
    return [row for row in found if row.action == "recovery"]


async def stopped(server: Serving) -> None:
    server.child.signal(signal.SIGTERM)
    assert await server.child.wait(timeout_s=25) == 0, server.child.stderr.tail


# --- the schedule -------------------------------------------------------------------------------------------------


class Run(LimitedRun):
    """A run that ends when it is told to."""

    def __init__(self) -> None:
        super().__init__(RecoveryOrder(dead_queue="q"), clock=SystemClock())
        self.ends = asyncio.Event()
        self.count = 0
        self.at_once = 0
        self.most = 0

    def stop(self) -> None:
        self.ends.set()

    abandon = stop

    async def __call__(self, on_begin: OnBegin) -> Summary:
        self.count += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        on_begin(self)
        await self.ends.wait()
        self.at_once -= 1
        return Summary()


async def test_a_run_that_fails_is_followed_by_the_next() -> None:
    count = 0

    async def fail(on_begin: OnBegin) -> Summary:
        nonlocal count
        count += 1
        raise StorageFailed("storage failed; by a test") if count % 2 else RuntimeError("a bug")

    async with RecoverySchedule([ScheduledRecovery(dead_queue="q", run=fail, on_start=True, every_s=0.01)]).at_work():
        await eventually(lambda: count >= 4)


async def test_runs_do_not_overlap_and_are_stopped_at_the_end() -> None:
    run = Run()
    async with RecoverySchedule([ScheduledRecovery(dead_queue="q", run=run, every_s=0.01)]).at_work():
        await eventually(lambda: run.count)
    assert (run.count, run.most, run.at_once) == (1, 1, 0)


async def test_it_is_off_by_default_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run, other = Run(), Run()
    schedule = RecoverySchedule(
        [ScheduledRecovery(dead_queue="q", run=run), ScheduledRecovery(dead_queue="other", run=other, every_s=60.0)]
    )
    with caplog.at_level(logging.WARNING, "holdfast"):
        async with schedule.at_work():
            assert len([task for task in asyncio.all_tasks() if "recovery of q" in task.get_name()]) == 0
    assert run.count == 0
    [told] = [record.getMessage() for record in caplog.records]
    assert "'q'" in told
    assert "on_start" in told


# --- a server -----------------------------------------------------------------------------------------------------


async def test_a_server_recovers_its_own_dead_queue_again_and_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    await filled(url, 3)
    (tmp_path / "holdfast.toml").write_text('[recover.dead]\non_start = true\nevery = "1s"\n')
    async with Serving(url, tmp_path) as server, server.client() as client:
        await server.start()

        async def count(expected: int) -> bool:
            return len(await items(client, "orders")) == expected and not await items(client, "dead")

        await eventually(lambda: count(3))
        await kill(client, "bills", b"later")
        await eventually(lambda: items(client, "bills"))
        # A run from the shell writes into the ledger that the server has open.
        arguments = ("recover", server.address, "dead", "--by", "ann")
        await asyncio.to_thread(Command(tmp_path, url), *arguments, HOLDFAST_TOKEN=TOKEN)
        await stopped(server)
    found = await rows(tmp_path / "work")
    assert [row.queue for row in found if row.actor == "ann"] == ["dead"]
    first, *_, last = [row for row in found if row.actor != "ann"]
    # The next item may have died before the first run had counted what is left: then that run is done in part.
    assert (first.actor.split("@")[0], first.queue, first.count) == ("holdfast", "dead", 3)
    assert first.reason == "all_taken"
    assert last.reason in {"all_taken", "signal"}


async def test_a_server_says_at_its_start_which_recoveries_never_run(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text("[recover.dead]\nlimit = 10\n")
    async with Serving(f"sqlite:///{tmp_path}/work", tmp_path) as server:
        await server.start()
        await eventually(lambda: "neither on_start nor every is set" in server.child.stderr.tail)
        await stopped(server)


async def test_a_run_that_cannot_begin_leaves_the_server_alone(tmp_path: Path) -> None:
    toml = '[recover."x.dlq"]\non_start = true\nurl = "amqp://guest:secret@127.0.0.1:1/"\nto = "source"\n'
    (tmp_path / "holdfast.toml").write_text(toml)
    async with Serving(f"sqlite:///{tmp_path}/work", tmp_path) as server, server.client() as client:
        await server.start()
        await eventually(lambda: "recovery.failed" in server.child.stderr.tail)
        await client.queues_create("a")
        await stopped(server)
        assert "secret" not in server.child.stderr.tail
    (row,) = await rows(tmp_path / "work")
    assert (row.outcome, row.origin) == ("failed", "queue 'x.dlq' in '/' at 127.0.0.1:1")


@pytest.mark.rabbitmq
async def test_a_server_recovers_a_queue_of_its_broker_at_its_start(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(number) for number in range(50))
    toml = f'[recover."{dlq.name}"]\non_start = true\nroutes = "routes.toml"\n'
    (dlq.folder / "holdfast.toml").write_text(toml)
    env = {"HOLDFAST_BROKER": dlq.url}
    async with Serving(f"sqlite:///{dlq.folder}/work", dlq.folder, env=env) as server:
        await server.start()

        async def is_recovered() -> bool:
            return await dlq.admin.count("collection.scan") == 50

        await eventually(is_recovered)
        await stopped(server)
    await dlq.check()
    (row,) = await rows(dlq.folder / "work")
    assert (row.queue, row.count, row.outcome) == (dlq.name, 50, "done")
    assert "guest" not in row.origin


@pytest.mark.rabbitmq
async def test_letters_that_are_kept_are_one_line_in_the_log_for_each_reason(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(number, kind="Strange") for number in range(15))
    toml = f'[recover."{dlq.name}"]\non_start = true\nroutes = "routes.toml"\n'
    (dlq.folder / "holdfast.toml").write_text(toml)
    env = {"HOLDFAST_BROKER_URL": dlq.url}
    async with Serving(f"sqlite:///{dlq.folder}/work", dlq.folder, env=env) as server:
        await server.start()
        await eventually(lambda: "recovery.kept" in server.child.stderr.tail)
        await stopped(server)
        [kept] = [line for line in server.child.stderr.tail.splitlines() if "recovery.kept" in line]
    assert "15 letters of" in kept
    assert "type 'Strange' is not in the route table" in kept
    await dlq.check()


@pytest.mark.rabbitmq
async def test_a_stop_of_the_server_stops_its_run_without_loss(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(number) for number in range(200))
    toml = f'[recover."{dlq.name}"]\non_start = true\nroutes = "routes.toml"\nrate = 20\n'
    (dlq.folder / "holdfast.toml").write_text(toml)
    env = {"HOLDFAST_BROKER_URL": dlq.url}
    async with Serving(f"sqlite:///{dlq.folder}/work", dlq.folder, env=env) as server:
        await server.start()

        async def has_begun() -> bool:
            return await dlq.admin.count("collection.scan") >= 5

        await eventually(has_begun)
        await stopped(server)
    await dlq.check()
    (row,) = await rows(dlq.folder / "work")
    assert (row.reason, row.outcome) == ("signal", "partly_done")
    assert 5 <= row.count < 200


async def test_an_app_recovers_the_dead_queue_of_its_own_queues(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    await filled(url, 3)
    async with holdfast.open(url) as queues:
        await queues.queues_create("other", dead_queue="dead", max_attempts=3)
    (tmp_path / "orders.py").write_text(APP.format(url=url))
    (tmp_path / "holdfast.toml").write_text("[recover.dead]\non_start = true\n")
    child = await Child.start(python_argv("holdfast", "run", "orders:app"), cwd=tmp_path, env={"HOLDFAST_URL": url})
    try:
        await eventually(lambda: "recovery.ended" in child.stderr.tail + child.stdout.tail)
        child.signal(signal.SIGTERM)
        assert await child.wait(timeout_s=25) == 0, child.stderr.tail
    finally:
        await child.close()
    async with holdfast.open(url) as queues:
        assert len(await items(queues, "orders")) == 3
    assert [row.count for row in await rows(tmp_path / "work")] == [3]


# --- the shell ----------------------------------------------------------------------------------------------------


@pytest.mark.rabbitmq
async def test_every_run_from_the_shell_leaves_a_row(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(number) for number in range(5))
    assert (await dlq.recover("--by", "ann", "--dry-run")).code == 0
    assert (await dlq.recover("--by", "ann")).code == 0
    assert (await asyncio.to_thread(dlq.command(), "recover", dlq.url, "no.dlq", "--to-source")).code == 1
    dry, done, failed = await rows(dlq.folder / "holdfast-data")
    assert (dry.outcome, dry.count, '"dry_run":true' in dry.detail) == ("done", 0, True)
    assert (done.actor, done.queue, done.outcome, done.count, done.reason) == ("ann", dlq.name, "done", 5, "all_taken")
    assert (failed.queue, failed.outcome) == ("no.dlq", "failed")


async def test_a_run_over_an_embedded_queue_leaves_a_row_or_says_why_not(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    await filled(url, 2)
    command = Command(tmp_path, "memory://")
    assert (await asyncio.to_thread(command, "recover", url, "dead", "--limit", "1")).code == 3
    (row,) = await rows(tmp_path / "holdfast-data")
    assert (row.queue, row.count, row.outcome) == ("dead", 1, "partly_done")
    assert row.origin == f"queue 'dead' in sqlite:///{tmp_path}/work"
    (tmp_path / "holdfast-data" / "ledger-key").write_text("another")
    told = await asyncio.to_thread(command, "recover", url, "dead")
    assert told.code == 0
    assert "this run is not in the ledger; key of the ledger is another one" in told.text
    assert TOKEN not in told.text
