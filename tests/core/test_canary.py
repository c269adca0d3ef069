"""How wide a canary has become, and how often it watches."""

from __future__ import annotations

import pytest

from holdfast.core.plan import Canary


@pytest.mark.parametrize(("sent", "allowed"), [(0, 10), (10, 10), (11, 20), (20, 20), (35, 40)])
def test_after_a_restart_it_is_as_wide_as_it_was(sent: int, allowed: int) -> None:
    assert Canary(first=10, widen=2).allows(sent) == allowed


@pytest.mark.parametrize(("count", "times"), [(5, 0), (10, 1), (19, 1), (20, 2), (39, 2), (40, 3)])
def test_it_watches_whenever_as_many_have_gone_as_may(count: int, times: int) -> None:
    assert Canary(first=10, widen=2).watches(count) == times


def test_it_becomes_wider_by_one_at_least() -> None:
    assert Canary(first=1, widen=1.1).wider(1) == 2
