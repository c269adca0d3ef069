"""A crash point ends the process with SIGKILL at the n-th pass, and is nothing at all when off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import proof
from holdfast.errors import CannotStart
from holdfast.proof import Trap, crash_points

PROGRAM = """
from holdfast.proof import crash_point
try:
    for turn in range(1, 4):
        crash_point("other.place")
        crash_point("some.place")
        print("passed", turn, flush=True)
finally:
    print("unwound", flush=True)
"""

THREADS = """
import threading
from holdfast.proof import crash_point

def work():
    for _ in range(1000):
        crash_point("some.place")
    print("got past", flush=True)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
"""


def run(program: str, crash_at: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != proof.VARIABLE}
    if crash_at is not None:
        env[proof.VARIABLE] = crash_at
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("crash_at", [None, ""])
def test_a_process_that_was_not_told_to_crash_passes_every_point(crash_at: str | None) -> None:
    done = run(PROGRAM, crash_at)
    assert done.returncode == 0
    assert done.stdout.split("\n")[:4] == ["passed 1", "passed 2", "passed 3", "unwound"]


@pytest.mark.parametrize("passes", [1, 3])
def test_the_process_is_killed_at_the_named_pass_and_nothing_is_unwound(passes: int) -> None:
    done = run(PROGRAM, f"some.place:{passes}")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "".join(f"passed {turn}\n" for turn in range(1, passes))


def test_passes_are_counted_over_all_threads_and_none_gets_past_the_last() -> None:
    done = run(THREADS, "some.place:999")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_point_that_is_passed_less_often_does_not_crash() -> None:
    assert run(PROGRAM, "some.place:4").returncode == 0


@pytest.mark.parametrize(
    "setting",
    [
        "some.place",
        "some.place:",
        "some.place:0",
        "some.place:-1",
        "some.place:x",
        ":1",
        "Some Place:1",
        "a:1:2",
    ],
)
def test_a_malformed_setting_is_refused_at_once(setting: str) -> None:
    with pytest.raises(CannotStart, match="HOLDFAST_CRASH_AT is invalid; expected name:n"):
        Trap.parse(setting)


def test_a_malformed_setting_stops_the_process_at_import() -> None:
    done = run(PROGRAM, "some.place")
    assert done.returncode == 1
    assert "HOLDFAST_CRASH_AT is invalid" in done.stderr
    assert done.stdout == ""


def test_crash_point_is_an_empty_function_when_off() -> None:
    if not os.environ.get(proof.VARIABLE):
        assert proof.crash_point is proof._pass_by


def test_the_names_are_found_by_reading_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('from x import crash_point\nif 1:\n    crash_point("one.place")\n')
    (tmp_path / "b.py").write_text('import x\ndef f():\n    x.crash_point("two.place")\n')
    assert crash_points(tmp_path) == {"one.place", "two.place"}


@pytest.mark.parametrize("call", ["crash_point(name)", "crash_point()", 'crash_point(f"a.{b}")', 'crash_point("a", 1)'])
def test_a_name_that_cannot_be_read_is_an_error(tmp_path: Path, call: str) -> None:
    (tmp_path / "a.py").write_text(call + "\n")
    with pytest.raises(ValueError, match=r"a\.py:1: crash_point takes one plain string"):
        crash_points(tmp_path)


def test_every_crash_point_of_the_package_has_a_well_formed_name() -> None:
    assert all(proof.NAME.fullmatch(name) for name in crash_points())
