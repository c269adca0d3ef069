"""What a terminal of 80 columns shows, and what a pipe gets: nothing is cut, nothing vanishes, nothing is padded."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections import Counter

import pytest

import holdfast
from holdfast.faces.cli.letters import _show_letter
from holdfast.faces.cli.output import Output, folded
from holdfast.testing import assert_dead
from tests.support.command import PROGRAM, TIMEOUT_S, Command, all_of

pytestmark = pytest.mark.slow

COLUMNS = 80
ERROR = "customer 77 has no address in the database and cannot be served before somebody adds it"
STACK = "Traceback (most recent call last):\n" + "".join(f'  File "orders.py", line {n}, in handle\n' for n in range(5))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A folder with two letters in custody, and a queue of items with long payloads."""
    tmp_path = tmp_path_factory.mktemp("terminal")
    asyncio.run(_prepare(f"sqlite:///{tmp_path}/data"))
    command = Command(tmp_path, f"sqlite:///{tmp_path}/data")
    command.done("capture", "orders.dlq")
    return command


async def _prepare(url: str) -> None:
    async with holdfast.open(url) as queues:
        await queues.queues_create("orders.dlq")
        await queues.queues_create("orders", dead_queue="orders.dlq")
        new = [holdfast.NewItem(payload=b"x" * 200, kind="order.created.by.somebody") for _ in range(4)]
        await queues.queue_produce("orders", new)
        leased = await queues.queue_lease("orders", batch_size=2)
        reason = f"ValueError: {ERROR}"
        await queues.queue_retry(
            "orders", [holdfast.RetryItem(id=i.id, dead=True, reason=reason) for i in leased.items]
        )
        assert await assert_dead(queues, "orders.dlq", source_queue="orders")


def on_terminal(run: Command, *arguments: str) -> str:
    """What a terminal of 80 columns shows."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = run.environment(COLUMNS=str(COLUMNS), NO_COLOR="1", TERM="xterm")
    with subprocess.Popen(
        [str(PROGRAM), *arguments], cwd=run.folder, env=environment, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        text = all_of(leader).replace("\r\n", "\n")
        os.close(leader)
        assert process.wait(TIMEOUT_S) == 0, text
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize(
    "arguments", ["letters list", "letters show 1", "groups list", "queue items list orders", "ledger show"]
)
def test_a_terminal_of_80_columns_shows_what_a_pipe_gets_without_padding(run: Command, arguments: str) -> None:
    seen = on_terminal(run, *arguments.split())
    piped = run.done(*arguments.split()).text
    assert max(map(len, seen.splitlines())) <= COLUMNS
    assert Counter(re.sub(r"[\s─]", "", seen)) == Counter(re.sub(r"[\s─]", "", piped)), "folded, not cut"
    assert [line for line in piped.splitlines() if line != line.rstrip()] == []


def test_ids_and_keys_stay_whole(run: Command) -> None:
    (group,) = run.done("groups", "list", "--json").documents
    assert group["key"] in on_terminal(run, "groups", "list")
    text = on_terminal(run, "queue", "items", "list", "orders")
    for item in run.done("queue", "items", "list", "orders", "--json").documents:
        assert item["id"] in text


def test_a_letter_reads_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"id": 1, "queue": "", "error_message": ERROR, "error_stack": STACK, "headers": {"x": [1]}}
    _show_letter(Output(as_json=False), found)
    beginning, _, stack = capsys.readouterr().out.partition("Error stack\n")
    assert beginning == f"id             1\nerror_message  {ERROR}\n\n"
    assert stack == "".join(f"  {line}\n" for line in STACK.splitlines()) + "\nHeaders\n  x = [1]\n\n"


@pytest.mark.parametrize("text", ["", "short", "a b " * 30, "x" * 100, "word " + "y" * 70 + " end", "漢字" * 40])
def test_folded_text_is_whole_again_when_joined(text: str) -> None:
    assert "".join(folded(text, 20)) == text
