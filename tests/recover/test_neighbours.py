"""Letters that cannot go, or that nobody answers for, harm none that come after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.recovery import StoppedBy
from tests.recover.dead_letter_queue import DeadLetterQueue, letter, noted, summary
from tests.recover.inside import DrainAround, Inside
from tests.support.amqp import Admin, message_id_of

pytestmark = pytest.mark.rabbitmq


@pytest.mark.parametrize("window", [("--one-at-a-time",), ("--window", "10")])
async def test_a_window_full_of_refused_letters_holds_nobody_up(
    any_dlq: DeadLetterQueue, window: tuple[str, ...]
) -> None:
    """They are refused when no further letter comes: then it is for nobody but the run to make room."""
    dlq = any_dlq
    await dlq.fill(letter(n, kind="Refused" if n < 31 else "CollectionScan") for n in range(50))
    told = summary(await dlq.recover(*window))
    assert (told["recovered"], told["failed"], told["stopped_by"]) == (20, 30, "all_taken")
    kept = [message_id_of(one) for one in (await dlq.found())[dlq.name]]
    assert kept == sorted(kept)
    dlq.books.check()


async def test_an_exchange_that_cannot_be_is_the_trouble_of_its_letters_alone(dlq: DeadLetterQueue) -> None:
    """Whoever sends a letter can write its headers."""
    told = noted("e" * 300, "k")
    await dlq.fill([letter(0, kind=None, told=told), *(letter(n) for n in range(1, 10))])
    ended = await dlq.recover()
    found = summary(ended)
    assert (ended.code, found["recovered"], found["failed"], found["remaining"]) == (3, 9, 1, 1)
    assert "refused: the exchange has 300 bytes, 255 are allowed" in found["reasons"]
    await dlq.check()


async def test_a_routing_key_of_any_bytes_is_no_trouble(dlq: DeadLetterQueue) -> None:
    """A dead-letter exchange may keep the key that a letter was published with: here bytes that are not UTF-8."""
    await dlq.admin.exchange("any", "fanout")
    await dlq.admin.bind(dlq.name, "any")
    letters = [letter(0), letter(1, kind="Strange")]
    for one in letters:
        one.exchange, one.routing_key = "any", "\udcff\udcfekey"
    await dlq.fill(letters)
    backup = dlq.folder / "letters.jsonl"
    ended = await dlq.recover("--backup", backup)
    told = summary(ended)
    assert (ended.code, told["recovered"], told["skipped"]) == (3, 1, 1)
    (reason,) = told["reasons"].values()
    assert reason["sample"]["routing_key"] == "\ufffd\ufffdkey"
    assert (await dlq.recover("--from-backup", backup, "--dry-run")).code == 0
    await dlq.check()


async def test_a_letter_that_is_put_back_does_not_go_round_and_round(admin: Admin, tmp_path: Path) -> None:
    """The queue bears fewer returns than are spared, and one letter that was found is gone: all others come twice."""
    dlq = DeadLetterQueue(admin, tmp_path)
    await admin.quorum_queue(dlq.name, **{"x-delivery-limit": 5})
    await dlq.make(declare_it=False)
    await dlq.fill(letter(n, kind="Strange") for n in range(10))
    told = await Inside(DrainAround, dlq).run()
    assert (told.stopped_by, told.skipped, told.put_back, told.remaining) == (StoppedBy.EMPTY, 10, 20, 10)
    await dlq.check()
