"""amqp:// and amqps:// addresses: several hosts, virtual host, and RabbitMQ's usual query parameters.

The text of an address never shows its password.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from holdfast.core.checks import unclear_url
from holdfast.engines.rabbitmq.wire.session import FRAME_BYTES_MIN, Login
from holdfast.errors import BadAddress

T = TypeVar("T")

PORTS = {"amqp": 5672, "amqps": 5671}
CONNECT_TIMEOUT_S = 15.0
VERIFY = {"verify_peer": True, "verify_none": False}
MECHANISMS = {"plain": "PLAIN", "external": "EXTERNAL"}

MANAGEMENT_PORTS = {False: ("http", 15672), True: ("https", 15671)}

Reader: TypeAlias = Callable[[str], object]
#: Parameter → what it sets a field of (the URL itself, its login, its TLS), that field, and how its text is read.
PARAMETERS: Mapping[str, tuple[str, str, Reader]] = {
    "auth_mechanism": ("login", "mechanism", lambda value: _one_of(value, MECHANISMS)),
    "cacertfile": ("tls", "ca_file", str),
    "certfile": ("tls", "certificate_file", str),
    "channel_max": ("login", "channel_max", lambda value: _whole(value, 1, 65535)),
    "connection_timeout": ("", "connect_timeout_s", lambda value: _whole(value, 1, 600_000) / 1000),
    "frame_max": ("login", "frame_bytes_max", lambda value: _whole(value, FRAME_BYTES_MIN, 2**20)),
    "heartbeat": ("login", "heartbeat_s", lambda value: _whole(value, 0, 3600)),
    "keyfile": ("tls", "key_file", str),
    "name": ("login", "name", str),
    "server_name_indication": ("tls", "server_name", str),
    "verify": ("tls", "verify", lambda value: _one_of(value, VERIFY)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Whom to trust and who we are. By default: the system's authorities, and the host's name is checked."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """The context of the standard library. Raises BadAddress when a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.ca_file, self.certificate_file, self.key_file)))
            raise BadAddress(f"TLS files cannot be used; {files}: {error}") from error
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerUrl:
    """Where the broker is and how to log in."""

    hosts: tuple[tuple[str, int], ...]
    login: Login = field(default_factory=Login)
    tls: Tls | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S

    def __str__(self) -> str:
        scheme = "amqps" if self.tls else "amqp"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{self.login.user}@{hosts}/{self.login.vhost.replace('/', '%2F')}"

    def named(self, name: str) -> BrokerUrl:
        """The same, under another connection name (the broker's overview shows it)."""
        return replace(self, login=replace(self.login, name=name))

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Read `amqp://user:password@host:port,host2/vhost?heartbeat=30`. Raises BadAddress, without the password."""
        scheme, _, rest = url.partition("://")
        if scheme not in PORTS or not rest:
            raise BadAddress("broker address is invalid; expected amqp://… or amqps://…")
        if why := unclear_url(url):
            raise BadAddress(f"broker address is invalid; {why}")
        parts = urlsplit(f"//{rest}")
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, has_password, password = credentials.partition(":")
        login = Login(
            user=unquote(user) if user else "guest",
            password=unquote(password) if has_password else ("" if user else "guest"),
            # "amqp://host/" means the virtual host "" by the letter, and "/" to everybody.
            vhost=unquote(parts.path[1:]) or "/",
        )
        found = cls(
            hosts=tuple(_host(host, PORTS[scheme]) for host in hosts.split(",")),
            login=login,
            tls=Tls() if scheme == "amqps" else None,
        )
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            found = _with_parameter(found, name, value)
        return found

    def default_management(self) -> str:
        """Where the management API usually is: on the same host, with the same login."""
        scheme, port = MANAGEMENT_PORTS[self.tls is not None]
        host = self.hosts[0][0]
        login = f"{quote(self.login.user, safe='')}:{quote(self.login.password, safe='')}"
        return f"{scheme}://{login}@{f'[{host}]' if ':' in host else host}:{port}"


def _host(host: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "localhost", parts.port or default_port
    except ValueError as error:
        raise BadAddress(
            "broker address is invalid; its host or port cannot be read, is its password escaped?"
        ) from error


def _with_parameter(url: BrokerUrl, name: str, value: str) -> BrokerUrl:
    if name not in PARAMETERS:
        raise BadAddress(
            f"broker address is invalid; no parameter '{name}', use one of {', '.join(sorted(PARAMETERS))}"
        )
    part, field_name, read = PARAMETERS[name]
    changed: Any = getattr(url, part) if part else url
    if changed is None:
        raise BadAddress(f"broker address is invalid; '{name}' needs amqps://")
    try:
        changed = replace(changed, **{field_name: read(value)})
    except ValueError as error:
        raise BadAddress(f"broker address is invalid; {name}: {error}") from error
    found: BrokerUrl = replace(url, **{part: changed}) if part else changed
    return found


def _whole(value: str, low: int, high: int) -> int:
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{number} is not between {low} and {high}")
    return number


def _one_of(value: str, known: Mapping[str, T]) -> T:
    if value.lower() not in known:
        raise ValueError(f"'{value}' is none of {', '.join(known)}")
    return known[value.lower()]
