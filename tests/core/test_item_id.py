"""Item ids: read back as they were written, in the order of arrival, and nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.item import SEQUENCE_MAX, format_id, id_suffix, parse_id

sequences = st.integers(0, SEQUENCE_MAX)
generations = st.integers(1, 2**40)
partitions = st.integers(0, 999)


@given(sequences, generations, partitions)
def test_an_id_is_read_back_as_it_was_written(sequence: int, generation: int, partition: int) -> None:
    suffix = id_suffix(generation, partition)
    assert parse_id(format_id(sequence, suffix), suffix) == sequence


@given(sequences, sequences, generations, partitions)
def test_ids_of_a_partition_sort_in_the_order_of_arrival(a: int, b: int, generation: int, partition: int) -> None:
    suffix = id_suffix(generation, partition)
    assert (format_id(a, suffix) < format_id(b, suffix)) == (a < b)


@given(sequences, generations, partitions, generations, partitions)
def test_an_id_of_another_queue_or_partition_is_none(
    sequence: int, generation: int, partition: int, other_generation: int, other_partition: int
) -> None:
    ours, theirs = id_suffix(generation, partition), id_suffix(other_generation, other_partition)
    assert parse_id(format_id(sequence, theirs), ours) == (sequence if ours == theirs else None)


@given(st.text(max_size=40))
def test_any_text_is_an_id_that_we_would_write_or_none(text: str) -> None:
    suffix = id_suffix(1, 0)
    sequence = parse_id(text, suffix)
    assert sequence is None or format_id(sequence, suffix) == text


@pytest.mark.parametrize(
    "digits",
    [
        *("0" * 13, "0" * 15, "0X0000000000ff", "0x0000000000ff", "+0000000000001", " 0000000000001"),
        *("0000000000_001", "0000000000000A", "𝟘" * 14, "ffffffffffffff", "-0000000000001"),
    ],
)
def test_what_only_looks_like_an_id_is_none(digits: str) -> None:
    suffix = id_suffix(10, 3)
    assert parse_id(digits + suffix, suffix) is None
