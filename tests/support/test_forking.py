"""A forked command is like one that was started: same output, same codes, its own folder, and a limit ends it."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from holdfast.proof.process import child_process, python_argv
from tests.support.command import PROGRAM, Command, Forked
from tests.support.eventually import eventually
from tests.support.forking import forked_process, run_forked

pytestmark = pytest.mark.slow

SEVERAL = [("--version",), ("recover",), ("recover", "amqp://127.0.0.1:1", "some.dlq"), ("nothing",)]


@pytest.mark.parametrize("arguments", SEVERAL)
def test_it_says_and_ends_as_a_started_one(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert Forked(tmp_path, "memory://")(*arguments) == Command(tmp_path, "memory://")(*arguments)


def test_it_has_its_own_folder_and_stdin(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        forked = Forked(tmp_path / name, "sqlite:///work")
        forked.done("queue", "create", "orders")
        forked.done("queue", "produce", "orders", stdin=b'{"utf8": "%s"}\n' % name.encode())
        (item,) = forked.done("queue", "lease", "orders", "--json").document["items"]
        assert base64.b64decode(item["bytes"]) == name.encode()


async def test_a_program_that_reads_itself_sees_where_it_is_to_crash(tmp_path: Path) -> None:
    program = "import os, sys; from holdfast.proof import crash_point; print(os.getcwd(), *sys.argv, flush=True)"
    (tmp_path / "program.py").write_text(f"{program}; crash_point('here'); sys.exit(7)\n")
    argv = python_argv("program", "given")
    for crash_at, code in (("", 7), ("here:1", -9), ("here:2", 7)):
        env = {"HOLDFAST_CRASH_AT": crash_at}
        async with (
            forked_process(argv, env=env, cwd=tmp_path) as forked,
            child_process(argv, env=env, cwd=tmp_path) as child,
        ):
            assert await forked.wait() == await child.wait() == code
            assert forked.stdout.lines == child.stdout.lines == [f"{tmp_path} {tmp_path}/program.py given"]
            assert forked.stderr.lines == child.stderr.lines == []


async def test_a_forked_program_is_killed_with_its_group(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal; print('up', flush=True); signal.pause()\n")
    async with forked_process(python_argv("program"), cwd=tmp_path) as child:
        await child.wait_line("up")
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid
        assert await child.kill() == -9
    assert not psutil.pid_exists(child.pid)


async def test_a_limit_ends_it(tmp_path: Path) -> None:
    environment = Forked(tmp_path, "sqlite:///work").environment()
    argv = [str(PROGRAM), "serve", "--listen", "127.0.0.1:0"]

    def serve() -> None:
        run_forked(argv, stdin=b"", folder=tmp_path, environment=environment, timeout_s=2.0)

    async def count() -> int:
        return sum(process.info["cwd"] == str(tmp_path) for process in psutil.process_iter(["cwd"]))

    async def is_gone() -> bool:
        return await count() == 0

    serving = asyncio.create_task(asyncio.to_thread(serve))
    await eventually(count)
    with pytest.raises(subprocess.TimeoutExpired):
        await serving
    await eventually(is_gone)
