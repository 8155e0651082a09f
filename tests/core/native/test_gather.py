"""Compiled copies of ranges give what NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.gather import OUTSIDE, gathered, gathered_by_numpy, spread

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


@pytest.mark.parametrize("number", [-1, 1, 255, 256, -256])
@pytest.mark.parametrize("way", [gathered, gathered_by_numpy])
def test_no_such_buffer(number: int, way: Any) -> None:
    one = np.array([1], dtype=np.int64)
    with pytest.raises(IndexError):
        way([np.arange(9)], np.array([number]), one, one)


def test_lengths_that_end_far_outside() -> None:
    huge = np.array([2**62, 2**62], dtype=np.int64)
    for starts, lengths in ((huge, huge), (huge * 0, huge), (huge, huge * 0), (huge * 0 + 1, huge * -2)):
        with pytest.raises((IndexError, MemoryError, ValueError)):
            gathered([np.arange(9)], np.zeros(2, dtype=np.uint8), starts, lengths)
    zero = np.zeros(2, dtype=np.int64)
    with pytest.raises(IndexError, match=OUTSIDE):  # in all no bytes, but the first range would be written
        gathered([np.arange(9)], zero, zero, np.array([9, -9]))


def test_other_layouts_take_the_other_way() -> None:
    every_second, one = np.arange(20)[::2], np.array([1], dtype=np.int64)
    assert gathered([every_second], one * 0, one, one * 3).tolist() == [2, 4, 6]
    words = np.array(["a", "b", "c"], dtype=object)
    assert gathered([words], one * 0, one, one * 2).tolist() == ["b", "c"]
    mixed: list[Any] = [np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64)]
    assert gathered(mixed, one, one, one).tolist() == [1]
    numbers = np.arange(6, dtype=np.int64)[::2]
    assert gathered([np.arange(9)], np.zeros(3, dtype=np.uint8), numbers, numbers).tolist() == [2, 3, 4, 5, 6, 7]


@settings(max_examples=500)
@given(
    st.lists(st.tuples(st.integers(0, 120), LENGTHS), max_size=12),
    st.sampled_from(DTYPES),
    st.sampled_from([np.int64, np.int32, np.uint8]),
)
def test_spread(items: list[tuple[int, int]], dtype: Any, index: Any) -> None:
    values = np.array([value for value, _ in items]).astype(dtype)
    lengths = np.array([length for _, length in items], dtype=index)
    found = spread(values, lengths)
    np.testing.assert_array_equal(found, np.repeat(values, lengths))
    assert found.dtype == values.dtype


def test_spread_of_other_layouts_and_mistakes() -> None:
    assert spread(np.arange(8, dtype=np.uint8)[::4], np.array([2, 1])).tolist() == [0, 0, 4]
    assert spread(np.arange(3, dtype=np.int32), np.array([2])).tolist() == [0, 0, 1, 1, 2, 2]
    for lengths in ([-1, 2], [3, -3], [-(2**63), 5]):
        with pytest.raises(ValueError, match="negative"):
            spread(np.arange(2, dtype=np.uint8), np.array(lengths))
        with pytest.raises(ValueError, match="negative"):
            spread(np.arange(2, dtype=np.int64), np.array(lengths))
