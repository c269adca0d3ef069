"""The public names: few, sorted, complete, and each with a sentence."""

from __future__ import annotations

from types import ModuleType

import holdfast

NAMES_COUNT_MAX = 30


#: Names that every module of ours brings along.
NOT_OURS = {"annotations", "TYPE_CHECKING"}


def public_names(module: ModuleType) -> set[str]:
    """What a module shows: everything that is neither private nor a module of its own."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in NOT_OURS
    }


def test_all_is_sorted_without_regard_to_case() -> None:
    assert holdfast.__all__ == sorted(holdfast.__all__, key=str.casefold)


def test_all_is_complete_and_nothing_else_is_public() -> None:
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)  # one is imported when it is first asked for
    assert public_names(holdfast) - set(holdfast.__all__) == set()


def test_no_name_is_there_twice() -> None:
    assert len(holdfast.__all__) == len(set(holdfast.__all__))


def test_the_public_surface_stays_short() -> None:
    assert len(holdfast.__all__) <= NAMES_COUNT_MAX


def test_every_public_name_says_what_it_is() -> None:
    silent = [name for name in holdfast.__all__ if not (getattr(holdfast, name).__doc__ or "").strip()]
    assert silent == []
