"""What stands before the body of an HTTP/1.1 request, and where the body ends.

llhttp (through httptools) reads a head that is there as a whole; what it lets pass and the standard does not is refused
here. Whoever can read a request in two ways can be made to smuggle one behind another: in doubt it is refused.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from msgspec import Struct

from holdfast.errors import HoldfastError

TARGET_BYTES_MAX = 8 * 1024
HEADERS_BYTES_MAX = 64 * 1024
HEADERS_COUNT_MAX = 100
#: A request line is a method, a target and a version.
LINE_BYTES_MAX = TARGET_BYTES_MAX + 64
CHUNK_LINE_BYTES_MAX = 1024
TRAILERS_BYTES_MAX = 8 * 1024
#: So much of the line before a chunk is let be; what is beyond, and more than twice the chunk, counts against a limit.
CHUNK_LINE_BYTES_FREE = 16
CHUNK_LINES_BYTES_MAX = 16 * 1024

_LENGTH = re.compile(rb"[0-9]{1,18}")
_FIRST_LINE = re.compile(rb"[A-Z-]+ [\x21-\x7e]+ HTTP/[0-9]\.[0-9]\r\n")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0")
_BEGINNING = re.compile(rb"[A-Z-]+(?: |$)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class RequestRefused(HoldfastError):
    """A request that is no HTTP/1.1, or is beyond a limit of it: the connection ends with the answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.code_text = HTTPStatus(code).phrase


class RequestHead(Struct, frozen=True):
    """A request before its body. `length` is what its body has; None where it comes in chunks."""

    method: str
    path: str  #: without escapes
    scope: dict[str, Any]  #: what ASGI says of a request; of every one with the same head on its connection
    length: int | None
    keeps_alive: bool
    expects: bool  #: a word of ours, before it sends the body


class _Found:
    """What llhttp finds in a head."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))


def check_partial(data: bytes | bytearray) -> None:
    """Refuse what cannot become a head any more, or grows beyond its limits."""
    line_end = data.find(b"\r\n", 0, LINE_BYTES_MAX)
    if line_end < 0 and len(data) >= LINE_BYTES_MAX:
        raise _too_long()
    if len(data) >= (line_end if line_end >= 0 else 0) + HEADERS_BYTES_MAX:
        raise _too_large()
    # Only where the first line is not there as a whole: a method of another protocol, or none at all.
    if line_end < 0 and not _BEGINNING.match(data[:32]):
        raise _malformed("it does not begin with a method")


def check_lines(data: bytes | bytearray, begin: int) -> None:
    """Refuse a line end that is none, in what has come since."""
    if (bare := _BARE.search(data, begin)) and bare.end() < len(data):
        raise _malformed("a line ends otherwise than with CR and LF")


def read_head(data: bytes, base: dict[str, Any]) -> RequestHead:
    """A head that ends with its empty line; `base` is what the connection says of all its requests."""
    if len(data) - data.find(b"\r\n") > HEADERS_BYTES_MAX:
        raise _too_large()
    if not _FIRST_LINE.match(data):
        raise _malformed("its first line is not a method, a target and a version")
    try:
        parser, found = _parsed(data)
        method = parser.get_method()
    except httptools.HttpParserInvalidMethodError:
        # A word that llhttp does not know: another method, as any that is not meant.
        method, blank, rest = data.partition(b" ")
        parser, found = _parsed(b"POST" + blank + rest)
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise RequestRefused(505, f"version is not supported; HTTP/{version} was asked for, HTTP/1.1 is spoken here")
    if len(found.target) > TARGET_BYTES_MAX:
        raise _too_long()
    if len(found.headers) > HEADERS_COUNT_MAX:
        raise RequestRefused(431, f"headers are too many; {HEADERS_COUNT_MAX} is the maximum")
    return _checked(method.decode("ascii"), found, version, base)


def _parsed(data: bytes) -> tuple[Any, _Found]:
    found = _Found()
    parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # nothing is upgraded here: it is answered as if nobody had asked
    except httptools.HttpParserInvalidMethodError:
        raise
    except httptools.HttpParserError as error:
        raise _malformed(str(error)) from error
    return parser, found


def _checked(method: str, found: _Found, version: str, base: dict[str, Any]) -> RequestHead:
    headers = _Known()
    for name, value in found.headers:
        if _VALUE.fullmatch(value) is None:
            raise _malformed(f"the header {name.decode('latin-1')} has a character that no header may have")
        if name in _KNOWN:
            headers.take(name, value)
    is_new = version == "1.1"
    if is_new and headers.host is None:
        raise _malformed("the header host is missing")
    if headers.coding is not None and (not is_new or headers.length is not None):
        raise _malformed("it says transfer-encoding beside content-length, or in HTTP/1.0")
    if headers.coding not in (None, b"chunked"):
        raise RequestRefused(501, "transfer coding is unknown; chunked is the only one")
    path, query = _target(found.target)
    scope = {
        **base,
        "http_version": version,
        "method": method,
        "path": (plain := unquote(path.decode("ascii"))),
        "raw_path": path,
        "query_string": query,
        "headers": found.headers,
    }
    return RequestHead(
        method=method,
        path=plain,
        scope=scope,
        length=None if headers.coding else headers.length or 0,
        keeps_alive=is_new and b"close" not in headers.connection,
        expects=is_new and headers.expects,
    )


class _Known:
    """The headers that say where a request ends and what becomes of its connection. Twice is not once."""

    def __init__(self) -> None:
        self.host: bytes | None = None
        self.length: int | None = None
        self.coding: bytes | None = None
        self.connection: list[bytes] = []
        self.expects = False

    def take(self, name: bytes, value: bytes) -> None:
        """Note one, or refuse it."""
        if name == b"host":
            if self.host is not None:
                raise _malformed("the header host is there twice")
            self.host = value
        elif name == b"content-length":
            if self.length is not None or not _LENGTH.fullmatch(value):
                raise _malformed("its content-length is no number, or is there twice")
            self.length = int(value)
        elif name == b"transfer-encoding":
            if self.coding is not None:
                raise RequestRefused(501, "transfer coding is unknown; chunked is the only one, and once")
            self.coding = value.lower()
        elif name == b"connection":
            self.connection += [one.strip().lower() for one in value.split(b",")]
        elif value.lower() == b"100-continue":
            self.expects = True
        else:
            raise RequestRefused(417, "expectation is unknown; 100-continue is the only one")


_KNOWN = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"})


def _target(target: bytes) -> tuple[bytes, bytes]:
    """The path and the query of a target, whose host is not looked at: there is one server here."""
    if target[:1] != b"/":
        scheme, _, rest = target.partition(b"://")
        if scheme.lower() not in (b"http", b"https") or not rest:
            raise _malformed("its target is neither a path nor a URL")
        target = b"/" + rest.partition(b"/")[2]
    if b"#" in target:
        raise _malformed("its target has a fragment")
    path, _, query = target.partition(b"?")
    return path, query


def _malformed(why: str) -> RequestRefused:
    return RequestRefused(400, f"request is malformed; {why}")


def _too_long() -> RequestRefused:
    return RequestRefused(414, f"URL is too long; {TARGET_BYTES_MAX} bytes is the maximum, ids can go by POST")


def _too_large() -> RequestRefused:
    return RequestRefused(431, f"headers are too large; {HEADERS_BYTES_MAX} bytes is the maximum")


class ChunkedBody:
    """A body that comes in chunks: takes them out of what arrives, up to its end."""

    def __init__(self) -> None:
        self._left = 0  # bytes of the chunk that is being read
        self._after_chunk = False
        self._trailers = -1  # bytes of the lines after the last chunk; -1 before it
        self._part = b""  # of a line
        self._spent = 0  # bytes of lines that were more than their chunks are worth

    def take(self, data: bytes | bytearray, into: bytearray) -> int | None:
        """How many bytes of `data` belong to the body; None when it goes on. Its bytes are added to `into`."""
        before = len(self._part)
        data, at, self._part = self._part + data if before else data, 0, b""
        while True:
            if self._left:
                piece = data[at : at + self._left]
                into += piece
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    return None
                self._after_chunk = True
            end = data.find(b"\r\n", at, at + CHUNK_LINE_BYTES_MAX)
            if end < 0:
                if len(data) - at >= CHUNK_LINE_BYTES_MAX or b"\n" in data[at:]:
                    raise _malformed("a line of a chunk does not end")
                self._part = bytes(data[at:])
                return None
            line, at = bytes(data[at:end]), end + 2
            if self._line(line):
                return at - before

    def _line(self, line: bytes) -> bool:
        """One line between chunks; whether it was the last."""
        if self._after_chunk:
            if line:
                raise _malformed("a chunk is longer than it says")
            self._after_chunk = False
        elif self._trailers < 0:
            if (size := _CHUNK.fullmatch(line)) is None:
                raise _malformed("the size of a chunk is none")
            self._left = int(size[1], 16)
            self._spent = max(0, self._spent + len(line) - CHUNK_LINE_BYTES_FREE - 2 * self._left)
            if self._spent > CHUNK_LINES_BYTES_MAX:
                raise _malformed("its chunks are mostly extensions")
            self._trailers = -1 if self._left else 0
        elif not line:
            return True
        else:
            self._trailers += len(line)
            if self._trailers > TRAILERS_BYTES_MAX or not _TRAILER.fullmatch(line):
                raise _malformed("what stands behind the last chunk is no header, or too much")
        return False
