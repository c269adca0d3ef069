"""What settings must be together. Each rule raises CannotStart, which says what is wrong and what to do."""

from __future__ import annotations

import os
import ssl
from urllib.parse import urlsplit

from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.errors import BadUrl, CannotStart, Invalid
from holdfast.settings.values import Settings, is_readable, masked, parse_address

RECOVERABLE = frozenset({"amqp", "amqps", "sqlite", "postgresql", "postgres"})


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
