"""Opens plain, gzip and Zstandard files as streams of bytes, and splits them into lines of limited length.

A damaged or cut-off archive is one clear error, and no file can fill the memory with one line.
"""

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

BOM = b"\xef\xbb\xbf"
PACKINGS = ("", ".gz", ".zst")
"""What the name of a file may end in: nothing more, or how it is packed."""
LINE_LIMIT = 256 << 20
"""Bytes of the longest line that is read, unpacked."""


def is_packed(path: Place) -> bool:
    """Return whether the name of a file says that it is packed."""
    return path.suffix.lower() in PACKINGS[1:]


@contextmanager
def open_bytes(path: Place) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked block by block if its name ends in .gz or .zst; `FormatError` for damage."""
    try:
        with path.open("rb") as packed:
            if path.suffix.lower() == ".gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=packed))
            elif path.suffix.lower() == ".zst":  # whose reader notices a last frame that is cut off
                import pyarrow

                yield io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))
            else:
                yield packed
    except (EOFError, zlib.error) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        refuse_out_of_memory(error, f"{path} cannot be unpacked")
        if error.errno is None:  # not from the operating system: gzip and Arrow report broken archives like this
            raise _damaged(path, error) from None
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None


def _damaged(path: Place, error: Exception) -> FormatError:
    return FormatError(f"{path} cannot be unpacked: {error}. The file is damaged or was cut off")


def limited_lines(stream: IO[bytes], path: str | Place) -> Iterator[bytes]:
    """Yield the lines of a stream with their ends, without a byte order mark; `FormatError` for one over the limit.

    Only a line feed ends a line.
    """
    number = 0
    while line := stream.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) - line.endswith(b"\n") > LINE_LIMIT:
            raise line_too_long(path, number)
        yield line.removeprefix(BOM) if number == 1 else line


def numbered_lines(path: Place) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, unpacked, with their numbers from 1."""
    with open_bytes(path) as stream:
        for number, line in enumerate(limited_lines(stream, path), 1):
            if line and not line.isspace():
                yield number, line


def line_too_long(path: str | Place, number: int, noun: str = "the line") -> FormatError:
    """Return the error for a line, or a record over several lines, that has more bytes than the limit."""
    return FormatError(f"{path}:{number}: {noun} is longer than {LINE_LIMIT} bytes, the limit for one record. Split it")
