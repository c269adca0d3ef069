"""What settings must be together. Each rule raises CannotStart, which says what is wrong and what to do."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from holdfast.errors import CannotStart
from holdfast.settings.values import Settings, masked, parse_address


def check(settings: Settings) -> None:
    """The rules for everybody: an address that can be read, and storages that can be told apart."""
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
