"""The embedded queue as a broker: a delivery is a lease, a retry is the schedule, parking is the dead queue.

Attempts are counted by the queue itself, when it leases: also the one that ended with its process. A lease is extended
for as long as its message is worked on; one that runs out all the same is somebody else's. A delivery keeps its item as
the broker's own; what is published is told as JSON in its properties.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.core import checks
from holdfast.core.checks import BATCH_COUNT_MAX, TEXT_CHARACTERS_MAX
from holdfast.core.death import QueueNames, RedriveStamp
from holdfast.core.item import Item, LeasedItem, NewItem, RetryItem
from holdfast.core.letter import (
    ERROR_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    Content,
    DeathStory,
    Fingerprinter,
    Kinds,
    NewLetter,
    Origin,
    clip,
    fingerprint,
)
from holdfast.core.message import CONFIRMED, Address, Delivery, Message, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import SECOND_US, format_duration, microseconds, moment
from holdfast.core.plan import Retries, longest
from holdfast.core.policy import Park, Wait, tail
from holdfast.core.requests.queue import ImportedItem, LeaseReply
from holdfast.errors import (
    BadIds,
    Forbidden,
    HoldfastError,
    Invalid,
    NotOurs,
    QueueMissing,
    TryAgain,
    Unauthorized,
    Unreachable,
    Unstorable,
)
from holdfast.ports.broker import QueueFacts, Reach, Subscription, Unsettled
from holdfast.ports.clock import Clock
from holdfast.services.queue.queues import REQUEST_TIMEOUT, Leaser, Queues, UnsettledItems, all_queues, lease_s

DEAD_SUFFIX = ".dlq"
#: Of queues of our own: nothing in them may die of its age; whoever gives up is the one they belong to.
EXPIRE_TIMEOUT = "87600h"
LEASE_TIMEOUT = "30s"
#: A message that will never be taken as it is, in the words of AMQP.
PRECONDITION_FAILED = 406
ACCESS_REFUSED = 403
#: What is published together weighs at most this in one request, but for a single one.
REQUEST_BYTES = 1 << 20
#: In the reason for which a consumer parked an item, what begins the frames of its traceback: the last ones say most.
STACK = "\nTraceback (most recent call last):\n"
#: What an item is beside its payload, in the properties of a letter and of what is published.
_SHOWN = ("kind", "encoding", "reference")


class QueueBroker:
    """Queues, in this process or of a server; see `ports.broker.Broker`."""

    origin: Origin = "queue"

    def __init__(
        self,
        queues: Queues,
        *,
        clock: Clock,
        grouped: Fingerprinter = fingerprint,
        retries: Retries | None = None,
        lease_timeout: str = LEASE_TIMEOUT,
    ) -> None:
        """`lease_timeout` is that of queues of our own."""
        self.queues = queues
        self.publisher = QueuePublisher(queues)
        self.inspector = QueueInspector(queues, retries or Retries())
        self._clock = clock
        self._grouped = grouped
        self._lease_timeout = lease_timeout

    async def missing(self, subscription: Subscription) -> list[str]:
        name, attempts = subscription.queue, subscription.policy.attempts
        try:
            info = await self.queues.queues_info(name)
        except QueueMissing:
            return [f"queue '{name}' does not exist, create it or use --declare"]
        found = []
        if not info.dead_queue:
            found.append(f"queue '{name}' has no dead_queue, what is parked would be deleted; set one or use --declare")
        if 0 < info.max_attempts < attempts:
            found.append(
                f"queue '{name}' lets an item die after max_attempts = {info.max_attempts}, "
                f"the consumer wants {attempts} attempts; make them agree"
            )
        return found

    async def declare(self, subscription: Subscription) -> None:
        """Make the queue and its dead queue, or give the queue one."""
        name, dead_queue = subscription.queue, subscription.dead_queue or subscription.queue + DEAD_SUFFIX
        is_own = bool(subscription.dead_queue)
        await self._make(dead_queue, "", is_own=is_own)
        await self._make(name, dead_queue, is_own=is_own)
        if not is_own and not (await self.queues.queues_info(name)).dead_queue:
            await self.queues.queues_update(name, dead_queue=dead_queue)

    async def _make(self, name: str, dead_queue: str, *, is_own: bool) -> None:
        try:
            await self.queues.queues_info(name)
            return
        except QueueMissing:
            pass
        try:
            if is_own:
                lease_timeout = self._lease_timeout
                await self.queues.queues_create(
                    name, dead_queue=dead_queue, lease_timeout=lease_timeout, expire_timeout=EXPIRE_TIMEOUT
                )
            else:
                await self.queues.queues_create(name, dead_queue=dead_queue)
        except Invalid as error:
            # Another process with the same consumers may have been faster.
            if "already exists" not in error.message:
                raise

    async def delete_empty(self, queue: str) -> bool:
        try:
            for logical in (await self.queues.queue_stats(queue)).logical_queues:
                if any(part.total or part.scheduled or part.dying for part in logical.partitions):
                    return False
            await self.queues.queues_delete(queue)
        except QueueMissing:
            return True
        except Invalid as error:
            if "not empty" in error.message:
                return False
            raise
        return True

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[QueueConsumer]:
        """Lease from the queue. Raises QueueMissing."""
        every_s = await lease_s(self.queues, subscription.queue) / 3
        consumer = QueueConsumer(self.queues, subscription, clock=self._clock)
        keeper = asyncio.create_task(consumer.unsettled.keep_alive(every_s), name=f"leases of {subscription.queue}")
        try:
            yield consumer
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def peek(self, queue: str, *, count_max: int) -> Sequence[NewLetter]:
        info = await self.queues.queues_info(queue)
        found: list[NewLetter] = []
        for partition in info.partitions:
            items = await self.queues.storage_items_list(
                queue, partition=partition.partition, limit=max(1, count_max - len(found))
            )
            found += [_letter(queue, item, redelivered=False, grouped=self._grouped) for item in items]
        return found[:count_max]

    def letter(self, delivery: Delivery, queue: str) -> NewLetter:
        item = delivery.own
        if isinstance(item, LeasedItem):  # its story could not be had
            item = msgspec.convert(item, Item, from_attributes=True)
        return _letter(queue, item, redelivered=delivery.redelivered, grouped=self._grouped)

    def kinds(self, properties: bytes) -> Kinds:
        del properties
        return Kinds()

    def write(self, message: Message, to: Address, *, death: DeathStory | None = None, by: str = "") -> Outgoing:
        """Headers stand as JSON in the item's reference."""
        del by  # an item does not tell
        named = {"message-id": message.id} if message.id else {}
        reference = msgspec.json.encode({**named, **message.headers}).decode()
        if death is not None:
            reason = death.error_message[:TEXT_CHARACTERS_MAX]
            story = {"reference": reference, "death_reason": reason, "source_queue": death.queue}
        else:
            # Repeated after a crash while the first is still there, it stays one.
            key = hashlib.sha256(reference.encode() + b"\0" + message.body).hexdigest()
            story = {"reference": reference, "kind": str(message.headers.get("kind", "")), "dedupe_key": key}
        return Outgoing(to.exchange, to.routing_key, msgspec.json.encode(story), message.body)

    def outgoing(self, message: Message, to: Address, *, at_us: int = 0) -> Outgoing:
        """The id is the dedupe_key: while the item is in its queue, the same id does not make a second one."""
        lost = [name for name in ("headers", "priority", "reply_to") if getattr(message, name) not in ({}, None, "")]
        if to.exchange or lost:
            what = "an exchange" if to.exchange else " and ".join(lost)
            raise Invalid(f"publish is not possible; an embedded queue has no place for {what}, leave it out")
        if "/" not in message.content_type and message.content_type:
            raise Invalid(f"content_type is invalid; '{message.content_type}' is not like 'application/json'")
        checks.queue_name(to.routing_key)
        item = NewItem(
            kind=message.type,
            encoding=message.content_type,
            reference=message.correlation_id,
            dedupe_key=message.id,
            enqueue_at=moment(at_us) if at_us else None,
        )
        checks.item_texts(item.kind, item.encoding, item.reference, item.dedupe_key)
        return Outgoing("", to.routing_key, msgspec.json.encode(item), message.body)

    def rewrite(self, content: Content, to: Address, stamp: RedriveStamp, redrive_id: str) -> Outgoing:
        del stamp  # an item has no headers
        story = msgspec.json.decode(content.properties, type=dict[str, Any])
        # As long as the copy is in its queue, the same redrive does not make a second one.
        story = {name: text for name, text in story.items() if name in _SHOWN} | {"dedupe_key": redrive_id}
        return Outgoing(to.exchange, to.routing_key, msgspec.json.encode(story), content.body)


class QueuePublisher:
    """Produces items, one by one; see `ports.broker.Publisher`."""

    trouble = ""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    async def publish(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        """Without `timeout_s`, each request has its own."""
        deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        outcomes: list[Outcome] = []
        for alike in _alike(messages):
            outcomes += await self._produce_until(alike, deadline_s)
        return outcomes

    async def _produce_until(self, alike: Sequence[Outgoing], deadline_s: float | None) -> list[Outcome]:
        if deadline_s is None:
            return await self._produce(alike, REQUEST_TIMEOUT)
        left_us = round((deadline_s - asyncio.get_running_loop().time()) * SECOND_US)
        if left_us <= 0:
            return [Outcome(OutcomeKind.UNKNOWN, 0, "its time was up before it was sent")] * len(alike)
        timeout_us = min(max(left_us, checks.REQUEST_TIMEOUT_US_MIN), checks.REQUEST_TIMEOUT_US_MAX)
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._produce(alike, format_duration(timeout_us))
        except TimeoutError:
            return [Outcome(OutcomeKind.UNKNOWN, 0, "no answer in time")] * len(alike)

    async def _produce(self, alike: Sequence[Outgoing], request_timeout: str) -> list[Outcome]:
        """One of many that is refused takes no other along: then each goes by itself."""
        for message in alike:
            message.sent_count += 1
        try:
            await self._store(alike, request_timeout)
        except QueueMissing as error:
            outcome = Outcome(OutcomeKind.RETURNED, 0, error.message)
        except (Invalid, Unstorable) as error:
            if len(alike) > 1:  # nothing of it is stored
                for message in alike:
                    message.sent_count -= 1
                return [outcome for one in alike for outcome in await self._produce([one], request_timeout)]
            kind = OutcomeKind.REFUSED if isinstance(error, Invalid) else OutcomeKind.UNKNOWN
            outcome = Outcome(kind, PRECONDITION_FAILED if isinstance(error, Invalid) else 0, error.message)
        except (Forbidden, Unauthorized) as error:
            outcome = Outcome(OutcomeKind.REFUSED, ACCESS_REFUSED, error.message)
        except Unreachable as error:
            for message in alike:
                message.sent_count -= error.is_unsent
            outcome = Outcome(OutcomeKind.UNKNOWN, 0, error.message)
        except HoldfastError as error:
            outcome = Outcome(OutcomeKind.UNKNOWN, 0, error.message)
        else:
            outcome = CONFIRMED
        return [outcome] * len(alike)

    async def _store(self, alike: Sequence[Outgoing], request_timeout: str) -> None:
        stories = [msgspec.json.decode(message.properties, type=dict[str, Any]) for message in alike]
        queue = alike[0].routing_key
        if "death_reason" in stories[0]:  # it is put into a dead queue as one that died
            item = ImportedItem(payload=alike[0].body, **stories[0])
            await self._queues.storage_items_import(queue, [item])
            return
        items = [
            replace(msgspec.convert(story, NewItem), payload=message.body)
            for story, message in zip(stories, alike, strict=True)
        ]
        await self._queues.queue_produce(queue, items, request_timeout=request_timeout)


def _alike(messages: Sequence[Outgoing]) -> list[list[Outgoing]]:
    """In their order, what may go in one request: to one queue, and so much at the most; what died goes alone."""
    found: list[list[Outgoing]] = []
    size_bytes = 0
    for message in messages:
        size_bytes += len(message.body)
        is_one_more = (
            found
            and found[-1][0].routing_key == message.routing_key
            and len(found[-1]) < BATCH_COUNT_MAX
            and size_bytes <= REQUEST_BYTES
            and not any(b'"death_reason"' in one.properties for one in (found[-1][0], message))
        )
        if is_one_more:
            found[-1].append(message)
        else:
            found.append([message])
            size_bytes = len(message.body)
    return found


class QueueInspector:
    """Known as dead-letter queues are those that another queue names as its dead queue."""

    def __init__(self, queues: Queues, retries: Retries) -> None:
        self._queues = queues
        self._retries = retries

    async def queues(self) -> list[QueueFacts]:
        sources: dict[str, str] = {}
        async for info in all_queues(self._queues):
            if info.dead_queue:
                sources.setdefault(info.dead_queue, info.queue_name)
        return [await self._facts(name, source) for name, source in sorted(sources.items())]

    async def queue(self, name: str) -> QueueFacts | None:
        return next((one for one in await self.queues() if one.queue == name), None)

    async def sources(self, queue: str, names: QueueNames) -> frozenset[str]:
        del names  # an embedded queue says itself what its dead queue is
        return frozenset(one.source_queue for one in await self.queues() if one.queue == queue)

    async def _facts(self, name: str, source: str) -> QueueFacts:
        (logical,) = (await self._queues.queue_stats(name)).logical_queues[:1]
        ready = sum(partition.total for partition in logical.partitions)
        return QueueFacts(queue=name, source_queue=source, ready=ready, peek_is_free=True)

    async def reach(self, addresses: Sequence[Address]) -> dict[Address, Reach]:
        found: dict[Address, Reach] = {}
        for address in dict.fromkeys(addresses):
            try:
                await self._queues.queues_info(address.routing_key)
                found[address] = Reach(queues=(address.routing_key,))
            except (QueueMissing, Invalid) as error:
                found[address] = Reach(why=error.message, queues=())
        return found

    async def ladder_s(self, addresses: Sequence[Address]) -> float | None:
        """By the settings: a queue knows how often an item is tried, but not after which delays."""
        ladders = []
        for address in dict.fromkeys(addresses):
            info = await self._queues.queues_info(address.routing_key)
            ladders.append(self._retries.ladder_s(attempts=info.max_attempts))
        return longest(ladders)


class QueueConsumer:
    """Leases of one queue, each item settled by itself; see `ports.broker.Consumer`.

    The `channel` of a delivery is its partition. Acks that wait at the same time are one request.
    """

    def __init__(self, queues: Queues, subscription: Subscription, *, clock: Clock) -> None:
        self._queues = queues
        self._queue = subscription.queue
        self._attempts_max = subscription.policy.attempts
        self._letters = subscription.letters
        self._clock = clock
        self.unsettled = UnsettledItems(queues, subscription.queue)
        self._leases = Leaser(queues, subscription.queue)
        self._taking: asyncio.Task[LeaseReply | None] | None = None
        self._is_stopped = False
        self._acks: list[Delivery] = []  # that wait for the next request
        self._failed: dict[Delivery, HoldfastError] = {}
        self._acking = asyncio.Lock()

    @property
    def trouble(self) -> str:
        return self._leases.trouble

    async def take(self, count_max: int, *, timeout_s: float | None = None) -> Sequence[Delivery]:
        """Raises QueueMissing when the queue is gone, ShuttingDown when the service ends."""
        if self._is_stopped:
            return ()
        taking = self._leases.next(min(count_max, BATCH_COUNT_MAX), timeout_s=timeout_s)
        self._taking = asyncio.create_task(taking, name=f"lease of {self._queue}")
        try:
            reply = await self._taking
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return ()  # it was stopped first
        return () if reply is None else await self._delivered(reply)

    async def _delivered(self, reply: LeaseReply) -> list[Delivery]:
        partition, queue = reply.partition, self._queue
        self.unsettled.add(reply.items, partition)
        stories = await self._stories(reply) if self._letters else {}
        return [
            Delivery(partition, 0, item.attempts > 1, "", queue, "", b"", item.payload, stories.get(item.id, item))
            for item in reply.items
        ]

    async def _stories(self, reply: LeaseReply) -> dict[str, Item]:
        """A lease does not tell how an item died; the listing does. What was leased together lies together, mostly."""
        wanted = {item.id for item in reply.items}
        found: dict[str, Item] = {}
        for pivot in sorted(wanted):
            if pivot not in found:
                items = await self._queues.storage_items_list(
                    self._queue, partition=reply.partition, pivot=pivot, limit=len(wanted) - len(found)
                )
                found |= {item.id: item for item in items if item.id in wanted}
        return found

    def message(self, delivery: Delivery) -> Message:
        item: LeasedItem = delivery.own
        used = max(0, item.attempts - 1)  # the queue counts when it leases
        return Message(
            body=item.payload,
            id=item.first_id or item.id,
            queue=self._queue,
            routing_key=self._queue,
            type=item.kind,
            reference=item.reference,
            correlation_id=item.reference,
            content_type=item.encoding if "/" in item.encoding else "",
            content_encoding=item.encoding,
            redelivered=used > 0,
            attempt=used + 1,
            attempts_max=self._attempts_max,
        )

    async def stop(self) -> None:
        self._is_stopped = True
        if self._taking is not None:
            self._taking.cancel()

    async def begin(self, delivery: Delivery) -> None:
        """The lease has counted it."""

    async def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Unsettled]:
        self._acks += deliveries
        async with self._acking:
            if self._acks:  # else somebody who waited before us has taken ours along
                waiting, self._acks = self._acks, []
                await self._complete_all(waiting)
        unsettled = []
        for delivery in deliveries:
            error = self._failed.pop(delivery, None)
            if error is None and delivery.own.id in self.unsettled:
                error = TryAgain("ack was called off; whoever waited for it went away")
            if error is not None:
                unsettled.append(Unsettled(delivery, error))
        return unsettled

    async def _complete_all(self, deliveries: Sequence[Delivery]) -> None:
        by_partition: dict[int, list[Delivery]] = {}
        for delivery in deliveries:
            if delivery.own.id in self.unsettled:
                by_partition.setdefault(delivery.channel, []).append(delivery)
            else:
                self._failed[delivery] = self._lost(delivery)
        for partition, same in by_partition.items():
            for first in range(0, len(same), BATCH_COUNT_MAX):
                await self._complete(partition, same[first : first + BATCH_COUNT_MAX])

    async def _complete(self, partition: int, deliveries: Sequence[Delivery]) -> None:
        ids = [delivery.own.id for delivery in deliveries]
        try:
            lost = await self.unsettled.complete(ids, partition=partition)
        except QueueMissing as error:
            self._failed |= {delivery: NotOurs(error.message) for delivery in deliveries}
            self.unsettled.let_go(ids)
        except HoldfastError as error:
            self._failed |= dict.fromkeys(deliveries, error)  # they may be done or not, and are ours still
        else:
            self._failed |= {delivery: self._lost(delivery) for delivery in deliveries if delivery.own.id in lost}

    async def retry(self, delivery: Delivery, wait: Wait) -> None:
        retry_at = moment(self._clock.now_us() + wait.delay_us)
        await self._retry(delivery, RetryItem(id=delivery.own.id, retry_at=retry_at))

    async def park(self, delivery: Delivery, park: Park) -> None:
        """Raises Invalid while the queue has no dead queue: there a death is a deletion."""
        try:
            info = await self._queues.queues_info(self._queue)
        except QueueMissing as error:
            raise NotOurs(error.message) from error
        if not info.dead_queue:
            raise Invalid(f"queue has no dead_queue; what is parked of '{self._queue}' would be deleted, set one")
        failure = str(park.failure)
        reason = f"{park.reason}; {failure}"[:TEXT_CHARACTERS_MAX]
        frames = park.failure.stack.rpartition(f"\n{failure[:NAME_CHARACTERS_MAX]}")[0].removeprefix(STACK.lstrip())
        if frames:
            reason = reason[: TEXT_CHARACTERS_MAX // 2] + STACK
            reason += tail(frames, TEXT_CHARACTERS_MAX - len(reason))
        await self._retry(delivery, RetryItem(id=delivery.own.id, dead=True, reason=reason))

    async def give_back(self, delivery: Delivery) -> None:
        await self._retry(delivery, RetryItem(id=delivery.own.id))

    async def _retry(self, delivery: Delivery, item: RetryItem) -> None:
        if item.id not in self.unsettled:
            raise self._lost(delivery)
        try:
            await self.unsettled.retry([item], partition=delivery.channel)
        except (BadIds, QueueMissing) as error:
            self.unsettled.let_go([item.id])
            raise NotOurs(error.message) from error

    def _lost(self, delivery: Delivery) -> NotOurs:
        return NotOurs(f"lease is lost; item '{delivery.own.id}' of queue '{self._queue}'")


def _letter(queue: str, item: Item, *, redelivered: bool, grouped: Fingerprinter) -> NewLetter:
    why, head, stack = item.death_reason.partition(STACK)
    reason, _, error = why.partition("; ")
    error_type, _, error_message = error.partition(": ")
    at_us = microseconds(item.died_at) if item.died_at else 0
    death = DeathStory(
        queue=item.source_queue,
        reason=clip(reason, NAME_CHARACTERS_MAX),
        count=item.death_attempts,
        first_at_us=at_us,
        last_at_us=at_us,
        error_type=clip(error_type, NAME_CHARACTERS_MAX),
        error_message=clip(error_message, ERROR_CHARACTERS_MAX),
        error_stack=(head + stack).lstrip(),
    )
    group = grouped(item.kind, death, {}, queue)
    shown = {name: getattr(item, name) for name in _SHOWN}
    properties = msgspec.json.encode({**shown, "id": item.id})
    made = hashlib.blake2b(properties, digest_size=16)
    made.update(item.payload)
    return NewLetter(
        queue=queue,
        origin="queue",
        body=item.payload,
        properties=properties,
        digest=made.digest(),
        death=death,
        message_id=item.id,
        type=item.kind,
        routing_key=queue,
        shown=shown,
        redelivered=redelivered,
        redrive_id=clip(item.former_key, NAME_CHARACTERS_MAX),  # the key that `rewrite` gave it
        group=group.key,
        group_title=group.title,
    )
