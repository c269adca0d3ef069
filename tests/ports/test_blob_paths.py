"""Which paths a blob may have: none that leads anywhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid
from holdfast.ports.blobs import PATH_BYTES_MAX, SEGMENT_BYTES_MAX, check_path


@pytest.mark.parametrize("path", ["a", "a/b", "transactions/42/series-0/000017", "größe/名前", "a b", "a.b", "x" * 200])
def test_a_plain_path_is_taken_apart(path: str) -> None:
    assert "/".join(check_path(path)) == path


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/..", "./a", "a/.", ".hidden", "a/.partial"),
        *("a\0b", "a\nb", "a\x7fb", "a\u202eb", "a\\b", "..\\a", "\ud800"),
        *("x" * (SEGMENT_BYTES_MAX + 1), "ü" * (SEGMENT_BYTES_MAX // 2 + 1)),
        "/".join(["x" * 100] * (PATH_BYTES_MAX // 100 + 1)),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(Invalid, match="blob path is invalid;"):
        check_path(path)


@given(st.text(alphabet=st.sampled_from("a./\\\0\n~é"), max_size=12))
def test_what_passes_never_has_a_segment_that_climbs(path: str) -> None:
    try:
        segments = check_path(path)
    except Invalid:
        return
    assert all(segment and not segment.startswith(".") and "/" not in segment for segment in segments)
