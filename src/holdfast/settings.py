"""What a server is started with: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments.

Everything is read and checked once, in `load_settings`; whoever gets a `Settings` need not check again. Each value
remembers where it came from. A secret comes from the environment alone, and neither it nor a password in a URL is
ever shown.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec
from msgspec import Meta, Struct

from holdfast.errors import CannotStart

FILE_NAME = "holdfast.toml"
PREFIX = "HOLDFAST_"
DEFAULT_URL = "sqlite:///holdfast-data"
DEFAULT_LISTEN = "127.0.0.1:8470"
MASK = "***"
FILE_BYTES_MAX = 1_000_000
#: Variables with our prefix that are no settings: the client's, and those of tests and proofs.
OTHER_VARIABLES = frozenset(
    {"TOKEN", "CONFIG", "CRASH_AT", "CLOCK_OFFSET_S", "TEST_WITHOUT", "TEST_POSTGRES_BIN", "SOAK_SEED"}
)
#: Between these a variable is taken for a misspelt setting; Kubernetes sets HOLDFAST_PORT and the like by itself.
NEAR_ENOUGH = 0.8


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


class Address(NamedTuple):
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


BodyBytes = Annotated[int, Meta(ge=1_000, le=1_000_000_000)]


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
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least level that is logged")
    ] = "info"
    log_format: Annotated[Literal["json", "text"], Meta(description="One JSON object a line, or text for people")] = (
        "json"
    )
    #: Where each value came from, by key; for `explain`.
    sources: dict[str, str] = {}

    @property
    def address(self) -> Address:
        return parse_address(self.listen)

    @property
    def admin_token_file(self) -> Path:
        """Where a generated admin token is kept, readable by its owner alone."""
        return self.data_folder / "admin-token"


class Explained(NamedTuple):
    """One setting, for people: the value is safe to show."""

    key: str
    value: str
    source: str
    meaning: str


_HINTS = {key: hint for key, hint in get_type_hints(Settings, include_extras=True).items() if key != "sources"}
#: Every key that a file may have, in order; the environment has the same ones, in capitals after the prefix.
KEYS = ("url", *_HINTS)
_SECRETS = frozenset({"admin_token"})
_FILE_KEYS = tuple(key for key in KEYS if key not in _SECRETS)
_ENVIRONMENT_KEYS = tuple(key for key in KEYS if key != "storages")


def load_settings(
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    serving: bool = True,
) -> Settings:
    """Read all sources and check them. An argument that is None was not given.

    `file` is the configuration file; without it HOLDFAST_CONFIG names one, or ./holdfast.toml is read if it is there.
    With `serving` false the rules that only matter to a server are left out. Raises CannotStart.
    """
    env = os.environ if environment is None else environment
    values: dict[str, object] = {}
    sources = dict.fromkeys(_HINTS, "default")
    for key, value, source in (*_from_file(file, env), *_from_environment(env), *_from_arguments(arguments or {})):
        target = "storages" if key == "url" else key
        values[target] = (
            (StorageSettings(name="default", url=_converted("url", value, source)),)
            if key == "url"
            else _converted(key, value, source)
        )
        sources[target] = source
    settings = Settings(**values, sources=sources)  # type: ignore[arg-type]  # each was converted to its field's type
    _check(settings)
    if serving:
        check_serving(settings)
    return settings


def explain(settings: Settings) -> list[Explained]:
    """Every setting with its value, its source and its meaning; secrets are masked."""
    return [
        Explained(key, _shown(getattr(settings, key)), settings.sources.get(key, "default"), _description(hint))
        for key, hint in _HINTS.items()
    ]


def masked(url: str) -> str:
    """The URL without its passwords."""
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


def parse_address(text: str) -> Address:
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
    return Address(host, int(port))


def nearest(key: str, known: tuple[str, ...]) -> str:
    """A hint for a key that does not exist: the one that was probably meant, or all of them."""
    close = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


# --- the sources ----------------------------------------------------------------------------------------------


def _from_file(file: Path | None, env: Mapping[str, str]) -> list[tuple[str, object, str]]:
    named = file or (Path(env[PREFIX + "CONFIG"]) if env.get(PREFIX + "CONFIG") else None)
    path = named or Path(FILE_NAME)
    if named is None and not path.exists():
        return []
    table = _read_toml(path)
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


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise CannotStart(f"configuration is invalid; {path} is larger than {FILE_BYTES_MAX} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise CannotStart(f"configuration cannot be read; {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CannotStart(f"configuration is invalid; {path} is not UTF-8 at byte {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise CannotStart(f"configuration is invalid; {path} is not TOML: {error}") from error


def _from_environment(env: Mapping[str, str]) -> list[tuple[str, object, str]]:
    found: list[tuple[str, object, str]] = []
    for variable, text in env.items():
        key = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in OTHER_VARIABLES:
            continue
        if key in _ENVIRONMENT_KEYS:
            if text:  # an empty variable is how shells and container tools unset one
                found.append((key, text, f"environment {variable}"))
        elif key == "storages":
            raise CannotStart(f"setting is not allowed; {variable} cannot be a variable, use [[storages]] in a file")
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


# --- the values -----------------------------------------------------------------------------------------------


def _converted(key: str, value: object, source: str) -> Any:
    """The value as its field's type; text from the environment may be a number or a truth. Raises CannotStart."""
    hint: Any = str if key == "url" else _HINTS[key]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise CannotStart(f"setting is invalid; '{key}' ({source}): {value} is not a number")
    strict = not source.startswith("environment")
    try:
        return msgspec.convert(value, hint, strict=strict, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError) as error:
        choices = _choices(hint)
        reason = f"use one of {', '.join(choices)}" if choices else _readable(str(error))
        given = "" if key in _SECRETS or isinstance(value, list | dict) else f" '{masked(str(value))}'"
        raise CannotStart(f"setting is invalid; '{key}'{given} ({source}): {reason}") from error


def _decode(kind: type, value: object) -> object:
    makers: dict[type, Callable[[str], object]] = {Path: Path, Secret: Secret}
    if not isinstance(value, str) or not value:
        raise ValueError("a text is expected")
    return makers[kind](value)


def _readable(message: str) -> str:
    text, _, place = message.partition(" - at `$")
    if place and place != "`":
        text += f" in storages{place.rstrip('`')}"
    return text[:1].lower() + text[1:]


def _choices(hint: Any) -> tuple[str, ...]:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(inner) if get_origin(inner) is Literal else ()


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
        case tuple():
            return "\n".join(f"{s.name} = {masked(s.url)} (affinity {s.affinity:g})" for s in value)
    return str(value)


# --- the rules ------------------------------------------------------------------------------------------------


def _check(settings: Settings) -> None:
    parse_address(settings.listen)
    storages = settings.storages
    source = settings.sources.get("storages", "")
    if not storages:
        raise CannotStart(f"storages is invalid; the list is empty ({source}), leave it out or name one")
    for what, texts in (
        ("name", [storage.name for storage in storages]),
        ("url", [masked(storage.url) for storage in storages if not storage.url.startswith("memory:")]),
    ):
        twice = sorted({text for text in texts if texts.count(text) > 1})
        if twice:
            raise CannotStart(f"storages is invalid; {what} '{twice[0]}' is used twice ({source})")
    if not any(storage.affinity > 0 for storage in storages):
        raise CannotStart(f"storages is invalid; every affinity is 0 ({source}), give one storage a positive number")


def check_serving(settings: Settings) -> None:
    """The rules that keep a server from standing open by mistake; raises CannotStart that says what to do."""
    for storage in settings.storages:
        if urlsplit(storage.url).scheme in {"http", "https"}:
            raise CannotStart(
                f"storage URL is invalid; {masked(storage.url)} is the address of a server, a server needs a storage, "
                "use --url sqlite:///FOLDER or postgresql://…"
            )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "tls_key" if settings.tls_key is None else "tls_cert"
        raise CannotStart(f"TLS is incomplete; {missing} is missing, give both --tls-cert and --tls-key")
    for key, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        if path is not None and not os.access(path, os.R_OK):
            raise CannotStart(f"TLS cannot be used; {key} '{path}' cannot be read, check the path and its permissions")
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
