"""Loads the compiled part of Chatmill, which the install has built."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from chatmill.errors import ChatmillError

ABI_VERSION = 29
"""The same number as in columns.c; a library with another one is of an older or newer source."""
MOST_AT_ONCE = (1 << 31) - 1
"""Bytes that `ctypes.string_at` can copy, which takes a C int."""
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
PATH = Path(__file__).with_name(f"_columns{SUFFIX}")


def call(name: str, *arguments: Any) -> int:
    """Call a compiled function with numbers, bytes and contiguous arrays of its argument types."""
    result: int = _function(name, len(arguments))(*map(_word, arguments))
    return result


def call_allocating(name: str, *arguments: Any) -> int:
    """Call a compiled function that is negative if it runs out of memory."""
    number = call(name, *arguments)
    if number < 0:
        raise MemoryError
    return number


def _word(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return int(value) if isinstance(value, np.integer) else value


@cache
def _function(name: str, count: int) -> Any:
    """A compiled function; each gives an int64, or a pointer as one, and takes words of 8 bytes: both are alike."""
    function = load_library(PATH)[name]
    function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_void_p,) * count
    return function


def struct(*members: NDArray[Any] | int | None) -> NDArray[np.int64]:
    """Make a C struct of 8-byte words: numbers, and addresses of arrays, which must outlive it."""
    return np.array(
        [member.ctypes.data if isinstance(member, np.ndarray) else member or 0 for member in members], dtype=np.int64
    )


def memory(address: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return a copy of an array that compiled code has."""
    size = count * np.dtype(dtype).itemsize
    if size > MOST_AT_ONCE:
        return np.frombuffer((ctypes.c_char * size).from_address(address).raw, dtype=dtype)
    return np.frombuffer(ctypes.string_at(address, size) if size else b"", dtype=dtype)


def int64s(*columns: ArrayLike) -> list[NDArray[np.int64]]:
    """Columns of numbers as compiled code reads them."""
    return [np.ascontiguousarray(column, dtype=np.int64) for column in columns]


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """Load the compiled functions on first use; a `ChatmillError` if that fails, or if their version is not ours."""
    try:
        handle = ctypes.CDLL(str(path))
        handle.chatmill_abi_version.restype = ctypes.c_int64
        version = handle.chatmill_abi_version()
        if version != ABI_VERSION:
            raise OSError(f"it is of version {version}, and this is version {ABI_VERSION}")
    except (OSError, AttributeError) as error:
        raise ChatmillError(
            f"the compiled part of Chatmill cannot be loaded: {error}. Install Chatmill again; "
            "in a source tree, run `python hatch_build.py`"
        ) from error
    return handle
