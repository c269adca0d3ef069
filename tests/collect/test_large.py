"""Memory is bounded by the byte budget, not by the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collect.large import CEILING_MIB, peak_mib

pytestmark = pytest.mark.slow


async def test_a_result_larger_than_the_memory_it_may_take(tmp_path: Path) -> None:
    told = await peak_mib(tmp_path, 100)
    assert told["peak_mib"] < CEILING_MIB, told
