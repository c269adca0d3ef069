"""Item ids: read back as they were written, in the order of arrival, and nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.item import SEQUENCE_MAX, PartitionIds

sequences = st.integers(0, SEQUENCE_MAX)
generations = st.integers(1, 2**40)
partitions = st.integers(0, 999)


@given(sequences, generations, partitions)
def test_an_id_is_read_back_as_it_was_written(sequence: int, generation: int, partition: int) -> None:
    ids = PartitionIds(generation, partition)
    text = ids.id_of(sequence)
    assert ids.number_of(text) == sequence
    assert ids.numbers_of([text, text]) == [sequence, sequence]


@given(sequences, sequences, generations, partitions)
def test_ids_of_a_partition_sort_in_the_order_of_arrival(a: int, b: int, generation: int, partition: int) -> None:
    ids = PartitionIds(generation, partition)
    assert (ids.id_of(a) < ids.id_of(b)) == (a < b)


@given(sequences, generations, partitions, generations, partitions)
def test_an_id_of_another_queue_or_partition_is_none(
    sequence: int, generation: int, partition: int, other_generation: int, other_partition: int
) -> None:
    ours, theirs = PartitionIds(generation, partition), PartitionIds(other_generation, other_partition)
    found = sequence if ours.suffix == theirs.suffix else -1
    assert ours.number_of(theirs.id_of(sequence)) == found
    assert ours.numbers_of([theirs.id_of(sequence)]) == [found]


@given(st.text(max_size=40))
def test_any_text_is_an_id_that_we_would_write_or_none(text: str) -> None:
    ids = PartitionIds(1, 0)
    sequence = ids.number_of(text)
    assert sequence == -1 or ids.id_of(sequence) == text


@pytest.mark.parametrize(
    "digits",
    [
        *("0" * 13, "0" * 15, "0X0000000000ff", "0x0000000000ff", "+0000000000001", " 0000000000001"),
        *("0000000000_001", "0000000000000A", "𝟘" * 14, "ffffffffffffff", "-0000000000001"),
    ],
)
def test_what_only_looks_like_an_id_is_none(digits: str) -> None:
    ids = PartitionIds(10, 3)
    assert ids.number_of(digits + ids.suffix) == -1
    assert ids.numbers_of([digits + ids.suffix]) == [-1]
