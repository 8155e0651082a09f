"""Opens plain, gzip and Zstandard files as streams of bytes; a damaged or cut-off archive is one clear error."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.errors import FormatError
from chatmill.read.places import Place

PACKINGS = ("", ".gz", ".zst")
"""What the name of a file may end in: nothing more, or how it is packed."""


def is_packed(path: Place) -> bool:
    """Whether the name of a file says that it is packed."""
    return path.suffix.lower() in PACKINGS[1:]


@contextmanager
def open_bytes(path: Place) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked when its name ends in .gz or .zst; `FormatError` where it is damaged or cut off.

    Both kinds are unpacked block by block as they are read, so that memory does not depend on the unpacked size.
    """
    try:
        with path.open("rb") as packed:
            if path.suffix.lower() == ".gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=packed))
            elif path.suffix.lower() == ".zst":
                yield _zstandard(packed)
            else:
                yield packed
    except (EOFError, zlib.error) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        refuse_out_of_memory(error, f"{path} cannot be unpacked")
        if error.errno is None:  # not from the operating system: gzip and Arrow report broken archives like this
            raise _damaged(path, error) from None
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None


def _zstandard(packed: IO[bytes]) -> IO[bytes]:
    """All frames of a file. Arrow's reader gives out one block at a time and notices a last frame that is cut off."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))


def _damaged(path: Place, error: Exception) -> FormatError:
    return FormatError(f"{path} cannot be unpacked: {error}. The file is damaged or was cut off")
