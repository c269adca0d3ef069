"""A channel of a connection: questions with answers, and a listener for what comes unasked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from pamqp import base

from holdfast.engines.rabbitmq.wire import commands
from holdfast.engines.rabbitmq.wire.events import (
    ORDINARY,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    Event,
    Method,
)
from holdfast.errors import BrokerError, BrokerLost, BrokerRefused

CALL_TIMEOUT_S = 30.0

Close: TypeAlias = ChannelClosedByBroker | ConnectionClosedByBroker | None


class Listener(Protocol):
    """Who owns a channel. Called from the event loop; must not block and must not raise."""

    def on_events(self, events: list[Event]) -> None:
        """What one read of the socket brought for this channel, in order."""

    def on_closed(self, error: BrokerError, close: Close) -> None:
        """The channel is gone, once; `close` is what the broker said, None when the connection just ended."""

    def on_writable(self) -> None:
        """The socket takes bytes again."""


class Channel:
    """`call` asks and waits for the answer; `write` sends what needs none."""

    def __init__(
        self,
        number: int,
        listener: Listener,
        *,
        write: Callable[[bytes], None],
        release: Callable[[int], None],
    ) -> None:
        self.number = number
        self.error: BrokerError | None = None
        self._listener = listener
        self._write = write
        self._release = release
        self._questions: deque[tuple[str, asyncio.Future[base.Frame]]] = deque()

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self.error is None

    def write(self, data: bytes) -> None:
        """Send frames of this channel. What is written to a closed one goes nowhere: its owner was told."""
        if self.error is None:
            self._write(data)

    async def call(self, method: base.Frame, *, timeout_s: float = CALL_TIMEOUT_S) -> base.Frame:
        """Ask and wait. Raises BrokerRefused (the broker closed the channel), BrokerLost (also when time ran out)."""
        self.write(commands.method(self.number, method))
        return await self.answer(method.name, timeout_s=timeout_s)

    async def answer(self, question: str, *, timeout_s: float = CALL_TIMEOUT_S) -> base.Frame:
        """Wait for the answer to something that was just sent."""
        if self.error is not None:
            raise self.error
        future: asyncio.Future[base.Frame] = asyncio.get_running_loop().create_future()
        self._questions.append((question, future))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise BrokerLost(f"the broker did not answer; {question} after {timeout_s} s") from error

    def handle(self, events: list[Event]) -> None:
        """Called by the connection with what came for this channel."""
        if set(map(type, events)) <= ORDINARY:
            self._listener.on_events(events)
            return
        unasked: list[Event] = []
        for event in events:
            kind = type(event)
            if kind is Method:
                self._answered(event.method)  # type: ignore[union-attr]
            elif kind is ChannelClosedByBroker:
                if unasked:
                    self._listener.on_events(unasked)
                    unasked = []
                self.close(refusal(event), event)  # type: ignore[arg-type]
            else:
                unasked.append(event)
        if unasked:
            self._listener.on_events(unasked)

    def close(self, error: BrokerError, close: Close) -> None:
        """The channel is gone: whoever waits is told, once."""
        if self.error is not None:
            return
        self.error = error
        while self._questions:
            _, waiting = self._questions.popleft()
            if not waiting.done():
                waiting.set_exception(error)
                # Nobody may be waiting any more; asyncio would complain about an error that was never looked at.
                waiting.exception()
        self._listener.on_closed(error, close)

    def writable(self) -> None:
        """Called by the connection when the socket takes bytes again."""
        self._listener.on_writable()

    def _answered(self, method: base.Frame) -> None:
        if method.name == "Channel.CloseOk":
            self._release(self.number)
        # The broker answers in the order of the questions. One that was given up is answered all the same, as a rule.
        while self._questions:
            question, waiting = self._questions.popleft()
            if not waiting.done():
                waiting.set_result(method)
                return
            if method.name.startswith(question):
                return


def refusal(close: ChannelClosedByBroker | ConnectionClosedByBroker) -> BrokerError:
    """The error for what the broker said when it closed a channel or a connection."""
    if close.code == 320:  # CONNECTION_FORCED: an operator, a restart
        return BrokerLost(f"the broker ended the connection; {close.code} {close.text}")
    return BrokerRefused(f"the broker refused; {close.code} {close.text}", reply_code=close.code)
