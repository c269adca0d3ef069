"""Which publish an ack, a nack or a return of the broker belongs to. Pure: no socket, no clock.

Acks and nacks carry the number of the publish. A return carries none: only the message itself. It is matched by
everything that it carries (exchange, key, properties, body), never by the message id, which may repeat. Of
publishes that are equal in every byte, nobody can tell which one came back; since they are interchangeable, their
outcomes are told together, when the broker has answered all of them: so many returned, the others stored. A return
that fits no publish exactly makes every publish that it may have been *unknown*: a wrong "stored" loses a message,
a wrong "unknown" only sends it twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar

from holdfast.core.message import CONFIRMED, Outcome, OutcomeKind
from holdfast.engines.rabbitmq.wire.events import Returned
from holdfast.engines.rabbitmq.wire.properties import canonical

NACKED = Outcome(OutcomeKind.NACKED)
AMBIGUOUS = Outcome(
    OutcomeKind.UNKNOWN, 0, "a publish like it was returned, and the broker's answer does not say which"
)


class SentPublish(Protocol):
    """What a publish looked like on the wire."""

    @property
    def exchange(self) -> str: ...
    @property
    def routing_key(self) -> str: ...
    @property
    def properties(self) -> bytes: ...
    @property
    def body(self) -> bytes: ...


T = TypeVar("T", bound=SentPublish)
Likeness: TypeAlias = tuple[str, str, bytes, bytes]


class _Twins:
    """Publishes of which some were returned, and nobody can say which."""

    __slots__ = ("acked", "members", "returned", "same")

    def __init__(self, *, same: bool) -> None:
        self.members: set[int] = set()
        self.acked: list[int] = []
        self.returned: list[Outcome] = []
        self.same = same  # equal in every byte, and so interchangeable


class UnknownTag(Exception):
    """The broker answered a publish that was never sent: the books are wrong, and the channel must go."""


class Confirms(Generic[T]):
    """The books of one channel in confirm mode: `sent` every publish, then tell it every answer."""

    def __init__(self) -> None:
        self._next = 1
        self._lowest = 1  # every tag below it was answered by a `multiple`
        self._open: dict[int, T] = {}
        self._held: dict[int, T] = {}  # answered, but waiting for its twins
        self._returned: dict[int, Outcome] = {}
        self._twins: dict[int, _Twins] = {}
        # Made at the first return and kept up while anything is in flight: without returns it costs nothing.
        self._alike: defaultdict[Likeness, dict[int, None]] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def sent(self, publish: T) -> int:
        """Enter the next publish of the channel; answers its tag."""
        tag = self._next
        self._next = tag + 1
        self._open[tag] = publish
        if self._alike is not None:
            self._alike[_likeness(publish)][tag] = None
        return tag

    def answered(self, tag: int, *, multiple: bool, ack: bool) -> list[tuple[T, Outcome]]:
        """An ack or a nack: the outcomes that are certain now, in publish order. Raises UnknownTag."""
        if tag >= self._next or tag < 0:
            raise UnknownTag(f"the broker answered publish {tag}; only {self._next - 1} were sent")
        plain = CONFIRMED if ack else NACKED
        tags: Iterable[int] = (tag,)
        if multiple:
            # Tag 0 with `multiple` means: all that were sent.
            tags = range(self._lowest, (tag or self._next - 1) + 1)
            self._lowest = max(self._lowest, tags.stop)
        if self._alike is None:
            take = self._open.pop
            return [(publish, plain) for one in tags if (publish := take(one, None)) is not None]
        outcomes: list[tuple[T, Outcome]] = []
        for one in tags:
            if one in self._open:
                self._answer(one, plain, outcomes)
        if not self._open:
            self._alike = None
        return outcomes

    def returned(self, event: Returned) -> None:
        """A return: finds its publish, whose outcome is told with the ack that follows. Raises UnknownTag."""
        outcome = Outcome(OutcomeKind.RETURNED, event.code, event.text)
        if self._alike is None:
            self._alike = defaultdict(dict)
            for tag, publish in self._open.items():
                self._alike[_likeness(publish)][tag] = None
        alike = self._alike.get(_likeness(event))
        tags = alike or self._suspects(event)
        first = next(iter(tags))
        twins = self._twins.get(first)
        if len(tags) == 1 and twins is None:
            self._returned[first] = outcome
            self._unlist(first, self._open[first])
        elif twins is not None and twins.same and alike is not None and len(twins.members) == len(alike):
            twins.returned.append(outcome)
        else:
            self._join(list(tags), outcome, same=alike is not None)

    def lost(self) -> list[T]:
        """The channel is gone: everything that was not told yet, in publish order. These books are closed."""
        remaining = {**self._open, **self._held}
        self._open.clear()
        self._held.clear()
        return [remaining[tag] for tag in sorted(remaining)]

    def _answer(self, tag: int, plain: Outcome, outcomes: list[tuple[T, Outcome]]) -> None:
        publish = self._open.pop(tag)
        self._unlist(tag, publish)
        twins = self._twins.get(tag)
        if twins is None:
            outcomes.append((publish, self._returned.pop(tag, plain)))
            return
        twins.members.discard(tag)
        if plain is NACKED:
            # Whatever was returned, it was not this one: the broker acks what it returns.
            del self._twins[tag]
            outcomes.append((publish, plain))
        else:
            self._held[tag] = publish
            twins.acked.append(tag)
        if not twins.members:
            self._tell(twins, outcomes)

    def _tell(self, twins: _Twins, outcomes: list[tuple[T, Outcome]]) -> None:
        all_returned = len(twins.returned) >= len(twins.acked)
        for place, tag in enumerate(sorted(twins.acked)):
            del self._twins[tag]
            publish = self._held.pop(tag)
            if not twins.same and not all_returned:
                outcomes.append((publish, AMBIGUOUS))
            else:
                outcomes.append((publish, twins.returned[place] if place < len(twins.returned) else CONFIRMED))

    def _join(self, tags: list[int], outcome: Outcome, *, same: bool) -> None:
        """One of these was returned: from now on they are told together, with all whom they were told with before."""
        merged = _Twins(same=same)
        merged.members.update(tags)
        for group in {id(self._twins[tag]): self._twins[tag] for tag in tags if tag in self._twins}.values():
            merged.members |= group.members
            merged.acked += group.acked
            merged.returned += group.returned
            merged.same = merged.same and group.same
        merged.returned.append(outcome)
        for tag in (*merged.members, *merged.acked):
            self._twins[tag] = merged

    def _suspects(self, event: Returned) -> list[int]:
        """Whom a return may be about when it fits none exactly: all that have the closest likeness in flight."""
        tests: tuple[Callable[[SentPublish], bool], ...] = (
            lambda sent: (
                (sent.exchange, sent.routing_key, sent.body) == (event.exchange, event.routing_key, event.body)
            ),
            lambda sent: (sent.exchange, sent.routing_key) == (event.exchange, event.routing_key),
            lambda sent: True,
        )
        for test in tests:
            suspects = [tag for tag, sent in self._open.items() if tag not in self._returned and test(sent)]
            if suspects:
                return suspects
        raise UnknownTag("the broker returned a publish, and none is in flight")

    def _unlist(self, tag: int, publish: T) -> None:
        """It was answered, or its return was found: no later return can be about it."""
        if self._alike is not None:
            likeness = _likeness(publish)
            tags = self._alike.get(likeness)
            if tags is not None:
                tags.pop(tag, None)
                if not tags:
                    del self._alike[likeness]


def _likeness(publish: SentPublish) -> Likeness:
    return publish.exchange, publish.routing_key, canonical(publish.properties), publish.body
