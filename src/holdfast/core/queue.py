"""A queue's settings: as a store keeps them (`QueueRecord`) and as people and programs see them (`QueueInfo`)."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from holdfast.core.moments import format_duration, moment


class PartitionPlace(Struct, frozen=True):
    """Which storage holds a partition."""

    partition: int
    storage: str


class QueueRecord(Struct, frozen=True, kw_only=True):
    """What a catalog keeps of a queue. `generation` is its own for ever: made anew, a queue has another."""

    name: str
    generation: int = 0
    lease_timeout_us: int
    expire_timeout_us: int
    max_attempts: int = 0
    dead_queue: str = ""
    reference: str = ""
    created_at_us: int = 0
    updated_at_us: int = 0
    paused: bool = False
    dead_retention_us: int = 0
    partitions: tuple[PartitionPlace, ...] = ()

    def info(self) -> QueueInfo:
        """The same, for people and programs."""
        return QueueInfo(
            queue_name=self.name,
            lease_timeout=format_duration(self.lease_timeout_us),
            expire_timeout=format_duration(self.expire_timeout_us),
            max_attempts=self.max_attempts,
            dead_queue=self.dead_queue,
            reference=self.reference,
            requested_partitions=len(self.partitions),
            created_at=moment(self.created_at_us),
            updated_at=moment(self.updated_at_us),
            partitions=[PartitionInfo(partition=p.partition, storage=p.storage) for p in self.partitions],
            dead_retention=format_duration(self.dead_retention_us) if self.dead_retention_us else "",
            paused=self.paused,
        )


class PartitionInfo(Struct, frozen=True, kw_only=True):
    """A partition as people see it."""

    partition: int = 0
    storage: str = ""


class QueueInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A queue as people and programs see it."""

    queue_name: str
    lease_timeout: str = ""
    expire_timeout: str = ""
    max_attempts: int = 0
    dead_queue: str = ""
    reference: str = ""
    requested_partitions: int = 0
    created_at: datetime | None = None
    updated_at: datetime | None = None
    partitions: list[PartitionInfo] = []
    dead_retention: str = ""
    paused: bool = False
