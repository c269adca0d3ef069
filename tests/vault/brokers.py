"""A RabbitMQ with a dead-letter queue, and a vault app over a vault, for the tests of custody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.core.message import Outgoing
from holdfast.core.requests.declare import Caller, Role
from holdfast.core.selection import Selection
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Secret, Settings, StorageSettings
from holdfast.wiring import open_vault_app
from tests.support.amqp import Admin, outgoing

DLQ, MAIN = "orders.dlq", "orders"
ADMIN = Caller(name="tester", role=Role.ADMIN, origin="tests")


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


async def send(admin: Admin, letters: Sequence[Outgoing]) -> None:
    """Put letters where they belong."""
    await admin.publish(letters)


async def bodies(vault_app: VaultApp, selection: Selection | None = None) -> list[bytes]:
    """The bodies of letters in the vault, oldest first."""
    page = await vault_app.vault.letters.find(selection or Selection(), count_max=1000)
    found = [await vault_app.custody.content(one) for one in reversed(page.letters)]
    return [one.body for one in found]
