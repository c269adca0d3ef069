"""How long to wait before trying again: doubling, with a ceiling, and spread so that clients do not come at once."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """`delay_s(0)` is the wait after the first failure."""

    first_s: float = 0.1
    factor: float = 2.0
    delay_s_max: float = 15.0

    def delay_s(self, failures: int, *, spread: float | None = None) -> float:
        """Between half and all of the doubled delay; `spread` (0 to 1) is chosen by chance unless given."""
        chance = random.random() if spread is None else spread  # noqa: S311  nobody gains by guessing it
        # The exponent has a ceiling of its own: a broker that is away for a week must not overflow a float.
        full_s = min(self.first_s * self.factor ** min(failures, 64), self.delay_s_max)
        return full_s * (0.5 + chance / 2)
