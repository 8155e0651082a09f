"""The groups of records: records of one source that agree in a field share a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.core.message_parser import is_encodable
from chatmill.errors import RecordError
from chatmill.read.files import decode_line
from chatmill.read.ranges import Chunk, ChunkKind, chunk_bytes, chunk_rows
from chatmill.read.shapes import find_shape


def group_of(record: Any, field: str, chunk: Chunk) -> str | None:
    """Return what the records of one tree agree in: their source, and the text or whole number in a field.

    None where the field holds neither.
    """
    value = record.get(field) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    key = f"{record.get(find_shape(chunk.shape).source) or chunk.source}\0{type(value).__name__} {value}"
    return key if is_encodable(key) else None


def record_groups(chunk: Chunk, field: str) -> Iterator[str | None]:
    """Yield the group of every line (blank ones too) or row of a chunk."""
    if chunk.kind is ChunkKind.ROWS:
        for batch in chunk_rows(chunk):
            names = {field, find_shape(chunk.shape).source} & set(batch.schema.names)
            rows = batch.select(sorted(names)).to_pylist() if names else [{}] * batch.num_rows
            yield from (group_of(row, field, chunk) for row in rows)
        return
    lines = chunk_bytes(chunk).split(b"\n")
    yield from (group_of(decode_line(line, "").value, field, chunk) for line in lines[: chunk.count])


def no_group(field: str, where: str, record_id: str) -> RecordError:
    """Return the error about a record that is in no group."""
    return RecordError(
        f"has no text and no whole number in the field {field!r}, by which records share trees (tree.group). Fill "
        "the field, or leave such records out (on_error: quarantine)",
        code="no_group",
        path=field,
        where=where,
        record_id=record_id,
    )
