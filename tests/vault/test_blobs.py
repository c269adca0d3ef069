"""Large bodies in the blob store: there as long as a letter has them, and gone when none has, whatever crashed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.engines.folder import open_folder_blobs
from holdfast.errors import StorageFailed
from holdfast.ports.blobs import Blobs
from holdfast.services.vault.capture import CLAIM_S
from holdfast.services.vault.upkeep import Retention
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.vault.letters import ACT, act, letter

S = LetterState
DAY_S = 24 * 3600.0


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with open_folder_blobs(tmp_path / "blobs") as blobs:
        yield blobs


@pytest.fixture
def retention(vault: Vault, blobs: Blobs, clock: FrozenClock) -> Retention:
    return Retention(vault, clock=clock, blobs=blobs)


async def put(vault: Vault, blobs: Blobs, *names: str) -> list[int]:
    """Letters whose bodies are blobs."""
    await vault.unclaimed.announce(names, for_s=CLAIM_S)
    for name in names:
        await blobs.put(name, name.encode())
    stored = await vault.letters.put([replace(letter(name.encode()), blob=name) for name in names], ACT)
    return [one.letter for one in stored]


async def there(blobs: Blobs) -> list[str]:
    return [stat.path async for stat in blobs.find()]


async def test_retention_takes_the_blobs_of_the_letters_that_it_deletes(
    vault: Vault, blobs: Blobs, retention: Retention, clock: FrozenClock
) -> None:
    ids = await put(vault, blobs, "letters/a", "letters/b")
    await vault.letters.move(ids[:1], source=S.CAPTURED, target=S.DISCARDED, act=act("discard"), expected=1)
    await clock.advance(10 * DAY_S)
    assert await retention.run(resolve_after_s=DAY_S, retention_s={S.DISCARDED: DAY_S}) == 1
    assert await there(blobs) == ["letters/b"]
    assert await vault.unclaimed.delete_later(count_max=10) == []


async def test_a_blob_that_another_letter_has_stays(
    vault: Vault, blobs: Blobs, retention: Retention, clock: FrozenClock
) -> None:
    (first,) = await put(vault, blobs, "letters/shared")
    await vault.unclaimed.announce(["letters/shared"], for_s=CLAIM_S)
    await vault.letters.put([replace(letter(b"same"), blob="letters/shared")], ACT)
    await vault.letters.move([first], source=S.CAPTURED, target=S.DISCARDED, act=act("discard"), expected=1)
    await clock.advance(2 * DAY_S)
    assert await retention.run(resolve_after_s=DAY_S, retention_s={S.DISCARDED: DAY_S}) == 1
    assert await there(blobs) == ["letters/shared"]


async def test_a_blob_that_a_crash_left_is_swept_when_nobody_can_claim_it_any_more(
    vault: Vault, blobs: Blobs, retention: Retention, clock: FrozenClock
) -> None:
    await vault.unclaimed.announce(["letters/orphan"], for_s=CLAIM_S)
    await blobs.put("letters/orphan", b"x")  # and then the process is killed
    await clock.advance(CLAIM_S - 1)
    assert await retention.sweep() == 0
    assert await there(blobs) == ["letters/orphan"]
    await clock.advance(2)
    assert await retention.sweep() == 1
    assert await there(blobs) == []


async def test_a_sweep_that_was_killed_is_finished_by_the_next(
    vault: Vault, blobs: Blobs, retention: Retention, clock: FrozenClock
) -> None:
    await vault.unclaimed.announce(["letters/one", "letters/two"], for_s=1)
    await blobs.put("letters/two", b"x")
    await clock.advance(2)
    assert sorted(await vault.unclaimed.delete_later(count_max=10)) == [
        "letters/one",
        "letters/two",
    ]  # and then it is killed
    assert await retention.sweep() == 2
    assert await there(blobs) == []
    assert await retention.sweep() == 0


async def test_who_comes_too_late_with_a_letter_has_to_put_its_body_again(vault: Vault, clock: FrozenClock) -> None:
    await vault.unclaimed.announce(["letters/late"], for_s=1)
    await clock.advance(2)
    assert await vault.unclaimed.delete_later(count_max=10) == ["letters/late"]
    with pytest.raises(StorageFailed, match="put it again"):
        await vault.letters.put([replace(letter(b"x"), blob="letters/late"), letter(b"y")], ACT)
    assert (await vault.letters.count(Selection())).count == 0
