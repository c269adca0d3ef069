"""A dead-letter queue full of letters that are all known, and the books that count them afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.message import Delivery, Outgoing
from holdfast.proof.conservation import Conservation, ConservationReport
from tests.support.amqp import Admin, headers_of, outgoing, properties, table
from tests.support.command import Command, Ended, Forked
from tests.support.eventually import eventually
from tests.support.forking import memory_peak_mib

DLQ, EXCHANGE = "imageviewer.dlq", "imageviewer"
ROUTES = """exchange = "imageviewer"
type_header = "MessageType"

[routes]
CollectionScan = "collection.scan"
CacheGeneration = "cache.generation"
Refused = "refusing.queue"
LibraryScan = { exchange = "", key = "library_scan_queue" }
"""
TARGETS = ("collection.scan", "cache.generation", "refusing.queue", "library_scan_queue")
#: A quorum queue that is younger is forgotten by a single node that is killed.
QUORUM_AGE_S = 3.0
CHANGED = {
    *(f"x-redriven-{what}" for what in ("at", "by", "from", "count")),
    *(f"x-original-{what}" for what in ("exchange", "routing-key", "queue", "for")),
    *(f"x-first-original-{what}" for what in ("exchange", "routing-key", "queue")),
    *(f"x-{which}-death-{what}" for which in ("first", "last") for what in ("queue", "reason", "exchange")),
    *("x-redrive-id", "x-redrive-run", "x-kept-death", "x-delivery-count", "x-acquired-count", "x-death"),
    "x-retry-count",
}


def letter(
    number: int, *, kind: str | None = "CollectionScan", key: str = "", told: Mapping[str, Any] | None = None
) -> Outgoing:
    """A letter as it lies in a dead-letter queue; `key` is the queue to publish it to, `told` are further headers."""
    death = {
        "count": 1,
        "reason": "rejected",
        "queue": "collection.scan",
        "exchange": EXCHANGE,
        "routing-keys": ["collection.scan"],
    }
    headers: dict[str, Any] = {"tenant": "acme", "x-death": [death], **(told or {})}
    if kind is not None:
        headers["MessageType"] = kind
    body = json.dumps({"n": number, "pad": "x" * 100}).encode()
    named = f"m-{number:06}"
    return outgoing(key, body, message_id=named, content_type="application/json", headers=headers, delivery_mode=2)


def noted(exchange: str, key: str, *, queue: str = "collection.scan", dead_queue: str = DLQ) -> dict[str, Any]:
    """The headers by which a consumer of ours says where a message failed."""
    origin = {"x-original-exchange": exchange, "x-original-routing-key": key, "x-original-queue": queue}
    return {**origin, "x-original-for": dead_queue}


def essence(delivery: Delivery | Outgoing) -> bytes:
    """Everything of a message that a redrive may not change, in bytes."""
    pieces = properties.split(delivery.properties)
    headers = pieces.pop("headers", table.EMPTY)
    entries = [
        headers[start:end]
        for name, start, end in table.scan(headers).entries
        if name.decode("utf-8", "replace") not in CHANGED
    ]
    pieces.pop("delivery_mode", None)
    return b"\0".join([properties.join(pieces), *sorted(entries), delivery.body])


@dataclass
class DeadLetterQueue:
    """A virtual host with a dead-letter queue, targets, and a routes file."""

    admin: Admin
    folder: Path
    kind: str = "classic"
    name: str = DLQ
    books: Conservation = field(default_factory=Conservation)
    routes: Path = Path()

    @property
    def url(self) -> str:
        return self.admin.url

    async def make(
        self, targets: Sequence[str] = TARGETS, *, declare_it: bool = True, target_kind: str = "classic"
    ) -> DeadLetterQueue:
        """Declare everything. `refusing.queue` takes one message and refuses the rest."""
        self.routes = self.folder / "routes.toml"
        self.routes.write_text(ROUTES)
        await self.admin.exchange(EXCHANGE)
        if declare_it:
            await self.queue(self.name, self.kind)
        for target in targets:
            full: dict[str, int | str] = {"x-max-length": 1, "x-overflow": "reject-publish"}
            await self.queue(target, target_kind, **(full if target == "refusing.queue" else {}))
            await self.admin.bind(target, EXCHANGE, target)
        return self

    async def queue(self, name: str, kind: str = "classic", **arguments: int | str) -> str:
        make = self.admin.quorum_queue if kind == "quorum" else self.admin.queue
        return await make(name, **arguments)

    async def fill(self, letters: Iterable[Outgoing], *, counted: bool = True) -> None:
        """Publish into the dead-letter queue, confirmed, and enter each into the books."""
        batch = list(letters)
        for one in batch:
            one.routing_key = one.routing_key or self.name
        await self.admin.publish(batch)
        if counted:
            for one in batch:
                self.put(one)

    def put(self, one: Outgoing) -> None:
        """It is in the queue."""
        self.books.put(self.name_of(one), essence(one))

    def name_of(self, one: Delivery | Outgoing) -> str:
        """What a message is called in the books: by its id, so that one whose bytes were changed is known again.

        One without an id is called by its bytes: changed, it is lost and another is unexpected.
        """
        message_id = properties.split(one.properties).get("message_id")
        return message_id[1:].decode("utf-8", "replace") if message_id else hashlib.sha256(essence(one)).hexdigest()

    async def found(self, places: Sequence[str] | None = None) -> dict[str, list[Delivery]]:
        """Everything that is in the targets and the dead-letter queue, taken out and entered into the books."""
        seen: dict[str, list[Delivery]] = {}
        for place in (self.name, *(TARGETS if places is None else places)):
            count = await self.admin.count(place)
            seen[place] = await self.admin.drain(place, count) if count else []
            for one in seen[place]:
                self.books.found(place, self.name_of(one), essence(one))
        return seen

    async def check(self, *, duplicates_max: int | None = 0, places: Sequence[str] | None = None) -> ConservationReport:
        """Nothing lost, nothing altered, and no more duplicates than the summary counted."""
        await self.found(places)
        return self.books.check(duplicates_max=duplicates_max)

    async def arrived(self, count: int, *places: str, unless_ended: subprocess.Popen[bytes] | None = None) -> None:
        """Wait until so many are in these places, or in the first target. A queue without a leader says 0."""

        async def are_there() -> bool:
            if unless_ended and unless_ended.poll() is not None:
                return True
            return sum([await self.admin.count(place) for place in places or TARGETS[:1]]) >= count

        await eventually(are_there, timeout_s=90.0)

    # The command.

    def command(self) -> Command:
        return Forked(self.folder, "memory://")

    def arguments(self, *more: str | Path, url: str = "") -> list[str]:
        return ["recover", url or self.url, self.name, "--json", *map(str, more)]

    async def recover(self, *more: str | Path, routes: bool = True, **variables: str) -> Ended:
        """Run `holdfast recover` to its end, in a process of its own."""
        given = ("--routes", self.routes) if routes else ()
        return await asyncio.to_thread(lambda: self.command()(*self.arguments(*given, *more), stdin=b"", **variables))

    def start(self, *more: str | Path, url: str = "", **variables: str) -> subprocess.Popen[bytes]:
        """Start it; `url` is another way to the same broker."""
        return self.command().start(*self.arguments("--routes", self.routes, *more, url=url), **variables)


def summary(ended: Ended) -> dict[str, Any]:
    """What it printed last on stdout."""
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


async def ended(process: subprocess.Popen[bytes], *codes: int, timeout_s: float = 180.0) -> dict[str, Any]:
    """What a run told at its end, which must be one of these; 0 or 3, when none is named."""
    out, err = await asyncio.to_thread(process.communicate, timeout=timeout_s)
    assert process.returncode in (codes or (0, 3)), err
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def header(delivery: Delivery | Outgoing, name: str) -> object:
    """A decoded header."""
    return headers_of(delivery).get(name)


def ended_by_kill(process: subprocess.Popen[bytes]) -> bool:
    """Whether it was ended by SIGKILL."""
    return process.wait(60.0) == -signal.SIGKILL


async def peak_mb(process: subprocess.Popen[bytes]) -> float:
    """Of its own memory, at its end."""
    peak = 0.0
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            peak = memory_peak_mib(process.pid)
        await asyncio.sleep(0.02)
    return peak
