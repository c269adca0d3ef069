"""Moves of an item from one queue to another: a death takes it to its dead queue, a redrive takes it back.

Three commits: the source marks it with its target (`SendBack`, or whatever lets it die), the target inserts it
(`Arrive`), the source removes it (`Remove`); then the target forgets that it came (`Forget`). A crash anywhere resumes
at the mark.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class MoveTarget(Struct, frozen=True, kw_only=True):
    """Where an item goes: one partition, chosen when it is marked and never changed."""

    queue_name: str
    generation: int
    partition: int
    storage: str
    expire_timeout_us: int


class DyingItem(Struct, frozen=True, kw_only=True):
    """An item marked as dying: what its target stores. `source_id` is its old id. Without a reason for its death it is
    on its way back: then it begins anew, with no story but its `source_id`."""

    source_id: str
    source_queue: str
    target: MoveTarget
    kind: str
    encoding: str
    reference: str
    payload: bytes
    death_reason: str
    death_attempts: int
    died_at_us: int
    former_key: str = ""

    @property
    def is_redrive(self) -> bool:
        return not self.death_reason


class SendBack(Struct, frozen=True):
    """First commit of a redrive: mark those of the ids that are queued here, un-leased, and died in the queue that is
    the target. All others are left alone. Where both queues are in one database it is the whole redrive."""

    partition: int
    ids: Sequence[str]
    target: MoveTarget


class SentBack(Struct, frozen=True):
    """Which of them are on their way, or, if `moved`, there."""

    ids: Sequence[str]
    moved: bool = False


class Arrive(Struct, frozen=True):
    """Second commit of a move: insert what is neither here by `source_id` nor remembered as arrived."""

    partition: int
    items: Sequence[DyingItem]
    expire_timeout_us: int


class Remove(Struct, frozen=True):
    """Third commit of a move: the marked items have arrived, remove them."""

    partition: int
    ids: Sequence[str]


class Revive(Struct, frozen=True):
    """The target of these moves is gone for good: back to the tail, to live or to die again by today's rules."""

    partition: int
    ids: Sequence[str]


class Forget(Struct, frozen=True):
    """The third commit of these moves is known: their arrivals need no memory any more."""

    partition: int
    source_ids: Sequence[str]
