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

ABI_VERSION = 20
"""The same number as in columns.c; a library with another one is of an older or newer source."""
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
PATH = Path(__file__).with_name(f"_columns{SUFFIX}")


def call(name: str, *given: Any) -> int:
    """Call a compiled function with numbers, bytes, and contiguous arrays of the types that it takes."""
    return int(_function(name)(*map(_passed, given)))


@cache
def _function(name: str) -> Any:
    """A compiled function; each gives an int64, or a pointer as one."""
    function = library()[name]
    function.restype = ctypes.c_int64
    return function


def _passed(value: Any) -> Any:
    """An argument: all numbers are int64, and what lies in memory is passed as its address."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, int | np.integer):
        return ctypes.c_int64(int(value))
    return value


def struct(*members: NDArray[Any] | int | None) -> NDArray[np.int64]:
    """A C struct: numbers, and arrays as their addresses, which must live as long; each is a word of 8 bytes."""
    return np.array([one.ctypes.data if isinstance(one, np.ndarray) else one or 0 for one in members], dtype=np.int64)


def memory(address: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
    """A copy of an array that compiled code has."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size) if size else b"", dtype=dtype)


def int64s(*columns: ArrayLike) -> list[NDArray[np.int64]]:
    """Columns of numbers as compiled code reads them."""
    return [np.ascontiguousarray(column, dtype=np.int64) for column in columns]


def library() -> ctypes.CDLL:
    """The compiled functions, loaded when first asked for; a `ChatmillError` if they cannot be."""
    return load_library(PATH)


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """A library, if it is of this version."""
    try:
        found = ctypes.CDLL(str(path))
        found.chatmill_abi_version.restype = ctypes.c_int64
        version = found.chatmill_abi_version()
        if version != ABI_VERSION:
            raise OSError(f"it is of version {version}, and this is version {ABI_VERSION}")
    except (OSError, AttributeError) as error:
        raise ChatmillError(
            f"the compiled part of Chatmill cannot be loaded: {error}. Install Chatmill again; "
            "in a source tree, run `python hatch_build.py`"
        ) from error
    return found
