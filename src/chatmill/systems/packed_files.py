"""Files of texts to a Parquet file of packed rows: what `chatmill pack` does (spec 3)."""

from __future__ import annotations

import json
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from chatmill.core.publish import whole_file
from chatmill.errors import UnknownNameError
from chatmill.read.transcripts import read_texts
from chatmill.structs import typed
from chatmill.systems.document_boundaries import tokenize_blocks

ABOUT = b"chatmill_packed_rows"
"""Key of the description in a Parquet file's metadata."""


def packing_options(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Packing options of a YAML file: those of `tokenize_blocks`, in their types."""
    known = {name: p.default for name, p in signature(tokenize_blocks).parameters.items() if p.default is not p.empty}
    for name, value in given.items():
        if name not in known:
            raise UnknownNameError(f"option of {where}", name, list(known))
        if isinstance(known[name], bool):
            typed(bool, value, f"{where}: {name}")
        elif isinstance(known[name], int) or name == "max_len":
            kind = Annotated[int, Meta(ge=0)]
            typed(kind | None if name == "max_len" else kind, value, f"{where}: {name}")
    return dict(given)


def pack_texts(
    paths: list[Path], tokenizer: Any, options: dict[str, Any], field: str = "text"
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Rows, document starts and the report of texts in JSONL files."""
    made = tokenize_blocks({field: list(read_texts(paths, field=field))}, tokenizer, field, **options)
    return made.input_ids, made.document_starts, asdict(made.report)


def write_rows(path: Path, rows: list[list[int]], starts: list[list[int]], about: dict[str, Any]) -> None:
    """Write a Parquet file with `input_ids` and `document_starts`, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(rows, kind), "document_starts": pa.array(starts, kind)})
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about).encode()}), partial)
