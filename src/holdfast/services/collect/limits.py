"""How much the collector does at a time, and how long it waits."""

from __future__ import annotations

from msgspec import Struct

from holdfast.core.moments import SECOND_US
from holdfast.errors import Invalid


class CollectLimits(Struct, frozen=True, kw_only=True):
    """Every number with its unit. Uploads are counted over the whole collector, messages held per transaction."""

    uploads_max: int = 16
    uploads_bytes_max: int = 64 * 2**20
    transactions_max: int = 64  #: worked on at a time
    lease_us: int = 30 * SECOND_US  #: how long a dead owner's transactions stay his
    abandon_after_us: int = 24 * 3600 * SECOND_US
    abandon_check_us: int = 60 * SECOND_US
    gap_after_us: int = 300 * SECOND_US
    keep_blobs: bool = False  #: of a transaction that failed or was abandoned
    backoff_s_first: float = 0.05
    backoff_s_max: float = 5.0
    inline_bytes_max: int = 256 * 2**10

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "keep_blobs" and getattr(self, name) <= 0:
                raise Invalid(f"{name} is invalid; it must be more than nothing")
