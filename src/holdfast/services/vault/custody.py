"""Custody: dead-letter queues, captures, and what operators do to letters. Faces ask `VaultApp` (`admin`) for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from holdfast.core.death import DROPPED_HEADERS, STORY_HEADERS, QueueNames
from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import SENSITIVE_HEADERS, Content, Kinds, Letter, NewLetter, Origin
from holdfast.core.moments import moment_or_none
from holdfast.core.plan import PLAN_COUNT_MAX
from holdfast.core.requests.declare import Caller
from holdfast.core.requests.vault import CaptureReport, EditLetter, QueueView, Verified
from holdfast.core.selection import Selection, check_selection
from holdfast.core.states import LetterState
from holdfast.errors import BlobMissing, BrokerError, CannotStart, Conflict, Invalid, NotFound, StorageFailed
from holdfast.ports.blobs import Blobs
from holdfast.ports.broker import Broker, QueueFacts
from holdfast.ports.clock import Clock
from holdfast.services.vault.capture import COUNT_MAX, IDLE_S, Capture
from holdfast.stores.redrives import LeasedLetter
from holdfast.stores.vault import Vault
from holdfast.telemetry.events import emit

HEADERS_COUNT_MAX = 200
BODY_BYTES_MAX = 64 * 1024 * 1024
PEEK_COUNT_MAX = 1_000

#: What an operator may do to letters by name: from which state into which.
ACTIONS: Mapping[str, tuple[LetterState, LetterState]] = {
    "archive": (LetterState.CAPTURED, LetterState.ARCHIVED),
    "restore": (LetterState.ARCHIVED, LetterState.CAPTURED),
    "discard": (LetterState.CAPTURED, LetterState.DISCARDED),
    "resolve": (LetterState.REDRIVEN, LetterState.RESOLVED),
}


class Custody:
    """One vault, and the brokers that letters come from and go back to. The first that knows a queue has it."""

    def __init__(
        self,
        vault: Vault,
        brokers: Sequence[Broker],
        *,
        clock: Clock,
        blobs: Blobs | None = None,
        names: QueueNames | None = None,
        found_code: str = "",
    ) -> None:
        """`found_code` would have to group letters, and nobody has said that it may: so none are captured."""
        self._found_code = found_code
        self.vault = vault
        self.names = names or QueueNames()
        self.brokers = tuple(brokers)
        self.clock = clock
        self._blobs = blobs
        self._captures: dict[str, Capture] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    # --- queues -----------------------------------------------------------------------------------------------

    async def dead_queues(self, caller: Caller) -> list[QueueView]:
        """The ones that are known, and those that letters were captured from. A broker that does not answer takes
        nothing away from what the vault and the others know."""
        found: dict[str, QueueFacts] = {}
        silent = False
        for broker in self.brokers:
            try:
                found |= {one.queue: one for one in await broker.inspector.queues()}
            except BrokerError as error:
                emit("dead_queues.unknown", error=error)
                silent = True
        told = set(found)
        for queue in [*(tally.queue for tally in await self.vault.ledger.tallies()), *self._captures]:
            found.setdefault(queue, QueueFacts(queue=queue))
        return [
            await self._view(one, caller, is_told=name in told or not silent)
            for name, one in sorted(found.items())
            if caller.may_touch(name)
        ]

    async def waiting(self, queue: str, caller: Caller) -> int | None:
        """How many letters are in a queue itself; None when its broker does not say, or does not know it."""
        try:
            _, found = await self.known(queue, caller)
        except (BrokerError, NotFound):
            return None
        return found.ready

    async def _view(self, found: QueueFacts, caller: Caller, *, is_told: bool) -> QueueView:
        selection = Selection(queue=found.queue, state=LetterState.CAPTURED)
        ids = await self.vault.letters.count(selection)
        oldest = await self.vault.letters.oldest(selection) if ids.count else None
        return QueueView(
            queue=found.queue,
            source_queue=(found.source_queue or None) if caller.may_touch(found.source_queue) else None,
            ready=found.ready if is_told else None,
            captured=ids.count,
            oldest_at=moment_or_none(oldest.death.last_at_us or oldest.captured_at_us) if oldest else None,
            consumers=found.consumers if is_told else None,
        )

    async def known(self, queue: str, caller: Caller) -> tuple[Broker, QueueFacts]:
        """Raises NotFound for a queue that is neither configured nor discovered."""
        caller.check_queue(queue)
        for broker in self.brokers:
            if (found := await broker.inspector.queue(queue)) is not None:
                return broker, found
        raise NotFound(f"queue is unknown; '{queue}' is no dead-letter queue that is configured or was discovered")

    async def peek(self, queue: str, caller: Caller, *, count_max: int, live: bool) -> list[NewLetter]:
        """Look at a queue itself. Raises Conflict where that costs something and was not asked for."""
        broker, found = await self.known(queue, caller)
        if not found.peek_is_free and not live:
            raise Conflict(
                f"looking costs letters; '{queue}': {found.note or 'its delivery limit is not known'}; capture it "
                f"with POST /admin/captures, or ask for it with ?live=1"
            )
        return list(await broker.peek(queue, count_max=min(count_max, PEEK_COUNT_MAX)))

    # --- captures ---------------------------------------------------------------------------------------------

    def captures(self) -> list[CaptureReport]:
        """The captures of this process since it started, one for each queue."""
        return [capture.look() for capture in self._captures.values()]

    def is_capturing(self, queue: str) -> bool:
        """Whether what dies into a queue is captured now."""
        return queue in self._captures and self._captures[queue].report.state in ("running", "waiting")

    async def capture(
        self, queue: str, caller: Caller, *, count_max: int = COUNT_MAX, idle_s: float = IDLE_S
    ) -> CaptureReport:
        """Capture what is there, and return when nothing more comes."""
        await self.known(queue, caller)  # of a queue that nobody knows there is no capture to be shown
        if self.is_capturing(queue):
            raise Conflict(f"capture runs already; '{queue}' is being captured by this server")
        return await self._new_capture(queue, caller).run(count_max=count_max, idle_s=idle_s)

    async def start_capture(self, queue: str, caller: Caller) -> CaptureReport:
        """Capture from now on, until `close`. One that runs already is left to it. Raises NotFound, BrokerError."""
        if not self.is_capturing(queue):
            await self.known(queue, caller)
        return self.keep_capturing(queue, caller)

    def keep_capturing(self, queue: str, caller: Caller) -> CaptureReport:
        """Capture until `close`, as soon as the queue can be found: until then it is tried again and again."""
        if self.is_capturing(queue):
            return self._captures[queue].report
        capture = self._new_capture(queue, caller)
        task: asyncio.Task[object] = asyncio.create_task(capture.keep_on(), name=f"capture of {queue}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return capture.report

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            emit("server.bug", method=task.get_name(), error=repr(bug), traceback=bug)

    def _new_capture(self, queue: str, caller: Caller) -> Capture:
        if self._found_code:
            raise CannotStart(
                f"capture is refused; letters are grouped by '{self._found_code}', code that the file names which "
                "lay here, say --config holdfast.toml if it is to run"
            )

        async def find() -> Broker:
            broker, _ = await self.known(queue, caller)
            return broker

        capture = Capture(self.vault, find, queue, actor=caller.name, clock=self.clock, blobs=self._blobs)
        self._captures[queue] = capture
        return capture

    async def close(self) -> None:
        """End all captures after the batch that each has in hand."""
        for capture in self._captures.values():
            capture.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        for task in self._tasks:
            task.cancel()

    # --- letters ----------------------------------------------------------------------------------------------

    def broker_of(self, origin: Origin) -> Broker | None:
        """The broker that such letters came from, where it is configured here."""
        return next((broker for broker in self.brokers if broker.origin == origin), None)

    async def letter(self, number: int, caller: Caller) -> Letter:
        """Raises NotFound."""
        found = await self.vault.letters.get(number)
        if found is None or not caller.may_touch(found.queue):
            raise NotFound(f"letter does not exist; there is no letter {number}")
        return found

    async def content(self, letter: Letter, *, revision: int | None = None) -> Content:
        """What would be published of it, with its body. Raises NotFound when retention was faster."""
        found = await self.vault.letters.content(letter.id, revision=revision)
        if found is None:
            raise NotFound(f"letter does not exist; there is no letter {letter.id}")
        return await self._with_body(found)

    async def part(self, letter: Letter, *, revision: int | None, skip: int, limit: int | None) -> bytes:
        """Its body from a byte on, at most so many; of one that is elsewhere no more is read than that takes. Raises
        NotFound when retention was faster."""
        found = await self.vault.letters.content(letter.id, revision=revision)
        if found is None:
            raise NotFound(f"letter does not exist; there is no letter {letter.id}")
        end = None if limit is None else skip + limit
        if not found.blob:
            return found.body[skip:end]
        pieces, size = [], 0
        async with aclosing(self._stored(found.blob).get(found.blob)) as chunks:
            async for chunk in chunks:
                pieces.append(chunk[max(0, skip - size) : None if end is None else max(0, end - size)])
                size += len(chunk)
                if end is not None and size >= end:
                    break
        return b"".join(pieces)

    async def kinds(self, letter: Letter) -> Kinds:
        """What its broker calls the kinds of its properties and headers."""
        broker = self.broker_of(letter.origin)
        found = await self.vault.letters.content(letter.id, revision=0) if broker else None
        return broker.kinds(found.properties) if broker and found else Kinds()

    async def contents(self, leased: Sequence[LeasedLetter]) -> list[Content | BlobMissing]:
        """What is to be published of letters, with their bodies; one whose body is gone does not hold up the others."""
        found: list[Content | BlobMissing] = []
        for content in await self.vault.redrives.contents(leased):
            try:
                found.append(await self._with_body(content))
            except BlobMissing as error:
                found.append(error)
        return found

    async def _with_body(self, content: Content) -> Content:
        if not content.blob:
            return content
        body = b"".join([chunk async for chunk in self._stored(content.blob).get(content.blob)])
        return Content(body=body, properties=content.properties, put=content.put, drop=content.drop)

    def _stored(self, blob: str) -> Blobs:
        if self._blobs is None:  # never as if it had no body
            raise StorageFailed(f"body is elsewhere; it is the blob {blob}, set vault_blobs as there")
        return self._blobs

    async def verify(self, anchor: str = "") -> Verified:
        """Look at the ledger and all that it vouches for. Raises Invalid for an anchor that is none."""
        return await self.vault.seals.verify(anchor=anchor, blobs=self._blobs)

    async def act(self, action: str, selection: Selection, *, expected: int, act: LedgerAct, caller: Caller) -> int:
        """Archive, restore, discard or resolve a selection: exactly as many as the caller saw, or none."""
        source, target = ACTIONS[action]
        if selection == Selection():
            raise Invalid("selection is invalid; it is empty, name ids, a group or a filter")
        check_selection(selection)
        caller.check_queue(selection.queue)
        found = await self.vault.letters.ids(selection, count_max=PLAN_COUNT_MAX)
        if len(found) != expected:
            raise Conflict(f"letters have changed; {expected} were expected and {len(found)} fit; nothing was done")
        if not found:
            return 0
        return await self.vault.letters.move(found, source=source, target=target, act=act, expected=expected)

    async def edit(self, edit: EditLetter, caller: Caller, act: LedgerAct) -> int:
        """A new revision. Locked headers are refused, sensitive ones need to be said."""
        letter = await self.letter(edit.id, caller)
        names, body = [*edit.put, *edit.drop], edit.body
        if edit.restore:
            if body is not None or names:
                raise Invalid("edit is invalid; restore goes with no other change")
            body = (await self.content(letter, revision=0)).body
        if body is None and not names:
            raise Invalid("edit is invalid; nothing is changed, give a body, or headers to put or drop")
        if dropped := sorted(set(names) & set(DROPPED_HEADERS)):
            raise Invalid(f"header is locked; '{dropped[0]}' is taken off when the letter is redriven")
        if locked := sorted(set(names) & set(STORY_HEADERS)):
            raise Invalid(f"header is locked; '{locked[0]}' says who the message is or where it has been")
        if not edit.sensitive and (meant := sorted(set(names) & set(SENSITIVE_HEADERS))):
            raise Invalid(
                f"header is sensitive; '{meant[0]}' is what was taken off so that it is safe, say sensitive = true"
            )
        if len(names) > HEADERS_COUNT_MAX or any(not name or len(name.encode()) > 255 for name in names):
            raise Invalid(f"headers are invalid; at most {HEADERS_COUNT_MAX} with names of 1 to 255 bytes")
        if body is not None and len(body) > BODY_BYTES_MAX:
            raise Invalid(f"body is too large; {BODY_BYTES_MAX} bytes is the maximum")
        return await self.vault.letters.revise(
            letter.id, revision=edit.revision, body=body, put=edit.put, drop=edit.drop, act=act
        )
