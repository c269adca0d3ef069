"""Real processes: facts are waited for, signals reach the whole group, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from pwd import getpwnam

import pytest

from holdfast.proof.process import (
    LINE_BYTES_MAX,
    Child,
    ChildFailed,
    ChildOutput,
    child_process,
    http_status,
    python_argv,
)
from tests.support.eventually import eventually

STAY = "print('ready', flush=True)\nimport signal\nsignal.pause()"

POLITE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
while True:
    signal.pause()
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print("grandchild", child.pid, flush=True)
{then}
"""

SERVER = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print("port", server.server_port, flush=True)
server.serve_forever()
"""


def program(source: str) -> Sequence[str]:
    return [sys.executable, "-c", source]


def state_of(pid: int) -> str:
    """The letter that /proc gives for a process: R, S, T (stopped), Z, or "gone"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


async def test_a_line_on_stdout_is_waited_for_and_matched() -> None:
    async with child_process(program("print('listening on port 8470', flush=True)")) as child:
        assert (await child.wait_line(r"port (\d+)"))[1] == "8470"
        assert await child.wait() == 0
        assert (await child.wait_line("listening"))[0] == "listening", "a line of the past is a fact too"


async def test_leaving_the_block_kills_and_reaps() -> None:
    async with child_process(program(STAY)) as child:
        await child.wait_line("ready")
    assert child.returncode == -signal.SIGKILL
    assert state_of(child.pid) == "gone"


async def test_leaving_the_block_by_an_error_kills_too() -> None:
    child: Child | None = None

    async def work() -> None:
        nonlocal child
        async with child_process(program(STAY)) as child:
            await child.wait_line("ready")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert child is not None
    assert state_of(child.pid) == "gone"


async def test_kill_is_sigkill() -> None:
    async with child_process(program(POLITE)) as child:
        await child.wait_line("ready")
        assert await child.kill() == -signal.SIGKILL


async def test_terminate_lets_it_end_by_itself() -> None:
    async with child_process(program(POLITE)) as child:
        await child.wait_line("ready")
        assert await child.terminate() == 0


async def test_a_child_that_ignores_sigterm_is_reported() -> None:
    source = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY
    async with child_process(program(source)) as child:
        await child.wait_line("ready")
        with pytest.raises(ChildFailed, match="still running after"):
            await child.terminate(timeout_s=0.05)


async def test_stop_holds_it_and_resume_lets_it_go_on() -> None:
    async with child_process(program(STAY)) as child:
        await child.wait_line("ready")
        child.stop()
        await eventually(lambda: state_of(child.pid) == "T")
        child.resume()
        await eventually(lambda: state_of(child.pid) == "S")


async def test_a_stopped_child_can_be_killed() -> None:
    async with child_process(program(STAY)) as child:
        await child.wait_line("ready")
        child.stop()
        assert await child.kill() == -signal.SIGKILL


@pytest.mark.parametrize("then", ["import signal; signal.pause()", "sys.exit(0)"])
async def test_the_children_of_a_child_end_with_it(then: str) -> None:
    async with child_process(program(PARENT.format(then=then))) as child:
        grandchild = int((await child.wait_line(r"grandchild (\d+)"))[1])
        assert state_of(grandchild) != "gone"
    # Reaping it is the init process's duty, so it may be seen as a zombie for a moment, or for good.
    await eventually(lambda: state_of(grandchild) in ("gone", "Z", "X"))


async def test_an_end_without_the_line_is_reported_with_the_output() -> None:
    async with child_process(program("import sys; print('one'); sys.exit('broken')")) as child:
        with pytest.raises(ChildFailed, match=r"(?s)ended without a line with 'ready'.*one.*broken"):
            await child.wait_line("ready")


async def test_a_line_that_never_comes_is_reported() -> None:
    async with child_process(program(STAY)) as child:
        with pytest.raises(ChildFailed, match="no line with 'never' on stdout after"):
            await child.wait_line("never", timeout_s=0.05)


async def test_an_http_answer_is_waited_for(tmp_path: Path) -> None:
    async with child_process(program(SERVER), cwd=tmp_path) as child:
        url = f"http://127.0.0.1:{(await child.wait_line('port ([0-9]+)'))[1]}"
        await child.wait_http(url)
        await child.wait_http(f"{url}/missing?x=1", status=404)
        with pytest.raises(ChildFailed, match="gave 404 and not 200"):
            await child.wait_http(f"{url}/missing", timeout_s=0.1)


async def test_a_child_that_ends_before_it_serves_is_reported() -> None:
    async with child_process(program("import sys; sys.exit('no port')")) as child:
        with pytest.raises(ChildFailed, match=r"(?s)it ended before http.* gave 200.*no port"):
            await child.wait_http("http://127.0.0.1:9")


async def test_nobody_listening_is_no_status(unused_tcp_port: int) -> None:
    assert await http_status(f"http://127.0.0.1:{unused_tcp_port}/") is None


async def test_an_answer_that_is_not_http_is_no_status() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await http_status(f"http://127.0.0.1:{port}/") is None


async def test_the_environment_and_the_folder_are_given(tmp_path: Path) -> None:
    source = "import os; print(os.environ['GIVEN'], os.environ['PATH'] != '', os.getcwd(), sep='|')"
    async with child_process(program(source), env={"GIVEN": "yes"}, cwd=tmp_path) as child:
        assert (await child.wait_line(".+"))[0] == f"yes|True|{tmp_path}"


async def test_a_missing_program_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="could not start; /no/such/program"):
        await Child.start(["/no/such/program"])


async def test_python_argv_runs_a_module_with_this_python() -> None:
    async with child_process(python_argv("platform")) as child:
        assert await child.wait() == 0
        assert child.stdout.lines


async def test_closing_twice_is_harmless() -> None:
    child = await Child.start(program(STAY))
    await child.close()
    await child.close()
    assert state_of(child.pid) == "gone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_root_can_start_it_as_another_user() -> None:
    async with child_process(["/bin/sh", "-c", "id -u; id -G"], user="nobody") as child:
        assert await child.wait() == 0
        assert child.stdout.lines == [str(getpwnam("nobody").pw_uid), str(getpwnam("nobody").pw_gid)]


async def test_much_output_does_not_block_the_child_and_is_bounded() -> None:
    source = "for n in range(20_000): print('line', n, 80 * 'x')\nprint('the end')"
    async with child_process(program(source)) as child:
        assert await child.wait() == 0
        assert child.stdout.lines[-1] == "the end"
        assert child.stdout.dropped_count > 0
        assert len(child.stdout.lines) + child.stdout.dropped_count == 20_001


async def test_output_keeps_the_newest_lines_within_its_budget() -> None:
    output = ChildOutput(kept_bytes_max=8)
    output.feed(b"one\ntwo\nth")
    output.feed(b"ree\r\nunfin")
    assert output.lines == ["three"]
    assert output.dropped_count == 2
    output.end()
    assert output.lines == ["unfin"]


async def test_an_endless_line_is_kept_in_pieces() -> None:
    output = ChildOutput()
    for _ in range(3):
        output.feed(b"x" * LINE_BYTES_MAX)
    assert max(len(line) for line in output.lines) <= 2 * LINE_BYTES_MAX
