"""Copies many short ranges of buffers, one by one or joined into pieces, and finds the tokens at which bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, int64s, struct

ScalarT = TypeVar("ScalarT", bound=np.generic)
Bytes = NDArray[np.uint8]
Ints = NDArray[np.integer[Any]]

OUTSIDE = "a range lies outside its buffer"
MAX_BUFFERS = 256
"""The number of a buffer is one byte."""


def gathered(buffers: Sequence[NDArray[ScalarT]], which: Ints, starts: Ints, lengths: Ints) -> NDArray[ScalarT]:
    """Ranges, concatenated: `buffers[which[i]][starts[i] : starts[i] + lengths[i]]` for every i.

    All buffers are flat and of one dtype. A range outside its buffer is an `IndexError`.
    """
    dtype = buffers[0].dtype
    if dtype.hasobject or any(buffer.dtype != dtype for buffer in buffers):
        raise TypeError(f"buffers of {', '.join(str(buffer.dtype) for buffer in buffers)}: not one type of numbers")
    if not len(which) == len(starts) == len(lengths):
        raise ValueError(f"{len(which)} buffers, {len(starts)} starts and {len(lengths)} lengths of ranges")
    buffers = [np.ascontiguousarray(buffer) for buffer in buffers]
    numbers, (begins, counts) = _bytes(which), int64s(starts, lengths)
    out = np.empty(max(int(counts.sum()), 0), dtype=dtype)
    ranges = (numbers, begins, counts, len(begins), dtype.itemsize)
    if call("chatmill_gather", *_passed(buffers), *ranges, out, out.nbytes) != out.nbytes:
        raise IndexError(OUTSIDE)
    return out


class Pieces(NamedTuple):
    """The pieces that differ from each other, and where the parts are in them."""

    data: Bytes
    """All pieces, one after another, in the order in which they are met."""
    offsets: NDArray[np.int64]
    """Where each begins, and where the last one ends."""
    not_ascii: NDArray[np.bool_]
    """Of each piece."""
    numbers: NDArray[np.int64]
    """For each part the number of its piece."""
    before: NDArray[np.int64]
    """For each part the bytes of its piece that come before it."""


def joined_pieces(
    buffers: Sequence[Bytes], which: Bytes, starts: Ints, lengths: Ints, opens: NDArray[np.bool_]
) -> Pieces:
    """Join parts into texts and keep equal texts once: many are equal (system prompts, tools).

    Part `i` is `buffers[which[i]][starts[i] : starts[i] + lengths[i]]`, and begins a new piece where `opens[i]`. The
    first part begins one in any case. A part outside its buffer is an `IndexError`.
    """
    parts = len(which)
    if not len(starts) == len(lengths) == len(opens) == parts:
        raise ValueError(f"{parts} buffers of parts, {len(starts)} starts, {len(lengths)} lengths, {len(opens)} flags")
    buffers = [np.ascontiguousarray(buffer) for buffer in buffers]
    which, opened = np.ascontiguousarray(which, dtype=np.uint8), np.ascontiguousarray(opens, dtype=np.bool_)
    begins, sizes = int64s(starts, lengths)
    out = np.empty(max(int(sizes.sum()), 0), dtype=np.uint8)
    most = int(np.count_nonzero(opened[1:])) + bool(parts)
    numbers, before = np.empty((2, parts), dtype=np.int64)
    offsets, highs = np.empty(most + 1, dtype=np.int64), np.empty(most, dtype=np.bool_)
    table = np.full(1 << (2 * most).bit_length(), -1, dtype=np.int64)
    arguments = (which, begins, sizes, opened, parts, out, len(out))
    count = call("chatmill_pieces", *_passed(buffers), *arguments, numbers, before, offsets, highs, table, len(table))
    if count < 0:
        raise IndexError(OUTSIDE)
    return Pieces(out[: offsets[count]], offsets[: count + 1], highs[:count], numbers, before)


def _passed(buffers: Sequence[NDArray[Any]]) -> tuple[Any, ...]:
    """Addresses, sizes and count of contiguous buffers; refuse more than compiled code can number."""
    if len(buffers) > MAX_BUFFERS:
        raise ValueError(f"{len(buffers)} buffers: at most {MAX_BUFFERS} can be read at once")
    return struct(*buffers), struct(*map(len, buffers)), len(buffers)


def _bytes(numbers: Ints) -> NDArray[np.uint8]:
    """Numbers of buffers in one byte each."""
    if numbers.dtype.itemsize > 1 and len(numbers) and not 0 <= numbers.min() <= numbers.max() < MAX_BUFFERS:
        raise IndexError(OUTSIDE)
    return np.ascontiguousarray(numbers.view(np.uint8) if numbers.dtype.itemsize == 1 else numbers, dtype=np.uint8)


def token_points(
    ids: NDArray[np.int32], sizes: NDArray[np.int32], offsets: Ints, which: Ints, bytes_: Ints
) -> NDArray[np.int64]:
    """For each pair: the first token of text `which[i]`, counted among all, with at least `bytes_[i]` bytes before it.

    The tokens of a text are those between two offsets; `sizes` has the bytes of every id. If there is no such token,
    the point is the end of the text.
    """
    ids, sizes = np.ascontiguousarray(ids, dtype=np.int32), np.ascontiguousarray(sizes, dtype=np.int32)
    offsets, which, bytes_ = int64s(offsets, which, bytes_)
    if len(which) != len(bytes_):
        raise ValueError(f"{len(which)} texts and {len(bytes_)} numbers of bytes")
    points = np.empty(len(which), dtype=np.int64)
    texts = (ids, len(ids), sizes, len(sizes), offsets, len(offsets) - 1)
    if call("chatmill_points", *texts, which, bytes_, len(which), points) != len(which):
        raise IndexError("a text or an id lies outside its array")
    return points
