"""The books of these tests: they see every letter that was altered, and every copy."""

from __future__ import annotations

import pytest

from holdfast.core.message import Outgoing
from holdfast.proof.conservation import NotConserved
from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.support.amqp import properties

pytestmark = pytest.mark.rabbitmq

THERE = "collection.scan"


async def test_the_books_see_what_was_altered_and_every_copy(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(6))
    await dlq.admin.drain(dlq.name, 6)
    body, content_type = letter(1, key=THERE), letter(2, key=THERE)
    body.body += b" "
    content_type.properties = properties.splice(content_type.properties, drop=("content_type",))
    changed = [body, content_type, letter(3, key=THERE, told={"tenant": "zeta"})]
    redriven = letter(4, key=THERE, told={"x-redriven-count": 1, "x-death": []})
    copies = [Outgoing("", THERE, letter(5).properties, letter(5).body) for _ in range(3)]
    await dlq.fill([letter(0, key=THERE), *changed, redriven, *copies], counted=False)
    with pytest.raises(NotConserved, match="lost 0, duplicates 2, altered 3, unexpected 0"):
        await dlq.check(duplicates_max=2)
    report = dlq.books.report()
    assert list(report.altered) == ["m-000001", "m-000002", "m-000003"]
    assert report.duplicated == {"m-000005": (THERE, THERE, THERE)}
