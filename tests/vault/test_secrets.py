"""A secret that is made at the first start, and read by whoever comes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import CannotStart
from holdfast.settings import Settings, StorageSettings
from holdfast.stores.files import made_once
from holdfast.wiring import open_vault_app


def test_whoever_comes_at_once_gets_the_same_secret(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"{number}" / "secret"
        with ThreadPoolExecutor(8) as threads:
            found = set(threads.map(lambda text, path=path: made_once(path, text), "abcdefgh"))
        assert found == {path.read_bytes()}
        assert [one.name for one in path.parent.iterdir()] == ["secret"]
        assert path.stat().st_mode & 0o777 == 0o600


def test_what_ends_on_its_way_leaves_no_part_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            made_once(tmp_path / "secret", "a")
    assert list(tmp_path.iterdir()) == []
    assert made_once(tmp_path / "secret", "b\n") == b"b"


async def test_an_empty_key_of_the_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger-key").write_bytes(b"\n")
    settings = Settings(storages=(StorageSettings(name="default", url=f"sqlite:///{tmp_path}"),))
    with pytest.raises(CannotStart, match="key of the ledger is empty"):
        async with open_vault_app(settings, None):
            pass
