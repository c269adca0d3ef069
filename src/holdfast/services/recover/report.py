"""What a run says, before it begins and while it goes on, and what is refused before it begins. The sentences are those
of people who ran such recoveries by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from holdfast.core.death import QueueNames
from holdfast.core.message import Message
from holdfast.core.recovery import SAMPLE_CHARACTERS_MAX, Preflight, RecoveryOrder, Sample, Summary, as_utf8
from holdfast.core.routes import NOWHERE
from holdfast.core.selection import died_in
from holdfast.errors import BrokerError, RecoveryRefused
from holdfast.telemetry.events import emit

PROGRESS_COUNT = 1_000
#: Of each reason; the summary counts them all.
WARNINGS_COUNT_MAX = 10
NO_ROUTE = "Message has no MessageType or routing key. Keeping in DLQ for manual review."
NOT_TAKEN = "{why}. Keeping in DLQ for manual review."
NOT_PUBLISHED = "Failed to republish message. Keeping in DLQ. MessageType={type}"
STOPPING = "Stopping: {what}; Ctrl-C again ends at once"
ASSUMED = " (assumed from the version)"
LINE_END = "\n"
KEEPING, LEAVING = "Keeping in DLQ", "It stays in the backup"

T = TypeVar("T")


class Notices:
    """Says it to the log, and to whoever listens: `say(sentence)`, `on_progress(summary)` for a bar, and
    `urge(sentence)` for what somebody who has just pressed a key waits to see."""

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        on_progress: Callable[[Summary], None] | None = None,
        urge: Callable[[str], None] | None = None,
    ) -> None:
        self.has_begun = False  #: letters may be in hand from now on
        self.say = say or (lambda sentence: None)
        self._on_progress = on_progress or (lambda summary: None)
        self._urge = urge or (lambda sentence: None)
        self._trouble = ""

    def nobody_may_listen(self) -> None:
        """Whoever read this may be gone, as `tee` is with its terminal: from now on that is no reason to end."""
        self.say, self._on_progress, self._urge = _safe(self.say), _safe(self._on_progress), _safe(self._urge)

    def beginning(self) -> None:
        """Before anything else."""
        self.say("Starting DLQ Recovery Service...")

    def begun(self) -> None:
        """The run itself begins. A reader who goes away, as `head` does, is no reason to end from now on."""
        self.has_begun = True
        self.nobody_may_listen()

    def found(self, summary: Summary) -> None:
        """It begins, with so many letters."""
        self.begun()
        emit("recovery.started", queue=summary.dead_queue, found=summary.found)
        if summary.found:
            self.say(f"Found {summary.found} messages in DLQ. Starting recovery...")
        else:
            self.say("DLQ Empty")

    def started(self, summary: Summary, tag: str) -> None:
        """Consuming has begun; without a tag, letters are read that no queue has."""
        if not tag:
            self.begun()
            return
        self.found(summary)
        self.say(f"Started DLQ consumer with tag: {tag}")

    def stopping(self, confirms: int | None) -> None:
        """Somebody has asked for the end; so many confirms are awaited first. None: there are none to await."""
        what = "what is marked arrives first"
        if confirms is not None:
            what = f"waiting for {confirms} confirm{'' if confirms == 1 else 's'}"
        self._urge(STOPPING.format(what=what))

    def progressed(self, summary: Summary, before: int) -> None:
        """Some more are recovered."""
        self._on_progress(summary)
        for thousand in range(before // PROGRESS_COUNT + 1, summary.recovered // PROGRESS_COUNT + 1):
            self.say(f"Recovered {thousand * PROGRESS_COUNT} messages so far...")
            emit("recovery.progress", queue=summary.dead_queue, recovered=thousand * PROGRESS_COUNT)

    def kept(self, summary: Summary, why: str, kind: str, *, count: int, failed: bool) -> None:
        """A letter stays."""
        self._on_progress(summary)
        if count > WARNINGS_COUNT_MAX:
            return
        if failed:
            text = f"{NOT_PUBLISHED.format(type=kind)} ({why})"
        else:
            text = f"{NO_ROUTE} ({why})" if why == NOWHERE else NOT_TAKEN.format(why=why[:1].upper() + why[1:])
        self.say(text.replace(KEEPING, LEAVING, 1) if summary.from_backup else text)
        if count == WARNINGS_COUNT_MAX:
            self.say(f"Further messages that are kept for this reason are only counted: {why}")

    def waits(self, summary: Summary, trouble: str) -> None:
        """Nothing can be published at the moment."""
        if trouble != self._trouble:
            self._trouble = trouble
            emit("recovery.waits", queue=summary.dead_queue, error=trouble)
            self.say(f"Waiting: {trouble}")

    def interrupted(self, summary: Summary, error: BrokerError) -> None:
        """The connection is lost."""
        emit("recovery.interrupted", queue=summary.dead_queue, error=error)
        self.say(f"Connection lost, trying again: {error}")

    def resumed(self, summary: Summary) -> None:
        """The connection is back."""
        self._trouble = ""
        emit("recovery.resumed", queue=summary.dead_queue)
        self.say("Connected again, recovery goes on.")

    def ended(self, summary: Summary) -> None:
        """All is said."""
        self._on_progress(summary)
        for why, reason in summary.reasons.items():
            emit("recovery.kept", queue=summary.dead_queue, count=reason.count, error=why)
        emit("recovery.ended", queue=summary.dead_queue, recovered=summary.recovered, kept=summary.kept)


def _safe(tell: Callable[[T], None]) -> Callable[[T], None]:
    def told(what: T) -> None:
        with suppress(OSError):
            tell(what)

    return told


def sample(message: Message, kind: str, names: QueueNames) -> Sample:
    """A letter in a few words."""
    return Sample(
        message_id=as_utf8(message.id)[:SAMPLE_CHARACTERS_MAX],
        type=(kind or as_utf8(message.type))[:SAMPLE_CHARACTERS_MAX],
        exchange=as_utf8(message.exchange),
        routing_key=as_utf8(message.routing_key),
        died_in=died_in(message, names),
        body_bytes=len(message.body),
        body=message.body[: SAMPLE_CHARACTERS_MAX * 4].decode("utf-8", "replace")[:SAMPLE_CHARACTERS_MAX],
    )


def check(order: RecoveryOrder, preflight: Preflight) -> None:
    """Raises RecoveryRefused: nothing was taken."""
    if refused := [str(right) for right in preflight.rights if right.given is False and right.verb == "read"]:
        raise RecoveryRefused(f"permission is missing; {'; '.join(refused)}; nothing was taken")
    if preflight.cycles:
        raise RecoveryRefused(f"route is cyclic; {'; '.join(preflight.cycles)}; nothing was taken")
    if preflight.missing and not order.keep_unroutable:
        raise RecoveryRefused(
            f"route leads nowhere; {'; '.join(preflight.missing)}; nothing was taken, make it or use --keep-unroutable"
        )
    if order.strict and preflight.delivery_limit is not None:
        assumed = f"{ASSUMED}; --management sees whether it has one" if preflight.limit_is_assumed else ""
        raise RecoveryRefused(
            f"queue has a delivery limit; '{order.dead_queue}' deletes a letter that comes back "
            f"{preflight.delivery_limit} times{assumed}; the cure is {' '.join(preflight.cure.split(LINE_END))}"
        )


def preflight_lines(order: RecoveryOrder, preflight: Preflight) -> list[str]:
    """What was found, for people."""
    limit = "none" if preflight.delivery_limit is None else str(preflight.delivery_limit)
    assumed = ASSUMED if preflight.limit_is_assumed else ""
    kind = preflight.queue_type or "unknown without the management API"
    alarm = preflight.alarm or ("none" if preflight.has_management else "not asked")
    depth = f"{preflight.depth.ready} messages, {preflight.depth.consumers} other consumers"
    lines = [f"Broker: {preflight.broker}; alarms: {alarm}"]
    if order.from_backup:
        lines.append(f"Backup '{order.from_backup}': its letters are published, no queue is read")
    else:
        lines.append(f"Queue '{order.dead_queue}': {depth}, type {kind}, delivery limit {limit}{assumed}")
    if order.journal_file:
        lines.append(f"Journal: {order.journal_file}")
    if preflight.rights:
        lines.append(f"Permissions: {'; '.join(map(str, preflight.rights))}")
    if preflight.depth.consumers:
        lines.append("Warning: other consumers take letters from this queue as well.")
    if preflight.delivery_limit is not None:
        cure, _, command = preflight.cure.partition(LINE_END)
        lines.append(f"Warning: letters that come back too often are deleted by the broker; the cure is {cure}")
        lines += [command] if command else []  # to be copied
    barred = [right.what for right in preflight.rights if right.given is False and right.verb == "write"]
    lines += [f"Warning: {what} may not be written to; what would go there is kept." for what in barred]
    lines += [f"Warning: {text}" for text in (*preflight.missing, *preflight.warnings)]
    for address, queues in preflight.copies.items():
        if len(queues) > 1:
            lines.append(f"Note: {address} copies to {len(queues)} queues: {', '.join(queues)}")
    return lines
