"""The settings as frozen values, how each is explained, and how none gives a secret away."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Meta, Struct

from holdfast.errors import CannotStart

DEFAULT_URL = "sqlite:///holdfast-data"
DEFAULT_LISTEN = "127.0.0.1:8470"
MASK = "***"
BodyBytes = Annotated[int, Meta(ge=1_000, le=1_000_000_000)]


class Secret:
    """A text that shows itself only to `reveal`."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return MASK


class StorageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named place for partitions. The first one holds the catalog; affinity is its share of new partitions."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    url: Annotated[str, Meta(min_length=1)]
    affinity: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0

    def __repr__(self) -> str:
        return f"StorageSettings(name={self.name!r}, url={masked(self.url)!r}, affinity={self.affinity:g})"


class RecoverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dead-letter queue that `serve` and `run` recover by themselves: [recover."NAME"]. Without `on_start` and
    `every` they do not."""

    on_start: bool = False
    every: str | None = None
    url: Secret | None = None
    routes: Path | None = None
    to: Literal["routes", "source", "exchange", "wait"] = "routes"
    limit: Annotated[int, Meta(ge=1)] | None = None
    rate: Annotated[float, Meta(ge=0)] = 0.0
    total_timeout: str = "30m"

    def plain(self) -> dict[str, object]:
        """What was set, safe to show."""
        values = {key: getattr(self, key) for key in self.__struct_fields__}
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        return {
            key: str(value) if isinstance(value, Path | Secret) else value
            for key, value in values.items()
            if value != defaults[key]
        }


class ListenAddress(NamedTuple):
    """Where a server listens. Port 0 is a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host.lower() == "localhost":
            return True
        try:
            address = ip_address(self.host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            return address.ipv4_mapped.is_loopback
        return address.is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Settings(Struct, frozen=True, kw_only=True):
    """Everything a server can be told. The sentences are what `holdfast config show --explain` says."""

    storages: Annotated[
        tuple[StorageSettings, ...],
        Meta(description="Where queues are kept: `url` for one storage, or [[storages]] with name, url and affinity"),
    ] = (StorageSettings(name="default", url=DEFAULT_URL),)
    listen: Annotated[str, Meta(description="Address and port to serve on; port 0 takes a free one")] = DEFAULT_LISTEN
    data_folder: Annotated[Path, Meta(description="Where the file with the admin token is")] = Path("holdfast-data")
    auth: Annotated[
        Literal["token", "none"],
        Meta(description="Who may call: holders of a token, or, on a loopback address only, everybody"),
    ] = "token"
    tls_cert: Annotated[Path | None, Meta(description="Certificate chain (PEM) for https; needs tls_key")] = None
    tls_key: Annotated[Path | None, Meta(description="Private key (PEM) of the certificate")] = None
    insecure_http: Annotated[
        bool, Meta(description="Allow plain http on an address that others can reach: tokens travel in the clear")
    ] = False
    admin_token: Annotated[
        Secret | None, Meta(description="The admin token instead of a generated one; from the environment alone")
    ] = None
    produce_body_bytes_max: Annotated[BodyBytes, Meta(description="Largest body of a produce request")] = 5_000_000
    import_body_bytes_max: Annotated[BodyBytes, Meta(description="Largest body of an import request")] = 64_000_000
    other_body_bytes_max: Annotated[BodyBytes, Meta(description="Largest body of any other request")] = 512_000
    open_files_max: Annotated[
        int, Meta(ge=1, le=100_000, description="How many SQLite queue files of a storage are open at a time")
    ] = 200
    blobs: Annotated[
        str | None,
        Meta(
            description="Where collected results are kept: a folder, s3://, az:// or gs://; beside a SQLite storage "
            "when left out"
        ),
    ] = None
    vault: Annotated[
        Secret | None,
        Meta(description="Where letters are kept: sqlite:///FOLDER or postgresql://…; with the queues when left out"),
    ] = None
    vault_blobs: Annotated[
        str | None,
        Meta(
            description="Where bodies of more than 1 MiB are kept: a folder, s3://, az:// or gs://; beside a SQLite "
            "vault when left out, and with PostgreSQL in the database"
        ),
    ] = None
    broker: Annotated[
        Secret | None, Meta(description="amqp://… of the RabbitMQ whose dead-letter queues are looked after")
    ] = None
    management: Annotated[
        Secret | None, Meta(description="http://user:password@host:15672, the management API of that RabbitMQ")
    ] = None
    dead_queues: Annotated[
        str, Meta(description="Names or patterns of dead-letter queues that may be touched, separated by commas")
    ] = "*.dlq"
    capture: Annotated[
        str | None, Meta(description="Dead-letter queues that a server captures all the time, separated by commas")
    ] = None
    resolve_after: Annotated[
        str, Meta(description="A redriven letter that has not come back for so long is resolved")
    ] = "24h"
    retry_delay: Annotated[
        str | None,
        Meta(
            description="After which delays consumers try again, `15s` or `1s,15s,5m`: for a canary's `auto`, where no "
            "wait queue tells"
        ),
    ] = None
    retry_attempts: Annotated[
        int, Meta(ge=1, le=65_536, description="How often consumers try a message before it is dead, for the same")
    ] = 3
    retention: Annotated[
        str | None, Meta(description="How long settled letters are kept, as state=duration,…; for ever when left out")
    ] = None
    redrive_role: Annotated[
        Literal["operator", "admin"], Meta(description="The least role that may plan, redrive and stop a redrive")
    ] = "operator"
    fingerprint: Annotated[
        str | None,
        Meta(description="MODULE:FUNCTION that groups letters by the cause of their death"),
    ] = None
    ledger_key: Annotated[
        Secret | None,
        Meta(description="The key of the ledger's chain instead of a generated one; from the environment alone"),
    ] = None
    recover: Annotated[
        dict[str, RecoverSettings],
        Meta(
            description='Dead-letter queues that are recovered by themselves: [recover."NAME"] with on_start, every, '
            "url, routes, to, limit, rate and total_timeout"
        ),
    ] = {}
    collect_broker: Annotated[
        Secret | None,
        Meta(description="amqp://… when results arrive over RabbitMQ and not over the queues of this server"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least level that is logged")
    ] = "info"
    log_format: Annotated[Literal["json", "text"], Meta(description="One JSON object a line, or text for people")] = (
        "json"
    )
    #: Where each value came from, by key; for `explain`.
    sources: dict[str, str] = {}

    @property
    def address(self) -> ListenAddress:
        return parse_address(self.listen)

    @property
    def admin_token_file(self) -> Path:
        """Where a generated admin token is kept, readable by its owner alone."""
        return self.data_folder / "admin-token"


class Explained(NamedTuple):
    """One setting, safe to show: `value` for people, `plain` for programs."""

    key: str
    value: str
    plain: object
    source: str
    meaning: str


#: Every setting and its annotated type, in the order in which they are explained.
HINTS = {key: hint for key, hint in get_type_hints(Settings, include_extras=True).items() if key != "sources"}


def explain(settings: Settings) -> list[Explained]:
    """Every setting with its value, its source and its meaning; secrets are masked."""
    explained = []
    for key, hint in HINTS.items():
        value = getattr(settings, key)
        source = settings.sources.get(key, "default")
        explained.append(Explained(key, _shown(value), _plain(value), source, _description(hint)))
    return explained


def masked(url: str) -> str:
    """The URL without its passwords."""
    if not is_readable(url):
        return MASK
    parts = urlsplit(url)
    netloc = parts.netloc
    user, at, host = netloc.rpartition("@")
    if at and ":" in user:
        netloc = f"{user.partition(':')[0]}:{MASK}@{host}"
    query = parts.query
    if "password" in query.lower():
        pairs = parse_qsl(query, keep_blank_values=True)
        query = urlencode([(k, MASK if "password" in k.lower() else v) for k, v in pairs], safe="*/:")
    if (netloc, query) == (parts.netloc, parts.query):
        return url
    return urlunsplit(parts._replace(netloc=netloc, query=query))


def listed(text: str | None) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def is_readable(url: str) -> bool:
    """Whether it can be taken apart; one that cannot might hide a password anywhere."""
    try:
        urlsplit(url).port  # noqa: B018 - raises for a port that is no number
    except ValueError:
        return False
    return True


def parse_address(text: str) -> ListenAddress:
    """`127.0.0.1:8470`, `localhost:0`, `[::1]:8470`; raises CannotStart."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise CannotStart(
            f"listen address is invalid; '{text}' is not HOST:PORT, use for example {DEFAULT_LISTEN} or [::1]:8470"
        )
    return ListenAddress(host, int(port))


def _description(hint: Any) -> str:
    descriptions = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta) and meta.description]
    return descriptions[-1] if descriptions else ""


def _shown(value: object) -> str:
    match value:
        case None:
            return "(none)"
        case bool():
            return str(value).lower()
        case int():
            return f"{value:_}"
        case dict():
            return "\n".join(f"{name}: {_pairs(entry.plain())}" for name, entry in value.items()) or "(none)"
        case tuple():
            return "\n".join(f"{s.name} = {masked(s.url)} (affinity {s.affinity:g})" for s in value)
    return str(value)


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{key} = {_shown(value)}" for key, value in values.items()) or "off"


def _plain(value: object) -> object:
    match value:
        case dict():
            return {name: entry.plain() for name, entry in value.items()}
        case tuple():
            return [{"name": s.name, "url": masked(s.url), "affinity": s.affinity} for s in value]
        case Path() | Secret():
            return str(value)
    return value
