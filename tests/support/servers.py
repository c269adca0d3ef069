"""Which servers the tests may start. A missing one fails; only HOLDFAST_TEST_WITHOUT leaves its tests out."""

from __future__ import annotations

import os

import pytest

VARIABLE = "HOLDFAST_TEST_WITHOUT"
KNOWN = frozenset({"postgres", "rabbitmq"})


def left_out(setting: str | None = None) -> frozenset[str]:
    """The servers named in HOLDFAST_TEST_WITHOUT. A name that is no server is an error."""
    text = os.environ.get(VARIABLE, "") if setting is None else setting
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := names - KNOWN:
        raise pytest.UsageError(f"{VARIABLE}: no such server: {', '.join(sorted(unknown))}")
    return names


def skip_left_out(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker names a server that was left out; called by conftest."""
    for name in left_out():
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{VARIABLE} names {name}"))
