"""Holdfast keeps messages from getting lost: durable queues with leases, retries and dead queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.item import Item, LeasedItem, NewItem, QueueInfo, RetryItem
from holdfast.core.message import Message
from holdfast.core.policy import Permanent, RetryAfter
from holdfast.core.policy import RetryPolicy as Retry
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import (
    BadIds,
    CannotStart,
    HoldfastError,
    Invalid,
    NothingToLease,
    QueueMissing,
    ShuttingDown,
    StorageFailed,
    TryAgain,
)
from holdfast.faces.app import App
from holdfast.faces.collector import Collector
from holdfast.services.consume.once import SqlMarks, once
from holdfast.services.queue.queues import Lease, Queues
from holdfast.wiring import open_queues as open  # noqa: A004 - read as `holdfast.open(url)`

if TYPE_CHECKING:
    from holdfast.faces.client import Client

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
    "once",
    "open",
    "Permanent",
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


def __getattr__(name: str) -> object:
    # An HTTP client takes a tenth of a second to import; most programs that hold queues in process never need it.
    if name == "Client":
        from holdfast.faces.client import Client

        return Client
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
