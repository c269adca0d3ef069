"""Asking again what a lost connection has left without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.engines.rabbitmq.backoff import Backoff, BackoffTimer
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
