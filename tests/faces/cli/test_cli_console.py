"""`holdfast console`: a link for a browser on the server's machine, on a terminal alone."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from holdfast.settings import DEFAULT_LISTEN
from tests.faces.cli.test_cli_server import call, serving
from tests.faces.cli.test_cli_terminal import on_terminal
from tests.support.command import PROGRAM, TIMEOUT_S, Command, all_of

pytestmark = pytest.mark.slow

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/sign-in/link\?secret=([\w-]{43})\n")


async def test_a_link_is_printed_on_a_terminal(tmp_path: Path) -> None:
    async with serving(tmp_path) as (child, run):
        shown = await asyncio.to_thread(on_terminal, run, "console")
        link = LINK.search(shown)
        assert link is not None, shown
        assert link[1] == run.url
        assert "once, within 5 minutes" in shown
        assert await child.terminate() == 0
        assert link[2] not in child.stdout.tail + child.stderr.tail


async def test_a_link_is_printed_nowhere_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as (child, run):
        refused = await call(run, "console")
        assert (refused.code, refused.stdout) == (1, b"")
        assert refused.stderr.startswith("error: link is not printed; ")
        assert "sign-in" not in child.stdout.tail + child.stderr.tail, "what a server says may be a log"


async def test_a_browser_is_opened_with_it(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o700)
    async with serving(tmp_path) as (_, run):
        own = Command(tmp_path, run.url)  # a process of its own: the browser is looked for once
        ended = await call(own, "console", "--open", BROWSER=str(browser))
        assert (ended.code, ended.stdout) == (0, b""), ended
        assert LINK.fullmatch((tmp_path / "opened").read_text())
        nowhere = await call(own, "console", "--open", BROWSER=str(tmp_path / "none"), PATH="")
        assert nowhere.code == 1
        assert nowhere.stderr.startswith("error: browser cannot be opened; ")


async def test_without_tokens_the_address_is_enough(tmp_path: Path) -> None:
    async with serving(tmp_path, "--auth", "none") as (_, run):
        assert f"{run.url}/\n" in await asyncio.to_thread(on_terminal, run, "console")


def test_without_a_url_it_is_the_server_that_would_be_here(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text('listen = "127.0.0.1:1"')
    gone = Command(tmp_path, "")("console", "--open")
    assert gone.stderr.startswith("error: server cannot be reached; http://127.0.0.1:1: ")
    assert DEFAULT_LISTEN in Command(tmp_path, "").run("serve", "--help", stdin=b"").text
    unknown = Command(tmp_path, "")("console", "--open", HOLDFAST_LISTEN="127.0.0.1:0")
    assert (unknown.code, unknown.stderr.startswith("error: server is not known; ")) == (2, True)


async def test_a_server_on_a_terminal_prints_one_at_its_start(tmp_path: Path) -> None:
    shown = await asyncio.to_thread(_served_on_terminal, Command(tmp_path, ""))
    link = LINK.search(shown)
    assert link is not None, shown
    assert f"Holdfast serves on {link[1]}\n" in shown
    assert shown.count(link[2]) == 1, "not in the log"


def _served_on_terminal(run: Command) -> str:
    """What a server tells somebody who looks at it, until Ctrl-C."""
    leader, follower = pty.openpty()
    argv = [str(PROGRAM), "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        argv, cwd=run.folder, env=run.environment(), stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        limit = threading.Timer(TIMEOUT_S, process.kill)
        limit.start()
        shown = b""
        while b"server.started" not in shown and (part := os.read(leader, 65_536)):
            shown += part
        process.send_signal(signal.SIGINT)
        shown += all_of(leader).encode()
        os.close(leader)
        assert process.wait(TIMEOUT_S) == 0
        limit.cancel()
    return shown.decode().replace("\r\n", "\n")
