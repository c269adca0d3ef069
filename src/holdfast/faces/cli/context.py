"""What every command starts with: who answers at --url, a server or the services of this process, and where to print.

What went wrong is told in one line with what to do next, or in one JSON object. Nobody sees a stack trace for a mistake
of theirs, a server that is gone, or a file that is missing.
"""

from __future__ import annotations

import gc
import getpass
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import msgspec
import typer

from holdfast.core.checks import without_passwords
from holdfast.core.requests.declare import Caller, Request, Role
from holdfast.errors import BadUrl, BrokerUnreachable, CannotStart, HoldfastError, Unauthorized, Unreachable
from holdfast.faces.cli.output import Output, one_line
from holdfast.settings import ListenAddress, Settings, load_settings

if TYPE_CHECKING:  # what takes its time to import is imported when it is needed
    import ssl

    from holdfast.faces.client import Client, RequestClient
    from holdfast.services.collect.service import CollectService
    from holdfast.services.queue.queues import Queues
    from holdfast.services.queue.service import QueueService
    from holdfast.services.vault.admin import VaultApp

TOKEN_BYTES_MAX = 10_000
#: What the service calls a field is an option here.
OPTIONS = {"say sensitive = true": "say --sensitive", ", use force": ", use --force"}


class ExitCode(IntEnum):
    """How a command ended. 141 is what the shell shows for a reader that went away."""

    DONE = 0
    FAILED = 1
    BAD_USAGE = 2
    PARTLY_DONE = 3
    INTERRUPTED = 130
    READER_GONE = 141


class CommandFailed(HoldfastError):
    """The command cannot go on: a file, a line, an argument, or its `cause`, whose code it has."""

    code = 400
    code_text = "Bad Request"

    def __init__(
        self,
        message: str,
        *,
        details: dict[str, object] | None = None,
        exit_code: ExitCode = ExitCode.FAILED,
        cause: HoldfastError | None = None,
    ) -> None:
        super().__init__(message)
        self.details = details or {}
        self.exit_code = exit_code
        if cause is not None:
            self.code, self.code_text = cause.code, cause.code_text


class BadUsage(CommandFailed):
    """The arguments do not go together."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.BAD_USAGE)


def partly_done(message: str, cause: HoldfastError, *, done_count: int, **details: object) -> CommandFailed:
    """The error for a command that stopped on its way: partly done if anything was done before."""
    exit_code = ExitCode.PARTLY_DONE if done_count else ExitCode.FAILED
    return CommandFailed(message, details={"done_count": done_count, **details}, exit_code=exit_code, cause=cause)


def report(error: HoldfastError, *, as_json: bool, server: str = "") -> ExitCode:
    """Say it on stderr; returns how the command ended."""
    message = without_passwords(error.message) + advice(error, server=server)
    for name, option in OPTIONS.items():
        message = message.replace(name, option)
    details: dict[str, object] = {"ids": list(error.ids)} if error.ids else {}
    if isinstance(error, CommandFailed):
        details = error.details
    if as_json:
        line = msgspec.json.encode(
            {"code": error.code, "code_text": error.code_text, "message": message, "details": details}
        ).decode()
    else:
        line = f"error: {one_line(message)}"
        if len(error.ids) > 1:
            line += f" (and {len(error.ids) - 1} more: {one_line(', '.join(error.ids[1:6]))})"
    typer.echo(line, err=True)
    if isinstance(error, CommandFailed):
        return error.exit_code
    return ExitCode.BAD_USAGE if isinstance(error, BadUrl) else ExitCode.FAILED


def advice(error: HoldfastError, *, server: str) -> str:
    """What to do next, where the text itself does not say it."""
    match error:
        case Unauthorized():
            return ", give it with --token-file or in HOLDFAST_TOKEN"
        case BrokerUnreachable() if "cannot be reached" in error.message:
            return "; check that it runs, and its host and port"
        case Unreachable() if "cannot be reached" in error.message:
            return "; start it with 'holdfast serve', or give another --url"
        case CannotStart() if error.message.startswith("data folder is in use"):
            where = f"--url {server}" if server else "give its address with --url http://HOST:PORT"
            return f"; if that process is a Holdfast server, talk to it: {where}"
    return ""


def collect_seldom() -> None:
    """Set the garbage collector for a process that works for long, once everything is imported: by itself it walks over
    all modules every few thousand requests, and each of those waits. Never in a process that is somebody else's."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@dataclass
class CommandContext:
    """The options that commands share; `given` are other settings that a command has options for."""

    url: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    config: Path | None = None
    as_json: bool = False
    blobs: str | None = None
    broker: str | None = None
    management: str | None = None
    given: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def out(self) -> Output:
        """Where results go."""
        return Output(as_json=self.as_json)

    @cached_property
    def settings(self) -> Settings:
        """Everything that was set, without the rules for serving."""
        return load_settings({"url": self.url, **self.given}, file=self.config, serving=False)

    @property
    def server(self) -> str:
        """Where a server of these settings would be; nowhere when it takes a free port, or they cannot be read."""
        try:
            settings = self.settings
        except HoldfastError:
            return ""
        return f"{'https' if settings.tls_cert else 'http'}://{settings.address}" if settings.address.port else ""

    @property
    def is_far(self) -> bool:
        """Whether --url names a server."""
        return urlsplit(self.settings.storages[0].url).scheme in {"http", "https"}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Queues]:
        """The queues. Raises CannotStart when a storage cannot be opened."""
        from holdfast.services.queue.queues import Queues

        async with AsyncExitStack() as stack:
            yield await self._client(stack) if self.is_far else Queues(await self._service(stack))

    @asynccontextmanager
    async def connect(self, request: type[Request[Any]]) -> AsyncIterator[RequestClient]:
        """Who answers requests of this kind: a server, or the services that they take, in this process. Raises
        CannotStart."""
        from holdfast.faces.client import VaultClient

        path = request.declared.path
        async with AsyncExitStack() as stack:
            if self.is_far:
                if self.blobs or self.broker:
                    raise BadUsage("--blobs and --broker are for a collector in this process; a server has its own")
                yield await self._client(stack)
            elif path.startswith("/v1/results"):
                yield await self._collector(stack)
            elif path.startswith("/admin/"):
                yield VaultClient(await self._vault(stack), _caller())
            else:
                yield cast("RequestClient", await self._service(stack))  # no other requests come here

    @asynccontextmanager
    async def connect_server(self) -> AsyncIterator[tuple[str, Client]]:
        """The server that --url names, or the one that would be here: its address, and a client. Raises BadUsage."""
        url = self.settings.storages[0].url.rstrip("/") if self.is_far else self.server
        if not url:
            raise BadUsage("server is not known; here one takes a free port, say which with --url http://HOST:PORT")
        async with AsyncExitStack() as stack:
            yield url, await self._client(stack, url)

    async def _client(self, stack: AsyncExitStack, url: str = "") -> Client:
        from holdfast.faces.client import Client

        url = url or self.settings.storages[0].url
        return await stack.enter_async_context(Client(url, self.token(url), tls=self.tls()))

    async def _service(self, stack: AsyncExitStack) -> QueueService:
        from holdfast.wiring import open_storages

        return await stack.enter_async_context(open_storages(self.settings))

    async def _vault(self, stack: AsyncExitStack) -> VaultApp:
        if urlsplit(self.settings.storages[0].url).scheme in {"amqp", "amqps"}:
            raise BadUsage(
                "letters are kept in a vault; --url names its storage or server, HOLDFAST_BROKER_URL the broker"
            )
        from holdfast.wiring import open_app

        return (await stack.enter_async_context(open_app(self.settings)))[1]

    async def _collector(self, stack: AsyncExitStack) -> CollectService:
        """It runs in this process, and resumes what was left."""
        from holdfast.wiring import open_collector

        settings = self.settings
        known = settings.collect_broker.reveal() if settings.collect_broker else None
        opened = open_collector(
            settings.storages[0].url, blobs=self.blobs or settings.blobs, broker=self.broker or known
        )
        return await stack.enter_async_context(opened)

    def token(self, url: str) -> str:
        """The token for a server: --token-file, HOLDFAST_TOKEN, HOLDFAST_ADMIN_TOKEN, or the local data folder's.

        The last is given to a server on this machine alone: another one must not learn it.
        """
        if self.token_file is not None:
            return _read_token(self.token_file)
        if token := os.environ.get("HOLDFAST_TOKEN"):
            return _checked(token, "HOLDFAST_TOKEN")
        if self.settings.admin_token is not None:
            return _checked(self.settings.admin_token.reveal(), "HOLDFAST_ADMIN_TOKEN")
        local = self.settings.admin_token_file
        is_here = ListenAddress(urlsplit(url).hostname or "", 0).is_loopback
        return _read_token(local) if is_here and os.access(local, os.R_OK) else ""

    def tls(self) -> ssl.SSLContext | None:
        """What --ca-file says about an https server's certificate. Raises CannotStart."""
        if self.ca_file is None:
            return None
        import ssl

        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise CannotStart(
                f"CA file cannot be used; '{self.ca_file}': {error.strerror or error}, give a PEM file"
            ) from error


def _caller() -> Caller:
    """Whoever runs the command, for the ledger."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # no such user: a container
        name = "nobody"
    return Caller(name=f"cli:{name}", role=Role.ADMIN, origin="127.0.0.1")


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX).decode("utf-8", "replace").strip()
    except OSError as error:
        raise CannotStart(f"token cannot be read; '{path}': {error.strerror}, check --token-file") from error
    return _checked(token, f"'{path}'")


def _checked(token: str, source: str) -> str:
    """A token goes into a header: one line of plain characters."""
    if not token or not token.isascii() or not token.isprintable():
        raise CannotStart(f"token is invalid; {source} is not one line of plain characters, check where it came from")
    return token
