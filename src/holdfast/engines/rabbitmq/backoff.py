"""How long to wait before trying again: doubling, with a ceiling, and spread so that clients do not come at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.errors import BadAddress, BrokerError, BrokerLost, BrokerRefused
from holdfast.telemetry.events import emit

T = TypeVar("T")


LIMIT_S = 600.0


def passes(error: BrokerError) -> bool:
    """Whether it may be another time: nobody has said no.

    Only of somebody whom we have met: that a broker was there tells a restart, or a proxy with nobody behind it, from
    a wrong address.
    """
    return not isinstance(error, BadAddress) and not (isinstance(error, BrokerRefused) and error.reply_code)


async def retry_call(ask: Callable[[], Awaitable[T]], *, address: object, is_met: bool, limit_s: float = LIMIT_S) -> T:
    """Ask until there is an answer, with back-off. What is asked must do no harm when it is done twice.

    Raises the BrokerError that does not pass, or the last one when the time is over. With a broker that was not met
    before, only a connection that was there and was lost is a reason to go on.
    """
    loop = asyncio.get_running_loop()
    deadline_s, patience = loop.time() + limit_s, BackoffTimer(Backoff())
    while True:
        try:
            return await ask()
        except BrokerError as error:
            is_met = is_met or isinstance(error, BrokerLost)
            if not is_met or not passes(error) or loop.time() > deadline_s:
                raise
            emit("broker.lost", address=str(address), error=error)
            await asyncio.sleep(patience.delay_s(loop.time()))


STEADY_S = 5.0


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


class BackoffTimer:
    """The wait before the next try, by how the last ones went. No clock of its own: moments are handed in.

    What worked, but not for long, counts as a failure: a broker that hangs up on everybody is not asked in a loop.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0
        self._since_s: float | None = None

    def worked(self, now_s: float) -> None:
        """A try succeeded."""
        self._since_s = now_s

    def delay_s(self, now_s: float) -> float:
        """A try failed, or what it had brought about ended: how long to wait before the next."""
        if self._since_s is not None and now_s - self._since_s >= STEADY_S:
            self._failures = 0
        self._since_s = None
        self._failures += 1
        return self._backoff.delay_s(self._failures - 1)
