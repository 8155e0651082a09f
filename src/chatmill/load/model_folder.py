"""Opens what transformers finds in a model folder: nothing is downloaded, and no code of the folder runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from chatmill.core.machine_limits import is_out_of_memory
from chatmill.errors import ChatmillError, ConfigError

NO_CODE = {"trust_remote_code": False}
"""Left out, transformers asks on a terminal whether to run the code, and runs it after a `y`."""
LOCAL = {"local_files_only": True, **NO_CODE}
"""For every `from_pretrained`."""
EXPECTED = (OSError, ValueError, ImportError)
"""Errors of transformers whose text says enough."""


def open_model_folder(folder: str | os.PathLike[str], opened: Callable[[], Any], hint: str = "") -> Any:
    """Return what `opened` makes of the files of a folder; whatever transformers raises is one `ConfigError`.

    `hint` goes to the end of its text.
    """
    try:
        return opened()
    except ChatmillError:
        raise
    except Exception as error:  # of transformers, torch or safetensors, as the damage is
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"transformers cannot load {folder} without the Python code that the folder brings (auto_map in its "
                f"files), and Chatmill runs no code of a model: give one whose classes are part of transformers{hint}"
            ) from None
        kind = "" if isinstance(error, EXPECTED) else f"{type(error).__name__}: "
        raise ConfigError(f"transformers cannot load {folder}: {kind}{error}{hint}") from None
