"""Server-sent events of a stream, split where they end."""

from __future__ import annotations

import re

EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r)")
"""An empty line ends an event. The atomic group keeps CR LF from counting as two line ends."""
LINE_END = re.compile(rb"\r\n|\n|\r")


class EventSplitter:
    """Incremental splitter of server-sent events."""

    def __init__(self) -> None:
        self.rest = b""
        """Bytes after the last whole event."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events completed by more bytes.

        Each has the empty line at its end.
        """
        data = self.rest + data
        events: list[bytes] = []
        start = 0
        for match in EVENT_END.finditer(data):
            events.append(data[start : match.end()])
            start = match.end()
        self.rest = data[start:]
        return events


def event_data(event: bytes) -> bytes | None:
    """Extract the data of an event.

    Returns None for comments and other events without data.
    """
    lines: list[bytes] = []
    for line in LINE_END.split(event):
        if line.startswith(b"data:"):
            lines.append(line.removeprefix(b"data:").removeprefix(b" "))
    return b"\n".join(lines) if lines else None
