"""Counts messages before and after: every message put in must be found, unaltered, and only once.

A message is known by its id and the digest of its body. What was acknowledged is put for certain; where the
answer was lost (the process died, the connection was cut) it is in doubt, and may be there or not. The same
holds for what is found: a message that was completed with an answer was found in the place "completed".
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError

SAMPLES_MAX = 5


class NotConserved(HoldfastError):
    """Messages were lost, altered, duplicated or came from nowhere."""


class Conservation:
    """The counts of one run: `put` what goes in, `found` what is there afterwards, then `report().check()`."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownMessage] = {}
        self._found: defaultdict[str, list[str]] = defaultdict(list)
        self._maybe: set[str] = set()
        self._altered: defaultdict[str, list[str]] = defaultdict(list)

    def put(self, message_id: str, body: bytes) -> None:
        """It was acknowledged: from now on it must be somewhere.

        An id in doubt becomes certain. Raises ValueError for an id that was put already, because two messages
        with one id cannot be told apart when they are counted.
        """
        self._enter(message_id, body, certain=True)

    def put_in_doubt(self, message_id: str, body: bytes) -> None:
        """It was sent, but no answer came: it may be somewhere or nowhere. Raises as `put` does."""
        self._enter(message_id, body, certain=False)

    def found(self, place: str, message_id: str, body: bytes | None = None) -> None:
        """It is in `place`. Without a body, it is counted but not compared."""
        self._found[message_id].append(place)
        self._compare(place, message_id, body)

    def found_in_doubt(self, place: str, message_id: str, body: bytes | None = None) -> None:
        """It may be in `place`: enough not to be lost, not enough to be a duplicate."""
        self._maybe.add(message_id)
        self._compare(place, message_id, body)

    def report(self) -> ConservationReport:
        """Count. Nothing is forgotten by it: more can be found later, and counted again."""
        seen = self._found.keys() | self._maybe
        certain = [message_id for message_id, known in self._known.items() if known.certain]
        return ConservationReport(
            put_count=len(certain),
            in_doubt_count=len(self._known) - len(certain),
            found_count=sum(len(places) for places in self._found.values()),
            lost=tuple(sorted(message_id for message_id in certain if message_id not in seen)),
            duplicated={i: tuple(self._found[i]) for i in sorted(self._found) if len(self._found[i]) > 1},
            altered={i: tuple(self._altered[i]) for i in sorted(self._altered)},
            unexpected={i: tuple(self._found.get(i, ["(in doubt)"])) for i in sorted(seen) if i not in self._known},
        )

    def check(self, *, duplicates_max: int | None = 0) -> ConservationReport:
        """Count, raise NotConserved unless all is well, and return the report."""
        report = self.report()
        report.check(duplicates_max=duplicates_max)
        return report

    def _enter(self, message_id: str, body: bytes, *, certain: bool) -> None:
        digest = hashlib.sha256(body).digest()
        known = self._known.get(message_id)
        if known is not None and (known.certain or known.digest != digest):
            raise ValueError(f"the id {message_id!r} was put already")
        self._known[message_id] = _KnownMessage(digest, certain)

    def _compare(self, place: str, message_id: str, body: bytes | None) -> None:
        known = self._known.get(message_id)
        if known is not None and body is not None and hashlib.sha256(body).digest() != known.digest:
            self._altered[message_id].append(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConservationReport:
    """What the count came to. Ids are sorted; places are named in the order in which they were counted."""

    put_count: int
    in_doubt_count: int
    found_count: int
    lost: tuple[str, ...]
    duplicated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    altered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unexpected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def duplicates_count(self) -> int:
        """Copies too many: a message that is there three times is two of them."""
        return sum(len(places) - 1 for places in self.duplicated.values())

    def check(self, *, duplicates_max: int | None = 0) -> None:
        """Raise NotConserved, naming samples, unless all is well. `duplicates_max=None` allows any number of copies."""
        duplicates_fail = duplicates_max is not None and self.duplicates_count > duplicates_max
        if self.lost or self.altered or self.unexpected or duplicates_fail:
            raise NotConserved(self.text(), ids=[*self.lost, *self.altered, *self.unexpected][:SAMPLES_MAX])

    def text(self) -> str:
        """One line of numbers, then a line of samples for each kind of trouble."""
        lines = [self._numbers()]
        if self.lost:
            lines.append("lost: " + _samples([repr(message_id) for message_id in self.lost]))
        kinds = {"duplicated": self.duplicated, "altered": self.altered, "unexpected": self.unexpected}
        for kind, places in kinds.items():
            if places:
                texts = [f"{message_id!r} in {', '.join(where)}" for message_id, where in places.items()]
                lines.append(f"{kind}: {_samples(texts)}")
        return "\n".join(lines)

    def _numbers(self) -> str:
        return (
            f"not conserved; put {self.put_count}, in doubt {self.in_doubt_count}, found {self.found_count}, "
            f"lost {len(self.lost)}, duplicates {self.duplicates_count}, altered {len(self.altered)}, "
            f"unexpected {len(self.unexpected)}"
        )

    def line(self, scenario: str, *, kills: int, **more: float | str) -> str:
        """One line of JSON for a long run: its name, the kills, and the counts, with `more` after them."""
        numbers = {
            "scenario": scenario,
            "kills": kills,
            "messages": self.put_count,
            "in_doubt": self.in_doubt_count,
            "lost": len(self.lost),
            "duplicates": self.duplicates_count,
            "altered": len(self.altered),
            "unexpected": len(self.unexpected),
        }
        return json.dumps(numbers | more, ensure_ascii=False)


@dataclass(slots=True)
class _KnownMessage:
    digest: bytes
    certain: bool


def _samples(texts: list[str]) -> str:
    more = len(texts) - SAMPLES_MAX
    return ", ".join(texts[:SAMPLES_MAX]) + (f" and {more} more" if more > 0 else "")
