"""One suite for the state and the index, over memory, SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.core.collect import Header, Part, Transaction
from holdfast.core.states import TransactionState
from holdfast.errors import LeaseLost
from holdfast.stores.collect import CollectStore
from holdfast.wiring import SystemClock, open_collect_store

LEASE_US = 60_000_000
STATE = TransactionState


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CollectStore]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/data"}.get(request.param, "")
    opened = open_collect_store(url or request.getfixturevalue("postgres_url"), clock=SystemClock())
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """An id of the test's own: the tests of PostgreSQL share a database."""
    return f"t{abs(hash(request.node.name)) % 10**9}"


async def begun(store: CollectStore, name: str, **more: object) -> Transaction:
    wanted = Transaction(id=name, state=STATE.FORWARDING, producer="p", notify="n", owner="me", series=("a", "b"))
    return await store.create(wanted, b"\x00request\xff", lease_us=LEASE_US)


def part(ordinal: int, *, series: str = "a", sha256: str = "d", size_bytes: int = 10) -> Part:
    return Part(
        series=series, ordinal=ordinal, path=f"t/{series}/{ordinal}-{sha256}", size_bytes=size_bytes, sha256=sha256
    )


async def test_a_transaction_is_created_once(store: CollectStore, name: str) -> None:
    first = await begun(store, name)
    second = await store.create(
        Transaction(id=name, state=STATE.FORWARDING, producer="other", owner="you"), b"other", lease_us=LEASE_US
    )
    assert first == second == await store.find(name)
    assert (first.series, first.owner, await store.request(name)) == (("a", "b"), "me", b"\x00request\xff")
    assert await store.find("no-such-one") is None
    assert name in [each.id for each in await store.page(after="", count_max=1000)]


async def test_moves_are_compared_and_fenced(store: CollectStore, name: str) -> None:
    ours = await begun(store, name)
    moved = await store.move(name, fence=ours.fence, source=STATE.FORWARDING, target=STATE.AWAITING)
    assert (moved.state, moved.updated_at_us >= ours.updated_at_us) == (STATE.AWAITING, True)
    with pytest.raises(LeaseLost):
        await store.move(name, fence=ours.fence, source=STATE.FORWARDING, target=STATE.AWAITING)
    theirs = await store.seize(name, owner="you", lease_us=LEASE_US)
    assert theirs is not None
    assert theirs.fence > ours.fence
    for late in (
        store.move(name, fence=ours.fence, source=STATE.AWAITING, target=STATE.SENDING),
        store.put_parts(name, [part(0)], fence=ours.fence),
        store.put_header(name, Header(series="a", count=1), fence=ours.fence),
        store.remove(name, [part(0)], fence=ours.fence),
        store.note_stray(name, ["t/a/0-x"], fence=ours.fence),
        store.set_clean(name, fence=ours.fence),
    ):
        with pytest.raises(LeaseLost):
            await late
    assert await store.extend({name: ours.fence}, lease_us=LEASE_US) == []
    assert await store.extend({name: theirs.fence}, lease_us=LEASE_US) == [name]
    assert await store.stand(name) == {}


async def test_an_end_is_in_the_ledger_and_a_clean_one_is_not_taken_again(store: CollectStore, name: str) -> None:
    ours = await begun(store, name)
    ended = await store.move(name, fence=ours.fence, source=STATE.FORWARDING, target=STATE.FAILED, reason="too late")
    assert (ended.reason, ended.is_clean) == ("too late", False)
    await store.give_back(name, fence=ours.fence)
    (taken,) = [each for each in await store.take(owner="you", lease_us=LEASE_US, count_max=100) if each.id == name]
    await store.set_clean(name, fence=taken.fence)
    assert name not in [each.id for each in await store.take(owner="third", lease_us=LEASE_US, count_max=100)]
    lines = [line for line in await store.ledger(after=0, count_max=1000) if line.transaction == name]
    assert [(line.action, line.reason, line.detail) for line in lines] == [("failed", "too late", "forwarding")]


async def test_the_first_bytes_of_an_ordinal_count(store: CollectStore, name: str) -> None:
    ours = await begun(store, name)
    given = [part(0), part(2), part(0, sha256="other")]
    await store.put_parts(name, given, fence=ours.fence)
    put = await store.put_parts(name, given, fence=ours.fence)  # as when the first answer was lost
    assert [winner.sha256 for winner in put.winners] == ["d", "d", "d"]
    again = await store.put_parts(name, [part(2, sha256="e"), part(1, series="b", size_bytes=5)], fence=ours.fence)
    assert [winner.sha256 for winner in again.winners] == ["d", "d"]
    assert sorted(await store.strays(name)) == ["t/a/0-other", "t/a/2-e"]
    stand = await store.stand(name)
    assert stand == dict(again.stand)
    assert (stand["a"].stored_count, stand["a"].stored_bytes, stand["a"].count) == (2, 20, None)
    assert await store.count(name) == {"a": (2, 20, 2), "b": (1, 5, 1)}
    assert set(await store.find_parts(name, [("a", 0), ("a", 1), ("b", 1)])) == {("a", 0), ("b", 1)}


async def test_concurrent_writers_of_one_ordinal_agree(store: CollectStore, name: str) -> None:
    ours = await begun(store, name)
    puts = [store.put_parts(name, [part(7, sha256=f"d{number}")], fence=ours.fence) for number in range(20)]
    winners = {put.winners[0].sha256 for put in await asyncio.gather(*puts)}
    assert len(winners) == 1
    assert (await store.count(name))["a"][0] == (await store.stand(name))["a"].stored_count == 1


async def test_headers_ranges_and_removal(store: CollectStore, name: str) -> None:
    ours = await begun(store, name)
    stand = await store.put_header(name, Header(series="a", count=9, series_count=2), fence=ours.fence)
    assert (stand["a"].count, stand["a"].series_count) == (9, 2)
    stand = await store.put_header(name, Header(series="a", count=9), fence=ours.fence)
    assert stand["a"].series_count == 2
    await store.put_parts(name, [part(number) for number in (0, 1, 4, 5, 6, 11)], fence=ours.fence)
    assert list(await store.stored(name, "a", count_max=10)) == [(0, 1), (4, 6), (11, 11)]
    assert list(await store.stored(name, "a", count_max=1)) == [(0, 1)]
    assert [each.ordinal for each in await store.parts(name, "a", first=5, count_max=2)] == [5, 6]
    await store.remove(name, [part(11)], fence=ours.fence)
    assert (await store.stand(name))["a"].stored_count == 5
    assert "t/a/11-d" in await store.strays(name)
    await store.put_header(name, Header(series="x", count=1), fence=ours.fence)
    await store.remove_header(name, "x", fence=ours.fence)
    assert list(await store.stand(name)) == ["a"]
    while await store.forget(name, fence=ours.fence, count_max=2):
        pass
    assert await store.stand(name) == {}
    assert await store.count(name) == {}


async def test_what_makes_no_progress_is_idle(store: CollectStore, name: str) -> None:
    ours = await begun(store, name)
    assert name in await store.idle(for_us=0, count_max=1000)
    assert name not in await store.idle(for_us=60_000_000, count_max=1000)
    await store.move(name, fence=ours.fence, source=STATE.FORWARDING, target=STATE.ABANDONED, reason="enough")
    assert name not in await store.idle(for_us=0, count_max=1000)


@pytest.mark.postgres
async def test_two_collectors_never_take_the_same_transaction(postgres_url: str) -> None:
    stores = [open_collect_store(postgres_url, clock=SystemClock()) for _ in range(2)]
    for each in stores:
        await each.open()
    try:
        names = {f"shared-{number}" for number in range(30)}
        for name in names:
            given = await stores[0].create(
                Transaction(id=name, state=STATE.FORWARDING, producer="p", owner="dead"), b"", lease_us=1
            )
            assert given.owner == "dead"
        takes = [stores[number % 2].take(owner=f"o{number}", lease_us=LEASE_US, count_max=5) for number in range(12)]
        taken = [each.id for batch in await asyncio.gather(*takes) for each in batch if each.id in names]
        assert sorted(taken) == sorted(names)
        assert [
            each for each in await stores[1].take(owner="late", lease_us=LEASE_US, count_max=99) if each.id in names
        ] == []
    finally:
        for each in stores:
            await each.close()
