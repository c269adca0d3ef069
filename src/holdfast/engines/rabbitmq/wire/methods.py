"""Methods that carry names, without pamqp's opinion on names.

pamqp takes letters, digits and a few signs; the broker takes any UTF-8 of up to 255 bytes, and so a queue that somebody
made may be called anything.
"""

from __future__ import annotations

from typing import TypeVar

from pamqp import base
from pamqp import commands as amqp

F = TypeVar("F", bound=base.Frame)


def _any_name(kind: type[F]) -> type[F]:
    # No __slots__ of its own: pamqp reads there what has to be sent.
    return type(kind.__name__, (kind,), {"validate": lambda self: None})


ExchangeDeclare = _any_name(amqp.Exchange.Declare)
ExchangeDelete = _any_name(amqp.Exchange.Delete)
ExchangeBind = _any_name(amqp.Exchange.Bind)
ExchangeUnbind = _any_name(amqp.Exchange.Unbind)
QueueDeclare = _any_name(amqp.Queue.Declare)
QueueDelete = _any_name(amqp.Queue.Delete)
QueueBind = _any_name(amqp.Queue.Bind)
QueueUnbind = _any_name(amqp.Queue.Unbind)
QueuePurge = _any_name(amqp.Queue.Purge)
Consume = _any_name(amqp.Basic.Consume)
Get = _any_name(amqp.Basic.Get)
