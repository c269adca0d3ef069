"""RabbitMQ, for custody: deliveries become letters with all their bytes, and letters become publishes again."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from math import isfinite
from types import TracebackType
from typing import Self

from msgspec.structs import replace
from pamqp import commands as amqp

from holdfast.core.death import REDRIVE_ID, deaths, first_death, redriven_count
from holdfast.core.letter import (
    ERROR_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    REASON_CHARACTERS_MAX,
    DeathStory,
    Fingerprinter,
    JsonValue,
    Letter,
    NewLetter,
    Origin,
    clip,
    fingerprint,
)
from holdfast.core.message import Address as Destination
from holdfast.core.message import Delivery, Message, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import microseconds, moment
from holdfast.core.plan import Place, Retries, Target
from holdfast.core.routes import TYPE_HEADER, Mode, RouteTable, find_route
from holdfast.engines.rabbitmq.connection import Channel, Close, Connection
from holdfast.engines.rabbitmq.consumer import RabbitConsumer
from holdfast.engines.rabbitmq.inspector import Outlook
from holdfast.engines.rabbitmq.letters import digest
from holdfast.engines.rabbitmq.management import ManagedQueue, Management
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.redriver import Rewriter
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Event
from holdfast.engines.rabbitmq.wire.table import Undecodable, Value
from holdfast.errors import BrokerError, BrokerRefused
from holdfast.ports.clock import Clock
from holdfast.ports.custody import Caught, DeadQueue, Parcel, Posted, Reach

LETTER_BYTES_MAX = 64 * 1024 * 1024
PREFETCH = 4_000
PEEK_TIMEOUT_S = 5.0
PATTERNS = ("*.dlq",)
MODES = {
    "queue": Mode.SOURCE,
    "wait": Mode.WAIT,
    "original": Mode.EXCHANGE,
    "address": Mode.PLACE,
    "type": Mode.ROUTES,
}


class _Silent:
    """Listens to a channel that only answers what it is asked."""

    def on_events(self, events: list[Event]) -> None:
        pass

    def on_closed(self, error: BrokerError, close: Close) -> None:
        pass

    def on_writable(self) -> None:
        pass


class RabbitCustody:
    """`async with RabbitCustody(url, clock=clock) as post:`; known are the queues named, and those of the patterns."""

    origin: Origin = "rabbitmq"

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        management: str | None = None,
        known: Sequence[str] = (),
        patterns: Sequence[str] = PATTERNS,
        grouped: Fingerprinter = fingerprint,
        retries: Retries | None = None,
    ) -> None:
        self._address = BrokerUrl.parse(url)
        self._clock = clock
        self._management = management
        self._known = tuple(known)
        self._patterns = tuple(patterns)
        self._grouped = grouped
        self._publisher = RabbitPublisher(self._address)
        self._outlook = Outlook(self._address, management, retries or Retries())
        self._rewriter = Rewriter(self._address.login.user)

    async def __aenter__(self) -> Self:
        await self._publisher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._publisher.close()

    @asynccontextmanager
    async def source(self, queue: str, *, capacity_count: int) -> AsyncIterator[RabbitSource]:
        async with RabbitConsumer(self._address, queue, prefetch=min(capacity_count, PREFETCH)) as consumer:
            yield RabbitSource(consumer, self._grouped)

    async def queues(self) -> list[DeadQueue]:
        if self._management is None:
            found = [await self.queue(name) for name in self._known]
            return [replace(one, source_queue=await self._source(one.queue)) for one in found if one is not None]
        async with Management(self._management) as api:
            infos = await api.queues(self._address.login.vhost)
        names = {info.name for info in infos}
        dead = [_dead_queue(info) for info in infos if self._knows(info.name)]
        return [replace(one, source_queue=_source(one.queue) if _source(one.queue) in names else "") for one in dead]

    async def _source(self, dead_queue: str) -> str:
        """The queue that a dead-letter queue is named after, if there is one."""
        name = _source(dead_queue)
        return name if name and await self._asked(name) is not None else ""

    async def queue(self, name: str) -> DeadQueue | None:
        if not self._knows(name):
            return None
        try:
            if self._management is not None:
                async with Management(self._management) as api:
                    return _dead_queue(await api.queue(self._address.login.vhost, name))
            ready = await self._asked(name)
        except BrokerRefused as error:
            if error.reply_code == 404:
                return None
            raise
        if ready is None:
            return None
        return DeadQueue(queue=name, ready=ready, note="its delivery limit is not known")

    async def _asked(self, name: str) -> int | None:
        """How many messages wait in a queue, asked over AMQP; None when there is no such queue."""
        try:
            async with self._channel() as channel:
                answer = await channel.call(methods.QueueDeclare(queue=name, passive=True))
        except BrokerRefused as error:
            if error.reply_code == 404:
                return None
            raise
        return answer.message_count or 0 if isinstance(answer, amqp.Queue.DeclareOk) else 0

    def _knows(self, name: str) -> bool:
        return name in self._known or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        async with await Connection.open(self._address.named("holdfast custody")) as connection:
            yield await connection.channel(_Silent())

    def route(self, letter: Letter, target: Target) -> tuple[Destination | None, str]:
        found = find_route(_telling(letter, target), route_table(target), dead_queue=letter.queue)
        return found.address, found.why

    async def look(self, addresses: Sequence[Destination]) -> dict[Destination, Reach]:
        return await self._outlook.look(addresses)

    async def ladder_s(self, addresses: Sequence[Destination]) -> float | None:
        return await self._outlook.ladder_s(addresses)

    async def publish(self, parcels: Sequence[Parcel]) -> list[Posted]:
        outgoing: list[Outgoing] = []
        refused: dict[int, Posted] = {}
        at = moment(self._clock.now_us())
        for place, parcel in enumerate(parcels):
            try:
                outgoing.append(self._rewriter.outgoing(parcel, at=at))
            except (properties.Unreadable, ValueError, TypeError) as error:
                refused[place] = Posted("failed", f"it cannot be written: {error}")
        outcomes = iter(await self._publisher.publish(outgoing))
        return [refused.get(place) or _posted(next(outcomes)) for place in range(len(parcels))]

    async def peek(self, queue: str, *, count_max: int) -> list[NewLetter]:
        found: list[NewLetter] = []
        async with RabbitConsumer(self._address, queue, prefetch=count_max) as consumer:
            source = RabbitSource(consumer, self._grouped)
            while len(found) < count_max:
                batch = await source.take(count_max=count_max - len(found), timeout_s=0.3 if found else PEEK_TIMEOUT_S)
                if not batch:
                    break
                found += [one.letter for one in batch if one.letter is not None]
        return found


class RabbitSource:
    """Deliveries of one queue, as letters."""

    def __init__(self, consumer: RabbitConsumer, grouped: Fingerprinter) -> None:
        self._consumer = consumer
        self._grouped = grouped

    @property
    def trouble(self) -> str:
        return "" if self._consumer.connected else "its broker cannot be reached, the connection is tried again"

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Caught]:
        batch = await self._consumer.batch(count_max=count_max, timeout_s=timeout_s)
        return [self._caught(delivery) for delivery in batch]

    async def stop(self) -> None:
        try:
            await self._consumer.stop()
        except BrokerError:
            pass  # no connection: nothing comes either

    async def ack(self, caught: Sequence[Caught]) -> list[bool]:
        deliveries = [one.tag for one in caught if isinstance(one.tag, Delivery)]
        ours = [delivery.channel == self._consumer._generation for delivery in deliveries]
        self._consumer.ack([delivery for delivery, is_ours in zip(deliveries, ours, strict=True) if is_ours])
        self._consumer.flush()
        return ours

    def _caught(self, delivery: Delivery) -> Caught:
        body, raw = delivery.body, delivery.properties
        letter: NewLetter | None = None
        failure = ""
        if len(body) > LETTER_BYTES_MAX:
            failure = f"its body has {len(body)} bytes, {LETTER_BYTES_MAX} is the most that a letter may have"
        else:
            decoded = properties.decode(delivery.properties)
            if isinstance(unreadable := decoded.get("(unreadable)"), Undecodable):
                failure = f"its properties cannot be read: {unreadable.reason}"
            else:
                letter = new_letter(delivery, decoded, self._consumer.queue, self._grouped)
        return Caught(letter=letter, body=body, properties=raw, failure=failure, tag=delivery)


def new_letter(delivery: Delivery, decoded: dict[str, Value], queue: str, grouped: Fingerprinter) -> NewLetter:
    """A delivery with everything that its headers tell."""
    headers = decoded.pop("headers", None)
    headers = headers if isinstance(headers, dict) else {}
    death = _death(headers)
    kind = _text(decoded.get("type")) or _text(headers.get("MessageType"))
    group = grouped(kind, death)
    return NewLetter(
        queue=clip(queue, NAME_CHARACTERS_MAX),
        origin="rabbitmq",
        body=delivery.body,
        properties=delivery.properties,
        digest=digest(delivery.properties, delivery.body),
        death=death,
        message_id=clip(_text(decoded.get("message_id")), NAME_CHARACTERS_MAX),
        type=clip(kind, NAME_CHARACTERS_MAX),
        exchange=clip(delivery.exchange, NAME_CHARACTERS_MAX),
        routing_key=clip(delivery.routing_key, NAME_CHARACTERS_MAX),
        shown={name: plain(value) for name, value in decoded.items()},
        headers={clip(name, NAME_CHARACTERS_MAX): plain(value) for name, value in headers.items()},
        redelivered=delivery.redelivered,
        redrive_id=clip(_text(headers.get(REDRIVE_ID)), NAME_CHARACTERS_MAX),
        redriven_count=redriven_count(Message(body=b"", headers=headers)),
        group=group.key,
        group_title=group.title,
    )


def _death(headers: Mapping[str, Value]) -> DeathStory:
    found, first = deaths(headers), first_death(headers)
    died = [microseconds(death.at) for death in found if death.at]
    parked = _moment_us(headers.get("x-parked-at"))
    last = parked or max(died, default=0)
    queue = _text(headers.get("x-original-queue")) or (first.queue if first else "")
    reason = _text(headers.get("x-parked-reason")) or (found[0].reason if found else "")
    retries = headers.get("x-retry-count")
    count = retries if isinstance(retries, int) and not isinstance(retries, bool) else 0
    return DeathStory(
        queue=clip(queue, NAME_CHARACTERS_MAX),
        reason=clip(reason, REASON_CHARACTERS_MAX),
        count=min(max(0, count + sum(death.count for death in found)), 2**31),
        first_at_us=min([*died, last] if last else died, default=0),
        last_at_us=last,
        error_type=clip(_text(headers.get("x-error-type")), REASON_CHARACTERS_MAX),
        error_message=clip(_text(headers.get("x-error-message")), ERROR_CHARACTERS_MAX),
        error_stack=clip(_text(headers.get("x-error-stack")), ERROR_CHARACTERS_MAX),
    )


def _moment_us(value: object) -> int:
    try:
        return microseconds(datetime.fromisoformat(value)) if isinstance(value, str) else 0
    except (ValueError, OverflowError):
        return 0


def plain(value: Value) -> JsonValue:
    """A header value as JSON, for people and filters: what JSON has no word for is named by its kind."""
    if type(value) is str:  # nearly always
        return clip(value, len(value))
    match value:
        case None | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case str():
            return clip(value, len(value))
        case float():
            return value if isfinite(value) else {"double": str(value)}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case datetime():
            return {"timestamp": value.isoformat()}
        case Decimal():
            return {"decimal": str(value)}
        case list():
            return [plain(one) for one in value]
        case dict():
            return {clip(name, NAME_CHARACTERS_MAX): plain(one) for name, one in value.items()}
        case Undecodable():
            return {"undecodable": base64.b64encode(value.raw).decode()}


def route_table(target: Target) -> RouteTable:
    """What a target says, as the table that routes are found by."""
    return RouteTable(
        mode=MODES[target.kind],
        place=Destination(exchange=target.exchange, routing_key=target.routing_key),
        routes={name: _destination(place) for name, place in target.routes.items()},
        redirect=_destination(target.redirect) if target.redirect else None,
        type_header=target.type_header or TYPE_HEADER,
        has_table=bool(target.routes),
    )


def _telling(letter: Letter, target: Target) -> dict[str, JsonValue]:
    """The headers by which a letter finds its way."""
    told: dict[str, JsonValue] = {"x-original-queue": letter.death.queue} if letter.death.queue else {}
    for name in ("x-original-exchange", "x-original-routing-key"):
        value = letter.headers.get(name)
        if isinstance(value, str):
            told[name] = value
    if target.kind not in ("original", "type"):
        return told
    header = target.type_header or TYPE_HEADER
    typed: dict[str, JsonValue] = {header: letter.type} if letter.type and header not in letter.headers else {}
    return {**letter.headers, **told, **typed}


def _destination(place: Place) -> Destination:
    return Destination(exchange=place.exchange, routing_key=place.routing_key)


def _posted(outcome: Outcome) -> Posted:
    match outcome.kind:
        case OutcomeKind.CONFIRMED:
            return Posted("stored")
        case OutcomeKind.RETURNED | OutcomeKind.REFUSED:
            return Posted("failed", f"{outcome.kind.value}: {outcome.text or outcome.code}")
    # A nack may come from one queue of several: another may have it.
    return Posted("unknown", f"{outcome.kind.value}: {outcome.text or outcome.code}")


def _dead_queue(info: ManagedQueue) -> DeadQueue:
    limit = info.effective_policy.get("delivery-limit", info.arguments.get("x-delivery-limit"))
    free = info.type != "quorum" or limit == -1
    return DeadQueue(
        queue=info.name,
        ready=info.messages_ready or 0,
        consumers=info.consumers or 0,
        peek_is_free=free,
        note="" if free else "a quorum queue with a delivery limit: each look counts, and the last one deletes",
    )


def _source(name: str) -> str:
    return name.removesuffix(".dlq") if name.endswith(".dlq") else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
