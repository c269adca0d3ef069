"""Each error has a code that tells a program what to do: 500 is a bug of ours and nothing else."""

from __future__ import annotations

import re
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
    assert ours == {errors.HoldfastError, errors.InternalError, errors.LeaseLost, errors.MessageRefused, errors.NotOurs}


def test_the_tree_is_as_it_is_drawn() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^([│├└─ ]*)(\w+)(?: +(\d{3}))?(?:  .*)?$", errors.__doc__.split("\n\n")[1], re.MULTILINE)
    path: list[str] = []
    found = {}
    for lines, name, code in drawn:
        del path[len(lines) // 4 :]
        kind = getattr(errors, name)
        above = path[-1] if path else "Exception"
        found[name] = kind
        assert above in [base.__name__ for base in kind.__bases__], name
        assert not code or kind.code == int(code), name
        assert code or kind.code == kind.__bases__[0].code, f"{name} has a code of its own"
        path.append(name)
    assert found == {kind.__name__: kind for kind in every(HoldfastError) if kind.__module__ == errors.__name__}
