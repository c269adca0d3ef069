"""Each error has a code that tells a program what to do: 500 is a bug of ours and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast import errors
from holdfast.errors import BrokerLost, BrokerRefused, BrokerUnreachable, HoldfastError, RecoveryLocked


def every(kind: type[HoldfastError]) -> Iterator[type[HoldfastError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every(below)


def test_what_the_broker_refuses_is_no_bug_of_ours() -> None:
    assert (BrokerRefused.code, BrokerRefused.code_text) == (502, "Broker Refused")
    assert BrokerUnreachable.code == BrokerLost.code == 454, "the same may succeed later"
    assert RecoveryLocked.code == 409


def test_only_a_bug_says_that_it_is_one() -> None:
    ours = {kind for kind in every(HoldfastError) if kind.__module__ == errors.__name__ and kind.code == 500}
    assert ours == {errors.HoldfastError, errors.InternalError, errors.NotOurs}
