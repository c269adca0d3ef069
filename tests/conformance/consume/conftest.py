"""Which brokers the suite runs over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.consume.stands import QueueStand, Stand

BROKERS = ["memory", "sqlite"]


@pytest.fixture(params=BROKERS)
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Stand:
    """One broker in turn."""
    return QueueStand("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/data")
