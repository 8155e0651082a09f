"""Columns of texts, and compiled ways to trim, find, tell apart, copy and join them: what strings and NumPy give."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.gather import MAX_BUFFERS, OUTSIDE, gathered, joined_pieces
from chatmill.core.native.text_ranges import distinct, positions_of
from chatmill.core.texts import Texts
from tests.oracles import distinct_by_python, gathered_by_numpy, pieces_by_numpy, positions_by_python

TEXT = st.text(alphabet=st.sampled_from("ab\n é\u2003𝄞\u00a0\x1c"), max_size=8)


def shuffled(texts: list[str]) -> Texts:
    """The texts in a buffer where they lie backwards, with bytes of no text between them."""
    data, starts = b"", []
    for text in reversed(texts):
        starts.append(len(data))
        data += text.encode() + b"zz"
    lengths = [len(text.encode()) for text in texts]
    return Texts(np.frombuffer(data, np.uint8), np.array(starts[::-1], np.int64), np.array(lengths, np.int64))


RANGES = np.array([(0x80, 0xE9), (0x2003, 0x2003), (0x4E00, 0x1D11D), (0x1F600, 0x10FFFF)])


@given(texts=st.lists(TEXT | st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=6))
def test_characters_in_ranges_are_told_from_others(texts: list[str]) -> None:
    inside = "".join(chr(point) for first, last in RANGES[:2].tolist() for point in range(first, last + 1))
    for text in (*texts, *(inside[:k] + "a" * k + inside[k:] for k in range(12))):
        texts = [*texts, text]
    wanted = [
        any(point > 0x7F and not ((RANGES[:, 0] <= point) & (point <= RANGES[:, 1])).any() for point in map(ord, text))
        for text in texts
    ]
    for columns in (Texts.of(texts), shuffled(texts)):
        assert columns.has_other_characters(RANGES).tolist() == wanted
    assert Texts.of(texts).has_other_characters(RANGES[:0]).tolist() == [not text.isascii() for text in texts]


@given(texts=st.lists(TEXT, max_size=6))
def test_texts_are_a_document_of_strings(texts: list[str]) -> None:
    columns = shuffled(texts)
    for column in (Texts.of(texts), columns):
        assert list(column) == texts
        assert column[1:3] == texts[1:3]
        packed = column.packed()
        assert list(packed) == texts
        assert packed.data.tobytes() == "".join(texts).encode()
        np.testing.assert_array_equal(packed.starts, column.offsets[:-1])
    for byte in (ord("\n"), ord("a"), None):
        characters = None if byte is None else chr(byte)
        assert list(columns.trimmed(byte)) == [text.strip(characters) for text in texts]
        assert list(columns.trimmed(byte, end=False)) == [text.lstrip(characters) for text in texts]
        assert list(columns.trimmed(byte, begin=False)) == [text.rstrip(characters) for text in texts]
    assert columns.characters().tolist() == [len(text) for text in texts]
    assert columns.not_ascii().tolist() == [not text.isascii() for text in texts]


def test_every_white_space_and_long_texts() -> None:
    spaces = [one for one in map(chr, range(sys.maxunicode + 1)) if one.isspace()]
    near = [chr(ord(space) + step) for space in spaces for step in (-1, 1)]  # most of them are no white space
    every = (*spaces, *near, "\u00e0", "\u2083")
    texts = [side.format(one) for one in every for side in ("{0}a{0}", "a{0}", "{0}", "é{0}é")]
    for run in (" \n" * 40, " " * 63, "\n" * 65, " " * 1_000_000):
        texts += [run, run + "a", "a" + run, run + "a b" + run, "\n" + run[::-1] + "\u3000x"]
    texts += ["a" * before + "é" + "a" * behind for before in (0, 63, 64, 65, 130) for behind in (0, 1, 64)]
    columns = shuffled(texts)
    assert list(columns.trimmed(None)) == [text.strip() for text in texts]
    assert columns.characters().tolist() == [len(text) for text in texts]
    assert columns.not_ascii().tolist() == [not text.isascii() for text in texts]


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1), (0, 10), (10, 0), (9, 1), (2**62, 2**62)])
def test_a_text_outside_of_the_buffer(start: int, length: int) -> None:
    place = np.full(9, 32, dtype=np.uint8), np.array([0, start]), np.array([1, length])
    columns = Texts(*place)
    trim = partial(columns.trimmed, None)
    other = partial(columns.has_other_characters, RANGES)
    for ask in (columns.characters, columns.not_ascii, other, trim, partial(distinct, *place)):
        with pytest.raises(IndexError, match="outside of its buffer"):
            ask()
    with pytest.raises(IndexError, match="outside"):
        distinct_by_python(*place)
    with pytest.raises(UnicodeEncodeError):
        Texts.of(["a", "\ud800"])


@given(texts=st.lists(TEXT, min_size=1, max_size=6), data=st.data())
def test_choosing_and_replacing(texts: list[str], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=5))
    columns = shuffled(texts)
    at = np.array(places, dtype=np.int64)
    assert list(columns.take(at)) == [texts[i] for i in places]
    once = np.unique(at)
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


WORDS = [b"", b"\0", b"\0\0", b"a", b"b", b"analysis", b"analysit", b"analysis\0", b"final"]
LONG_WORDS = [b"x" * size for size in (16, 17, 300)]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS + LONG_WORDS) | st.binary(max_size=20), max_size=60))
def test_equal_texts_have_one_number(texts: list[bytes]) -> None:
    data = np.frombuffer(b"".join(texts), dtype=np.uint8)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    for way in (distinct, distinct_by_python):
        which, firsts = way(data, np.cumsum(lengths) - lengths, lengths)
        different = list(dict.fromkeys(texts))
        assert [different[number] for number in which.tolist()] == texts
        assert firsts.tolist() == [texts.index(text) for text in different]


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Any], Any, Any, Any]:
    dtype = draw(st.sampled_from((np.uint8, np.bool_, np.int16, np.int32, np.float32, np.int64)))
    sizes = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    buffers = [rng.integers(0, 100, size).astype(dtype) for size in sizes]
    which = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12))
    starts = [draw(st.integers(0, sizes[number])) for number in which]
    most = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 40, 100])
    lengths = [min(draw(most), sizes[number] - start) for number, start in zip(which, starts, strict=True)]
    index = draw(st.sampled_from([np.uint8, np.int32, np.int64]))
    return buffers, np.array(which, dtype=index), np.array(starts, dtype=np.int64), np.array(lengths, dtype=index)


@settings(max_examples=500)
@given(copies())
def test_copies_of_ranges_are_those_of_numpy(given_copies: tuple[list[Any], Any, Any, Any]) -> None:
    buffers, which, starts, lengths = given_copies
    found = gathered(buffers, which, starts, lengths)
    wanted = [buffers[b][s : s + n] for b, s, n in zip(which, starts, lengths, strict=True)]
    np.testing.assert_array_equal(found, np.concatenate([buffers[0][:0], *wanted]))
    np.testing.assert_array_equal(found, gathered_by_numpy(buffers, which, starts, lengths))
    assert found.dtype == buffers[0].dtype


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-3, 30), st.integers(-3, 30)), min_size=1, max_size=5),
    st.sampled_from([np.uint8, np.int32]),
)
def test_a_range_outside_its_buffer_is_an_error_in_both_ways(ranges: list[Any], dtype: Any) -> None:
    buffers = [np.arange(20).astype(dtype), np.arange(4).astype(dtype)]
    which, starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True))
    inside = all(0 <= b < 2 and s >= 0 and n >= 0 and s + n <= len(buffers[b]) for b, s, n in ranges)
    for way in (gathered, gathered_by_numpy):
        if inside:
            assert len(way(buffers, which, starts, lengths)) == lengths.sum()
        else:
            with pytest.raises(IndexError):
                way(buffers, which, starts, lengths)


def test_copies_from_far_outside_of_other_layouts_and_with_mistakes() -> None:
    huge = np.array([2**62, 2**62], dtype=np.int64)
    for starts, lengths in ((huge, huge), (huge * 0, huge), (huge, huge * 0), (huge * 0 + 1, huge * -2)):
        with pytest.raises((IndexError, MemoryError, ValueError)):
            gathered([np.arange(9)], np.zeros(2, dtype=np.uint8), starts, lengths)
    zero, one = np.zeros(2, dtype=np.int64), np.array([1], dtype=np.int64)
    with pytest.raises(IndexError, match=OUTSIDE):  # in all no bytes, but the first range would be written
        gathered([np.arange(9)], zero, zero, np.array([9, -9]))
    with pytest.raises(IndexError, match=OUTSIDE):
        gathered([np.arange(0)], zero, zero, zero + 1)
    for number in (1, 255, 256, -256):
        with pytest.raises(IndexError):
            gathered([np.arange(9)], one * number, one, one)
    assert gathered([np.arange(20)[::2]], one * 0, one, one * 3).tolist() == [2, 4, 6]
    numbers = np.arange(6, dtype=np.int64)[::2]
    assert gathered([np.arange(9)], np.zeros(3, dtype=np.uint8), numbers, numbers).tolist() == [2, 3, 4, 5, 6, 7]
    mixed: list[Any] = [np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64)]
    for buffers, lengths, message in (
        ([np.array(["a", "b"], dtype=object)], one, "not one type"),
        (mixed, one, "not one type"),
        (mixed[:1], np.array([1, 1]), "2 lengths"),
        (mixed[:1] * (MAX_BUFFERS + 1), one, "257 buffers"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            gathered(buffers, one * 0, one, lengths)


BUFFERS = [b"", b"<|user|>\n", "Größe, 何? and a text that is longer than thirty-two bytes".encode(), b"x" * 70]
WAYS = pytest.mark.parametrize("way", [joined_pieces, pieces_by_numpy])
Part = tuple[int, int, int, bool]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    number = draw(st.integers(0, len(BUFFERS) - 1))
    start = draw(st.integers(0, len(BUFFERS[number])))
    return number, start, draw(st.integers(0, len(BUFFERS[number]) - start)), draw(st.booleans())


def joined(way: Callable[..., Any], given: list[Part]) -> Any:
    columns = zip(*given, strict=True) if given else [()] * 4
    kinds = np.uint8, np.int64, np.int64, np.bool_
    buffers = [np.frombuffer(buffer, dtype=np.uint8) for buffer in BUFFERS]
    return way(buffers, *(np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)))


@WAYS
@settings(max_examples=300)
@given(st.lists(parts(), max_size=40))
def test_pieces_are_their_parts_and_equal_ones_are_kept_once(way: Callable[..., Any], given: list[Part]) -> None:
    wanted: list[bytes] = []
    before: list[int] = []
    owners: list[int] = []
    for place, (number, start, length, opens) in enumerate(given):
        if opens or not place:
            wanted.append(b"")
        before.append(len(wanted[-1]))
        owners.append(len(wanted) - 1)
        wanted[-1] += BUFFERS[number][start : start + length]
    different = list(dict.fromkeys(wanted))
    found = joined(way, given)
    borders = zip(found.offsets[:-1].tolist(), found.offsets[1:].tolist(), strict=True)
    assert [found.data[first:last].tobytes() for first, last in borders] == different
    assert found.not_ascii.tolist() == [not piece.isascii() for piece in different]
    assert found.before.tolist() == before
    assert [different[number] for number in found.numbers.tolist()] == [wanted[owner] for owner in owners]
    assert len(found.data) == sum(map(len, different))


@WAYS
@pytest.mark.parametrize("part", [(1, -1, 1), (1, 0, -1), (1, 5, 6), (1, 11, 0), (4, 0, 0), (1, 2**62, 1)])
def test_a_part_outside_of_its_buffer(way: Callable[..., Any], part: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError):
        joined(way, [(3, 0, 70, True), (*part, False)])
