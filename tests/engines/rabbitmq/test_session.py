"""The session without a socket, addresses, and the wait before another try."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import base
from pamqp import commands as amqp
from pamqp import frame as pamqp_frame

from holdfast.core.moments import STEADY_S, Backoff, BackoffTimer
from holdfast.engines.rabbitmq.url import BrokerUrl, Tls
from holdfast.engines.rabbitmq.wire.events import ClosedByBroker, Method
from holdfast.engines.rabbitmq.wire.frames import ProtocolBroken
from holdfast.engines.rabbitmq.wire.session import AmqpSession, HandshakeFailed, Login, State
from holdfast.errors import BadAddress


def said(channel: int, method: base.Frame) -> bytes:
    return pamqp_frame.marshal(method, channel)


def heard(data: bytes) -> list[object]:
    """What a broker would read in our bytes."""
    methods: list[object] = []
    while data:
        used, _, method = pamqp_frame.unmarshal(data)
        methods.append(method)
        data = data[used:]
    return methods


def start(mechanisms: str = "PLAIN AMQPLAIN") -> bytes:
    return said(
        0, amqp.Connection.Start(server_properties={"version": "3.10.8"}, mechanisms=mechanisms, locales="en_US")
    )


def opened(login: Login | None = None) -> AmqpSession:
    session = AmqpSession(login or Login())
    session.start()
    session.feed(start())
    session.feed(said(0, amqp.Connection.Tune(2047, 131_072, 60)))
    session.feed(said(0, amqp.Connection.OpenOk()))
    assert session.state is State.OPEN
    session.take()
    return session


def test_the_handshake_logs_in_tunes_and_opens() -> None:
    session = AmqpSession(Login(user="u", password="p", vhost="v", heartbeat_s=30, frame_bytes_max=50_000))
    assert session.start() == b"AMQP\0\0\x09\x01"
    session.feed(start())
    (start_ok,) = heard(session.take())
    assert isinstance(start_ok, amqp.Connection.StartOk)
    assert (start_ok.mechanism, start_ok.response) == ("PLAIN", "\0u\0p")
    session.feed(said(0, amqp.Connection.Tune(0, 131_072, 60)))
    tune_ok, open_ = heard(session.take())
    assert isinstance(tune_ok, amqp.Connection.TuneOk)
    assert (tune_ok.channel_max, tune_ok.frame_max, tune_ok.heartbeat) == (2047, 50_000, 30)
    assert isinstance(open_, amqp.Connection.Open)
    assert open_.virtual_host == "v"
    session.feed(said(0, amqp.Connection.OpenOk()))
    assert session.state is State.OPEN
    assert session.version == "3.10.8"


def test_external_sends_no_password() -> None:
    session = AmqpSession(Login(mechanism="EXTERNAL", password="secret"))
    session.start()
    session.feed(start("PLAIN EXTERNAL"))
    assert b"secret" not in session.take()


def test_a_mechanism_that_is_not_offered_is_said() -> None:
    session = AmqpSession(Login(mechanism="EXTERNAL"))
    session.start()
    with pytest.raises(HandshakeFailed, match="offers PLAIN AMQPLAIN, not EXTERNAL"):
        session.feed(start())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "management API"),
        (b"\x15\x03\x03\0\2\2\x46", "use amqps://"),
        (b"AMQP\0\1\0\0", "another AMQP"),
        (b"220 mail ready", "not a frame"),
        (said(0, amqp.Connection.OpenOk()), "waiting for the broker's greeting"),
    ],
)
def test_another_greeting_is_told(data: bytes, text: str) -> None:
    session = AmqpSession(Login())
    session.start()
    with pytest.raises(ProtocolBroken, match=text):
        session.feed(data)


def test_a_closed_channel_is_answered_and_its_number_is_not_used_at_once() -> None:
    session = opened()
    first = session.open_channel()
    session.take()
    (event,) = session.feed(said(first, amqp.Channel.Close(404, "NOT_FOUND", 60, 40)))
    assert event == ClosedByBroker(first, 404, "NOT_FOUND")
    assert isinstance(heard(session.take())[0], amqp.Channel.CloseOk)
    assert session.open_channel() != first


def test_channels_end_somewhere() -> None:
    session = opened(Login(channel_max=3))
    numbers = {session.open_channel() for _ in range(3)}
    assert numbers == {1, 2, 3}
    with pytest.raises(HandshakeFailed, match="all 3 channels"):
        session.open_channel()
    session.release(2)
    assert session.open_channel() == 2


def test_a_closed_connection_is_answered() -> None:
    session = opened()
    (event,) = session.feed(said(0, amqp.Connection.Close(320, "CONNECTION_FORCED", 0, 0)))
    assert event == ClosedByBroker(0, 320, "CONNECTION_FORCED")
    assert isinstance(heard(session.take())[0], amqp.Connection.CloseOk)
    assert session.state is State.CLOSED


def test_blocked_is_a_state() -> None:
    session = opened()
    (event,) = session.feed(said(0, amqp.Connection.Blocked("low on memory")))
    assert isinstance(event, Method)
    assert isinstance(event.method, amqp.Connection.Blocked)
    assert session.blocked == "low on memory"
    (event,) = session.feed(said(0, amqp.Connection.Unblocked()))
    assert isinstance(event, Method)
    assert isinstance(event.method, amqp.Connection.Unblocked)
    assert session.blocked is None


@given(junk=st.binary(max_size=100))
def test_whatever_comes_after_the_greeting_is_events_or_an_error(junk: bytes) -> None:
    session = opened()
    try:
        session.feed(junk)
    except (ProtocolBroken, HandshakeFailed):
        return


def test_an_address_is_read_with_all_its_parts() -> None:
    address = BrokerUrl.parse(
        "amqps://us%40er:pa%3Ass@one:1,two,[::1]:3/v%2Fh?heartbeat=7&connection_timeout=2500&channel_max=9"
        "&frame_max=8192&auth_mechanism=external&cacertfile=/ca&certfile=/c&keyfile=/k&verify=verify_none"
        "&server_name_indication=sni&name=me"
    )
    assert address.hosts == (("one", 1), ("two", 5671), ("::1", 3))
    login = address.login
    assert (login.user, login.password, login.vhost, login.mechanism) == ("us@er", "pa:ss", "v/h", "EXTERNAL")
    assert (login.heartbeat_s, login.channel_max, login.frame_bytes_max, login.name) == (7, 9, 8192, "me")
    assert address.connect_timeout_s == 2.5
    assert address.tls == Tls(ca_file="/ca", certificate_file="/c", key_file="/k", server_name="sni", verify=False)


@pytest.mark.parametrize("url", ["amqp://", "amqp://localhost", "amqp://localhost/", "amqp://localhost/%2F"])
def test_the_usual_defaults(url: str) -> None:
    if url == "amqp://":
        with pytest.raises(BadAddress):
            BrokerUrl.parse(url)
        return
    address = BrokerUrl.parse(url)
    assert (address.hosts, address.login.vhost, address.login.user) == ((("localhost", 5672),), "/", "guest")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://u:secret@h", "expected amqp"),
        ("amqp://u:secret@h:port", "cannot be read"),
        ("amqp://u:12/secret@h:5672/v", "write these as %2F"),
        ("amqp://u:12?secret@h:5672/v", "write these as %2F"),
        ("amqp://u:secret", "cannot be read"),
        ("amqp://u:secret@h/?heart=1", "no parameter 'heart'"),
        ("amqp://u:secret@h/?heartbeat=x", "heartbeat"),
        ("amqp://u:secret@h/?frame_max=100", "frame_max"),
        ("amqp://u:secret@h/?verify=verify_none", "needs amqps"),
        ("amqps://u:secret@h/?verify=maybe", "none of"),
    ],
)
def test_a_bad_address_is_explained_without_its_password(url: str, text: str) -> None:
    with pytest.raises(BadAddress, match=text) as caught:
        BrokerUrl.parse(url)
    assert "secret" not in str(caught.value)


def test_no_text_of_an_address_shows_the_password() -> None:
    address = BrokerUrl.parse("amqp://user:secret@[::1],b:7/v")
    assert str(address) == "amqp://user@[::1]:5672,b:7/v"
    assert "secret" not in repr(address)


@given(failures=st.integers(0, 10**6), spread=st.floats(0, 1))
def test_a_wait_has_a_floor_and_a_ceiling(failures: int, spread: float) -> None:
    backoff = Backoff(first_s=0.1, delay_s_max=5.0)
    delay_s = backoff.delay_s(failures, spread=spread)
    assert 0.05 <= delay_s <= 5.0
    assert delay_s <= 0.1 * 2.0 ** min(failures, 64)
    assert 0.05 <= backoff.delay_s(failures) <= 5.0


def test_what_works_only_for_a_moment_is_waited_for_longer_each_time() -> None:
    patience = BackoffTimer(Backoff(first_s=1.0, delay_s_max=60.0))
    now_s, delays_s = 0.0, []
    for _ in range(4):
        patience.worked(now_s)
        now_s += STEADY_S / 2
        delays_s.append(patience.delay_s(now_s))
    assert delays_s[3] >= 4.0
    patience.worked(now_s)
    assert patience.delay_s(now_s + STEADY_S) <= 1.0
    assert patience.delay_s(now_s + STEADY_S) >= 1.0
