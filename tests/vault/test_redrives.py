"""Leases and outcomes of a redrive, on every store: a confirm counts from anybody, a failure from the holder alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest

from holdfast.core.message import Address
from holdfast.core.moments import moment
from holdfast.core.plan import Plan, PlanOptions, RedriveState, RedriveTask
from holdfast.core.requests.vault import RedriveOutcome
from holdfast.core.selection import ID_MAX, Selection
from holdfast.core.states import LetterState
from holdfast.errors import Conflict
from holdfast.stores.redrives import LeasedLetter, Settled
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.vault.letters import ACT, act, letter

S = LetterState
LEASE_S = 60


async def task(vault: Vault, bodies: Sequence[bytes]) -> RedriveTask:
    """A task over new letters."""
    stored = await vault.letters.put([letter(body) for body in bodies], ACT)
    return await task_over(vault, [one.letter for one in stored])


async def task_over(vault: Vault, ids: Sequence[int]) -> RedriveTask:
    plan = Plan(
        hash="h",
        wish=PlanOptions(),
        ids="",
        count=len(ids),
        targets={},
        left_out=(),
        left_out_count=0,
        redriven_before=0,
        estimated_s=0,
        notes=(),
        made_at=moment(0),
        made_by="tester",
    )
    made, _ = await vault.redrives.start(
        plan=plan, letters=[(one, "x") for one in ids], wish=PlanOptions(), name="", operation="", act=act("start")
    )
    return made


async def lease(
    vault: Vault, redrive: RedriveTask, clock: FrozenClock, **more: int
) -> tuple[list[LeasedLetter], datetime]:
    until = moment(clock.now_us()) + timedelta(seconds=LEASE_S)
    count = more.pop("count_max", 10)
    return await vault.redrives.lease(redrive.id, count_max=count, until=until, act=act("lease"), **more), until


async def states(vault: Vault) -> list[LetterState]:
    page = await vault.letters.find(Selection(), count_max=100)
    return [one.state for one in reversed(page.letters)]


async def test_a_confirm_settles_after_the_lease_ran_out(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1"])
    first, first_until = await lease(vault, redrive, clock)
    await clock.advance(LEASE_S + 1)
    second, second_until = await lease(vault, redrive, clock)
    assert [one.redrive_id for one in first] == [one.redrive_id for one in second]
    await vault.redrives.settle(redrive.id, [Settled(1, "redriven")], act("settle"), until=first_until)
    assert await states(vault) == [S.REDRIVEN]
    # The other one hears that his copy came back as unroutable: the letter has gone all the same.
    await vault.redrives.settle(redrive.id, [Settled(1, "failed", "no")], act("settle"), until=second_until)
    assert await states(vault) == [S.REDRIVEN]
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.redriven, found.failed) == (1, 0)


async def test_a_failure_counts_only_from_the_holder_of_the_lease(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1"])
    _, first_until = await lease(vault, redrive, clock)
    await clock.advance(LEASE_S + 1)
    _, second_until = await lease(vault, redrive, clock)
    for kind in ("failed", "unknown"):
        await vault.redrives.settle(redrive.id, [Settled(1, kind)], act("settle"), until=first_until)
        assert await states(vault) == [S.REDRIVING]
        assert (await lease(vault, redrive, clock))[0] == [], "another could take what the second one publishes"
    await vault.redrives.settle(redrive.id, [Settled(1, "failed", "no")], act("settle"), until=second_until)
    assert await states(vault) == [S.CAPTURED]


async def test_a_late_confirm_wins_over_a_failure(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1", b"2"])
    _, first_until = await lease(vault, redrive, clock)
    await clock.advance(LEASE_S + 1)
    _, second_until = await lease(vault, redrive, clock)
    failed = [Settled(1, "failed", "no"), Settled(2, "failed", "no")]
    await vault.redrives.settle(redrive.id, failed, act("settle"), until=second_until)
    other = await task_over(vault, [2])
    await lease(vault, other, clock)
    done = [Settled(1, "redriven"), Settled(2, "redriven")]
    await vault.redrives.settle(redrive.id, done, act("settle"), until=first_until)
    # The second letter is in the hands of another task by now, which will say what became of it.
    assert await states(vault) == [S.REDRIVEN, S.REDRIVING]
    one = await vault.letters.get(1)
    assert one is not None
    assert one.redriven_count == 1
    await vault.redrives.settle(redrive.id, done, act("settle"), until=first_until)
    assert await states(vault) == [S.REDRIVEN, S.REDRIVING], "told twice"


async def test_an_unknown_letter_stays_and_is_repeated_under_its_id(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1"])
    (first,), until = await lease(vault, redrive, clock)
    await vault.redrives.settle(redrive.id, [Settled(1, "unknown", "no answer")], act("settle"), until=until)
    assert await states(vault) == [S.REDRIVING]
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert found.unknown == 1
    (again,), until = await lease(vault, redrive, clock)
    assert again.redrive_id == first.redrive_id
    await vault.redrives.settle(redrive.id, [Settled(1, "redriven")], act("settle"), until=until)
    assert await states(vault) == [S.REDRIVEN]


async def test_what_is_leased_again_is_a_possible_duplicate(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1", b"2"])
    await lease(vault, redrive, clock, count_max=1)
    await clock.advance(LEASE_S + 1)
    _, until = await lease(vault, redrive, clock)
    await vault.redrives.settle(
        redrive.id, [Settled(1, "redriven"), Settled(2, "redriven")], act("settle"), until=until
    )
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.redriven, found.unknown, found.possible_duplicates) == (2, 0, 1)


async def test_a_task_is_held_by_one_until_he_is_silent_for_too_long(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1"])
    until = moment(clock.now_us()) + timedelta(seconds=LEASE_S)
    assert await vault.redrives.hold(redrive.id, "one", until=until)
    assert await vault.redrives.hold(redrive.id, "one", until=until), "he says it again"
    assert not await vault.redrives.hold(redrive.id, "two", until=until)
    await vault.redrives.let_go(redrive.id, "two")
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.held_by, found.held_until) == ("one", until)
    await clock.advance(LEASE_S + 1)
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.held_by, found.held_until) == ("", None)
    later = moment(clock.now_us()) + timedelta(seconds=LEASE_S)
    assert await vault.redrives.hold(redrive.id, "two", until=later)
    await vault.redrives.let_go(redrive.id, "two")
    assert await vault.redrives.hold(redrive.id, "one", until=later)


async def cancel(vault: Vault, redrive: RedriveTask) -> int:
    """Cancel a task and release what can be; how many were."""
    states = [RedriveState.RUNNING, RedriveState.CANCELLED]
    assert await vault.redrives.set_state(redrive.id, RedriveState.CANCELLED, sources=states, act=act("cancel"))
    return await vault.redrives.release(count_max=10, act=act("redrives.release"))


async def test_what_is_unknown_of_a_cancelled_task_is_an_operators_again_with_a_note(
    vault: Vault, clock: FrozenClock
) -> None:
    redrive = await task(vault, [b"known", b"unknown", b"in flight", b"waiting"])
    _, until = await lease(vault, redrive, clock, count_max=3)
    outcomes = [Settled(1, "redriven"), Settled(2, "unknown", "no answer")]
    await vault.redrives.settle(redrive.id, outcomes, act("settle"), until=until)
    assert await vault.redrives.release(count_max=10, act=act("redrives.release")) == 0, "the task goes on"
    assert await cancel(vault, redrive) == 1
    # The third is in somebody's hands until his lease is over: he may publish it yet.
    assert await states(vault) == [S.REDRIVEN, S.CAPTURED, S.REDRIVING, S.CAPTURED]
    await clock.advance(LEASE_S + 1)
    assert await cancel(vault, redrive) == 1
    assert await states(vault) == [S.REDRIVEN, S.CAPTURED, S.CAPTURED, S.CAPTURED]
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.redriven, found.failed, found.skipped, found.unknown) == (1, 0, 0, 2)
    row = (await vault.ledger.of_letter(2, count_max=10))[-1]
    assert (row.action, row.from_state, row.to_state) == ("redrives.release", "redriving", "captured")
    assert "nobody knows whether it was published" in row.reason
    assert vault.moves["orders.dlq", "unknown", "captured"] == 2
    assert ("orders.dlq", "redriving", "captured") not in vault.moves, "nothing is known to have failed"
    # What is redriven again may be there twice; what was never published may not.
    again = await task_over(vault, [2, 4])
    await lease(vault, again, clock)
    assert (found := await vault.redrives.find(again.id)) is not None
    assert found.possible_duplicates == 1


async def test_a_confirm_counts_also_when_the_task_was_cancelled_before(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1", b"2", b"3"])
    _, until = await lease(vault, redrive, clock)
    await clock.advance(LEASE_S + 1)
    assert await cancel(vault, redrive) == 3
    other = await task_over(vault, [2])
    await lease(vault, other, clock)
    told = [Settled(1, "redriven"), Settled(2, "redriven"), Settled(3, "failed", "no")]
    await vault.redrives.settle(redrive.id, told, act("settle"), until=until)
    assert await states(vault) == [S.REDRIVEN, S.REDRIVING, S.CAPTURED]
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.redriven, found.failed, found.unknown) == (2, 0, 1), "a failure counts from the holder alone"


async def test_a_copy_that_came_back_was_published_whatever_its_cancelled_task_knows(
    vault: Vault, clock: FrozenClock
) -> None:
    redrive = await task(vault, [b"1", b"2"])
    (first, second), until = await lease(vault, redrive, clock)
    unknown = [Settled(1, "unknown", "no answer"), Settled(2, "unknown", "no answer")]
    await vault.redrives.settle(redrive.id, unknown, act("settle"), until=until)
    await vault.letters.put([letter(b"1", redrive_id=first.redrive_id)], ACT)
    assert await cancel(vault, redrive) == 2
    assert await states(vault) == [S.CAME_BACK, S.CAPTURED, S.CAPTURED]
    found = await vault.redrives.find(redrive.id)
    assert found is not None
    assert (found.redriven, found.unknown) == (1, 1)
    # One that comes back after that is linked to its letter, which nobody says anything else of.
    await vault.letters.put([letter(b"2", redrive_id=second.redrive_id)], ACT)
    back = await vault.letters.get(4)
    assert back is not None
    assert (back.came_from, await states(vault)) == (2, [S.CAME_BACK, S.CAPTURED, S.CAPTURED, S.CAPTURED])
    assert await vault.letters.came_back_as(2) == [(back.id, back.queue)]
    assert await vault.letters.came_back_as(back.id) == []


async def test_what_became_of_each_letter_is_told_with_the_reasons(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"%d" % number for number in range(6)])
    (first, *_), until = await lease(vault, redrive, clock, count_max=5)
    failed = {2: "no", 3: "why", 4: "no"}
    settled = [Settled(1, "redriven"), *(Settled(number, "failed", why) for number, why in failed.items())]
    await vault.redrives.settle(redrive.id, settled, act("settle"), until=until)
    await vault.letters.put([letter(b"1", redrive_id=first.redrive_id)], ACT)

    async def outcomes(wanted: RedriveOutcome | None = None, *, after: int = 0) -> list[tuple[int, str]]:
        found = await vault.redrives.letters(redrive.id, wanted, after=after, count_max=3)
        return [(one.letter, one.outcome) for one in found]

    assert await outcomes() == [(1, "came_back"), (2, "failed"), (3, "failed")]
    assert await outcomes(after=3) == [(4, "failed"), (5, "under_way"), (6, "waiting")]
    assert await outcomes("failed", after=2) == [(3, "failed"), (4, "failed")]
    (back,) = await vault.redrives.letters(redrive.id, "came_back", after=0, count_max=3)
    assert (back.letter, back.state, back.came_back_as, back.target) == (1, "came_back", 7, str(Address(exchange="x")))
    reasons = await vault.redrives.reasons(redrive.id, "failed")
    assert [(one.why, one.count, one.sample) for one in reasons] == [("no", 2, 2), ("why", 1, 3)]


async def test_a_letter_that_came_back_belongs_to_the_task_that_sent_it(vault: Vault, clock: FrozenClock) -> None:
    failing = await task(vault, [b"1"])
    _, until = await lease(vault, failing, clock)
    await vault.redrives.settle(failing.id, [Settled(1, "failed", "no")], act("settle"), until=until)
    sending = await task_over(vault, [1])
    (sent,), until = await lease(vault, sending, clock)
    await vault.redrives.settle(sending.id, [Settled(1, "redriven")], act("settle"), until=until)
    await vault.letters.put([letter(b"1", redrive_id=sent.redrive_id)], ACT)
    page = await vault.redrives.page(before=ID_MAX, count_max=10)
    assert [(one.id, one.came_back, one.redriven) for one in page] == [(2, 1, 1), (1, 0, 0)]


async def test_tasks_are_listed_by_state_and_plan_with_who_changed_them(vault: Vault, clock: FrozenClock) -> None:
    first, second = await task(vault, [b"1"]), await task(vault, [b"2"])
    await vault.redrives.watch(first.id, until=moment(clock.now_us()) + timedelta(seconds=9))
    found = await vault.redrives.find(first.id)
    assert found is not None
    assert (found.changed_at, found.watched_until) == (None, moment(clock.now_us()) + timedelta(seconds=9))
    await clock.advance(5)
    paused = RedriveState.PAUSED
    assert await vault.redrives.set_state(first.id, paused, sources=[RedriveState.RUNNING], act=act("pause"))
    (listed,) = await vault.redrives.page(before=ID_MAX, count_max=10, states=[paused])
    assert (listed.id, listed.changed_by, listed.changed_at, listed.watched_until) == (
        first.id,
        "tester",
        moment(clock.now_us()),
        None,
    )
    assert [one.id for one in await vault.redrives.page(before=ID_MAX, count_max=10, plan="h")] == [second.id, first.id]
    assert await vault.redrives.page(before=ID_MAX, count_max=10, plan="other") == []


async def test_a_letter_that_is_being_redriven_is_nobody_elses(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1"])
    await lease(vault, redrive, clock)
    for target in (S.ARCHIVED, S.DISCARDED):
        with pytest.raises(Conflict, match="letter 1 is redriving"):
            await vault.letters.move([1], source=S.CAPTURED, target=target, act=act("move"), expected=1)
    with pytest.raises(Conflict, match="redriving"):
        await vault.letters.revise(1, revision=0, body=b"", put={}, drop=[], act=act("edit"))
    other = await task_over(vault, [1])
    assert (await lease(vault, other, clock))[0] == []
    found = await vault.redrives.find(other.id)
    assert found is not None
    assert (found.skipped, found.total) == (1, 1)


async def test_a_lease_takes_no_more_bytes_than_asked_for(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [bytes(100), bytes(100), bytes(100)])
    for expected in ([1, 2], [3]):
        leased, _ = await lease(vault, redrive, clock, bytes_max=200)
        assert [one.letter for one in leased] == expected
    other = await task(vault, [bytes(300)])
    assert [one.letter for one in (await lease(vault, other, clock, bytes_max=1))[0]] == [4]


async def test_a_letter_is_published_as_it_was_edited(vault: Vault, clock: FrozenClock) -> None:
    redrive = await task(vault, [b"1", b"2"])
    await vault.letters.revise(2, revision=0, body=b"edited", put={"a": 1}, drop=["b"], act=act("edit"))
    leased, _ = await lease(vault, redrive, clock)
    plain, edited = await vault.redrives.contents(leased)
    assert (plain.body, plain.put, plain.drop) == (b"1", {}, ())
    assert (edited.body, edited.put, edited.drop) == (b"edited", {"a": 1}, ("b",))
    assert [content.body for content in await vault.redrives.contents(leased[::-1])] == [b"edited", b"1"]
