"""Splits a stream of bytes into lines, none longer than a limit: no file can fill the memory with one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO

from chatmill.errors import ConfigError, FormatError
from chatmill.read.compressed import open_bytes
from chatmill.read.places import Place
from chatmill.read.sniff import BOM

LINE_LIMIT = 256 << 20
"""Bytes of the longest line that is read, unpacked; the environment variable below sets another limit."""
LINE_LIMIT_VARIABLE = "CHATMILL_LINE_LIMIT"


def line_limit() -> int:
    """The limit in bytes: `CHATMILL_LINE_LIMIT`, or 256 MiB."""
    given = os.environ.get(LINE_LIMIT_VARIABLE)
    if not given:
        return LINE_LIMIT
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise ConfigError(f"{LINE_LIMIT_VARIABLE} is {given!r}; a whole number of bytes is needed, such as 268435456")
    return int(given)


def limited_lines(stream: IO[bytes], path: str | Place) -> Iterator[bytes]:
    """The lines of a stream with their ends, without a byte order mark; `FormatError` for one over the limit.

    Only a line feed ends a line.
    """
    limit = line_limit()
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        if len(line) - line.endswith(b"\n") > limit:
            raise line_too_long(path, number, limit)
        yield line.removeprefix(BOM) if number == 1 else line


def numbered_lines(path: Place) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, unpacked, with their numbers from 1."""
    with open_bytes(path) as stream:
        for number, line in enumerate(limited_lines(stream, path), 1):
            if line and not line.isspace():
                yield number, line


def line_too_long(path: str | Place, number: int, limit: int, what: str = "the line") -> FormatError:
    """The error for a line, or a record over several lines, that has more bytes than the limit."""
    return FormatError(
        f"{path}:{number}: {what} is longer than {limit} bytes, the limit for one record. Split it; or, if "
        f"the file is sound and the memory suffices, set the environment variable {LINE_LIMIT_VARIABLE} to more bytes"
    )
