"""Where parts of a piece begin among its tokens: all at once, one by one, compiled and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.native.gather import token_points
from chatmill.core.texts import Texts
from tests.data.tokenizer_files import loaded
from tests.oracles import points_by_numpy

PARTS = st.lists(
    st.sampled_from(
        ["assistant\n", " and", "\n", "", "e", "\u0301", "\u00e9", "e\u0301x", "\u1112\u1161\u11ab",
         "\ud55c\uad6d", "\u4f60\u597d",
         "\u304b\u3099", "\U0001f468\u200d\U0001f469", "\ufb01", "\u212b", "\u0928\u093f", "</think>\n\n", "12345"]
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return loaded(request.param)


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_all_borders_at_once_are_those_found_one_by_one(tokenizer: Any, pieces: list[list[str]]) -> None:
    texts = Texts.of(["".join(parts) for parts in pieces])
    encoded = tokenizer.encode_batch(texts)
    borders = [(n, "".join(parts[:k])) for n, parts in enumerate(pieces) for k in range(len(parts) + 1)]
    which = np.array([n for n, _ in borders], dtype=np.int64)
    sizes = np.array([len(prefix.encode()) for _, prefix in borders], dtype=np.int64)
    found = tokenizer.byte_points(encoded, which, sizes, texts)
    for (number, prefix), point in zip(borders, found.tolist(), strict=True):
        size, at = len(tokenizer.normalize(prefix).encode()), int(encoded[1][number])
        passed = 0
        while passed < size and at < encoded[1][number + 1]:
            passed += len(tokenizer.token_bytes(int(encoded[0][at])))
            at += 1
        assert point == at, (prefix, pieces[number])


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=5), st.data())
def test_compiled_points_are_those_of_numpy(texts: list[list[int]], data: st.DataObject) -> None:
    sizes = np.array([1, 2, 3, 1, 7, 4, 2], dtype=np.int32)
    ids = np.array([token for text in texts for token in text], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, texts)])
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(texts) - 1), st.integers(0, 40)), max_size=12))
    which, wanted = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    expected = points_by_numpy(ids, sizes, offsets, which, wanted)
    assert token_points(ids, sizes, offsets, which, wanted).tolist() == expected.tolist()


def test_what_lies_outside_is_an_error() -> None:
    ids, sizes, offsets = np.array([0, 1], dtype=np.int32), np.array([1], dtype=np.int32), np.array([0, 2])
    with pytest.raises(IndexError):
        token_points(ids, sizes, offsets, np.array([0]), np.array([5]))
    with pytest.raises(IndexError):
        token_points(ids, sizes, offsets, np.array([3]), np.array([5]))
