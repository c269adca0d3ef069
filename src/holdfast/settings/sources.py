"""Where settings come from: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments.

And what they must be together: each rule raises CannotStart, which says what is wrong and what to do.
"""

from __future__ import annotations

import difflib
import os
import ssl
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec

from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.errors import BadUrl, CannotStart, Invalid
from holdfast.settings.values import (
    HINTS,
    RecoverSettings,
    Secret,
    Settings,
    StorageSettings,
    is_readable,
    masked,
    parse_address,
)

FILE_NAME = "holdfast.toml"
PREFIX = "HOLDFAST_"
FILE_BYTES_MAX = 1_000_000
#: Variables with our prefix that are no settings: the client's, and those of tests and proofs.
OTHER_VARIABLES = frozenset({"TOKEN", "CONFIG", "CRASH_AT", "CLOCK_OFFSET_S", "TEST_WITHOUT", "TEST_POSTGRES_BIN"})
#: Other names of variables, which other commands know.
ALIASES = {"broker_url": "broker", "management_url": "management"}
#: From here on a variable is taken for a misspelt setting. Others are let be: Kubernetes sets HOLDFAST_PORT by itself.
NEAR_ENOUGH = 0.8
#: What a file may have; the environment has the same in capitals after the prefix, but for lists.
KEYS = ("url", *HINTS)
_SECRETS = frozenset({"admin_token", "ledger_key"})
_FILE_KEYS = tuple(key for key in KEYS if key not in _SECRETS)
_TABLES = {"storages": "[[storages]]", "recover": '[recover."NAME"]'}
_ENVIRONMENT_KEYS = tuple(key for key in KEYS if key not in _TABLES)
_STORAGE_KEYS = tuple(StorageSettings.__struct_fields__)
_PLAIN_WORDS = {"`int`": "a whole number", "`float`": "a number", "`str`": "a text", "`bool`": "true or false"}
RECOVERABLE = frozenset({"amqp", "amqps", "sqlite", "postgresql", "postgres"})


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
    sources = dict.fromkeys(HINTS, "default")
    for key, value, source in (*_from_file(file, env), *_from_environment(env), *_from_arguments(arguments or {})):
        target = "storages" if key == "url" else key
        values[target] = (
            (StorageSettings(name="default", url=_converted("url", value, source)),)
            if key == "url"
            else _converted(key, value, source)
        )
        sources[target] = source
    settings = Settings(**values, sources=sources)  # type: ignore[arg-type]  # each was converted to its field's type
    check(settings)
    if serving:
        check_serving(settings)
    return settings


def nearest(key: str, known: tuple[str, ...]) -> str:
    """A hint for a key that does not exist: the one that was probably meant, or all of them."""
    close = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


def check(settings: Settings) -> None:
    """The rules for everybody: an address that can be read, and storages that can be told apart."""
    parse_address(settings.listen)
    storages = settings.storages
    source = settings.sources.get("storages", "")
    if not storages:
        raise CannotStart(f"storages is invalid; the list is empty ({source}), leave it out or name one")
    for storage in storages:
        if not is_readable(storage.url):
            raise BadUrl(f"storage URL is invalid; the one of '{storage.name}' ({source}) is not a URL")
    for what, texts in (
        ("name", [storage.name for storage in storages]),
        ("url", [masked(storage.url) for storage in storages if not storage.url.startswith("memory:")]),
    ):
        twice = sorted({text for text in texts if texts.count(text) > 1})
        if twice:
            raise CannotStart(f"storages is invalid; {what} '{twice[0]}' is used twice ({source})")
    check_recoveries(settings)
    if not any(storage.affinity > 0 for storage in storages):
        raise CannotStart(f"storages is invalid; every affinity is 0 ({source}), give one storage a positive number")


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
    makers: dict[type, Callable[[str], object]] = {Path: Path, Secret: Secret}
    if not isinstance(value, str) or not value:
        raise ValueError("expected `str`, and not an empty one")
    return makers[kind](value)


def _readable(message: str, key: str) -> str:
    text, _, place = message.partition(" - at `$")
    if place and place != "`":
        text += f" in {key}{place.rstrip('`')}"
    for word, plain in _PLAIN_WORDS.items():
        text = text.replace(f"got {word}", f"not {plain}").replace(word, plain)
    text = text.replace("Object missing", "misses the").replace("`", "'")
    return text[:1].lower() + text[1:]


def _choices(hint: Any) -> tuple[str, ...]:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(inner) if get_origin(inner) is Literal else ()
