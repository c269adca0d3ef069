"""Capture: a dead-letter queue is emptied into the vault. Put, commit, note that the ack is about to go, then ack.

One commit for many letters. A crash before the note leaves un-acked rows, and each redelivered letter uses one up;
anything else is a new letter, whatever its message id. The note comes before the ack, not after: a row whose ack went
out unnoted would be taken for an equal twin that was never stored, and that twin would be lost. So a crash between note
and ack makes duplicates instead. What the vault cannot take goes to its list of failed imports, with its body, and is
acked: it never comes round again.

Letters are grouped by a fingerprint, which may be a function of the user's own: loaded once, at the start, and never
trusted with a letter's safety. One that fails or answers something else than a `Fingerprint` does not hold up a
capture: the letter is grouped by the built-in function, and the failure is told.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import (
    BLOB_BYTES_MIN,
    NAME_CHARACTERS_MAX,
    TITLE_CHARACTERS_MAX,
    DeathStory,
    Fingerprint,
    Fingerprinter,
    JsonValue,
    NewLetter,
    clip,
    fingerprint,
)
from holdfast.core.message import Delivery
from holdfast.core.moments import Backoff, BackoffTimer
from holdfast.core.requests.vault import CaptureReport
from holdfast.errors import (
    BrokerError,
    CannotStart,
    HoldfastError,
    MessageRefused,
    NotFound,
    NotOurs,
    QueueMissing,
    StorageFailed,
    TryAgain,
    Unstorable,
)
from holdfast.ports.blobs import Blobs
from holdfast.ports.broker import Broker, Consumer, Subscription, check_settled
from holdfast.ports.clock import Clock
from holdfast.proof import crash_point
from holdfast.stores.letters import Stored
from holdfast.stores.vault import Vault
from holdfast.telemetry.events import emit

T = TypeVar("T")

BATCH_COUNT_MAX = 1_000
BATCH_BYTES_MAX = 16 * 1024 * 1024
IDLE_S = 1.0
TRIES_MAX = 8
WAITS = Backoff(first_s=0.1, delay_s_max=10.0)
#: How many letters may be ours at a time.
PREFETCH_MAX = 4_000
COUNT_MAX = 10_000_000
#: Up to so many are taken before the first is acked.
HELD_COUNT_MAX = 1_000
HELD_BYTES_MAX = 64 * 1024 * 1024
#: A blob that no letter has claimed for so long is deleted.
CLAIM_S = 24 * 3600.0


class Capture:
    """One dead-letter queue. `run` ends when nothing came for `idle_s`, or goes on until it is stopped."""

    def __init__(
        self,
        vault: Vault,
        find: Callable[[], Awaitable[Broker]],
        queue: str,
        *,
        actor: str,
        clock: Clock,
        blobs: Blobs | None = None,
    ) -> None:
        """`find` answers which broker has the queue; it raises NotFound or BrokerError when none says so now."""
        self._clock = clock
        self._vault = vault
        self._find = find
        self._blobs = blobs
        self._stopped = asyncio.Event()
        self._waits = False
        self._timer = BackoffTimer(WAITS)
        self._act = LedgerAct(actor=actor, action="capture", origin="capture")
        self.report = CaptureReport(queue=queue)
        self._broker: Broker | None = None
        self._consumer: Consumer | None = None

    def look(self) -> CaptureReport:
        """The report as of now: a consumer that has lost its broker resumes by itself, and says nothing."""
        if self._consumer is not None:
            self.report.why = self._consumer.trouble
            self.report.state = "waiting" if self.report.why else "running"
        return self.report

    def stop(self) -> None:
        """End after the batch that is in hand."""
        self._stopped.set()

    async def run(
        self, *, count_max: int = COUNT_MAX, idle_s: float = IDLE_S, continuous: bool = False
    ) -> CaptureReport:
        """Raises NotFound or BrokerError when the queue cannot be consumed, StorageFailed when the vault stays away."""
        try:
            broker = await self._find()
            prefetch = min(count_max, PREFETCH_MAX)
            async with broker.consumer(
                Subscription(queue=self.report.queue, prefetch=prefetch, letters=True)
            ) as consumer:
                self._broker, self._consumer = broker, consumer
                self.report.state, self.report.why = "running", ""
                self._goes_on()
                if count_max <= HELD_COUNT_MAX and not continuous:
                    await self._exactly(consumer, count_max, idle_s)
                else:
                    await self._as_they_come(consumer, count_max, idle_s, continuous=continuous)
        except BaseException as error:
            self.report.state = "failed"
            self.report.why = error.message if isinstance(error, HoldfastError) else type(error).__name__
            raise
        finally:
            self._consumer = None
        self.report.state = "done"
        return self.report

    async def _exactly(self, consumer: Consumer, count_max: int, idle_s: float) -> None:
        """Take no more than so many: a letter that is delivered and given back comes nearer to its delivery limit."""
        held: list[Delivery] = []
        size = 0
        while len(held) < count_max and size < HELD_BYTES_MAX and not self._stopped.is_set():
            deliveries = await consumer.take(count_max - len(held), timeout_s=idle_s)
            if not deliveries:
                break
            held += deliveries
            size += sum(len(one.body) for one in deliveries)
        await consumer.stop()  # before the first ack, which would make room for more
        await self._all_in(consumer, held)

    async def _as_they_come(self, consumer: Consumer, count_max: int, idle_s: float, *, continuous: bool) -> None:
        """The next ones are read while the last ones are stored: one waits for the broker, the other for the disk."""
        left = count_max
        storing: asyncio.Task[None] | None = None
        try:
            while left > 0 and not self._stopped.is_set():
                deliveries = await consumer.take(min(left, BATCH_COUNT_MAX), timeout_s=idle_s)
                if storing is not None:
                    last, storing = storing, None
                    await last
                if not deliveries and not continuous:
                    break
                storing = asyncio.create_task(self._all_in(consumer, deliveries), name=f"storing {self.report.queue}")
                left -= 0 if continuous else len(deliveries)
        finally:
            if storing is not None:
                await storing

    async def _all_in(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        for batch in in_batches(deliveries, lambda one: len(one.body), bytes_max=BATCH_BYTES_MAX):
            await self._take_in(consumer, batch)

    async def keep_on(self) -> None:
        """Capture until stopped. What is away (queue, broker, vault) is waited for; that is told once, not each try."""
        loop = asyncio.get_running_loop()
        while not self._stopped.is_set():
            try:
                await self.run(continuous=True)
                return
            except (BrokerError, NotFound, QueueMissing, TryAgain) as error:
                self._stands_still(error)
            # Spread, so that many captures do not ask a broker that is back in the same moment.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self._timer.delay_s(loop.time()))

    def _stands_still(self, error: HoldfastError) -> None:
        self.report.state = "waiting"
        if not self._waits:
            self._waits = True
            emit("capture.failed", queue=self.report.queue, error=error)

    def _goes_on(self) -> None:
        self._timer.worked(asyncio.get_running_loop().time())
        if self._waits:
            self._waits = False
            emit("capture.resumed", queue=self.report.queue)

    async def _take_in(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        good, bad = self._read(deliveries)
        crash_point("capture.before_put")
        stored = await self._stored([letter for _, letter in good]) if good else []
        if stored is None:
            stored, refused = await self._one_by_one([letter for _, letter in good])
            bad += [(one, letter.properties, why) for (one, letter), why in zip(good, refused, strict=True) if why]
            good = [pair for pair, why in zip(good, refused, strict=True) if not why]
        for one, properties, why in bad:
            await self._vault.letters.put_failed(
                self.report.queue, body=one.body, properties=properties, reason=why, act=self._act
            )
            self.report.failed_imports += 1
        fresh = [one.letter for one in stored if not one.matched]
        if fresh:
            await self._vault.letters.acking(fresh)
        crash_point("capture.before_ack")
        unsettled = await consumer.ack([*(one for one, _ in good), *(one for one, _, _ in bad)])
        crash_point("capture.after_ack")
        again = {one.delivery for one in unsettled if isinstance(one.error, NotOurs)}
        unsent = [kept.letter for (one, _), kept in zip(good, stored, strict=True) if one in again]
        if unsent:
            await self._vault.letters.acking(unsent, sent=False)
        # Of the others nobody knows whether they are acked: what comes again of them is a duplicate, not lost.
        check_settled([one for one in unsettled if one.delivery not in again])
        self.report.matched += len(stored) - len(fresh)
        self._note_lag([letter for _, letter in good])
        self.report.captured += len(fresh)
        self.report.not_acked += len(unsent)

    def _read(
        self, deliveries: Sequence[Delivery]
    ) -> tuple[list[tuple[Delivery, NewLetter]], list[tuple[Delivery, bytes, str]]]:
        """Those that are letters, and with its properties and the reason each that can be none."""
        good: list[tuple[Delivery, NewLetter]] = []
        bad: list[tuple[Delivery, bytes, str]] = []
        assert self._broker is not None  # noqa: S101  it was found before anything was taken
        for one in deliveries:
            try:
                good.append((one, self._broker.letter(one, self.report.queue)))
            except MessageRefused as error:
                bad.append((one, one.properties, error.message))
        return good, bad

    def _note_lag(self, letters: Sequence[NewLetter]) -> None:
        died_at_us = next((letter.death.last_at_us for letter in reversed(letters) if letter.death.last_at_us), 0)
        if died_at_us:
            self.report.lag_s = max(0.0, self._clock.now_us() - died_at_us) / 1_000_000

    async def _stored(self, letters: Sequence[NewLetter]) -> list[Stored] | None:
        """None when the vault will never take this batch: then one of them is the reason."""
        for attempt in range(TRIES_MAX):
            try:
                return await self._vault.letters.put(await self._lightened(letters), self._act)
            except Unstorable:
                return None
            except StorageFailed as error:
                if attempt == TRIES_MAX - 1:
                    raise
                emit("capture.failed", queue=self.report.queue, error=error)
                await asyncio.sleep(WAITS.delay_s(attempt, spread=1.0))
        return None

    async def _one_by_one(self, letters: Sequence[NewLetter]) -> tuple[list[Stored], list[str]]:
        stored: list[Stored] = []
        refused: list[str] = []
        for letter in letters:
            try:
                stored += await self._vault.letters.put(await self._lightened([letter]), self._act)
                refused.append("")
            except Unstorable as error:
                refused.append(error.message)
        return stored, refused

    async def _lightened(self, letters: Sequence[NewLetter]) -> Sequence[NewLetter]:
        """Large bodies go to the blob store, each under a name of its own: who deletes a letter may delete its blob.

        Announced first, so that a crash leaves none that nobody knows of."""
        if self._blobs is None or all(len(letter.body) <= BLOB_BYTES_MIN for letter in letters):
            return letters
        names = {index: _blob_name() for index, one in enumerate(letters) if len(one.body) > BLOB_BYTES_MIN}
        await self._vault.unclaimed.announce(list(names.values()), for_s=CLAIM_S)
        for index, name in names.items():
            await self._blobs.put(name, letters[index].body)
        return [
            replace(one, blob=names[index], body_bytes=len(one.body)) if index in names else one
            for index, one in enumerate(letters)
        ]


def _blob_name() -> str:
    name = uuid.uuid4().hex
    return f"letters/{name[:2]}/{name}"


def in_batches(
    things: Iterable[T], size: Callable[[T], int], *, bytes_max: int, count_max: int = BATCH_COUNT_MAX
) -> list[list[T]]:
    """In their order; each batch has at most so many of so many bytes, and always one."""
    batches: list[list[T]] = []
    room_bytes = 0
    for one in things:
        if not batches or len(batches[-1]) >= count_max or size(one) > room_bytes:
            batches.append([])
            room_bytes = bytes_max
        batches[-1].append(one)
        room_bytes -= size(one)
    return batches


def load_fingerprint(target: str | None) -> Fingerprinter:
    """The function that MODULE:FUNCTION names, made safe; without one the built-in. Raises CannotStart."""
    if target is None:
        return fingerprint
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise CannotStart(f"fingerprint is invalid; '{target}' is not MODULE:FUNCTION")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise CannotStart(
            f"fingerprint cannot be loaded; importing '{module_name}': {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "is not there" if found is None else f"is a {type(found).__name__}, not a function"
        raise CannotStart(f"fingerprint cannot be loaded; '{name}' in '{module_name}' {what}")
    function = _fitted(found)
    _try_out(function, target)
    return _guarded(function, target)


def _fitted(function: Callable[..., Fingerprint]) -> Fingerprinter:
    """Headers and queue go to one that takes them by these names; others are given the type and the death."""
    with suppress(ValueError, TypeError):
        inspect.signature(function).bind("", DeathStory(), headers={}, queue="")
        return lambda message_type, death, headers, queue: function(message_type, death, headers=headers, queue=queue)
    return lambda message_type, death, headers, queue: function(message_type, death)


def _try_out(function: Fingerprinter, target: str) -> None:
    """With a death that nobody can object to: a function of another shape is told at the start, not at each letter."""
    try:
        answer: object = function("type", DeathStory(queue="queue", reason="rejected"), {}, "queue.dlq")
    except Exception as error:
        raise CannotStart(f"fingerprint cannot be used; {target} raised {type(error).__name__}: {error}") from error
    if not _is_good(answer):
        raise CannotStart(f"fingerprint cannot be used; {target} answered {answer!r}, not a Fingerprint with a key")


def _guarded(function: Fingerprinter, target: str) -> Fingerprinter:
    def grouped(message_type: str, death: DeathStory, headers: Mapping[str, JsonValue], queue: str) -> Fingerprint:
        try:
            found = function(message_type, death, headers, queue)
            if _is_good(found):
                return Fingerprint(clip(found.key, NAME_CHARACTERS_MAX), clip(found.title, TITLE_CHARACTERS_MAX))
            error: object = f"it answered a {type(found).__name__}"
        except Exception as bug:  # noqa: BLE001 - whatever it does, the letter is captured
            error = f"{type(bug).__name__}: {bug}"
        emit("fingerprint.failed", function=target, error=error)
        return fingerprint(message_type, death, headers, queue)

    return grouped


def _is_good(answer: object) -> bool:
    if not isinstance(answer, Fingerprint):
        return False
    texts: tuple[object, ...] = (answer.key, answer.title)  # whatever somebody put there
    return all(isinstance(text, str) for text in texts) and bool(answer.key.strip())
