"""Reads conversations from files of any known format and shape, one clear error per bad record."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from chatmill.core.conversation import Conversation
from chatmill.errors import DataError, RecordError, UnknownNameError
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.field_maps import FieldMap
from chatmill.read.files import Raw, read_records
from chatmill.read.places import place
from chatmill.read.record_shape import LABEL_FALSE, Shape, conversation_or_error
from chatmill.read.shapes import PREFERENCES, detect_shape, find_shape, preferred

DETECT_RECORDS = 32
"""How many records the shape of a file is found from."""


class ConversationFile:
    """One file of conversations; iterate it for the conversations, in order."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shape: str | FieldMap | None = None,
        source: str | None = None,
        on_error: Callable[[RecordError], None] | None = None,
        preferences: str | None = None,
        agent: AgentOptions | None = None,
    ) -> None:
        """`shape` is a name, a field map (`{"user": "question", "assistant": "answer"}`), or None to find it from the
        first records.

        `source` names the records that do not name their own source (default: the file's name without its endings).
        A bad record raises its `RecordError`, or is handed to `on_error` and left out. `preferences="chosen"` reads the
        chosen answers of pairs, and leaves out records whose label is false; "pairs" reads both, one after the other.
        `agent` says what is missing in files that agents left.
        """
        if preferences not in (None, *PREFERENCES):
            raise UnknownNameError("preferences", preferences, list(PREFERENCES))
        self._preferences = preferences
        self.path = place(path)
        self.source = source if source is not None else self.path.name.split(".")[0]
        self._on_error = on_error
        self._agent = agent
        self._format = shape if isinstance(shape, str) else None
        if shape is not None and self._format is None:
            self._format = find_shape(shape).key
        self._named = None if shape is None else _preferred(find_shape(shape), preferences)

    @property
    def shape(self) -> Shape:
        """The shape that was named, or the one the first records have."""
        if self._named is None:
            readable = (raw.value for raw in self._records() if raw.error is None)
            shape = detect_shape(list(itertools.islice(readable, DETECT_RECORDS)), str(self.path))
            self._named = _preferred(shape, self._preferences)
        return self._named

    def __iter__(self) -> Iterator[Conversation]:
        for read in itertools.chain.from_iterable(map(self._found, self._records())):
            if not isinstance(read, RecordError):
                yield from read.sides
            elif read.code == LABEL_FALSE and self._preferences is not None:
                continue
            elif self._on_error is None:
                raise read
            else:
                self._on_error(read)

    def _records(self) -> Iterator[Raw]:
        return read_records(self.path, self._agent, self._format)

    def _found(self, raw: Raw) -> Iterator[Conversation | RecordError]:
        """Return what is in a record; no shape is looked for if it cannot be decoded."""
        if raw.error is not None:
            return iter((raw.error,))
        return (conversation_or_error(record, self.shape, self.source) for record in self.shape.embedded(raw))


def read_conversations(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    shape: str | FieldMap | None = None,
    source: str | None = None,
    on_error: Callable[[RecordError], None] | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of one or more files, in order; see `ConversationFile`."""
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise DataError("no input files")
    for path in listed:
        yield from ConversationFile(path, shape=shape, source=source, on_error=on_error)


def _preferred(shape: Shape, preferences: str | None) -> Shape:
    """Return the shape that records are read in."""
    return find_shape(preferred(shape.key, preferences))
