"""Which states there are and which moves between them, written once. Diagrams are drawn from these tables.

An item of the embedded queue is in exactly one of these states; `gone` is outside of the queue. That it went into
another queue is a move of its own there: it arrives as a new item.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class ItemState(Enum):
    """Where an item is in its life."""

    OUTSIDE = "[*]"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    LEASED = "leased"
    DYING = "dying"


ITEM_MOVES: Mapping[tuple[ItemState, ItemState], str] = {
    (ItemState.OUTSIDE, ItemState.QUEUED): "produce, import, arrive from a queue it died in",
    (ItemState.OUTSIDE, ItemState.SCHEDULED): "produce or import with enqueue_at",
    (ItemState.SCHEDULED, ItemState.QUEUED): "its moment has come",
    (ItemState.SCHEDULED, ItemState.OUTSIDE): "clear, delete",
    (ItemState.QUEUED, ItemState.LEASED): "lease, attempts + 1",
    (ItemState.QUEUED, ItemState.DYING): "expired, or attempts at a lowered limit",
    (ItemState.QUEUED, ItemState.OUTSIDE): "clear, delete, dead_retention",
    (ItemState.LEASED, ItemState.QUEUED): "retry, or the lease ran out",
    (ItemState.LEASED, ItemState.SCHEDULED): "retry with retry_at",
    (ItemState.LEASED, ItemState.DYING): "attempts used up, or retry with dead",
    (ItemState.LEASED, ItemState.OUTSIDE): "complete, destructive clear, delete",
    (ItemState.DYING, ItemState.OUTSIDE): "arrived in its dead queue, or deleted where there is none",
    (ItemState.DYING, ItemState.QUEUED): "its dead queue is gone",
}


State = TypeVar("State", bound=Enum)


def mermaid(moves: Mapping[tuple[State, State], str]) -> str:
    """A state diagram of a table of moves."""
    lines = [f"    {source.value} --> {target.value}: {why}" for (source, target), why in moves.items()]
    return "\n".join(["stateDiagram-v2", *lines])
