"""For all tests of topologies."""

from __future__ import annotations

import pytest

from holdfast.engines.rabbitmq import topology


@pytest.fixture(autouse=True)
def _no_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker is killed right after a declaration here."""
    monkeypatch.setattr(topology, "GROWN_S", 0.0)
