"""Copies of many short ranges: in compiled code where it is there, else by NumPy, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

ScalarT = TypeVar("ScalarT", bound=np.generic)
Ints = NDArray[np.integer[Any]]

OUTSIDE = "a range lies outside its buffer"
MAX_BUFFERS = 256
"""The compiled way keeps the number of a buffer in one byte."""


def gathered(buffers: Sequence[NDArray[ScalarT]], which: Ints, starts: Ints, lengths: Ints) -> NDArray[ScalarT]:
    """Ranges, concatenated: `buffers[which[i]][starts[i] : starts[i] + lengths[i]]` for every i.

    All buffers are flat and of one dtype. A range outside its buffer is an `IndexError`.
    """
    compiled = library()
    dtype = buffers[0].dtype
    if (
        compiled is None
        or len(buffers) > MAX_BUFFERS
        or dtype.hasobject
        or not len(which) == len(starts) == len(lengths)
        or not all(buffer.dtype == dtype and buffer.flags.c_contiguous for buffer in buffers)
    ):
        return gathered_by_numpy(buffers, which, starts, lengths)
    numbers, begins, counts = _bytes(which), _int64s(starts), _int64s(lengths)
    out = np.empty(max(int(counts.sum()), 0), dtype=dtype)
    addresses = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uintp)
    sizes = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
    written = compiled.chatmill_gather(
        addresses.ctypes.data,
        sizes.ctypes.data,
        len(buffers),
        numbers.ctypes.data,
        begins.ctypes.data,
        counts.ctypes.data,
        len(begins),
        dtype.itemsize,
        out.ctypes.data,
        out.nbytes,
    )
    if written != out.nbytes:
        raise IndexError(OUTSIDE)
    return out


def gathered_by_numpy(
    buffers: Sequence[NDArray[ScalarT]], which: Ints, starts: Ints, lengths: Ints
) -> NDArray[ScalarT]:
    """What `gathered` gives, slower."""
    starts, lengths = _int64s(starts), _int64s(lengths)
    sizes = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
    if len(starts) and (which.min() < 0 or starts.min() < 0 or lengths.min() < 0):
        raise IndexError(OUTSIDE)
    if (lengths > sizes[which] - starts).any():
        raise IndexError(OUTSIDE)
    pool = buffers[0] if len(buffers) == 1 else np.concatenate(list(buffers))
    at = np.concatenate([[0], np.cumsum(sizes)])[which] + starts
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    copied: NDArray[ScalarT] = pool[np.arange(total) + np.repeat(at - (ends - lengths), lengths)]
    return copied


def spread(values: NDArray[ScalarT], lengths: Ints) -> NDArray[ScalarT]:
    """Every value as often as its length says, in order; a negative length is a `ValueError`."""
    compiled = library()
    item = values.dtype.itemsize
    if compiled is None or item not in (1, 4) or len(values) != len(lengths) or not values.flags.c_contiguous:
        return np.repeat(values, lengths)
    counts = _int64s(lengths)
    out = np.empty(max(int(counts.sum()), 0), dtype=values.dtype)
    written = compiled.chatmill_spread(
        values.ctypes.data, counts.ctypes.data, len(counts), item, out.ctypes.data, out.nbytes
    )
    if written != out.nbytes:
        raise ValueError("a length is negative: lengths must be >= 0")
    return out


def _int64s(numbers: Ints) -> NDArray[np.int64]:
    return np.ascontiguousarray(numbers, dtype=np.int64)


def _bytes(numbers: Ints) -> NDArray[np.uint8]:
    """Numbers of buffers in one byte each."""
    if numbers.dtype.itemsize > 1 and len(numbers) and not 0 <= numbers.min() <= numbers.max() < MAX_BUFFERS:
        raise IndexError(OUTSIDE)
    return np.ascontiguousarray(numbers.view(np.uint8) if numbers.dtype.itemsize == 1 else numbers, dtype=np.uint8)
