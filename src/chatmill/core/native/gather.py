"""Copies many short ranges of buffers."""

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
    buffers = contiguous(buffers)
    numbers, begins, counts = _bytes(which), _int64s(starts), _int64s(lengths)
    out = np.empty(max(int(counts.sum()), 0), dtype=dtype)
    addresses = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uintp)
    sizes = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
    written = library().chatmill_gather(
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


def contiguous(buffers: Sequence[NDArray[ScalarT]]) -> list[NDArray[ScalarT]]:
    """Buffers as compiled code reads them; more than it can number are a `ValueError`."""
    if len(buffers) > MAX_BUFFERS:
        raise ValueError(f"{len(buffers)} buffers: at most {MAX_BUFFERS} can be read at once")
    return [np.ascontiguousarray(buffer) for buffer in buffers]


def _int64s(numbers: Ints) -> NDArray[np.int64]:
    return np.ascontiguousarray(numbers, dtype=np.int64)


def _bytes(numbers: Ints) -> NDArray[np.uint8]:
    """Numbers of buffers in one byte each."""
    if numbers.dtype.itemsize > 1 and len(numbers) and not 0 <= numbers.min() <= numbers.max() < MAX_BUFFERS:
        raise IndexError(OUTSIDE)
    return np.ascontiguousarray(numbers.view(np.uint8) if numbers.dtype.itemsize == 1 else numbers, dtype=np.uint8)
