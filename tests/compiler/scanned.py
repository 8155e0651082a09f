"""Files as a build reads them: scanned, and chunk by chunk."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from chatmill.compiler.inputs import InputScan, ScannedInput, scan_input
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.read.columns import read_one_by_one
from chatmill.read.files import Raw, decode_line
from chatmill.read.ranges import chunk_records
from chatmill.read.shapes import find_shape
from tests.read.three_ways import as_lines


def told(records: Iterator[Raw]) -> list[tuple[Any, ...]]:
    """Records in a form that can be compared, errors included."""
    return [(raw.where, raw.value, raw.error and raw.error.__reduce__()[1]) for raw in records]


def in_chunks(scanned: ScannedInput) -> list[tuple[Any, ...]]:
    return told(itertools.chain.from_iterable(map(chunk_records, scanned.chunks)))


def scan(path: Path, **options: Any) -> ScannedInput:
    given = {"spool": str(path.parent / "spool"), "shape": "openai", **options}
    return scan_input(InputScan(path=str(path), **given))


def both_ways(records: list[Any], name: str) -> tuple[Conversations, Conversations, list[RecordError]]:
    """Conversations of records in a shape, read as columns and one by one, with the errors; the two must agree."""
    shape = find_shape(name)
    fast, wrong = as_lines(records, shape)
    raws = [decode_line(json.dumps(record).encode(), f"f:{number}") for number, record in enumerate(records, 1)]
    slow, also_wrong = read_one_by_one(raws, shape, "s")
    assert list(map(str, wrong)) == list(map(str, also_wrong))
    assert [one._replace(metadata={}) for one in fast] == [one._replace(metadata={}) for one in slow]
    assert fast.unused == slow.unused
    assert fast.records.tolist() == slow.records.tolist()
    return fast, slow, wrong


CHAT = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}'
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def parquet(path: Path, rows: int, group: int) -> Path:
    table = pyarrow.table({"n": list(range(rows)), "text": [f"row {n} " * 20 for n in range(rows)]})
    pyarrow.parquet.write_table(table, path, row_group_size=group, use_dictionary=False)
    return path
