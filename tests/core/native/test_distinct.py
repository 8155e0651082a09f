"""Equal texts get one number, and other texts other numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.text_ranges import distinct
from tests.oracles import distinct_by_python

WORDS = [
    b"",
    b"\0",
    b"\0\0",
    b"a",
    b"b",
    b"analysis",
    b"analysit",
    b"analysis\0",
    b"final",
    b"x" * 16,
    b"x" * 17,
    b"x" * 300,
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS) | st.binary(max_size=20), max_size=60))
def test_equal_texts_have_one_number(texts: list[bytes]) -> None:
    data = np.frombuffer(b"".join(texts), dtype=np.uint8)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    for way in (distinct, distinct_by_python):
        which, firsts = way(data, starts, lengths)
        different = list(dict.fromkeys(texts))
        assert [texts[first] for first in firsts.tolist()] == different
        assert [different[number] for number in which.tolist()] == texts
        assert firsts.tolist() == [texts.index(text) for text in different]


@pytest.mark.parametrize("way", [distinct, distinct_by_python])
@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1), (0, 10), (10, 0), (9, 1), (2**62, 2**62)])
def test_a_text_outside_of_the_buffer(way: type, start: int, length: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        way(np.arange(9, dtype=np.uint8), np.array([0, start]), np.array([1, length]))
