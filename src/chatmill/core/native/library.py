"""Loads the compiled part of Chatmill, where the install has built it; everything works without it, and is slower."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

ABI_VERSION = 13
"""The same number as in columns.c; a library with another one is of an older or newer source, and is not used."""
SWITCH = "CHATMILL_NATIVE"
"""Set to 0 in the environment: the compiled part is not used."""
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
PATH = Path(__file__).with_name(f"_columns{SUFFIX}")

_int, _pointer = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "chatmill_source_checksum": (),
    "chatmill_gather": (_pointer, _pointer, _int, _pointer, _pointer, _pointer, _int, _int, _pointer, _int),
    "chatmill_spread": (_pointer, _pointer, _int, _int, _pointer, _int),
    "chatmill_find": (_pointer, _int, _pointer, _int, _pointer, _int),
    "chatmill_points": (_pointer, _int, _pointer, _int, _pointer, _int, _pointer, _pointer, _int, _int, _pointer),
    "chatmill_distinct": (_pointer, _int, _pointer, _pointer, _int, _pointer, _pointer, _pointer, _int),
    "chatmill_pieces": (_pointer, _pointer, _int, *(_pointer,) * 4, _int, _pointer, _int, *(_pointer,) * 5, _int),
    "chatmill_not_ascii": (_pointer, _int, _pointer, _pointer, _int, _pointer),
    "chatmill_characters": (_pointer, _int, _pointer, _pointer, _int, _pointer),
    "chatmill_trim": (_pointer, _int, _pointer, _pointer, _int, _pointer, _pointer, _int, _int, _pointer, _pointer),
    "chatmill_sum_lengths": (*(_pointer,) * 3, _int, _pointer, _pointer, _int, _int, _pointer),
    "chatmill_sum_turns": (*(_pointer,) * 4, _int, _pointer, _int, *(_pointer,) * 3),
    "chatmill_lay_out": (*(_pointer,) * 4, _int, _pointer, _int, *(_pointer,) * 3),
    "chatmill_trees": (*(_pointer,) * 5, _int, _pointer, _int, _int, _pointer, _int, *(_pointer,) * 7),
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
    "chatmill_describe": (_pointer, _int, _pointer, _int, _int, _int),
    "chatmill_showing": (_pointer, _int, _pointer, _int),
    "chatmill_answers": (_pointer, _pointer, _int, _pointer, _int, _pointer),
    "chatmill_replay": (_pointer, _pointer, _int, _pointer, _int, _pointer),
    "chatmill_writer": (),
    "chatmill_writer_free": (_pointer,),
    "chatmill_writer_segment": (_pointer, _int, _pointer, *(_int,) * 3),
    "chatmill_writer_move": (_pointer, *(_int,) * 6),
    "chatmill_writer_shown": (_pointer, _int, _pointer, _int),
    "chatmill_write": (*(_pointer,) * 3, _int, _pointer, _int, _pointer, _int, *(_pointer,) * 3),
}


def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they were not built or are switched off. Loaded when first asked for."""
    return None if os.environ.get(SWITCH) == "0" else load_library(PATH)


def is_missing() -> bool:
    """Whether there is no library that could be used; one that is switched off is not missing."""
    return os.environ.get(SWITCH) != "0" and load_library(PATH) is None


@cache
def load_library(path: Path) -> ctypes.CDLL | None:
    """A library with its functions declared; None where it is missing, of another machine, or of another version."""
    try:
        found = ctypes.CDLL(str(path))
        version = found.chatmill_abi_version
        version.restype = _int
        if version() != ABI_VERSION:
            return None
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = _int, arguments
    except (OSError, AttributeError):
        return None
    return found
