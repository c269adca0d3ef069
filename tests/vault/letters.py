"""Letters for the tests."""

from __future__ import annotations

import hashlib

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import DeathStory, NewLetter, fingerprint

ACT = LedgerAct(actor="tester", action="capture", origin="tests")
QUEUE = "orders.dlq"


def act(action: str) -> LedgerAct:
    return LedgerAct(actor="tester", action=action, origin="tests", reason="because")


def letter(
    body: bytes = b"x",
    *,
    queue: str = QUEUE,
    type: str = "order",  # noqa: A002 - as the field is called
    error: str = "ValueError",
    message: str = "no",
    reason: str = "rejected",
    redelivered: bool = False,
    redrive_id: str = "",
    headers: dict[str, object] | None = None,
    died_at_us: int = 1,
) -> NewLetter:
    """A letter whose digest is that of its body."""
    death = DeathStory(
        queue="orders",
        reason=reason,
        count=3,
        first_at_us=1,
        last_at_us=died_at_us,
        error_type=error,
        error_message=message,
        error_stack="",
    )
    group = fingerprint(type, death)
    return NewLetter(
        queue=queue,
        origin="rabbitmq",
        body=body,
        properties=b"\0\0",
        digest=hashlib.sha256(body).digest(),
        death=death,
        message_id="m",
        type=type,
        exchange="",
        routing_key=queue,
        headers=headers or {},  # type: ignore[arg-type]  # whatever a test says
        redelivered=redelivered,
        redrive_id=redrive_id,
        group=group.key,
        group_title=group.title,
    )
