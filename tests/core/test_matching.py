"""Documents that two sets share, and the tokens in which two documents differ."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.matching import LONGEST_DIFF, _increasing, partners, unequal

Ids = list[int]
TOKENS = st.lists(st.integers(0, 2), max_size=40)


@st.composite
def edited(draw: st.DrawFn) -> tuple[Ids, Ids]:
    """Tokens, and the same with stretches that are repeated or moved."""
    a = draw(st.lists(st.integers(0, 1), min_size=12, max_size=30))
    b = a
    for _ in range(draw(st.integers(1, 3))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(b))] * 2)))
        b = b[:last] + b[first:] if draw(st.booleans()) else b[:first] + b[last:] + b[first:last]
    return a, b


@settings(max_examples=300)
@given(st.one_of(st.tuples(TOKENS, TOKENS), edited()))
def test_what_is_between_stretches_is_equal(both: tuple[Ids, Ids]) -> None:
    a, b = both
    at_a = at_b = 0
    for a1, a2, b1, b2 in [*unequal(np.array(a, dtype=int), np.array(b, dtype=int)), (len(a), len(a), len(b), len(b))]:
        assert a[at_a:a1] == b[at_b:b1]
        assert a1 < a2 or b1 < b2 or a1 == len(a)
        at_a, at_b = a2, b2


@pytest.mark.parametrize("gap", [1, 5, 300])
def test_single_tokens_are_found_in_long_documents(gap: int) -> None:
    """Changed tokens nearer to each other than a piece, and further apart; the documents are too long to compare."""
    a = np.arange(3 * LONGEST_DIFF)
    b = a.copy()
    places = [7, LONGEST_DIFF + 3, LONGEST_DIFF + 4 + gap, len(a) - 2]
    b[places] = -1
    assert list(unequal(a, b)) == [(at, at + 1, at, at + 1) for at in places]
    shorter = np.delete(a, places)
    assert list(unequal(a, shorter)) == [(at, at + 1, at - n, at - n) for n, at in enumerate(places)]
    whole = (np.arange(LONGEST_DIFF + 1) == 7).astype(int)
    assert list(unequal(whole, 2 - whole)) == [(0, len(whole), 0, len(whole))], "too long to be compared one by one"


def test_a_stretch_of_which_the_end_is_repeated_is_equal_once() -> None:
    """A piece over its end is once in both, and lies inside of what was equal in one of them alone."""
    a = np.array([-1, *range(40), -2])
    b = np.array([-3, *range(20), -5, *range(16, 40), -4])
    assert list(unequal(a, b)) == [(0, 1, 0, 1), (21, 21, 21, 26), (41, 42, 46, 47)]
    assert list(unequal(b, a)) == [(0, 1, 0, 1), (21, 26, 21, 21), (46, 47, 41, 42)]


@given(st.lists(st.sampled_from([b"x", b"y", b"z"])), st.lists(st.sampled_from([b"x", b"y"])), st.booleans())
def test_partners(a: list[bytes], b: list[bytes], once: bool) -> None:
    places = {key: [number for number, one in enumerate(b) if one == key] for key in a}
    wanted = []
    for number, key in enumerate(a):
        nth = a[:number].count(key) if once else 0
        wanted.append(places[key][nth] if nth < len(places[key]) else -1)
    assert partners(a, b, once=once).tolist() == wanted


@settings(max_examples=400)
@given(st.lists(st.integers(0, 9), max_size=8))
def test_the_longest_increasing_part(seconds: list[int]) -> None:
    pairs = list(enumerate(seconds))
    chosen = _increasing(pairs)
    assert all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(chosen))
    assert set(chosen) <= set(pairs)
    longest = 0
    for picked in range(1 << len(pairs)):
        values = [second for place, second in pairs if picked >> place & 1]
        if all(one < other for one, other in pairwise(values)):
            longest = max(longest, len(values))
    assert len(chosen) == longest
