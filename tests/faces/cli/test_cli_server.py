"""The command line against a real server: the same commands, the token, the lock, and a server that goes away."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.proof.process import Child, child_process
from tests.support.certificate import make_certificate
from tests.support.command import PROGRAM, TIMEOUT_S, Command, Ended, Inside
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


@asynccontextmanager
async def serving(folder: Path, *options: str) -> AsyncIterator[tuple[Child, Command]]:
    """A server on a free port, and the commands that talk to it; its data is in `folder`."""
    argv = [str(PROGRAM), "serve", "--url", "sqlite:///work", "--listen", "127.0.0.1:0", *options]
    environment = dict.fromkeys((name for name in os.environ if name.startswith("HOLDFAST_")), "")
    async with child_process(argv, cwd=folder, env=environment) as child:
        address = (await child.wait_line(r"(https?://\S+)"))[1]
        yield child, Inside(folder, address)


async def call(run: Command, *arguments: str, stdin: bytes = b"", **variables: str) -> Ended:
    """Beside the event loop, so that the server's output is read meanwhile."""
    return await asyncio.to_thread(run, *arguments, stdin=stdin, **variables)


async def done(run: Command, *arguments: str, stdin: bytes = b"") -> Ended:
    ended = await call(run, *arguments, stdin=stdin)
    assert ended.code == 0, ended
    return ended


async def test_the_same_commands_work_on_a_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as (child, run):
        await done(run, "queue", "create", "dead")
        await done(run, "queue", "create", "orders", "--dead-queue", "dead", "--partitions", "2")
        await done(run, "queue", "produce", "orders", "--raw", stdin=b"".join(b"%d\n" % n for n in range(2_000)))
        exported = (await done(run, "queue", "items", "export", "orders")).documents
        assert sorted(int(base64.b64decode(item["payload"])) for item in exported) == list(range(2_000))
        leased = (await done(run, "queue", "lease", "orders", "--json")).document
        (item,) = leased["items"]
        await done(run, "queue", "retry", "orders", item["id"], "--partition", str(leased["partition"]), "--dead")
        (letter,) = (await done(run, "queue", "items", "list", "dead", "--json")).documents
        assert letter["death_reason"] == "rejected"
        assert "1 999" in (await done(run, "queue", "watch", "--once")).text
        missing = await call(run, "queue", "info", "nope", "--json")
        assert missing.error["message"] == "queue does not exist; no such queue named 'nope'"
        assert await child.terminate() == 0


async def test_the_token_is_found_or_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, run):
        assert (await call(run, "queue", "list")).code == 0  # the local data folder's
        stranger = Inside(tmp_path / "elsewhere", run.url)
        stranger.folder.mkdir()
        refused = await call(stranger, "queue", "list")
        assert (refused.code, refused.stderr) == (
            1,
            "error: unauthorized; a valid token is required, give it with --token-file or in HOLDFAST_TOKEN\n",
        )
        file = tmp_path / "holdfast-data" / "admin-token"
        assert (await call(stranger, "queue", "list", "--token-file", str(file))).code == 0
        token = file.read_text("ascii").strip()
        assert (await call(stranger, "queue", "list", HOLDFAST_TOKEN=token)).code == 0
        assert (await call(stranger, "queue", "list", HOLDFAST_ADMIN_TOKEN=token)).code == 0
        assert (await call(run, "queue", "list", HOLDFAST_TOKEN="wrong")).code == 1
        missing = await call(run, "queue", "list", "--token-file", "nowhere")
        assert (
            missing.stderr == "error: token cannot be read; 'nowhere': No such file or directory, check --token-file\n"
        )


async def test_without_tokens_everybody_on_this_machine_may_call(tmp_path: Path) -> None:
    async with serving(tmp_path, "--auth", "none") as (_, run):
        await done(run, "queue", "create", "orders")
        assert not (tmp_path / "holdfast-data").exists()


async def test_a_folder_that_a_server_has_says_who_and_what_to_do(tmp_path: Path) -> None:
    async with serving(tmp_path) as (child, _):
        ended = await call(Inside(tmp_path, "sqlite:///work"), "queue", "list")
        assert ended.code == 1
        assert f"is locked by process {child.pid}" in ended.stderr
        assert ended.stderr.endswith("talk to it: --url http://127.0.0.1:8470\n")
        second = await call(Command(tmp_path, "sqlite:///work"), "serve", "--listen", "127.0.0.1:0")
        assert second.code == 1
        assert f"is locked by process {child.pid}" in second.stderr
        assert second.stderr.endswith("talk to it: give its address with --url http://HOST:PORT\n")
        address = f"127.0.0.1:{free_port()}"
        (tmp_path / "holdfast.toml").write_text(f'listen = "{address}"', "utf-8")
        for arguments in (["queue", "list"], ["serve"], ["letters", "list"]):
            configured = await call(Command(tmp_path, "sqlite:///work"), *arguments)
            assert configured.stderr.endswith(f"talk to it: --url http://{address}\n")


async def test_a_server_that_goes_away_leaves_a_clear_word(tmp_path: Path) -> None:
    async with serving(tmp_path) as (child, run):
        await done(run, "queue", "create", "orders")
        process = run.start("queue", "produce", "orders", "--raw", "--json")
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"first\n")
            process.stdin.flush()
            assert "id" in json.loads(await asyncio.to_thread(process.stdout.readline))
            await child.kill()
            _, stderr = await asyncio.to_thread(process.communicate, b"second\n", TIMEOUT_S)
        finally:
            process.kill()
        assert process.returncode == 3
        error = json.loads(stderr)
        assert error["message"].startswith("no answer for line 2; server cannot be reached; ")
        assert error["message"].endswith("; the 1 item before was stored, line 2 may be stored or not")
        assert error["details"] == {"done_count": 1, "line": 2}


async def test_https_is_trusted_by_its_certificate(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    async with serving(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as (child, run):
        await done(run, "queue", "list", "--ca-file", str(cert))
        refused = await call(run, "queue", "list")
        assert refused.code == 1
        assert "certificate verify failed" in refused.stderr
        assert await child.terminate() == 0
