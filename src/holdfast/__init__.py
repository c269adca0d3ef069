"""Holdfast keeps messages from getting lost: durable queues with leases, retries and dead queues."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.errors import (
    BadIds,
    CannotStart,
    HoldfastError,
    Invalid,
    NothingToLease,
    NotStored,
    OutcomeUnknown,
    QueueMissing,
    ShuttingDown,
    StorageFailed,
    TryAgain,
)

if TYPE_CHECKING:  # at run time each is imported when it is first asked for, see `_PLACES`
    from holdfast.core.item import Item, LeasedItem, NewItem, QueueInfo, RetryItem
    from holdfast.core.message import Message, Published
    from holdfast.core.policy import Permanent, RetryAfter
    from holdfast.core.policy import RetryPolicy as Retry
    from holdfast.core.requests.queue import ImportedItem
    from holdfast.faces.app import App
    from holdfast.faces.client import Client
    from holdfast.faces.collector import Collector
    from holdfast.services.consume.once import SqlMarks, once
    from holdfast.services.queue.queues import Lease, Queues
    from holdfast.wiring import open_queues as open  # noqa: A004 - read as `holdfast.open(url)`

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - sorted without regard to case
    "App",
    "BadIds",
    "CannotStart",
    "Client",
    "Collector",
    "HoldfastError",
    "ImportedItem",
    "Invalid",
    "Item",
    "Lease",
    "LeasedItem",
    "Message",
    "NewItem",
    "NothingToLease",
    "NotStored",
    "once",
    "open",
    "OutcomeUnknown",
    "Permanent",
    "Published",
    "QueueInfo",
    "QueueMissing",
    "Queues",
    "Retry",
    "RetryAfter",
    "RetryItem",
    "ShuttingDown",
    "SqlMarks",
    "StorageFailed",
    "TryAgain",
]


#: Where a public name is. Importing all of them takes a tenth of a second, which `holdfast --help`, and programs that
#: want one of them, need not wait for.
_PLACES = {
    "App": "faces.app:App",
    "Client": "faces.client:Client",
    "Collector": "faces.collector:Collector",
    "ImportedItem": "core.requests.queue:ImportedItem",
    "Item": "core.item:Item",
    "Lease": "services.queue.queues:Lease",
    "LeasedItem": "core.item:LeasedItem",
    "Message": "core.message:Message",
    "NewItem": "core.item:NewItem",
    "Permanent": "core.policy:Permanent",
    "Published": "core.message:Published",
    "QueueInfo": "core.item:QueueInfo",
    "Queues": "services.queue.queues:Queues",
    "Retry": "core.policy:RetryPolicy",
    "RetryAfter": "core.policy:RetryAfter",
    "RetryItem": "core.item:RetryItem",
    "SqlMarks": "services.consume.once:SqlMarks",
    "once": "services.consume.once:once",
    "open": "wiring:open_queues",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
    module, _, attribute = _PLACES[name].partition(":")
    found: object = getattr(importlib.import_module(f"holdfast.{module}"), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
