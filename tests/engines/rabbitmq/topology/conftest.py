"""For all tests of topologies."""

from __future__ import annotations

import pytest

from holdfast.engines.rabbitmq import declare as newborn


@pytest.fixture(autouse=True)
def _no_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker is killed right after a declaration here."""
    monkeypatch.setattr(newborn, "GROWN_S", 0.0)
