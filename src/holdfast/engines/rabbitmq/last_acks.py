"""Waits until a queue has worked through the last acks of a consumer that was cancelled.

A channel passes only some 30 acks on to a quorum queue at once, and forgets the rest when it is closed: those messages
would run a second time. No answer tells when an ack has arrived, but a consumer that is cancelled counts among the
queue's until the last of its messages is settled. Nothing here raises BrokerError: who cannot ask closes all the same.
"""

from __future__ import annotations

import asyncio

from holdfast.engines.rabbitmq.channel import Channel
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.recovery_lock import NoEvents
from holdfast.engines.rabbitmq.wire import methods
from holdfast.errors import BrokerError

ASK_TIMEOUT_S = 3.0
#: A consumer that comes while we wait is taken for ours: then it takes this long.
SETTLE_TIMEOUT_S, SETTLE_STEP_S = 5.0, 0.02
#: Where others consume as well, one of them may have gone and not ours: the count has to be the same for this long.
STILL_S = 0.1


async def count_consumers(connection: Connection, queue: str) -> int | None:
    """How many consumers the queue has, those included that are cancelled and hold messages; None: nobody says."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            channel = await connection.channel(NoEvents())
            try:
                return await _count(channel, queue)
            finally:
                if channel.is_open:
                    await connection.close_channel(channel)
    except (BrokerError, TimeoutError):
        return None


async def wait_until_settled(
    connection: Connection, queue: str, *, count_before: int, timeout_s: float = SETTLE_TIMEOUT_S
) -> bool:
    """Wait until the queue has fewer consumers than while ours was among them; False when that was not seen in time."""
    try:
        async with asyncio.timeout(timeout_s):
            # A channel of its own: when the question is refused, the one with the acks lives.
            channel = await connection.channel(NoEvents())
            await _fewer(channel, queue, count_before)
            await connection.close_channel(channel)
    except (BrokerError, TimeoutError):
        return False
    return True


async def _fewer(channel: Channel, queue: str, count_before: int) -> None:
    loop = asyncio.get_running_loop()
    last, since_s = count_before, loop.time()
    while True:
        count = await _count(channel, queue)
        if count == 0:
            return
        if count != last:
            last, since_s = count, loop.time()
        if count < count_before and loop.time() - since_s >= STILL_S:
            return
        await asyncio.sleep(SETTLE_STEP_S)  # a broker has to be asked


async def _count(channel: Channel, queue: str) -> int:
    answer = await channel.call(methods.QueueDeclare(queue=queue, passive=True))
    return int(getattr(answer, "consumer_count", 0) or 0)
