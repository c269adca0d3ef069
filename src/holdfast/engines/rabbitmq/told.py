"""What a recovery is told of its publishes."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engines.rabbitmq.lane import PublishBatch
from holdfast.engines.rabbitmq.wire.confirms import Outcome, OutcomeKind
from holdfast.ports.recovery import OnOutcome, RunLetter, Verdict

VERDICTS = {kind: Verdict(kind.value) for kind in OutcomeKind}


class Told(PublishBatch):
    """Tells each outcome to the run as soon as it is known."""

    __slots__ = ("_letters", "_on_outcome")

    def __init__(self, letters: Sequence[RunLetter], on_outcome: OnOutcome) -> None:
        super().__init__(len(letters), lambda: None)
        self._letters = letters
        self._on_outcome = on_outcome

    def settle(self, places: Sequence[int], outcome: Outcome) -> None:
        letters = self._letters
        self._on_outcome([letters[place] for place in places], VERDICTS[outcome.kind], outcome.code, outcome.text)
        self.missing -= len(places)
        if not self.missing:
            self.on_done()
