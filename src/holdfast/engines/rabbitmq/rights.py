"""What the user may do that a recovery needs, asked before the first letter is taken.

The management API shows the rights of every user, but to administrators only. AMQP answers by refusing: a binding that
does not exist can be removed by whoever may write to its exchange, and an unroutable message comes back to whoever may
write to the default exchange; neither changes anything. Whether the queue may be read is seen when it is consumed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from holdfast.core.routes import Mode, RouteTable
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.dead_letters_check import not_there
from holdfast.engines.rabbitmq.lane import Outgoing
from holdfast.engines.rabbitmq.management import ManagedPermission, Management
from holdfast.engines.rabbitmq.publisher import Publisher
from holdfast.engines.rabbitmq.recovery_lock import ACCESS_REFUSED, NoEvents, lock_name
from holdfast.engines.rabbitmq.wire import methods, properties
from holdfast.engines.rabbitmq.wire.confirms import OutcomeKind
from holdfast.errors import BrokerRefused, HoldfastError
from holdfast.ports.recovery import Permission, Preflight

#: What the default exchange is called where rights are given.
DEFAULT_EXCHANGE = "amq.default"
#: One that every broker has, to ask about others with.
SOURCES = ("amq.direct", "amq.fanout")
TIMEOUT_S = 5.0


async def find_rights(
    connection: Connection,
    publisher: Publisher,
    queue: str,
    table: RouteTable,
    found: Preflight,
    management: str | None,
) -> list[Permission]:
    """Of the user of this connection: to read the queue (if any), to take its lock, to write to every exchange."""
    login = connection.address.login
    shown = None
    if management is not None and found.has_management and login.mechanism == "PLAIN":
        shown = await _shown(management, login.vhost, login.user)
    rights = []
    if queue:
        lock = lock_name(queue)
        rights = [
            Permission(verb="read", what=f"queue '{queue}'", given=_given(shown, "read", queue)),
            Permission(verb="configure", what=f"its lock '{lock}'", given=_given(shown, "configure", lock)),
        ]
    for exchange in _exchanges(table, found):
        if any(text.startswith(not_there(exchange)) for text in found.missing):
            continue  # a binding to what is not there can be removed by everybody
        given = _given(shown, "write", exchange or DEFAULT_EXCHANGE)
        if given is None:
            given = await (may_write(connection, exchange) if exchange else _may_write_by_default(publisher))
        rights.append(
            Permission(verb="write", what=f"exchange '{exchange}'" if exchange else "the default exchange", given=given)
        )
    return rights


def _exchanges(table: RouteTable, found: Preflight) -> Iterable[str]:
    names = dict.fromkeys(address.exchange for address in table.fixed_addresses())
    if table.mode is Mode.SOURCE or found.delivery_limit is not None:
        names[""] = None  # also for what goes back by a publish
    return names


async def _shown(management: str, vhost: str, user: str) -> ManagedPermission | None:
    """None where nobody tells us: we are no administrator, or another service decides."""
    try:
        async with Management(management, timeout_s=TIMEOUT_S) as api:
            return await api.permission(vhost, user)
    except HoldfastError:
        return None


def _given(shown: ManagedPermission | None, verb: str, name: str) -> bool | None:
    if shown is None:
        return None
    pattern: str = getattr(shown, verb)
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return None  # the broker's expressions know more than ours


async def may_write(connection: Connection, exchange: str) -> bool | None:
    """Asked by removing a binding that cannot be there. The right to write is looked at before that to read."""
    source = SOURCES[exchange == SOURCES[0]]
    channel = await connection.channel(NoEvents())
    try:
        await channel.call(methods.ExchangeUnbind(destination=exchange, source=source, routing_key=uuid.uuid4().hex))
    except BrokerRefused as error:
        if error.reply_code != ACCESS_REFUSED:
            return None
        return f"exchange '{exchange}'" not in error.message
    await connection.close_channel(channel)
    return True


async def _may_write_by_default(publisher: Publisher) -> bool | None:
    nowhere = Outgoing("", f"holdfast.nowhere.{uuid.uuid4().hex}", properties.encode({}), b"")
    outcome = await publisher.publish(nowhere, timeout_s=TIMEOUT_S)
    if outcome.kind is OutcomeKind.RETURNED:
        return True
    return False if outcome.kind is OutcomeKind.REFUSED and outcome.code == ACCESS_REFUSED else None
