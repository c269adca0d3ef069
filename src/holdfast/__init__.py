"""Holdfast keeps messages from getting lost: durable queues with leases, retries and dead queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.item import Item, LeasedItem, NewItem, RetryItem
from holdfast.core.queue import QueueInfo
from holdfast.core.verbs import ImportedItem
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
from holdfast.services.queue.consumer import Lease
from holdfast.services.queue.methods import Queues
from holdfast.wiring import open_queues as open  # noqa: A004 - read as `holdfast.open(url)`

if TYPE_CHECKING:
    from holdfast.faces.client import Client

__version__ = "0.1.0"

__all__ = [
    "BadIds",
    "CannotStart",
    "Client",
    "HoldfastError",
    "ImportedItem",
    "Invalid",
    "Item",
    "Lease",
    "LeasedItem",
    "NewItem",
    "NothingToLease",
    "QueueInfo",
    "QueueMissing",
    "Queues",
    "RetryItem",
    "ShuttingDown",
    "StorageFailed",
    "TryAgain",
    "open",
]


def __getattr__(name: str) -> object:
    # An HTTP client takes a tenth of a second to import; most programs that hold queues in process never need it.
    if name == "Client":
        from holdfast.faces.client import Client

        return Client
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
