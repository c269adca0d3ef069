"""Ctrl-C, SIGTERM and a terminal that is gone: before a recovery has begun it ends at once, later it stops cleanly."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import EXCHANGE, DeadLetterQueue, letter
from tests.recover.test_schedule import rows
from tests.support.command import PROGRAM, all_of
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

COUNT = 700
#: A silent broker is waited for much longer than this.
AT_ONCE_S = 12.0
DECLARE = bytes((0, 50, 0, 10, 0, 0))  # a queue is declared, or asked for
PUBLISH = bytes((0, 60, 0, 40, 0, 0))


@pytest.fixture
async def proxy(dlq: DeadLetterQueue) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", dlq.admin.node.port) as proxy:
        yield proxy


def start(dlq: DeadLetterQueue, proxy: Proxy, *more: str | Path) -> subprocess.Popen[bytes]:
    url = dlq.admin.node.url(dlq.admin.vhost, port=proxy.port)
    return dlq.command().start("recover", url, dlq.name, "--routes", dlq.routes, *more)


def silent_at(proxy: Proxy, method: bytes, *names: str) -> asyncio.Event:
    """The broker goes silent when it is told this; the event says that it has."""
    wanted = method + b"".join(bytes((len(name),)) + name.encode() for name in names)
    silent = asyncio.Event()

    def seen(data: bytes) -> bool:
        if wanted in data and not silent.is_set():
            proxy.pause()
            silent.set()
        return False

    proxy.cut_when("up", seen)
    return silent


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever fails: nobody waits for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


async def ends_at_once(process: subprocess.Popen[bytes], number: signal.Signals) -> str:
    """Send the signal; returns what it said on stderr."""
    began_s = time.monotonic()
    process.send_signal(number)
    _, err = await asyncio.to_thread(process.communicate, timeout=60.0)
    assert time.monotonic() - began_s < AT_ONCE_S
    assert process.returncode == 130, err
    return err.decode()


# --- before it has begun ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_while_it_connects_it_ends_at_once(dlq: DeadLetterQueue, proxy: Proxy, number: signal.Signals) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    proxy.pause()
    with ending(start(dlq, proxy)) as process:
        await eventually(lambda: proxy.accepted_count)
        said = await ends_at_once(process, number)
    assert said == "error: recovery was stopped before it began; nothing was taken\n"
    proxy.resume()
    assert await dlq.admin.count(dlq.name) == COUNT
    await dlq.check()


@pytest.mark.parametrize("lock", ["", "recovery-lock."])
async def test_during_the_pre_flight_and_until_it_consumes_it_ends_at_once(
    dlq: DeadLetterQueue, proxy: Proxy, lock: str
) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    silent = silent_at(proxy, DECLARE, f"{lock}{dlq.name}")
    with ending(start(dlq, proxy, "--json")) as process:
        await asyncio.wait_for(silent.wait(), 60.0)
        said = await ends_at_once(process, signal.SIGINT)
    assert "nothing was taken" in json.loads(said.splitlines()[-1])["message"]
    assert "Traceback" not in said
    proxy.resume()
    await eventually(lambda: _there(dlq, COUNT))
    await dlq.check()


async def test_the_ledger_knows_of_a_run_that_did_not_begin(dlq: DeadLetterQueue, proxy: Proxy) -> None:
    proxy.pause()
    with ending(start(dlq, proxy)) as process:
        await eventually(lambda: proxy.accepted_count)
        await ends_at_once(process, signal.SIGINT)
    (row,) = await rows(dlq.folder / "holdfast-data")
    assert (row.outcome, row.count) == ("failed", 0)
    assert row.reason == "recovery was stopped before it began; nothing was taken"


# --- later --------------------------------------------------------------------------------------------------------


async def test_the_first_signal_says_at_once_what_it_waits_for(dlq: DeadLetterQueue, proxy: Proxy) -> None:
    await dlq.fill(letter(n) for n in range(3_000))
    silent = silent_at(proxy, PUBLISH, EXCHANGE, "collection.scan")
    with ending(start(dlq, proxy, "--json", "--window", "50", "--stop-timeout", "60s")) as process:
        await asyncio.wait_for(silent.wait(), 60.0)
        process.send_signal(signal.SIGINT)
        said = await asyncio.wait_for(asyncio.to_thread(_line_with, process, b"Stopping"), 60.0)
        message = json.loads(said)["message"]
        head, _, tail = message.partition(" confirms; ")
        assert head.startswith("Stopping: waiting for ")
        assert 0 < int(head.rpartition(" ")[2]) <= 50
        assert tail == "Ctrl-C again ends at once"
        proxy.resume()
        out, _ = await asyncio.to_thread(process.communicate, timeout=60.0)
    told = json.loads(out.splitlines()[-1])
    assert told["stopped_by"] == "signal"
    await dlq.check(duplicates_max=told["possible_duplicates"])


async def test_an_interruption_at_full_speed_announces_no_duplicates(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(8_000))
    with ending(dlq.start()) as process:
        await eventually(lambda: _some(dlq))
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    told = json.loads(out.splitlines()[-1])
    assert told["possible_duplicates"] == told["perhaps_elsewhere"] == 0
    await dlq.check()


async def test_a_hang_up_stops_cleanly_however_often_it_is_told(any_dlq: DeadLetterQueue) -> None:
    """A shell passes it on, and the kernel tells it too."""
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(3_000))
    with ending(dlq.start("--rate", "500/s")) as process:
        await eventually(lambda: _some(dlq))
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    told = json.loads(out.splitlines()[-1])
    assert process.returncode == 3
    assert (told["stopped_by"], told["possible_duplicates"]) == ("signal", 0)
    await dlq.check()


async def test_nohup_stays_nohup(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(1_000))
    with ending(_with_nohup(dlq, "--rate", "500/s")) as process:
        await eventually(lambda: _some(dlq))
        process.send_signal(signal.SIGHUP)
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["recovered"] == 1_000
    await dlq.check()


async def test_a_terminal_that_goes_away_stops_it_cleanly(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3_000))
    report = dlq.folder / "report.json"
    process, terminal = _on_terminal(dlq, "--rate", "500/s", "--report", report)
    with ending(process):
        await eventually(lambda: _some(dlq))
        os.close(terminal)
        await asyncio.to_thread(process.wait, 30.0)
    assert process.returncode == 3
    told = json.loads(report.read_text())
    assert (told["stopped_by"], told["possible_duplicates"]) == ("signal", 0)
    assert told["recovered"] + told["remaining"] == 3_000
    await dlq.check()


async def test_a_hang_up_takes_whoever_reads_with_it(dlq: DeadLetterQueue) -> None:
    """`holdfast recover … | tee log`, and the terminal is gone: what it says is lost, its clean end is not."""
    await dlq.fill(letter(n, kind="CollectionScan" if n % 400 else f"Strange{n}") for n in range(3_000))
    report = dlq.folder / "report.json"
    arguments = ("recover", dlq.url, dlq.name, "--routes", dlq.routes, "--rate", "500/s", "--report", report)
    with ending(dlq.command().start(*arguments)) as process:
        await eventually(lambda: _some(dlq))
        assert process.stdout is not None
        process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(_line_with, process, b"Stopping")  # whoever goes before that is a closed pipe
        process.stdout.close()
        await asyncio.to_thread(process.wait, 30.0)
    told = json.loads(report.read_text())
    assert (told["stopped_by"], told["possible_duplicates"]) == ("signal", 0)
    await dlq.check()


async def test_a_terminal_shows_that_it_is_stopping(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3_000))
    process, terminal = _on_terminal(dlq, "--rate", "500/s")
    with ending(process):
        await eventually(lambda: _some(dlq))
        process.send_signal(signal.SIGINT)
        shown = await asyncio.to_thread(all_of, terminal)
        os.close(terminal)
        await asyncio.to_thread(process.wait, 30.0)
    assert process.returncode == 3
    assert "Stopping: waiting for " in shown
    assert "; Ctrl-C again ends at once" in shown
    await dlq.check()


def _on_terminal(dlq: DeadLetterQueue, *more: str | Path) -> tuple[subprocess.Popen[bytes], int]:
    """With a terminal that is its own, as that of somebody who logged in."""
    ours, theirs = pty.openpty()

    arguments = ["recover", dlq.url, dlq.name, "--routes", dlq.routes, *more]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", PROGRAM, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs,
        cwd=dlq.folder, env=dlq.command().environment(TERM="xterm", COLUMNS="200"),
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def _with_nohup(dlq: DeadLetterQueue, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["nohup", PROGRAM, *dlq.arguments("--routes", dlq.routes, *more)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=dlq.folder, env=dlq.command().environment(),
    )  # fmt: skip


def _line_with(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)


async def _there(dlq: DeadLetterQueue, count: int) -> bool:
    return await dlq.admin.count(dlq.name) == count


async def _some(dlq: DeadLetterQueue) -> bool:
    return await dlq.admin.count("collection.scan") > 100
