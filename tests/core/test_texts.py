"""Columns of texts give what lists of strings give."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.native.text_ranges import positions_of
from chatmill.core.texts import OptionalTexts, Texts
from tests.oracles import positions_by_python

TEXT = st.text(alphabet=st.sampled_from("ab\n é\u2003𝄞\u00a0\x1c"), max_size=8)
LISTS = st.lists(TEXT, max_size=6)


def shuffled(texts: list[str]) -> Texts:
    """The texts in a buffer where they lie backwards, with bytes of no text between them."""
    data, starts = b"", []
    for text in reversed(texts):
        starts.append(len(data))
        data += text.encode() + b"zz"
    lengths = [len(text.encode()) for text in texts]
    return Texts(np.frombuffer(data, np.uint8), np.array(starts[::-1], np.int64), np.array(lengths, np.int64))


@given(texts=LISTS)
def test_texts_are_a_document_of_strings(texts: list[str]) -> None:
    for columns in (Texts.of(texts), shuffled(texts)):
        assert list(columns) == texts
        assert columns[1:3] == texts[1:3]
        packed = columns.packed()
        assert list(packed) == texts
        assert packed.data.tobytes() == "".join(texts).encode()
        np.testing.assert_array_equal(packed.starts, columns.offsets[:-1])


@given(texts=LISTS)
def test_trimming_and_counting(texts: list[str]) -> None:
    columns = shuffled(texts)
    for byte in (ord("\n"), ord("a"), None):
        characters = None if byte is None else chr(byte)
        assert list(columns.trimmed(byte)) == [text.strip(characters) for text in texts]
        assert list(columns.trimmed(byte, end=False)) == [text.lstrip(characters) for text in texts]
        assert list(columns.trimmed(byte, begin=False)) == [text.rstrip(characters) for text in texts]
    assert columns.characters().tolist() == [len(text) for text in texts]
    assert columns.not_ascii().tolist() == [not text.isascii() for text in texts]


def test_every_white_space_is_stripped() -> None:
    spaces = [one for one in map(chr, range(sys.maxunicode + 1)) if one.isspace()]
    near = [chr(ord(space) + step) for space in spaces for step in (-1, 1)]  # most of them are no white space
    every = (*spaces, *near, "\u00e0", "\u2083")
    texts = [side.format(one) for one in every for side in ("{0}a{0}", "a{0}", "{0}", "é{0}é")]
    assert list(shuffled(texts).trimmed(None)) == [text.strip() for text in texts]


def test_long_texts() -> None:
    runs = [" \n" * 40, " " * 63, "\n" * 65, " " * 1_000_000]
    texts = [
        text for run in runs for text in (run, run + "a", "a" + run, run + "a b" + run, "\n" + run[::-1] + "\u3000x")
    ]
    texts += ["a" * before + "é" + "a" * behind for before in (0, 63, 64, 65, 130) for behind in (0, 1, 64)]
    columns = shuffled(texts)
    assert list(columns.trimmed(None)) == [text.strip() for text in texts]
    assert columns.characters().tolist() == [len(text) for text in texts]
    assert columns.not_ascii().tolist() == [not text.isascii() for text in texts]


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1), (0, 10), (10, 0), (9, 1), (2**62, 2**62)])
def test_a_text_outside_of_the_buffer(start: int, length: int) -> None:
    outside = Texts(np.full(9, 32, dtype=np.uint8), np.array([0, start]), np.array([1, length]))
    for ask in (outside.characters, outside.not_ascii, lambda: outside.trimmed(None)):
        with pytest.raises(IndexError, match="outside of its buffer"):
            ask()


@given(texts=st.lists(TEXT, min_size=1, max_size=6), data=st.data())
def test_choosing_and_replacing(texts: list[str], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=5))
    columns = shuffled(texts)
    at = np.array(places, dtype=np.int64)
    assert list(columns.take(at)) == [texts[i] for i in places]
    once = np.unique(at)
    optional = OptionalTexts.of([text or None for text in texts])
    fewer = [None if i in once else text or None for i, text in enumerate(texts)]
    assert list(optional.without(once)) == optional.without(once)[:] == fewer
    assert optional.without(once).lengths.tolist() == OptionalTexts.of(fewer).lengths.tolist()
    wanted = [text.upper() if i in once else text for i, text in enumerate(texts)]
    others = Texts.of([texts[i].upper() for i in once.tolist()])
    assert list(columns.replaced(once, others)) == wanted
    of_one_buffer = columns.take(np.zeros(len(once), dtype=np.int64))
    assert list(columns.replaced(once, of_one_buffer)) == [texts[0] if i in once else t for i, t in enumerate(texts)]


@given(
    pieces=st.lists(st.sampled_from(["</think>", "<", "</think", "x", ">", "é"]), max_size=12),
    times=st.integers(1, 900),
)
def test_finding_marks(pieces: list[str], times: int) -> None:
    data = "".join(pieces).encode() * times
    found = [match.start() for match in re.finditer(b"</think>", data)]
    for find in (positions_of, positions_by_python):
        assert find(b"</think>", np.frombuffer(data, np.uint8)).tolist() == found


def test_a_text_without_a_utf8_form_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        Texts.of(["a", "\ud800"])
