"""What a request must look like. Each function raises Invalid with the text that clients match, or returns.

`nearest` is for what somebody wrote into a file: a key that does not exist. `unclear_url` is for URLs with a login.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlsplit

from holdfast.core.moments import SECOND_US, go_duration, parse_duration
from holdfast.errors import Invalid

#: There is one; it may be named or left out.
NAMESPACE = "_system"
BATCH_COUNT_MAX = 1_000
QUEUE_NAME_CHARACTERS_MAX = 512
NAMESPACE_CHARACTERS_MAX = 256
REFERENCE_CHARACTERS_MAX = 2_000
TEXT_CHARACTERS_MAX = 2_000
DEDUPE_KEY_CHARACTERS_MAX = 512
ATTEMPTS_MAX = 65_536
LIST_COUNT_DEFAULT = 1_000
LIST_COUNT_MAX = 65_536
PARTITIONS_COUNT_MAX = 1_000
REQUEST_TIMEOUT_US_MIN = 10_000
REQUEST_TIMEOUT_US_MAX = 15 * 60 * SECOND_US

T = TypeVar("T")
#: A login that ends too early: what follows would be taken for a host, a path, or a query, and be shown.
_BROKEN_LOGIN = re.compile(r"[^/?#@\[]+://[^/?#@\[]*:[^/?#@]*[/?#].*@", re.DOTALL)

#: A login with a password, wherever in a text; a path that was made of a URL has one slash of the two.
_LOGIN = re.compile(r"(\b[A-Za-z][\w+.-]*:/{1,2}[^\s/:@'\"]*):[^\s'\"]*@")


def queue_name(name: str, *, what: str = "queue name") -> None:
    """A name is 1 to 512 characters without whitespace, control characters or `~`."""
    if not name.strip() and len(name) <= QUEUE_NAME_CHARACTERS_MAX:
        raise Invalid(f"{what} is invalid; queue name cannot be empty")
    _name(name, what=what, characters_max=QUEUE_NAME_CHARACTERS_MAX, without="~")


def _name(name: str, *, what: str, characters_max: int, without: str) -> None:
    if len(name) > characters_max:
        raise Invalid(f"{what} is invalid; cannot be greater than '{characters_max}' characters")
    if any(character.isspace() for character in name):
        raise Invalid(f"{what} is invalid; '{name}' cannot contain whitespace")
    for character in without:
        if character in name:
            raise Invalid(f"{what} is invalid; '{name}' cannot contain '{character}' character")
    if not name.isprintable():
        raise Invalid(f"{what} is invalid; {name!a} cannot contain control characters")


def namespace(name: str) -> None:
    """There is one namespace; it may be named or left out."""
    if name not in {"", NAMESPACE}:
        _name(name, what="namespace name", characters_max=NAMESPACE_CHARACTERS_MAX, without="~:")
        raise Invalid(f"namespace is invalid; '{name}' is not known here, leave it out")


def queue_pivot(pivot: str) -> None:
    """A listing of queues begins with a name, or with what might be one."""
    if "~" in pivot:
        raise Invalid(f"pivot is invalid; '{pivot}' cannot contain '~' character")


@lru_cache(maxsize=1024)
def request_timeout(text: str) -> int:
    """Microseconds of a request timeout: required, 10 ms to 15 minutes, both ends allowed."""
    timeout_us = parse_duration(text, what="request timeout")
    if not timeout_us:
        raise Invalid("request timeout is required; '5m' is recommended, 15m is the maximum")
    if timeout_us > REQUEST_TIMEOUT_US_MAX:
        wanted = go_duration(timeout_us)
        raise Invalid(f"request timeout is invalid; maximum timeout is '15m' but '{wanted}' was requested")
    if timeout_us < REQUEST_TIMEOUT_US_MIN:
        wanted = go_duration(timeout_us)
        raise Invalid(f"request timeout is invalid; minimum timeout is '10ms' but '{wanted}' was requested")
    return timeout_us


#: What an empty list is called, as clients match it; each verb of the peer has its own words.
EMPTY_ITEMS = {
    "produce": "items cannot be empty; at least one item is required",
    "retry": "items is invalid; list of items cannot be empty",
    "import": "items is invalid; cannot be empty",
}


def items(batch: Sequence[T], verb: str = "produce") -> None:
    """A list of items has 1 to 1 000 of them."""
    if not batch:
        raise Invalid(EMPTY_ITEMS[verb])
    if len(batch) > BATCH_COUNT_MAX:
        raise Invalid(f"items is invalid; max_{verb}_batch_size is {BATCH_COUNT_MAX} but received {len(batch)}")


def ids(batch: Sequence[str], *, empty: str = "list of ids cannot be empty") -> None:
    """A list of ids has 1 to 1 000 of them."""
    if not batch:
        raise Invalid(f"ids is invalid; {empty}")
    if len(batch) > BATCH_COUNT_MAX:
        raise Invalid(f"ids is invalid; max_complete_batch_size is {BATCH_COUNT_MAX} but received {len(batch)}")


def client_id(text: str) -> None:
    """A lease request names its client."""
    if not text.strip():
        raise Invalid("invalid client id; cannot be empty")
    if len(text) > TEXT_CHARACTERS_MAX:
        raise Invalid(f"invalid client id; cannot be greater than '{TEXT_CHARACTERS_MAX}' characters")


def batch_size(count: int) -> None:
    """A lease request asks for 1 to 1 000 items."""
    if count <= 0:
        raise Invalid("invalid batch size; must be greater than zero")
    if count > BATCH_COUNT_MAX:
        raise Invalid(f"invalid batch size; max_lease_batch_size is {BATCH_COUNT_MAX}, but {count} was requested")


def list_limit(count: int) -> int:
    """The page size of a listing; 0 is the default."""
    if count < 0:
        raise Invalid("limit is invalid; limit cannot be negative")
    if count > LIST_COUNT_MAX:
        raise Invalid(f"limit is invalid; cannot be greater than {LIST_COUNT_MAX}")
    return count or LIST_COUNT_DEFAULT


def text_field(text: str, *, what: str, characters_max: int = TEXT_CHARACTERS_MAX) -> None:
    """A short text: bounded, and storable in every engine (PostgreSQL's text knows no NUL)."""
    if len(text) > characters_max:
        raise Invalid(f"{what} field is invalid; cannot be greater than '{characters_max}' characters")
    if "\x00" in text:
        raise Invalid(f"{what} field is invalid; cannot contain a NUL character")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise Invalid(f"{what} field is invalid; cannot contain half of a surrogate pair")


def item_texts(kind: str, encoding: str, reference: str, dedupe_key: str) -> None:
    """What an item is beside its payload."""
    text_field(kind, what="kind")
    text_field(encoding, what="encoding")
    text_field(reference, what="reference", characters_max=REFERENCE_CHARACTERS_MAX)
    text_field(dedupe_key, what="dedupe_key", characters_max=DEDUPE_KEY_CHARACTERS_MAX)


def max_attempts(count: int) -> None:
    """0 is no limit."""
    if count < 0:
        raise Invalid("max attempts is invalid; cannot be negative number")
    if count > ATTEMPTS_MAX:
        raise Invalid(f"max attempts is invalid; cannot be greater than {ATTEMPTS_MAX}")


def partitions(count: int, *, now: int = 0) -> int:
    """How many partitions a queue shall have: 0 is 1 (or as many as it has), and it never gets fewer."""
    if count < 0:
        raise Invalid("partitions is invalid; cannot be less than 1")
    if count > PARTITIONS_COUNT_MAX:
        raise Invalid(f"partitions is invalid; cannot be greater than {PARTITIONS_COUNT_MAX}")
    wanted = count or now or 1
    if wanted < now:
        raise Invalid(f"partitions is invalid; the queue has {now}, partitions cannot be removed")
    return wanted


def timeouts(lease_timeout_us: int, expire_timeout_us: int) -> None:
    """Both timeouts are set and an item may live at least as long as one lease."""
    if not lease_timeout_us:
        raise Invalid("lease timeout is invalid; cannot be empty")
    if not expire_timeout_us:
        raise Invalid("expire timeout is invalid; cannot be empty")
    if lease_timeout_us > expire_timeout_us:
        raise Invalid(
            f"lease timeout is too long; {go_duration(lease_timeout_us)} cannot be greater than the "
            f"expire timeout {go_duration(expire_timeout_us)}"
        )


def nearest(key: str, known: tuple[str, ...]) -> str:
    """A hint for a key that does not exist: the one that was probably meant, or all of them."""
    close = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


def without_passwords(text: str) -> str:
    """A text in which a URL may be, without its password."""
    return _LOGIN.sub(r"\1:***@", text)


def unclear_url(url: str) -> str:
    """Why nobody can say where its login ends and its host begins, without showing any of it; else empty."""
    if _BROKEN_LOGIN.match(url):
        return "its password has a '/', '?' or '#', write these as %2F, %3F and %23, and an '@' behind the host as %40"
    try:
        for host in urlsplit(url).netloc.rpartition("@")[2].split(","):
            urlsplit(f"//{host}").port  # noqa: B018 - raises for a port that is no number
    except ValueError:
        return "it cannot be read; is its port a number, and its password escaped?"
    return ""
