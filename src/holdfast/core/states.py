"""Which states there are and which moves between them, written once. Diagrams are drawn from these tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import TypeVar


class ItemState(Enum):
    """Where an item of the embedded queue is in its life: in exactly one of these.

    That it went into another queue is a move of its own there: it leaves this one, and arrives as a new item.
    """

    OUTSIDE = "[*]"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    LEASED = "leased"
    DYING = "dying"


ITEM_MOVES: Mapping[tuple[ItemState, ItemState], str] = {
    (ItemState.OUTSIDE, ItemState.QUEUED): "produce, import, arrive from the queue it died in or was redriven from",
    (ItemState.OUTSIDE, ItemState.SCHEDULED): "produce or import with enqueue_at",
    (ItemState.SCHEDULED, ItemState.QUEUED): "its moment has come",
    (ItemState.SCHEDULED, ItemState.OUTSIDE): "clear, delete",
    (ItemState.QUEUED, ItemState.LEASED): "lease, attempts + 1",
    (ItemState.QUEUED, ItemState.DYING): "expired, attempts at a lowered limit, or redriven",
    (ItemState.QUEUED, ItemState.OUTSIDE): "clear, delete, dead_retention",
    (ItemState.LEASED, ItemState.QUEUED): "retry, or the lease ran out",
    (ItemState.LEASED, ItemState.SCHEDULED): "retry with retry_at",
    (ItemState.LEASED, ItemState.DYING): "attempts used up, or retry with dead",
    (ItemState.LEASED, ItemState.OUTSIDE): "complete, destructive clear, delete",
    (
        ItemState.DYING,
        ItemState.OUTSIDE,
    ): "arrived in its dead queue or where it was redriven to, or deleted where there is no dead queue",
    (ItemState.DYING, ItemState.QUEUED): "the queue it was to arrive in is gone",
}


class LetterState(Enum):
    """Where a letter in the vault is in its life."""

    OUTSIDE = "[*]"
    CAPTURED = "captured"
    REDRIVING = "redriving"
    REDRIVEN = "redriven"
    RESOLVED = "resolved"
    CAME_BACK = "came_back"
    ARCHIVED = "archived"
    DISCARDED = "discarded"
    DELETED = "deleted"


LETTER_MOVES: Mapping[tuple[LetterState, LetterState], str] = {
    (LetterState.OUTSIDE, LetterState.CAPTURED): "capture",
    (LetterState.CAPTURED, LetterState.REDRIVING): "a redrive takes it",
    (LetterState.REDRIVING, LetterState.REDRIVEN): "the broker has confirmed it",
    (LetterState.REDRIVING, LetterState.CAPTURED): "known not to have been published, or cancelled and unknown",
    (LetterState.REDRIVING, LetterState.CAME_BACK): "captured again with its redrive id, before the confirm was noted",
    (LetterState.REDRIVEN, LetterState.RESOLVED): "done by a consumer, not back within resolve_after, or by hand",
    (LetterState.REDRIVEN, LetterState.CAME_BACK): "captured again with its redrive id",
    (LetterState.RESOLVED, LetterState.CAME_BACK): "captured again with its redrive id",
    (LetterState.CAPTURED, LetterState.ARCHIVED): "archive",
    (LetterState.ARCHIVED, LetterState.CAPTURED): "restore",
    (LetterState.CAPTURED, LetterState.DISCARDED): "discard",
    (LetterState.RESOLVED, LetterState.DELETED): "retention",
    (LetterState.CAME_BACK, LetterState.DELETED): "retention",
    (LetterState.DISCARDED, LetterState.DELETED): "retention",
    (LetterState.DELETED, LetterState.OUTSIDE): "only its count and its rows in the ledger are left",
}


class TransactionState(Enum):
    """Where a collected result is: the first three are worked on, the others are its end."""

    OUTSIDE = "[*]"
    FORWARDING = "forwarding"
    AWAITING = "awaiting"
    SENDING = "sending"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"

    @property
    def is_end(self) -> bool:
        """Whether nothing follows but clearing up."""
        return self in TRANSACTION_ENDS


TRANSACTION_ENDS = frozenset({TransactionState.COMPLETED, TransactionState.FAILED, TransactionState.ABANDONED})
TRANSACTION_MOVES: Mapping[tuple[TransactionState, TransactionState], str] = {
    (TransactionState.OUTSIDE, TransactionState.FORWARDING): "start",
    (TransactionState.FORWARDING, TransactionState.AWAITING): "the request is forwarded",
    (TransactionState.AWAITING, TransactionState.SENDING): "every ordinal of every series is in the index",
    (TransactionState.SENDING, TransactionState.COMPLETED): "the notice is confirmed",
    (TransactionState.FORWARDING, TransactionState.FAILED): "it can never complete, or made no progress for too long",
    (TransactionState.AWAITING, TransactionState.FAILED): "it can never complete, or made no progress for too long",
    (TransactionState.SENDING, TransactionState.FAILED): "it can never complete, or made no progress for too long",
    (TransactionState.FORWARDING, TransactionState.ABANDONED): "abandoned by hand",
    (TransactionState.AWAITING, TransactionState.ABANDONED): "abandoned by hand",
    (TransactionState.SENDING, TransactionState.ABANDONED): "abandoned by hand",
    (TransactionState.COMPLETED, TransactionState.OUTSIDE): "its queues are drained and deleted",
    (TransactionState.FAILED, TransactionState.OUTSIDE): "its queues and index rows are deleted",
    (TransactionState.ABANDONED, TransactionState.OUTSIDE): "its queues and index rows are deleted",
}


class RunState(StrEnum):
    """Where a letter of a recovery run is. With the last four it is done, unless it comes again or must be put back."""

    OUTSIDE = "[*]"
    WAITING = "waiting"  #: it has a route, and waits to be sent
    SENT = "sent"  #: published, and not answered yet
    CONFIRMED = "confirmed"  #: the broker has its copy; only the ack is missing
    HELD = "held"  #: it stays in the queue; unacked until the run ends
    PUTTING_BACK = "putting_back"  #: on its way back into its queue by a publish: it bears no other return
    SETTLED = "settled"
    PUT_BACK = "put_back"
    UNANSWERED = "unanswered"  #: published, and nobody answered
    GIVEN_BACK = "given_back"


#: A lost connection changes no state: the letter is *away*, and goes on where it was when it comes again.
RECOVERY_MOVES: Mapping[tuple[RunState, RunState], str] = {
    (RunState.OUTSIDE, RunState.WAITING): "taken, with a route; also one that was acked and is there again",
    (
        RunState.OUTSIDE,
        RunState.HELD,
    ): "taken, without a route, left out, blocked, unwanted, put back before, or dry run",
    (RunState.OUTSIDE, RunState.CONFIRMED): "noted in the journal of a killed run",
    (RunState.WAITING, RunState.SENT): "its pace allows it, its backup is written",
    (RunState.WAITING, RunState.HELD): "its exchange refuses",
    (RunState.SENT, RunState.CONFIRMED): "confirmed, and not returned",
    (RunState.SENT, RunState.HELD): "returned, nacked, refused or unknown",
    (RunState.CONFIRMED, RunState.SETTLED): "noted in the journal, then acked; away at the end, a possible duplicate",
    (RunState.HELD, RunState.PUTTING_BACK): "near the delivery limit",
    (RunState.PUTTING_BACK, RunState.PUT_BACK): "confirmed, then acked",
    (RunState.PUTTING_BACK, RunState.HELD): "not confirmed",
    (RunState.PUT_BACK, RunState.HELD): "was away, and came again",
    (RunState.SENT, RunState.UNANSWERED): "no answer at the end; given back",
    (RunState.OUTSIDE, RunState.PUTTING_BACK): "the end, near the delivery limit: delivered, and never looked at",
    (RunState.WAITING, RunState.PUTTING_BACK): "the end, near the delivery limit",
    (RunState.UNANSWERED, RunState.PUTTING_BACK): "the end, near the delivery limit",
    (RunState.WAITING, RunState.GIVEN_BACK): "the end",
    (RunState.HELD, RunState.GIVEN_BACK): "the end",
}


State = TypeVar("State", bound=Enum)


def mermaid(moves: Mapping[tuple[State, State], str]) -> str:
    """A state diagram of a table of moves."""
    lines = [f"    {source.value} --> {target.value}: {why}" for (source, target), why in moves.items()]
    return "\n".join(["stateDiagram-v2", *lines])
