"""What a recovery says, and to whom."""

from __future__ import annotations

import pytest

from holdfast.core.recovery import Summary
from holdfast.services.recover.report import Notices


def test_a_reader_that_is_gone_with_its_terminal_is_no_error() -> None:
    def fail(what: object) -> None:
        raise BrokenPipeError

    notices = Notices(fail, fail, fail)
    with pytest.raises(BrokenPipeError):
        notices.beginning()
    notices.nobody_may_listen()
    notices.beginning()
    notices.stopping(3)
    notices.ended(Summary())


@pytest.mark.parametrize(
    ("confirms", "what"),
    [(None, "what is marked arrives first"), (0, "waiting for 0 confirms"), (1, "waiting for 1 confirm")],
)
def test_a_stop_says_what_it_waits_for(confirms: int | None, what: str) -> None:
    said: list[str] = []
    Notices(urge=said.append).stopping(confirms)
    assert said == [f"Stopping: {what}; Ctrl-C again ends at once"]
