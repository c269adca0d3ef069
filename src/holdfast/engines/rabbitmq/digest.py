"""The digest by which a letter is recognised when it is delivered again: its body, properties and headers.

A quorum queue sorts the header table of what it gives back, makes an empty table of none, and writes its counts into
it: so headers are taken in the order of their names, no table is an empty one, and the counts are left out.
"""

from __future__ import annotations

import hashlib

from holdfast.engines.rabbitmq.wire import properties, table

DIGEST_BYTES = 16
#: What changes from delivery to delivery of one and the same message.
COUNTS = frozenset((b"x-delivery-count", b"x-acquired-count"))


def digest(raw: bytes, body: bytes) -> bytes:
    """Of a message's raw properties and its body. Never raises: what cannot be read counts as it came."""
    try:
        pieces = properties.split(raw)
    except properties.Unreadable:
        return _hash(raw, body)
    headers = pieces.pop("headers", table.EMPTY)
    found = table.scan(headers)
    return digest_of(
        properties.join(pieces), [headers[start:end] for name, start, end in found.entries if name not in COUNTS],
        headers[found.rest :], body,
    )  # fmt: skip


def digest_of(plain: bytes, entries: list[bytes], rest: bytes, body: bytes) -> bytes:
    """Of the properties without headers, the header entries, what of the headers could not be read, and the body."""
    # An entry begins with the length of its name, so this is not the order of names; but it is one and the same.
    return _hash(b"".join((plain, *sorted(entries), rest)), body)


def _hash(head: bytes, body: bytes) -> bytes:
    made = hashlib.blake2b(len(head).to_bytes(8, "big"), digest_size=DIGEST_BYTES)
    made.update(head)
    made.update(body)
    return made.digest()
