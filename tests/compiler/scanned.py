"""Records of a shape as a build reads them: as columns, and one by one."""

from __future__ import annotations

import json
from typing import Any

from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.read.columns import read_one_by_one
from chatmill.read.files import decode_line
from chatmill.read.shapes import find_shape
from tests.read.three_ways import as_lines, bare


def both_ways(records: list[Any], name: str) -> tuple[Conversations, Conversations, list[RecordError]]:
    """Conversations of records in a shape, read as columns and one by one, with the errors; the two must agree."""
    shape = find_shape(name)
    fast, wrong = as_lines(records, shape)
    raws = [decode_line(json.dumps(record).encode(), f"f:{number}") for number, record in enumerate(records, 1)]
    slow, also_wrong = read_one_by_one(raws, shape, "s")
    assert list(map(str, wrong)) == list(map(str, also_wrong))
    assert list(map(bare, fast)) == list(map(bare, slow))
    assert fast.unused == slow.unused
    assert fast.records.tolist() == slow.records.tolist()
    return fast, slow, wrong
