"""One connection to RabbitMQ: socket, TLS, heartbeats, and channels on top of the wire's session.

Nothing reconnects here: a connection that is lost is over, and everyone on it is told. Publisher and consumer each
have one of their own, because under an alarm the broker stops reading from connections that publish, acks included.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import groupby
from operator import attrgetter
from typing import Self, TypeAlias, TypeVar, cast

from pamqp import base
from pamqp import commands as amqp

from holdfast.core.moments import Backoff, BackoffTimer
from holdfast.core.recovery import Depth
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import commands
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import ORDINARY, ClosedByBroker, Event, Method
from holdfast.engines.rabbitmq.wire.frames import ProtocolBroken
from holdfast.engines.rabbitmq.wire.session import AmqpSession, HandshakeFailed, State
from holdfast.errors import (
    BadAddress,
    BrokerError,
    BrokerLost,
    BrokerRefused,
    BrokerUnreachable,
    NotABroker,
    TlsRefused,
)
from holdfast.telemetry.events import emit

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
#: A read of so many bytes is worth its cost: more is likely to be there already.
READ_BYTES_ENOUGH = 64 * 2**10
#: What the broker says when it says no.
ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
CONNECTION_FORCED, NOT_ALLOWED = 320, 530
#: For asking again and again.
LIMIT_S = 600.0

Close: TypeAlias = ClosedByBroker | None


class Listener:
    """Who owns a channel. Called from the event loop; must not block and must not raise.

    As it is, for a channel that only asks: nothing comes unasked, and whoever waits for an answer is told by the
    channel.
    """

    def on_events(self, events: list[Event]) -> None:
        """What one read of the socket brought for this channel, in order."""

    def on_closed(self, error: BrokerError, close: Close) -> None:
        """The channel is gone, once; `close` is what the broker said, None when the connection just ended."""

    def on_writable(self) -> None:
        """The socket takes bytes again. Nothing small waits for it: questions and acks do not."""


class Channel:
    """A channel of a connection: questions with answers, and a listener for what comes unasked.

    `call` asks and waits for the answer; `write` sends what needs none.
    """

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
        self.listener = listener
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

    async def end(self) -> None:
        """Close it in order: what was sent on it before has been worked through when this returns."""
        if self.is_open:
            await self.call(amqp.Channel.Close(200, "done", 0, 0))
            self.close(BrokerLost("the channel was closed"), None)

    def handle(self, events: list[Event]) -> None:
        """Called by the connection with what came for this channel."""
        if set(map(type, events)) <= ORDINARY:
            self.listener.on_events(events)
            return
        for event in events:
            if isinstance(event, Method):
                self._answered(event.method)
        unasked: list[Event] = [event for event in events if not isinstance(event, Method | ClosedByBroker)]
        if unasked:
            self.listener.on_events(unasked)
        for event in events:
            if isinstance(event, ClosedByBroker):
                self.close(refusal(event), event)

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
        self.listener.on_closed(error, close)

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


def refusal(close: ClosedByBroker) -> BrokerError:
    """The error for what the broker said when it closed a channel or a connection."""
    if close.code == CONNECTION_FORCED:  # an operator, a restart
        return BrokerLost(f"the broker ended the connection; {close.code} {close.text}")
    return BrokerRefused(f"the broker refused; {close.code} {close.text}", reply_code=close.code)


class Connection(asyncio.Protocol):
    """`await Connection.open(url)`, then `channel(listener)`."""

    def __init__(self, url: BrokerUrl) -> None:
        self.url = url
        self.session = AmqpSession(url.login)
        self.writable = True
        self.read_pause_s = 0.0  #: after a small read, so that the next one brings more
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[BrokerError] = loop.create_future()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._channels: dict[int, Channel] = {}
        self._heard = self._spoke = True
        self._silent_beats = 0
        self._paused = False
        self._rest: asyncio.TimerHandle | None = None  # between two reads
        self._beat: asyncio.TimerHandle | None = None
        self._last_word: Close = None
        self._questions: Channel | None = None
        self._turn = asyncio.Lock()  # to ask

    @classmethod
    async def open(cls, url: BrokerUrl) -> Connection:
        """Connect to the first host that takes us.

        Raises BrokerRefused (login, virtual host), NotABroker, TlsRefused or BrokerUnreachable.
        """
        failures: list[BrokerError] = []
        for host, port in url.hosts:
            try:
                return await cls._open_one(url, host, port)
            except BrokerRefused:
                raise  # the other hosts are the same cluster, and would say the same
            except BrokerError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        raise BrokerUnreachable("no broker could be reached; " + " / ".join(str(error) for error in failures))

    @classmethod
    async def renewed(cls, connection: Connection | None, url: BrokerUrl) -> Connection:
        """This one while it can be used, else another. Raises as `open`."""
        if connection is not None and connection.is_open:
            return connection
        if connection is not None:
            await connection.close()
        return await cls.open(url)

    @classmethod
    async def _open_one(cls, url: BrokerUrl, host: str, port: int) -> Connection:
        loop = asyncio.get_running_loop()
        connection = cls(url)
        context = url.tls.context() if url.tls else None
        name = (url.tls.server_name or host) if url.tls else None
        try:
            async with asyncio.timeout(url.connect_timeout_s):
                await loop.create_connection(lambda: connection, host, port, ssl=context, server_hostname=name)
                await asyncio.shield(connection.opened)
        except TimeoutError as error:
            connection._abort()
            raise connection._too_late(host, port) from error
        except ssl.SSLError as error:
            raise TlsRefused(f"TLS was refused; {host}:{port}: {_ssl_text(error)}") from error
        except OSError as error:
            connection._abort()
            if context and isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
                raise TlsRefused(f"TLS was refused; {host}:{port} ended the handshake") from error
            raise BrokerUnreachable(f"broker cannot be reached; {host}:{port}: {error.strerror or error}") from error
        except BaseException:
            connection._abort()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self.session.state is State.OPEN and not self.closed.done()

    async def channel(self, listener: Listener) -> Channel:
        """Open a channel. Raises BrokerRefused or BrokerLost."""
        if self.closed.done():
            raise self.closed.result()
        try:
            number = self.session.open_channel()
        except HandshakeFailed as error:
            raise BrokerRefused(f"no channel; {error}") from error
        channel = Channel(number, listener, write=self.write, release=self._release)
        self._channels[number] = channel
        self._flush()
        try:
            await channel.answer("Channel.Open")
        except BaseException:
            self._channels.pop(number, None)
            raise
        return channel

    async def ask(self, method: base.Frame) -> base.Frame:
        """Ask, one question at a time, beside whatever else goes on. A refusal closes the channel that it was asked on:
        that is one for questions, and the next question gets another. Raises BrokerRefused or BrokerLost."""
        async with self._turn:
            asked = self._questions
            if asked is None or not asked.is_open:
                asked = self._questions = await self.channel(Listener())
            try:
                return await asked.call(method)
            except BaseException:
                # Given up or too late, its answer may still come: the next question must not take it for its own.
                self._questions = None
                asked.write(commands.method(asked.number, amqp.Channel.Close(200, "given up", 0, 0)))
                raise

    async def has_queue(self, name: str) -> bool:
        """Whether there is such a queue. Raises BrokerRefused when that may not be asked."""
        return await self._has(methods.QueueDeclare(queue=name, passive=True))

    async def has_exchange(self, name: str) -> bool:
        """Whether there is such an exchange. Raises BrokerRefused when that may not be asked."""
        return await self._has(methods.ExchangeDeclare(exchange=name, passive=True))

    async def _has(self, passive: base.Frame) -> bool:
        try:
            await self.ask(passive)
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return False
            raise
        return True

    async def depth(self, queue: str) -> Depth:
        """What a queue says of itself now. Raises BrokerRefused when it is not there."""
        answer = await self.ask(methods.QueueDeclare(queue=queue, passive=True))
        assert isinstance(answer, amqp.Queue.DeclareOk)  # noqa: S101  the answer to that question
        return Depth(ready=answer.message_count or 0, consumers=answer.consumer_count or 0)

    def write(self, data: bytes) -> None:
        """Send frames, joined by the caller as far as it can."""
        if self._transport is not None and data and not self.closed.done():
            self._spoke = True
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Read nothing more until `resume_reading`: what the broker sends stays with it."""
        self._paused = True
        self._read_or_rest()

    def resume_reading(self) -> None:
        """Read again."""
        self._paused = False
        self._read_or_rest()

    async def close(self) -> None:
        """Say goodbye and wait for the answer, within a limit."""
        self.resume_reading()
        try:
            if self.is_open:
                self.session.close()
                self._flush()
                await asyncio.wait([self.closed], timeout=CLOSE_TIMEOUT_S)
        finally:
            self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream socket has no other. It cannot be asked for: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.write(self.session.start())

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self.read_pause_s and len(data) < READ_BYTES_ENOUGH:
            self._rest_from_reading()
        try:
            events = self.session.feed(data)
        except (ProtocolBroken, HandshakeFailed) as error:
            self._fail(NotABroker(f"this is no broker that we can talk to; {self.url}: {error}"))
            return
        self._flush()
        if len({event.channel for event in events}) == 1:
            self._dispatch(events)  # most reads concern one channel: its events go on as one list
            return
        for _, same in groupby(events, key=attrgetter("channel")):
            self._dispatch(list(same))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(self._why(error))

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        for channel in list(self._channels.values()):
            channel.listener.on_writable()

    def _rest_from_reading(self) -> None:
        """The broker sends two messages or so at a time: to read each by itself costs it and us more than they do."""
        if self._rest is None:
            self._rest = self._loop.call_later(self.read_pause_s, self._read_on)
            self._read_or_rest()

    def _read_on(self) -> None:
        self._rest = None
        self._read_or_rest()

    def _read_or_rest(self) -> None:
        """To pause or to resume twice does no harm."""
        if self._transport is not None and not self.closed.done():
            is_read = not self._paused and self._rest is None
            self._transport.resume_reading() if is_read else self._transport.pause_reading()

    def _dispatch(self, events: list[Event]) -> None:
        number = events[0].channel
        if number == 0:
            for event in events:
                self._about_connection(event)
        elif (channel := self._channels.get(number)) is not None:
            channel.handle(events)
            if not channel.is_open:
                self._channels.pop(number, None)

    def _about_connection(self, event: Event) -> None:
        match event:
            case Method(method=amqp.Connection.OpenOk()):
                self._start_heartbeats()
                if not self.opened.done():
                    self.opened.set_result(None)
            case Method(method=amqp.Connection.Blocked()):
                emit("broker.blocked", address=str(self.url), error=self.session.blocked)
            case Method(method=amqp.Connection.Unblocked()):
                emit("broker.unblocked", address=str(self.url))
                for channel in list(self._channels.values()):
                    channel.listener.on_writable()
            case ClosedByBroker():
                self._last_word = event
                self._fail(self._why(None))
            case _ if self.session.state is State.CLOSED:
                self._fail(BrokerLost("the connection was closed"))

    def _release(self, number: int) -> None:
        self.session.release(number)
        self._channels.pop(number, None)

    def _flush(self) -> None:
        self.write(self.session.take())

    def _start_heartbeats(self) -> None:
        if self.session.heartbeat_s:
            self._beat = self._loop.call_later(self.session.heartbeat_s / 2, self._on_beat)

    def _on_beat(self) -> None:
        """Twice per interval: speak if we were silent, and give up after two intervals in which nothing came."""
        # Whoever does not listen cannot tell whether the other has fallen silent.
        self._silent_beats = 0 if self._heard or self._paused else self._silent_beats + 1
        if self._silent_beats >= 4:
            silent_s = self._silent_beats * self.session.heartbeat_s / 2
            self._fail(BrokerLost(f"the broker has fallen silent; nothing came for {silent_s:g} s"))
            return
        if not self._spoke:
            self.write(commands.HEARTBEAT)
        self._heard = self._spoke = False
        self._start_heartbeats()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail(BrokerLost("the connection was closed"))

    def _fail(self, error: BrokerError) -> None:
        """The end, once: everyone who waits is told."""
        if self.closed.done():
            return
        self.closed.set_result(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()
        for timer in (self._beat, self._rest):
            if timer is not None:
                timer.cancel()
        if self._transport is not None:
            self._transport.close() if self._last_word else self._transport.abort()
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close(error, self._last_word)

    def _why(self, error: Exception | None) -> BrokerError:
        """What the end of the connection means, by where we stood."""
        state = self.session.state
        word = self._last_word
        login = self.url.login
        if word is not None and not self.opened.done():
            if word.code == ACCESS_REFUSED:
                return BrokerRefused(f"login refused; user '{login.user}': {word.text}", reply_code=word.code)
            if word.code == NOT_ALLOWED:
                return BrokerRefused(f"virtual host refused; '{login.vhost}': {word.text}", reply_code=word.code)
        if word is not None:
            return refusal(word)
        if isinstance(error, ssl.SSLError):
            return TlsRefused(f"TLS was refused; {_ssl_text(error)}")
        if state is State.GREETING:
            return NotABroker(f"this is no broker that we can talk to; {self.url}: it hung up without a greeting")
        if state is State.LOGIN:
            return BrokerRefused(f"login refused; user '{login.user}': the broker hung up")
        detail = (error.args[-1] if error.args else type(error).__name__) if error else "the broker hung up"
        return BrokerLost(f"connection to the broker was lost; {detail}")

    def _too_late(self, host: str, port: int) -> BrokerError:
        limit_s = self.url.connect_timeout_s
        if self._transport is None:
            return BrokerUnreachable(f"broker cannot be reached; {host}:{port} did not answer within {limit_s:g} s")
        if self.session.state in (State.NEW, State.GREETING):
            return NotABroker(
                f"this is no broker that we can talk to; {host}:{port} sent no greeting within {limit_s:g} s"
            )
        state = self.session.state.value
        return BrokerUnreachable(f"broker cannot be reached; {host}:{port} was still {state} after {limit_s:g} s")


def _ssl_text(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or error.reason or str(error)


def passes(error: BrokerError) -> bool:
    """Whether it may be another time: nobody has said no.

    Only of somebody whom we have met: that a broker was there tells a restart, or a proxy with nobody behind it, from
    a wrong address.
    """
    return not isinstance(error, BadAddress) and not (isinstance(error, BrokerRefused) and error.reply_code)


async def retry_call(ask: Callable[[], Awaitable[T]], *, url: object, is_met: bool, limit_s: float = LIMIT_S) -> T:
    """Ask until there is an answer, with back-off. What is asked must do no harm when it is done twice.

    Raises the BrokerError that does not pass, or the last one when the time is over. With a broker that was not met
    before, only a connection that was there and was lost is a reason to go on.
    """
    loop = asyncio.get_running_loop()
    deadline_s, backoff = loop.time() + limit_s, BackoffTimer(Backoff())
    while True:
        try:
            return await ask()
        except BrokerError as error:
            is_met = is_met or isinstance(error, BrokerLost)
            if not is_met or not passes(error) or loop.time() > deadline_s:
                raise
            emit("broker.lost", address=str(url), error=error)
            await asyncio.sleep(backoff.delay_s(loop.time()))
