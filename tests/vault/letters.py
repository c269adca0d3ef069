"""Letters for the tests: as a vault has them, and on a RabbitMQ with a dead-letter queue and a vault app beside it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import DeathStory, NewLetter, fingerprint
from holdfast.core.message import Outgoing
from holdfast.core.requests.declare import Caller, Role
from holdfast.core.selection import Selection
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Secret, Settings, StorageSettings
from holdfast.wiring import open_vault_app
from tests.support.amqp import Admin, outgoing

ACT = LedgerAct(actor="tester", action="capture", origin="tests")
DLQ, MAIN = "orders.dlq", "orders"
DEATH = DeathStory(MAIN, "rejected", 3, 1, 1, "ValueError", "no")
ADMIN = Caller(name="tester", role=Role.ADMIN, origin="tests")


def act(action: str) -> LedgerAct:
    return LedgerAct(actor="tester", action=action, origin="tests", reason="because")


def letter(
    body: bytes = b"x",
    *,
    queue: str = DLQ,
    type: str = "order",  # noqa: A002 - as the field is called
    redelivered: bool = False,
    redrive_id: str = "",
    headers: dict[str, object] | None = None,
    **death_fields: Any,
) -> NewLetter:
    """A letter whose digest is that of its body."""
    death = replace(DEATH, **death_fields)
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


@asynccontextmanager
async def vault_app_on(admin: Admin, folder: Path, **more: object) -> AsyncIterator[VaultApp]:
    """A vault app on this broker without embedded queues, with its vault in a folder; `more` are settings."""
    values: dict[str, object] = {
        "storages": (StorageSettings(name="default", url=f"sqlite:///{folder}/data"),),
        "data_folder": folder,
        "broker": Secret(admin.node.url(admin.vhost)),
        "management": Secret(admin.node.management_url),
        **more,
    }
    async with open_vault_app(Settings(**values), None) as vault_app:  # type: ignore[arg-type]
        yield vault_app


def dead(body: bytes, *, message_id: str = "m", queue: str = DLQ, **headers: object) -> Outgoing:
    """A letter as a consumer of ours parks it."""
    story = {
        "x-original-queue": MAIN,
        "x-original-exchange": "",
        "x-original-routing-key": MAIN,
        "x-error-type": "ValueError",
        "x-error-message": "no",
        "x-parked-reason": "attempts",
        "x-parked-at": "2026-01-02T03:04:05+00:00",
        "x-retry-count": 3,
        **headers,
    }
    return outgoing(queue, body, message_id=message_id, type="order", headers=story)


async def bodies(vault_app: VaultApp, selection: Selection | None = None) -> list[bytes]:
    """The bodies of letters in the vault, oldest first."""
    page = await vault_app.vault.letters.find(selection or Selection(), count_max=1000)
    found = [await vault_app.custody.content(one) for one in reversed(page.letters)]
    return [one.body for one in found]
