"""Loads the compiled part of Chatmill, which the install has built."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.errors import ChatmillError

ABI_VERSION = 19
"""The same number as in columns.c; a library with another one is of an older or newer source."""
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
PATH = Path(__file__).with_name(f"_columns{SUFFIX}")

_int, _pointer = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "chatmill_source_checksum": (),
    "chatmill_gather": (_pointer, _pointer, _int, _pointer, _pointer, _pointer, _int, _int, _pointer, _int),
    "chatmill_find": (_pointer, _int, _pointer, _int, _pointer, _int),
    "chatmill_points": (_pointer, _int, _pointer, _int, _pointer, _int, _pointer, _pointer, _int, _pointer),
    "chatmill_distinct": (_pointer, _int, _pointer, _pointer, _int, _pointer, _pointer, _pointer, _int),
    "chatmill_pieces": (_pointer, _pointer, _int, *(_pointer,) * 4, _int, _pointer, _int, *(_pointer,) * 5, _int),
    "chatmill_not_ascii": (_pointer, _int, _pointer, _pointer, _int, _pointer),
    "chatmill_characters": (_pointer, _int, _pointer, _pointer, _int, _pointer),
    "chatmill_trim": (_pointer, _int, _pointer, _pointer, _int, _pointer, _pointer, _int, _int, _pointer, _pointer),
    "chatmill_share": (*(_pointer,) * 5, _int, *(_pointer,) * 5),
    "chatmill_lay_out": (*(_pointer,) * 5, _int, _pointer, _int, *(_pointer,) * 3),
    "chatmill_trees": (*(_pointer,) * 8, _int, _pointer, _int, _int, _pointer, _int, *(_pointer,) * 7),
    "chatmill_free_list": (_pointer,),
    "chatmill_tree_ends": (_pointer, _pointer, _int, *(_pointer,) * 5),
    "chatmill_count_lines": (_pointer, _int, _int),
    "chatmill_scan": (_pointer, _int, _int, _pointer, _pointer),
    "chatmill_scan_texts": (_pointer, _int, _pointer, _int, _pointer, _pointer),
    "chatmill_replayer": (_pointer, _int, _int),
    "chatmill_replayer_free": (_pointer,),
    "chatmill_add_form": (_pointer, _pointer, _int, _int),
    "chatmill_add_recipe": (_pointer, _pointer, _int, _int, _int),
    "chatmill_add_loop": (_pointer, _pointer, _pointer, _int),
    "chatmill_add_node": (_pointer, _int, _int, _int, _int),
    "chatmill_add_numbers": (_pointer, _pointer, _int),
    "chatmill_add_leaf": (_pointer, _pointer, _int, _int, _int, _int),
    "chatmill_add_column": (_pointer, _int),
    "chatmill_link": (_pointer, _int, _int, _int),
    "chatmill_place": (_pointer, _int, _int),
    "chatmill_forget_classes": (_pointer,),
    "chatmill_describe": (_pointer, _int, _pointer, _int, _int),
    "chatmill_showing": (_pointer, _int, _pointer, _int),
    "chatmill_part": (_pointer, _pointer, _int, _int, _pointer),
    "chatmill_answers": (_pointer, _pointer, _int, _pointer, _int),
    "chatmill_replay": (_pointer, _int, _pointer, _int, _pointer, _int, _pointer),
    "chatmill_writer": (),
    "chatmill_writer_free": (_pointer,),
    "chatmill_writer_segment": (_pointer, _int, _pointer, *(_int,) * 3),
    "chatmill_writer_move": (_pointer, *(_int,) * 6),
    "chatmill_writer_marks": (_pointer, _pointer, _int),
    "chatmill_writer_answer": (_pointer, *(_int,) * 5),
    "chatmill_writer_held": (_pointer, *(_int,) * 3),
    "chatmill_writer_size": (_pointer,),
    "chatmill_write": (*(_pointer,) * 3, _int, _int, *(_pointer,) * 3),
}


def call(name: str, *given: Any) -> int:
    """Call a compiled function with numbers, bytes, structs, and contiguous arrays of the types that it takes."""
    return int(getattr(library(), name)(*map(_as_given, given)))


def _as_given(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return ctypes.addressof(value) if isinstance(value, ctypes.Structure | ctypes.Array) else value


def int64s(*columns: ArrayLike) -> list[NDArray[np.int64]]:
    """Columns of numbers as compiled code reads them."""
    return [np.ascontiguousarray(column, dtype=np.int64) for column in columns]


def library() -> ctypes.CDLL:
    """The compiled functions, loaded when first asked for; a `ChatmillError` if they cannot be."""
    return load_library(PATH)


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """A library with its functions declared."""
    try:
        found = ctypes.CDLL(str(path))
        version = found.chatmill_abi_version
        version.restype = _int
        if version() != ABI_VERSION:
            raise OSError(f"it is of version {version()}, and this is version {ABI_VERSION}")
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = _int, arguments
    except (OSError, AttributeError) as error:
        raise ChatmillError(
            f"the compiled part of Chatmill cannot be loaded: {error}. Install Chatmill again; "
            "in a source tree, run `python hatch_build.py`"
        ) from error
    return found
