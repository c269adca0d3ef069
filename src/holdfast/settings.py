"""What a server is started with: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments.

Everything is read and checked once, in `load_settings`; whoever gets a `Settings` need not check again. Each rule
raises CannotStart, which says what is wrong and what to do. Each value remembers where it came from. A secret comes
from the environment alone, and neither it nor a password in a URL is ever shown.
"""

from __future__ import annotations

import difflib
import os
import re
import ssl
import stat
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec
from msgspec import Meta, Struct

from holdfast.core.checks import nearest, unclear_url
from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.errors import BadUrl, CannotStart, Invalid

DEFAULT_URL = "sqlite:///holdfast-data"
DEFAULT_LISTEN = "127.0.0.1:8470"
MASK = "***"
BodyBytes = Annotated[int, Meta(ge=1_000, le=1_000_000_000)]
FILE_NAME = "holdfast.toml"
PREFIX = "HOLDFAST_"
FILE_BYTES_MAX = 1_000_000
#: Variables with our prefix that are no settings: the client's, and those of tests and proofs.
OTHER_VARIABLES = frozenset({"TOKEN", "CONFIG", "CRASH_AT", "CLOCK_OFFSET_S", "TEST_WITHOUT", "TEST_POSTGRES_BIN"})
#: Other names of variables, which other commands know.
ALIASES = {"broker_url": "broker", "management_url": "management"}
#: From here on a variable is taken for a misspelt setting. Others are let be: Kubernetes sets HOLDFAST_PORT by itself.
NEAR_ENOUGH = 0.8


#: In a key of a query: its value is not shown. Some separate with a semicolon, and then it is in the value before.
_SECRET_WORD = re.compile(r"pass|secret|token|credential|signature|(?:^|[&;_-])(?:sig|key|sslkey|access_key)=", re.I)


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


class RecoverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A dead-letter queue that `serve` and `run` recover by themselves: [recover."NAME"]. Without `on_start` and
    `every` they do not."""

    on_start: bool = False
    every: str | None = None
    url: Secret | None = None
    routes: Path | None = None
    to: Literal["routes", "source", "exchange", "wait"] = "routes"
    source: str = ""
    allow_copies: bool = False
    limit: Annotated[int, Meta(ge=1)] | None = None
    rate: Annotated[float, Meta(ge=0)] = 0.0
    total_timeout: str = "30m"

    def plain(self) -> dict[str, object]:
        """What was set, safe to show."""
        plain: dict[str, object] = msgspec.to_builtins(self, enc_hook=str)
        return plain


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
    trusted_proxy: Annotated[
        str | None,
        Meta(
            description="Addresses or networks, separated by commas, of proxies whose X-Forwarded-For and "
            "X-Forwarded-Proto are believed"
        ),
    ] = None
    open_names: Annotated[
        bool, Meta(description="Show the names of queues in /health and /metrics also to callers without a token")
    ] = False
    admin_token: Annotated[
        Secret | None, Meta(description="The admin token instead of a generated one; from the environment alone")
    ] = None
    produce_body_bytes_max: Annotated[BodyBytes, Meta(description="Largest body of a produce request")] = 5_000_000
    import_body_bytes_max: Annotated[BodyBytes, Meta(description="Largest body of an import request")] = 64_000_000
    other_body_bytes_max: Annotated[BodyBytes, Meta(description="Largest body of any other request")] = 512_000
    bodies_bytes_max: Annotated[
        int, Meta(ge=1_000_000, description="All bodies of requests that are being read or served, together")
    ] = 256_000_000
    connections_max: Annotated[
        int,
        Meta(ge=16, le=1_000_000, description="Most connections at a time; fewer where the limit of open files is low"),
    ] = 20_000
    first_byte_timeout: Annotated[
        str, Meta(description="How long a new connection may take until its first request begins")
    ] = "10s"
    headers_timeout: Annotated[str, Meta(description="How long the headers of a request, or TLS, may take")] = "10s"
    body_timeout: Annotated[
        str,
        Meta(description="How long a body may take, or a client that takes nothing of its answer"),
    ] = "30s"
    body_bytes_per_s_min: Annotated[
        int, Meta(ge=1, description="The least rate of a body once body_timeout is over")
    ] = 10_000
    idle_timeout: Annotated[str, Meta(description="How long a connection is kept after an answer")] = "75s"
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
    topology: Annotated[
        Path | None,
        Meta(
            description="A topology file (TOML) of that RabbitMQ: the console compares it with the broker, and draws "
            "it where the broker cannot be asked"
        ),
    ] = None
    accept_clock: Annotated[
        bool, Meta(description="Delete by time at once, also when nothing was written for more than 6 h")
    ] = False
    require_broker: Annotated[
        bool, Meta(description="A server ends at its start when its RabbitMQ is away, and does not wait for it")
    ] = False
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
    ledger_key_file: Annotated[
        Path | None,
        Meta(
            description="The file with that key, made when it is not there; ledger-key beside the vault when left out, "
            "with PostgreSQL in the data folder"
        ),
    ] = None
    recover: Annotated[
        dict[str, RecoverSettings],
        Meta(
            description='Dead-letter queues that are recovered by themselves: [recover."NAME"] with on_start, every, '
            "url, routes, to, source, allow_copies, limit, rate and total_timeout"
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
    #: Code of the user's that is named by a file which nobody has named: it lay there.
    found_code: str = ""

    @property
    def address(self) -> ListenAddress:
        return parse_address(self.listen)

    @property
    def vault_url(self) -> str:
        """Where letters are kept."""
        return self.vault.reveal() if self.vault else self.storages[0].url

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


_OTHERS = ("sources", "found_code")
#: Every setting and its annotated type, in the order in which they are explained.
HINTS = {key: hint for key, hint in get_type_hints(Settings, include_extras=True).items() if key not in _OTHERS}
#: What a file may have; the environment has the same in capitals after the prefix, but for lists.
KEYS = ("url", *HINTS)
_SECRETS = frozenset({"admin_token", "ledger_key"})
_FILE_KEYS = tuple(key for key in KEYS if key not in _SECRETS)
#: Texts with commas that may be lists in a file.
_LISTS = frozenset({"dead_queues", "capture", "retry_delay", "retention"})
_TABLES = {"storages": "[[storages]]", "recover": '[recover."NAME"]'}
_ENVIRONMENT_KEYS = tuple(key for key in KEYS if key not in _TABLES)
_STORAGE_KEYS = tuple(StorageSettings.__struct_fields__)
_PLAIN_WORDS = {"`int`": "a whole number", "`float`": "a number", "`str`": "a text", "`bool`": "true or false"}
TIMEOUTS = ("first_byte_timeout", "headers_timeout", "body_timeout", "idle_timeout")
RECOVERABLE = frozenset({"amqp", "amqps", "sqlite", "postgresql", "postgres"})


def load_settings(
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    serving: bool = True,
) -> Settings:
    """Read all sources and check them. An argument that is None was not given.

    `file` is the configuration file; without it HOLDFAST_CONFIG names one, or ./holdfast.toml is read if it is there
    and nobody else could have written it.
    With `serving` false the rules that only matter to a server are left out. Raises CannotStart.
    """
    env = os.environ if environment is None else environment
    values: dict[str, object] = {}
    sources = dict.fromkeys(HINTS, "default")
    named = file or (Path(env[PREFIX + "CONFIG"]) if env.get(PREFIX + "CONFIG") else None)
    for key, value, source in (*_from_file(named), *_from_environment(env), *_from_arguments(arguments or {})):
        target, converted = key, _converted(key, value, source)
        if key == "url":
            target, converted = "storages", (StorageSettings(name="default", url=converted),)
        values[target], sources[target] = converted, source
    found_code = "" if named or sources["fingerprint"] != FILE_NAME else str(values["fingerprint"])
    settings = Settings(**values, sources=sources, found_code=found_code)  # type: ignore[arg-type]  # each was converted to its field's type
    check(settings)
    if serving:
        check_serving(settings)
    return settings


def check(settings: Settings) -> None:
    """The rules for everybody: an address that can be read, and storages that can be told apart."""
    parse_address(settings.listen)
    networks(settings.trusted_proxy)
    storages = settings.storages
    source = settings.sources.get("storages", "")
    if not storages:
        raise CannotStart(f"storages is invalid; the list is empty ({source}), leave it out or name one")
    for storage in storages:
        if why := unclear_url(storage.url):
            raise BadUrl(f"storage URL is invalid; the one of '{storage.name}' ({source}): {why}")
    for what, texts in (
        ("name", [storage.name for storage in storages]),
        ("url", [storage.url for storage in storages if not storage.url.startswith("memory:")]),
    ):
        twice = sorted({text for text in texts if texts.count(text) > 1})
        if twice:
            raise CannotStart(f"storages is invalid; {what} '{masked(twice[0])}' is used twice ({source})")
    for key in TIMEOUTS:
        _check_timeout(key, getattr(settings, key), f"{key} ({settings.sources.get(key, '')})")
    check_recoveries(settings)
    if not any(storage.affinity > 0 for storage in storages):
        raise CannotStart(f"storages is invalid; every affinity is 0 ({source}), give one storage a positive number")


def _check_timeout(key: str, text: str, where: str) -> None:
    try:
        good = parse_duration(text, what=key) >= SECOND_US
    except Invalid as error:
        raise CannotStart(f"setting is invalid; {where}: {error.message}") from error
    if not good:
        raise CannotStart(f"setting is invalid; {where} is {text}, 1s is the least")


def check_recoveries(settings: Settings) -> None:
    """Durations that can be read, and places that can be recovered."""
    for name, entry in settings.recover.items():
        for what, text in (("every", entry.every), ("total_timeout", entry.total_timeout)):
            try:
                good = text is None or parse_duration(text, what=what) >= SECOND_US
            except Invalid as error:
                raise CannotStart(f'recover is invalid; [recover."{name}"]: {error.message}') from error
            if not good:
                raise CannotStart(f'recover is invalid; [recover."{name}"] has {what} = {text}, 1s is the least')
        url = entry.url.reveal() if entry.url else None
        if url is not None and (not is_readable(url) or urlsplit(url).scheme not in RECOVERABLE):
            raise CannotStart(
                f'recover is invalid; the url of [recover."{name}"] is none of amqp://…, sqlite:///FOLDER, postgresql://…'
            )


def check_serving(settings: Settings) -> None:
    """The rules that keep a server from standing open by mistake; raises CannotStart that says what to do."""
    for storage in settings.storages:
        if urlsplit(storage.url).scheme in {"http", "https"}:
            raise BadUrl(
                f"storage URL is invalid; {masked(storage.url)} is the address of a server, a server needs a storage, "
                "use --url sqlite:///FOLDER or postgresql://…"
            )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "tls_key" if settings.tls_key is None else "tls_cert"
        raise CannotStart(f"TLS is incomplete; {missing} is missing, give both --tls-cert and --tls-key")
    _check_tls_files(settings)
    if settings.address.is_loopback:
        return
    if settings.auth == "none":
        raise CannotStart(
            f"auth = none is not allowed; '{settings.listen}' can be reached by others, listen on 127.0.0.1 or use "
            "auth = token"
        )
    if settings.tls_cert is None and not settings.insecure_http:
        raise CannotStart(
            f"plain http is not allowed; '{settings.listen}' can be reached by others and tokens would travel in the "
            "clear, give --tls-cert and --tls-key, or --insecure-http behind a proxy that does TLS"
        )


def _check_tls_files(settings: Settings) -> None:
    cert, key = settings.tls_cert, settings.tls_key
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        if path is not None and not os.access(path, os.R_OK):
            raise CannotStart(f"TLS cannot be used; {name} '{path}' cannot be read, check the path and its permissions")
    if cert is None or key is None:
        return
    try:
        # The empty password keeps OpenSSL from asking on the terminal for one: a server has nobody to ask.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise CannotStart(
            f"TLS cannot be used; '{cert}' and '{key}' are not a certificate and its unencrypted key in PEM, give a "
            "pair that belongs together"
        ) from error


def _from_file(named: Path | None) -> list[tuple[str, object, str]]:
    path = named or Path(FILE_NAME)
    if named is None and not path.exists():
        return []
    table = _read_toml(path, is_found=named is None)
    for key in table:
        if key in _SECRETS:
            variable = PREFIX + key.upper()
            raise CannotStart(
                f"setting is not allowed; {path} has '{key}', which is a secret, set {variable} in the environment"
            )
        if key not in _FILE_KEYS:
            raise CannotStart(f"setting is unknown; {path} has '{key}', {nearest(key, _FILE_KEYS)}")
    if "url" in table and "storages" in table:
        raise CannotStart(f"setting is ambiguous; {path} has 'url' and 'storages', keep one of them")
    return [(key, value, f"{path}") for key, value in table.items()]


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _check_whose(path: Path, descriptor: int) -> None:
    """A file that lay there is believed when nobody else can have written it, or laid the way to it."""
    told, link = os.fstat(descriptor), path.lstat()
    if not stat.S_ISREG(told.st_mode):
        raise CannotStart(f"configuration is refused; ./{path} is no file")
    strangers = {told.st_uid, link.st_uid} - {os.geteuid(), 0}
    why = ""
    if strangers:
        why = f"belongs to user {min(strangers)}, not to you or root"
    elif told.st_mode & stat.S_IWOTH:
        why = "is not yours alone: everybody may write it"
    elif told.st_mode & stat.S_IWGRP and _has_others(told.st_gid):
        why = "is not yours alone: a group with other members may write it"
    if why:
        raise CannotStart(
            f"configuration is refused; ./{path} {why}, look into it, and name it with --config if it is right"
        )


def _has_others(group: int) -> bool:
    """Whether somebody but us and root is in a group."""
    import grp
    import pwd

    us = {os.geteuid(), 0}
    names = {one.pw_name for one in pwd.getpwall() if one.pw_uid in us}
    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        members = set()
    return bool(members - names) or any(one.pw_gid == group and one.pw_uid not in us for one in pwd.getpwall())


def _read_toml(path: Path, *, is_found: bool) -> dict[str, object]:
    try:
        # A pipe that lay there would be waited for without end.
        with open(path, "rb", opener=_at_once if is_found else None) as stream:
            if is_found:
                _check_whose(path, stream.fileno())
            data = stream.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise CannotStart(f"configuration is invalid; {path} is larger than {FILE_BYTES_MAX} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise CannotStart(f"configuration cannot be read; {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CannotStart(f"configuration is invalid; {path} is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # also of a number that is too long
        raise CannotStart(f"configuration is invalid; {path} is not TOML: {error}") from error


def _from_environment(env: Mapping[str, str]) -> list[tuple[str, object, str]]:
    found: list[tuple[str, object, str]] = []
    for variable, text in env.items():
        key = variable.removeprefix(PREFIX).lower()
        key = ALIASES.get(key, key)
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in OTHER_VARIABLES:
            continue
        if key in _ENVIRONMENT_KEYS:
            if text:  # an empty variable is how shells and container tools unset one
                found.append((key, text, f"environment {variable}"))
        elif key in _TABLES:
            raise CannotStart(f"setting is not allowed; {variable} cannot be a variable, use {_TABLES[key]} in a file")
        elif close := difflib.get_close_matches(key, _ENVIRONMENT_KEYS, n=1, cutoff=NEAR_ENOUGH):
            raise CannotStart(
                f"setting is unknown; the environment has {variable}, did you mean {PREFIX}{close[0].upper()}?"
            )
    return found


def _from_arguments(arguments: Mapping[str, object]) -> list[tuple[str, object, str]]:
    unknown = arguments.keys() - set(KEYS)
    if unknown:
        raise CannotStart(f"setting is unknown; '{min(unknown)}' was given, {nearest(min(unknown), KEYS)}")
    return [
        (key, value, f"argument --{key.replace('_', '-')}") for key, value in arguments.items() if value is not None
    ]


def _converted(key: str, value: object, source: str) -> Any:
    """The value as its field's type; text from the environment may be a number or a truth. Raises CannotStart."""
    hint: Any = str if key == "url" else HINTS[key]
    if isinstance(value, Path):
        value = str(value)
    if key in _LISTS and isinstance(value, list) and all(isinstance(part, str) and "," not in part for part in value):
        value = ",".join(value)
    if key == "storages":
        _check_keys(value if isinstance(value, list) else [], _STORAGE_KEYS, source, "[[storages]]")
    if key == "recover" and isinstance(value, dict):
        for name, table in value.items():
            _check_keys([table], RecoverSettings.__struct_fields__, source, f'[recover."{name}"]')
    try:
        return msgspec.convert(value, hint, strict=not source.startswith("environment"), dec_hook=_decode)
    except (msgspec.ValidationError, ValueError) as error:
        choices = _choices(hint)
        reason = f"use one of {', '.join(choices)}" if choices else _readable(str(error), key)
        given = "" if key in _SECRETS or isinstance(value, list | dict) else f" '{masked(str(value))}'"
        raise CannotStart(f"setting is invalid; '{key}'{given} ({source}): {reason}") from error


def _check_keys(tables: Sequence[object], known: tuple[str, ...], source: str, where: str) -> None:
    """Here and not by the converter, because it would not say which key was meant."""
    for table in tables:
        for key in table if isinstance(table, dict) else []:
            if key not in known:
                raise CannotStart(f"setting is unknown; {source} has '{key}' in {where}, {nearest(key, known)}")


def _decode(kind: type, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("expected `str`, and not an empty one")
    return kind(value)


def _readable(message: str, key: str) -> str:
    text, _, path = message.partition(" - at `$")
    if path and path != "`":
        text += f" in {key}{path.rstrip('`')}"
    for word, plain in _PLAIN_WORDS.items():
        text = text.replace(f"got {word}", f"not {plain}").replace(word, plain)
    text = text.replace("Object missing", "misses the").replace("`", "'")
    return text[:1].lower() + text[1:]


def _choices(hint: Any) -> tuple[str, ...]:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(inner) if get_origin(inner) is Literal else ()


def explain(settings: Settings) -> list[Explained]:
    """Every setting with its value, its source and its meaning; secrets are masked."""
    values = {key: getattr(settings, key) for key in HINTS}
    return [
        Explained(key, _shown(value), _plain(value), settings.sources.get(key, "default"), _description(HINTS[key]))
        for key, value in values.items()
    ]


def masked(url: str) -> str:
    """The URL without its passwords, also where one is not escaped."""
    scheme, mark, rest = url.partition("://")
    if not mark:  # perhaps the words of libpq, or a login without a scheme
        return MASK if "@" in url or "password" in url.lower() else url
    login, at, host = rest.rpartition("@")
    if at and ":" in login and not rest.startswith("/"):
        rest = f"{login.partition(':')[0]}:{MASK}@{host}"
    shown = f"{scheme}://{rest}"
    if not is_readable(shown):
        return MASK
    parts = urlsplit(shown)
    if not _SECRET_WORD.search(parts.query):
        return shown
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    hidden = [(key, MASK if _SECRET_WORD.search(f"{key}={value}") else value) for key, value in pairs]
    return urlunsplit(parts._replace(query=urlencode(hidden, safe="*/:")))


def listed(text: str | None) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def is_readable(url: str) -> bool:
    """Whether it can be taken apart; one that cannot might hide a password anywhere."""
    return not unclear_url(url)


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


def networks(text: str | None) -> tuple[IPv4Network | IPv6Network, ...]:
    """Addresses and networks, separated by commas; raises CannotStart."""
    try:
        return tuple(map(ip_network, listed(text)))
    except ValueError as error:
        raise CannotStart(f"trusted_proxy is invalid; {error}, use for example 127.0.0.1, 10.0.0.0/8") from error


def _description(hint: Any) -> str:
    return next(meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta) and meta.description)


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
        case str():
            return _shown_text(value)
    return str(value)


def _shown_text(text: str) -> str:
    """A place or another text; of one that is no URL but has a login in it all the same, nothing."""
    is_place = "://" in text or (":" in text and "@" in text) or "password=" in text
    return masked(text) if is_place else text


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
        case str():
            return _shown_text(value)
    return value
