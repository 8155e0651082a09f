"""Compiled copies of ranges give what NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.gather import MAX_BUFFERS, OUTSIDE, gathered
from tests.oracles import gathered_by_numpy

DTYPES = (np.uint8, np.bool_, np.int16, np.int32, np.float32, np.int64)
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 40, 100])


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Any], Any, Any, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    buffers = [rng.integers(0, 100, size).astype(dtype) for size in sizes]
    which = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12))
    starts = [draw(st.integers(0, sizes[number])) for number in which]
    lengths = [min(draw(LENGTHS), sizes[number] - start) for number, start in zip(which, starts, strict=True)]
    index = draw(st.sampled_from([np.uint8, np.int32, np.int64]))
    return buffers, np.array(which, dtype=index), np.array(starts, dtype=np.int64), np.array(lengths, dtype=index)


@settings(max_examples=500)
@given(copies())
def test_gathered(given_copies: tuple[list[Any], Any, Any, Any]) -> None:
    buffers, which, starts, lengths = given_copies
    found = gathered(buffers, which, starts, lengths)
    wanted = [buffers[b][s : s + n] for b, s, n in zip(which, starts, lengths, strict=True)]
    np.testing.assert_array_equal(found, np.concatenate([buffers[0][:0], *wanted]))
    np.testing.assert_array_equal(found, gathered_by_numpy(buffers, which, starts, lengths))
    assert found.dtype == buffers[0].dtype


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 30), st.integers(-3, 30)), min_size=1, max_size=5),
    st.sampled_from([np.uint8, np.int32]),
)
def test_a_range_outside_its_buffer_is_an_error_in_both_ways(ranges: list[Any], dtype: Any) -> None:
    buffers = [np.arange(20).astype(dtype), np.arange(4).astype(dtype)]
    which, starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True))
    inside = all(b < 2 and s >= 0 and n >= 0 and s + n <= len(buffers[b]) for b, s, n in ranges)
    for way in (gathered, gathered_by_numpy):
        if inside:
            assert len(way(buffers, which, starts, lengths)) == lengths.sum()
        else:
            with pytest.raises(IndexError):
                way(buffers, which, starts, lengths)


def test_lengths_that_end_far_outside() -> None:
    huge = np.array([2**62, 2**62], dtype=np.int64)
    for starts, lengths in ((huge, huge), (huge * 0, huge), (huge, huge * 0), (huge * 0 + 1, huge * -2)):
        with pytest.raises((IndexError, MemoryError, ValueError)):
            gathered([np.arange(9)], np.zeros(2, dtype=np.uint8), starts, lengths)
    zero = np.zeros(2, dtype=np.int64)
    with pytest.raises(IndexError, match=OUTSIDE):  # in all no bytes, but the first range would be written
        gathered([np.arange(9)], zero, zero, np.array([9, -9]))
    with pytest.raises(IndexError, match=OUTSIDE):
        gathered([np.arange(0)], zero, zero, zero + 1)


def test_other_layouts_and_mistakes() -> None:
    every_second, one = np.arange(20)[::2], np.array([1], dtype=np.int64)
    assert gathered([every_second], one * 0, one, one * 3).tolist() == [2, 4, 6]
    numbers = np.arange(6, dtype=np.int64)[::2]
    assert gathered([np.arange(9)], np.zeros(3, dtype=np.uint8), numbers, numbers).tolist() == [2, 3, 4, 5, 6, 7]
    words = [np.array(["a", "b"], dtype=object)]
    mixed: list[Any] = [np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64)]
    for buffers in (words, mixed):
        with pytest.raises(TypeError, match="not one type"):
            gathered(buffers, one * 0, one, one)
    with pytest.raises(ValueError, match="2 lengths"):
        gathered([np.arange(3)], one, one, np.array([1, 1]))
    with pytest.raises(ValueError, match="257 buffers"):
        gathered([np.arange(3)] * (MAX_BUFFERS + 1), one, one, one)


@pytest.mark.parametrize("number", [-1, 1, 255, 256, -256])
@pytest.mark.parametrize("way", [gathered, gathered_by_numpy])
def test_no_such_buffer(number: int, way: Any) -> None:
    one = np.array([1], dtype=np.int64)
    with pytest.raises(IndexError):
        way([np.arange(9)], np.array([number]), one, one)
