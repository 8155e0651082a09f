"""Records read as lines, as rows of Arrow and one by one: the three must agree."""

from __future__ import annotations

import json
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.read.columns import Lines, Read, read_lines
from chatmill.read.record_shape import Shape, conversation_of
from chatmill.read.rows import read_rows
from tests.read.converted import batch_of


def as_lines(records: list[dict[str, Any]], shape: Shape) -> Read:
    """What the lines of a file with these records give."""
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    return read_lines(data, Lines(0, len(data), 1, len(records)), before="f:", source="s", shape=shape)


def every_way(shape: Shape, records: list[dict[str, Any]], *, as_text: str = "") -> list[Conversation]:
    """The conversations of records, after a comparison of three ways to read them.

    `as_text`: the field that is a text of JSON in the rows, where its values have no one type.
    """
    slow = [conversation_of(record, shape, where=f"f:{n}", source="s") for n, record in enumerate(records, 1)]
    fast, errors = as_lines(records, shape)
    assert not errors
    assert [item._replace(metadata={}) for item in fast] == [item._replace(metadata={}) for item in slow]
    given = [{**record, as_text: json.dumps(record[as_text])} for record in records] if as_text else records
    rows, errors = read_rows(batch_of(given), first=1, path="f", source="s", shape=shape)
    assert not errors
    assert [item._replace(where="", metadata={}) for item in rows] == [c._replace(where="", metadata={}) for c in slow]
    return slow
