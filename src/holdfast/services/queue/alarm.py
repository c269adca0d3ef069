"""One timer for many moments: it rings at the nearest, and whoever hears it looks what is due."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.ports.clock import Clock, Timer


class EarliestTimer:
    """Rings once at the earliest moment that was asked for; ringing too early is harmless."""

    def __init__(self, clock: Clock, heard: Callable[[], None]) -> None:
        self._clock = clock
        self._heard = heard
        self._timer: Timer | None = None
        self._at_us = 0

    def ring_at(self, at_us: int) -> None:
        """Ring at that moment, unless it rings before; 0 asks for nothing."""
        if not at_us or (self._timer is not None and self._at_us <= at_us):
            return
        self.off()
        self._at_us = at_us
        self._timer = self._clock.call_later(at_us - self._clock.now_us(), self._ring)

    def off(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._heard()
