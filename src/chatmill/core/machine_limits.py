"""Full disks and used-up memory are not mistakes in data: found in whatever form a library reports them."""

from __future__ import annotations

import errno

from chatmill.errors import OutOfMemoryError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FREE_MEMORY = "use fewer workers or smaller batches, close other programs, or raise a limit that is set (ulimit -v)"
_MEMORY_TEXTS = (
    "failed to map segment from shared object",  # of a library that is being imported
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
    "can't start new thread",
)


def is_full_disk(error: BaseException) -> bool:
    """Return whether a disk or quota is full; libraries in Rust give the number in the text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    text = str(error).lower()
    return "no space left on device" in text or "disk quota exceeded" in text


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory is used up; only few libraries raise `MemoryError` for it."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if not isinstance(error, OSError | ImportError | RuntimeError):
        return False
    return any(text in str(error).lower() for text in _MEMORY_TEXTS)


def refuse_out_of_memory(error: BaseException, doing: str) -> None:
    """Raise `OutOfMemoryError` where that is what an error means; `doing` is the file or the step."""
    if is_out_of_memory(error):
        raise OutOfMemoryError(f"{doing}: there is not enough memory: {FREE_MEMORY}") from error
