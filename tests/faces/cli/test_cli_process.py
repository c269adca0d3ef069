"""The real `holdfast` command in a process of its own: its streams, its signals, its end."""

from __future__ import annotations

import base64
import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.support.command import PROGRAM, TIMEOUT_S, Command

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Command:
    return Command(tmp_path, "sqlite:///work")


def test_a_queue_is_used_over_several_processes(run: Command) -> None:
    run.done("queue", "create", "orders")
    run.done("queue", "produce", "orders", stdin=b'{"utf8": "hello"}\n')
    (item,) = run.done("queue", "lease", "orders", "--json").document["items"]
    assert base64.b64decode(item["bytes"]) == b"hello"
    assert run.done("queue", "complete", "orders", item["id"]).text == "1 item completed\n"
    assert run("queue", "info").code == 2
    assert run("queue", "info", "nope").code == 1


def test_an_argument_that_is_not_text_is_a_payload_or_bad_usage(run: Command) -> None:
    run.done("queue", "create", "orders")
    subprocess.run(
        [os.fsencode(PROGRAM), b"queue", b"produce", b"orders", b"\xff"],
        cwd=run.folder, env=run.environment(), check=True, capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    (item,) = run.done("queue", "items", "list", "orders", "--json").documents
    assert base64.b64decode(item["payload"]) == b"\xff"
    assert run("queue", "info", os.fsdecode(b"\xff")).code in {1, 2}


def test_the_version_is_told_by_the_module_too(run: Command) -> None:
    assert run.done("--version").text == f"holdfast {holdfast.__version__}\n"
    module = [str(PROGRAM.with_name("python")), "-m", "holdfast", "--version"]
    assert subprocess.run(module, capture_output=True, check=True).stdout == run.done("--version").stdout


def test_items_flow_while_the_input_stays_open_and_ctrl_c_ends_it(run: Command) -> None:
    run.done("queue", "create", "orders")
    process = run.start("queue", "produce", "orders", "--json")
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(b'{"utf8": "x"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["partition"] == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert len(run.done("queue", "items", "list", "orders", "--json").documents) == 1


def test_watching_goes_on_until_ctrl_c(run: Command) -> None:
    run.done("queue", "create", "orders")
    process = run.start("queue", "watch", "orders", "--json", "--interval", "0.1")
    assert process.stdout is not None
    with process:
        frames = [json.loads(process.stdout.readline())["queue_name"] for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    assert frames == ["orders", "orders"]


def test_a_reader_that_has_enough_is_no_error(run: Command) -> None:
    run.done("queue", "create", "orders")
    run.done("queue", "produce", "orders", "--raw", stdin=b"0123456789\n" * 5_000)
    process = run.start("queue", "items", "export", "orders")
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 141
        assert process.stderr.read() == b""


def test_a_terminal_sees_count_and_rate(run: Command) -> None:
    run.done("queue", "create", "orders")
    ours, theirs = pty.openpty()
    try:
        with (run.folder / "in").open("wb+") as source:
            source.write(b"x\n" * 3_000)
            source.seek(0)
            ended = subprocess.run(
                [PROGRAM, "queue", "produce", "orders", "--raw"],
                stdin=source, stdout=subprocess.PIPE, stderr=theirs,
                cwd=run.folder, env=run.environment(TERM="xterm", COLUMNS="100"), check=True, timeout=TIMEOUT_S,
            )  # fmt: skip
        seen = os.read(ours, 1 << 20).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ended.stdout == b"3 000 items produced to 'orders'\n"
    assert "3 000 items" in seen
    assert "/s" in seen


def test_closed_streams_are_empty_ones(run: Command) -> None:
    for closed in ("<&-", ">&-", "2>&-"):
        script = f"exec {PROGRAM} queue produce orders --url memory:// {closed}"
        ended = subprocess.run(
            ["sh", "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=run.folder,
            env=run.environment(),
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode in {0, 1}
        assert b"Traceback" not in ended.stderr
