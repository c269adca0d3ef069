"""What must be true of a vault, in plain Python: a dead-letter queue, letters and their states, tasks and their leases.

The broker is modelled too, so that nothing can be lost unseen: a message that was sent is still in its queue, or a
letter of its bytes was stored for it. What the vault alone decides (which of two equal un-acked rows is used up) is
taken from what it says, after it was checked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from holdfast.core.states import LETTER_MOVES, LetterState

S = LetterState
RETURNING = (S.REDRIVING, S.REDRIVEN, S.RESOLVED)
FINAL = ("redriven", "failed", "skipped", "released")


@dataclass(frozen=True)
class Message:
    """A message in a dead-letter queue."""

    queue: str
    body: bytes
    redrive_id: str = ""
    redelivered: bool = False

    @property
    def key(self) -> tuple[str, bytes, str]:
        """What it is told by: equal twins have the same."""
        return self.queue, self.body, self.redrive_id


@dataclass
class Known:
    """A letter as it must be in the vault."""

    queue: str
    body: bytes
    redrive_id: str
    changed_us: int
    state: LetterState = S.CAPTURED
    acked: bool = False
    edits: list[bytes] = field(default_factory=list)
    came_from: int = 0
    #: Copies of it that a broker has stored, whatever we were told of them.
    published: int = 0

    def move(self, target: LetterState, now_us: int) -> None:
        assert (self.state, target) in LETTER_MOVES, f"{self.state} to {target} is not in the table"
        self.state, self.changed_us = target, now_us


@dataclass
class Place:
    """A letter in a task."""

    redrive_id: str = ""
    status: str = "waiting"
    until_us: int = 0


@dataclass
class Task:
    """A redrive."""

    id: int
    places: dict[int, Place]
    state: str = "running"


@dataclass
class Holding:
    """Letters that a worker has leased and not settled yet. `stored` is what the broker did, known to nobody else."""

    task: Task
    letters: dict[int, str]
    until_us: int


class VaultModel:
    """Everything around one vault."""

    def __init__(self) -> None:
        self.waiting: list[Message] = []  #: in the dead-letter queues
        self.out: list[tuple[int, Message]] = []  #: on the targets, with the letter that each is a copy of
        self.letters: dict[int, Known] = {}
        self.tasks: list[Task] = []
        self.holdings: list[Holding] = []
        self.sent: Counter[tuple[str, bytes, str]] = Counter()
        self.stored: Counter[tuple[str, bytes, str]] = Counter()
        self.copies: Counter[tuple[str, bytes, str]] = Counter()  #: how often a stored one was given back unnoticed
        self.by_redrive_id: dict[str, int] = {}

    def arrive(self, message: Message) -> None:
        self.sent[message.key] += 1
        self.waiting.append(message)

    def may_match(self, message: Message, used: set[int]) -> set[int]:
        """The rows that this delivery may be taken for."""
        if not message.redelivered:
            return set()
        return {
            number
            for number, one in self.letters.items()
            if (one.queue, one.body, one.redrive_id) == message.key
            and not one.acked
            and number not in used
            and one.state is not S.DELETED
        }

    def take(self, number: int, message: Message, now_us: int) -> None:
        """A new letter."""
        assert number not in self.letters, f"id {number} was given out twice"
        old = self.by_redrive_id.get(message.redrive_id, 0)
        if old and self.letters[old].state in RETURNING:
            self.letters[old].move(S.CAME_BACK, now_us)
        gone = old and self.letters[old].state is S.DELETED
        self.letters[number] = Known(*message.key, now_us, came_from=0 if gone else old)
        self.stored[message.key] += 1

    def of_state(self, state: LetterState) -> list[int]:
        return sorted(number for number, one in self.letters.items() if one.state is state)

    def leasable(self, task: Task, count: int, now_us: int) -> dict[int, Place]:
        """Of the next places, the ones that are to be published; the others are passed over."""
        if task.state != "running":
            return {}
        due = {
            number: place
            for number, place in sorted(task.places.items())
            if place.status == "waiting" or (place.status in ("leased", "unknown") and place.until_us <= now_us)
        }
        ours: dict[int, Place] = {}
        for number, place in list(due.items())[:count]:
            state = self.letters[number].state
            if state is (S.CAPTURED if place.status == "waiting" else S.REDRIVING):
                ours[number] = place
            else:
                place.status = "skipped" if place.status == "waiting" else "redriven"
        return ours

    def settle(self, holding: Holding, number: int, kind: str, now_us: int) -> None:
        """A worker tells what became of a letter, in time or long after its lease ran out."""
        place, letter = holding.task.places[number], self.letters[number]
        if kind == "redriven":
            if place.status != "skipped":
                place.status = "redriven"
            if letter.state is S.CAPTURED:  # another worker thought that it had failed
                letter.move(S.REDRIVING, now_us)
            if letter.state is S.REDRIVING and not self.is_held_elsewhere(number, holding.task):
                letter.move(S.REDRIVEN, now_us)
            return
        if place.status in FINAL or place.until_us != holding.until_us:
            return  # another worker has it now: what became of it is his to say
        place.status, place.until_us = kind, 0
        if kind == "failed" and letter.state is S.REDRIVING:
            letter.move(S.CAPTURED, now_us)

    def release(self, now_us: int) -> int:
        """What nobody has in hand any more of cancelled tasks goes back; how many there were."""
        count = 0
        for task in self.tasks:
            for number, place in task.places.items():
                is_due = place.status in ("leased", "unknown") and place.until_us <= now_us
                if task.state != "cancelled" or not is_due:
                    continue
                count += 1
                letter = self.letters[number]
                place.status = "released" if letter.state is S.REDRIVING else "redriven"
                if letter.state is S.REDRIVING:
                    letter.move(S.CAPTURED, now_us)
        return count

    def is_held_elsewhere(self, number: int, task: Task) -> bool:
        """Whether another task has this letter in its hands."""
        return any(
            one is not task and number in one.places and one.places[number].status in ("leased", "unknown")
            for one in self.tasks
        )

    def check(self) -> None:
        """Nothing is lost, nothing came from nowhere, and nothing counts as sent back that was never published."""
        waiting = Counter(one.key for one in self.waiting)
        for key, sent in self.sent.items():
            assert self.stored[key] >= sent - waiting[key], f"{key} is lost"
            assert self.stored[key] <= sent + self.copies[key], f"{key} came from nowhere"
        for number, letter in self.letters.items():
            if letter.state in (S.REDRIVEN, S.RESOLVED, S.CAME_BACK):
                assert letter.published, f"letter {number} is {letter.state} and was never published"
        for holding in self.holdings:
            for number in holding.letters:
                place = holding.task.places[number]
                if place.status == "leased" and place.until_us == holding.until_us:
                    state = self.letters[number].state
                    assert state not in (S.CAPTURED, S.ARCHIVED, S.DISCARDED), f"letter {number} is leased and {state}"
