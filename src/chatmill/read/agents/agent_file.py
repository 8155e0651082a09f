"""Read a file of an agent as decoded JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from chatmill.errors import DataError, RecordError
from chatmill.json_values import decoded
from chatmill.read.lines import BOM, numbered_lines, open_bytes
from chatmill.read.places import Place


class AgentLine(NamedTuple):
    """One decoded line of a file, or the error that decoding it gave."""

    number: int
    value: Any
    error: RecordError | None = None


class AgentFile:
    """A file of an agent, opened anew for each reading."""

    def __init__(self, path: Place) -> None:
        self.path = path

    @property
    def stem(self) -> str:
        """The name of the file without its endings."""
        return self.path.name.split(".")[0]

    def lines(self) -> Iterator[AgentLine]:
        """Yield the lines that are not blank.

        A file with one JSON value over several lines, or a list, gives the value or the entries as its lines.
        """
        with open_bytes(self.path) as stream:
            first = stream.read(1 << 16).removeprefix(BOM).lstrip()
        if _is_one_value(first):
            value = self.document()
            entries = value if isinstance(value, list) else [value]
            yield from (AgentLine(number, entry) for number, entry in enumerate(entries, 1))
            return
        for number, line in numbered_lines(self.path):
            yield decode_numbered(line, number)

    def document(self) -> Any:
        """Return the one JSON value of the file."""
        with open_bytes(self.path) as stream:
            data = stream.read().removeprefix(BOM)
        try:
            return decoded(data)
        except RecordError as error:
            raise DataError(f"{self.path}: {error.message}. The file is damaged or was cut off") from None


def decode_numbered(line: bytes, number: int) -> AgentLine:
    """Decode one line.

    An error names the line.
    """
    try:
        return AgentLine(number, decoded(line))
    except RecordError as error:
        reason = RecordError(f"line {number}: {error.message}", code=error.code)
        return AgentLine(number, None, reason)


def _is_one_value(head: bytes) -> bool:
    """Check for one JSON value over several lines, or a list."""
    if head.startswith(b"["):
        return True
    line = head.partition(b"\n")[0].strip()
    return line == b"{"
