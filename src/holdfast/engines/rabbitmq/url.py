"""amqp:// and amqps:// addresses: several hosts, virtual host, and RabbitMQ's usual query parameters.

The text of an address never shows its password.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.engines.rabbitmq.wire.session import FRAME_BYTES_MIN, Login
from holdfast.errors import BadAddress

PORTS = {"amqp": 5672, "amqps": 5671}
CONNECT_TIMEOUT_S = 15.0
VERIFY = {"verify_peer": True, "verify_none": False}
MECHANISMS = {"plain": "PLAIN", "external": "EXTERNAL"}

TLS_PARAMETERS: Mapping[str, Callable[[BrokerUrl, str], BrokerUrl]] = {
    "cacertfile": lambda address, value: _tls(address, ca_file=value),
    "certfile": lambda address, value: _tls(address, certificate_file=value),
    "keyfile": lambda address, value: _tls(address, key_file=value),
    "server_name_indication": lambda address, value: _tls(address, server_name=value),
    "verify": lambda address, value: _tls(address, verify=VERIFY[_one_of(value, VERIFY)]),
}
PARAMETERS: Mapping[str, Callable[[BrokerUrl, str], BrokerUrl]] = {
    **TLS_PARAMETERS,
    "auth_mechanism": lambda address, value: _login(address, mechanism=MECHANISMS[_one_of(value, MECHANISMS)]),
    "channel_max": lambda address, value: _login(address, channel_max=_whole(value, 1, 65535)),
    "connection_timeout": lambda address, value: replace(address, connect_timeout_s=_whole(value, 1, 600_000) / 1000),
    "frame_max": lambda address, value: _login(address, frame_bytes_max=_whole(value, FRAME_BYTES_MIN, 2**20)),
    "heartbeat": lambda address, value: _login(address, heartbeat_s=_whole(value, 0, 3600)),
    "name": lambda address, value: _login(address, name=value),
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
        places = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{self.login.user}@{places}/{self.login.vhost.replace('/', '%2F')}"

    def named(self, name: str) -> BrokerUrl:
        """The same, under another connection name (the broker's overview shows it)."""
        return replace(self, login=replace(self.login, name=name))

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Read `amqp://user:password@host:port,host2/vhost?heartbeat=30`. Raises BadAddress, without the password."""
        scheme, _, rest = url.partition("://")
        if scheme not in PORTS or not rest:
            raise BadAddress("broker address is invalid; expected amqp://… or amqps://…")
        parts = urlsplit(f"//{rest}")
        credentials, _, places = parts.netloc.rpartition("@")
        user, has_password, password = credentials.partition(":")
        login = Login(
            user=unquote(user) if user else "guest",
            password=unquote(password) if has_password else ("" if user else "guest"),
            # "amqp://host/" means the virtual host "" by the letter, and "/" to everybody.
            vhost=unquote(parts.path[1:]) or "/",
        )
        address = cls(
            hosts=tuple(_place(place, PORTS[scheme]) for place in places.split(",")),
            login=login,
            tls=Tls() if scheme == "amqps" else None,
        )
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            address = _with_parameter(address, name, value)
        return address


def _place(place: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{place}")
        return parts.hostname or "localhost", parts.port or default_port
    except ValueError as error:
        raise BadAddress(f"broker address is invalid; host or port: {error}") from error


def _with_parameter(address: BrokerUrl, name: str, value: str) -> BrokerUrl:
    reader = PARAMETERS.get(name)
    if reader is None:
        raise BadAddress(
            f"broker address is invalid; no parameter '{name}', use one of {', '.join(sorted(PARAMETERS))}"
        )
    if name in TLS_PARAMETERS and address.tls is None:
        raise BadAddress(f"broker address is invalid; '{name}' needs amqps://")
    try:
        return reader(address, value)
    except ValueError as error:
        raise BadAddress(f"broker address is invalid; {name}: {error}") from error


def _whole(value: str, low: int, high: int) -> int:
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{number} is not between {low} and {high}")
    return number


def _one_of(value: str, known: Mapping[str, object]) -> str:
    if value.lower() not in known:
        raise ValueError(f"'{value}' is none of {', '.join(known)}")
    return value.lower()


def _tls(address: BrokerUrl, **changes: str | bool) -> BrokerUrl:
    if address.tls is None:
        return address
    return replace(address, tls=replace(address.tls, **changes))  # type: ignore[arg-type]


def _login(address: BrokerUrl, **changes: str | int) -> BrokerUrl:
    return replace(address, login=replace(address.login, **changes))  # type: ignore[arg-type]
