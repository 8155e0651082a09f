"""Pieces are their parts, joined; equal ones are kept once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.gather import Pieces, joined_pieces
from tests.oracles import pieces_by_numpy

BUFFERS = [b"", b"<|user|>\n", "Größe, 何? and a text that is longer than thirty-two bytes".encode(), b"x" * 70]
WAYS = [joined_pieces, pieces_by_numpy]
Part = tuple[int, int, int, bool]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    number = draw(st.integers(0, len(BUFFERS) - 1))
    start = draw(st.integers(0, len(BUFFERS[number])))
    return number, start, draw(st.integers(0, len(BUFFERS[number]) - start)), draw(st.booleans())


def made(way: type, given: list[Part]) -> Pieces:
    which, starts, lengths, opens = (np.array(column) for column in zip(*given, strict=True)) if given else [[]] * 4
    buffers = [np.frombuffer(buffer, dtype=np.uint8) for buffer in BUFFERS]
    numbers = (np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))
    return way(buffers, np.array(which, dtype=np.uint8), *numbers, np.array(opens, dtype=np.bool_))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=300)
@given(st.lists(parts(), max_size=40))
def test_pieces_are_their_parts(way: type, given: list[Part]) -> None:
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
    found = made(way, given)
    borders = zip(found.offsets[:-1].tolist(), found.offsets[1:].tolist(), strict=True)
    assert [found.data[first:last].tobytes() for first, last in borders] == different
    assert found.not_ascii.tolist() == [not piece.isascii() for piece in different]
    assert found.before.tolist() == before
    assert [different[number] for number in found.numbers.tolist()] == [wanted[owner] for owner in owners]
    assert len(found.data) == sum(map(len, different))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", [(1, -1, 1), (1, 0, -1), (1, 5, 6), (1, 11, 0), (4, 0, 0), (1, 2**62, 1)])
def test_a_part_outside_of_its_buffer(way: type, part: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError):
        made(way, [(3, 0, 70, True), (*part, False)])
