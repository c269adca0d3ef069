"""What the operating system lends: its clock."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from holdfast.ports.clock import Timer


class SystemClock:
    """The machine's clock. `HOLDFAST_CLOCK_OFFSET_S` shifts it, to prove that two servers' clocks may differ."""

    def __init__(self) -> None:
        self._offset_us = int(float(os.environ.get("HOLDFAST_CLOCK_OFFSET_S", "0")) * 1_000_000)

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self._offset_us

    def call_later(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0, delay_us) / 1_000_000, callback)
