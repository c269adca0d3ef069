"""A server's application over an embedded queue and a vault, in this process, for the tests of /admin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.declare import Role
from holdfast.core.requests.vault import CreateToken
from holdfast.faces.api.authenticator import token_hash
from holdfast.faces.api.endpoints import LazyCollector
from holdfast.faces.api.server import make_server
from holdfast.services.queue.queues import Queues
from holdfast.services.vault.access import SessionLinks
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Secret, Settings, StorageSettings
from holdfast.wiring import open_collector, open_service, open_vault_app
from tests.queue.installation import listening
from tests.support.postgres import emptied
from tests.vault.letters import ACT, letter

TOKEN = "the-admin-token"


@dataclass
class AdminInstallation:
    """The application, with a client for each role."""

    url: str
    vault_app: VaultApp
    queues: Queues

    def client(self, token: str = TOKEN) -> httpx2.AsyncClient:
        """A client with a token; the empty one sends none."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=30)

    async def token(self, name: str, role: Role, queues: Sequence[str] = ()) -> str:
        """A new token."""
        wanted = msgspec.convert({"name": name, "role": role.word, "queues": queues}, CreateToken)
        return await self.vault_app.tokens.create(wanted, LedgerAct(actor="test", action="tokens.create"))

    async def put(self, *bodies: bytes) -> list[int]:
        """Letters, straight into the vault."""
        return [one.letter for one in await self.vault_app.vault.letters.put([letter(body) for body in bodies], ACT)]


@asynccontextmanager
async def open_installation(folder: Path, **more: Any) -> AsyncIterator[AdminInstallation]:
    """An installation with its data in a folder; `more` are settings."""
    url = f"sqlite:///{folder}/data"
    settings = Settings(storages=(StorageSettings(name="default", url=url),), data_folder=folder, **more)
    async with open_service({"default": url}) as service, open_vault_app(settings, Queues(service)) as vault_app:
        results = LazyCollector(lambda: open_collector(url, queues=Queues(service)))
        server = make_server(
            service,
            admin_token_hash=token_hash(TOKEN),
            version="0",
            results=results,
            vault_app=vault_app,
            trusted_proxy=settings.trusted_proxy,
            links=SessionLinks(clock=vault_app.custody.clock) if settings.address.is_loopback else None,
        )
        async with listening(server) as address:
            yield AdminInstallation(address, vault_app, Queues(service))
        await results.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def stored(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    """An installation with its vault in SQLite, and one with it in PostgreSQL."""
    more: dict[str, Any] = {}
    if request.param == "postgres":
        more = {"vault": Secret(emptied(request.getfixturevalue("postgres_url"))), "ledger_key": Secret("k")}
    async with open_installation(tmp_path, **more) as installation:
        yield installation


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation
