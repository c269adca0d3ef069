"""The right to recover a dead-letter queue: an exclusive queue of a fixed name, which dies with its connection.

An exclusive consumer would not do: quorum queues take a second one without a word.
"""

from __future__ import annotations

import asyncio
import hashlib
from urllib.parse import quote

from holdfast.engines.rabbitmq.connection import Close, Connection
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Event
from holdfast.errors import BrokerError, BrokerRefused, RecoveryLocked
from holdfast.telemetry.events import emit

LOCK_PREFIX = "recovery-lock."
NAME_BYTES_MAX = 255
ACCESS_REFUSED, RESOURCE_LOCKED = 403, 405
LOCK_STEP_S = 0.5
MANAGEMENT_PORTS = {5672: ("http", 15672), 5671: ("https", 15671)}


class NoEvents:
    """A listener for a channel that only asks."""

    def on_events(self, events: list[Event]) -> None:
        """Nothing comes unasked."""

    def on_closed(self, error: BrokerError, close: Close) -> None:
        """Whoever waits for an answer is told by the channel."""

    def on_writable(self) -> None:
        """Questions are small."""


async def take_lock(connection: Connection, queue: str, *, patience_s: float) -> list[str]:
    """Returns warnings: without the permission to take it, a run goes on. Raises RecoveryLocked."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    name = lock_name(queue)
    while True:
        channel = await connection.channel(NoEvents())
        try:
            await channel.call(methods.QueueDeclare(queue=name, exclusive=True, durable=False))
        except BrokerRefused as error:
            if error.reply_code == ACCESS_REFUSED:
                emit("recovery.unlocked", queue=queue, error=error.message)
                return [f"no lock could be taken, another recovery may run beside this; {error.message}"]
            if error.reply_code != RESOURCE_LOCKED:
                raise
            if loop.time() >= deadline_s:
                text = f"another recovery of '{queue}' is running; it holds queue '{name}'"
                raise RecoveryLocked(f"{text}, wait for its end or stop it") from error
            await asyncio.sleep(LOCK_STEP_S)
        else:
            await connection.close_channel(channel)
            return []


def is_name(text: str) -> bool:
    """Whether the broker could have a queue or an exchange of this name."""
    return len(text.encode("utf-8", "surrogateescape")) <= NAME_BYTES_MAX


def lock_name(queue: str) -> str:
    """The exclusive queue that stands for the right to recover this one."""
    name = LOCK_PREFIX + queue
    if is_name(name):
        return name
    return LOCK_PREFIX + hashlib.sha256(queue.encode("utf-8", "surrogateescape")).hexdigest()


def default_management(address: BrokerUrl) -> str | None:
    """Where the management API is by default; None where the broker itself is not on its default port."""
    host, port = address.hosts[0]
    standard = MANAGEMENT_PORTS.get(port)
    if standard is None:
        return None
    scheme, management_port = standard
    user, password = quote(address.login.user, safe=""), quote(address.login.password, safe="")
    return f"{scheme}://{user}:{password}@{f'[{host}]' if ':' in host else host}:{management_port}"
