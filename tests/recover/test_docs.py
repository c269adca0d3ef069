"""docs/recovery.md names everything that `--json` prints: programs rely on it."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import fields

from holdfast.core.recovery import Sample, StoppedBy, Summary

DOCUMENT = Path(__file__).parents[2] / "docs" / "recovery.md"


def named(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_every_field_of_the_summary_is_a_row_and_no_other_is() -> None:
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", DOCUMENT.read_text(), re.MULTILINE)
    found = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(found) == sorted(field.encode_name for field in fields(Summary))


def test_every_end_and_every_part_of_a_sample_is_named() -> None:
    there = named(DOCUMENT.read_text())
    assert {*StoppedBy, *(field.encode_name for field in fields(Sample))} <= there
