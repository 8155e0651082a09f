"""Files of texts to a Parquet file of packed rows: what `chatmill pack` does (spec 3)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chatmill.core.publish import whole_file
from chatmill.errors import UnknownNameError
from chatmill.read.transcripts import read_texts
from chatmill.structs import typed
from chatmill.systems.document_boundaries import PackOptions, tokenize_blocks

ABOUT = b"chatmill_packed_rows"
"""Key of the description in a Parquet file's metadata."""


def packing_options(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Packing options of a YAML file or the command line, checked."""
    for name in given:
        if name not in PackOptions.__struct_fields__:
            raise UnknownNameError(f"option of {where}", name, list(PackOptions.__struct_fields__))
    typed(PackOptions, given, where)
    return dict(given)


def pack_texts(
    paths: list[Path], tokenizer: Any, options: dict[str, Any], field: str = "text"
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Rows, document starts and the report of texts in JSONL files."""
    made = tokenize_blocks({field: list(read_texts(paths, field=field))}, tokenizer, field, PackOptions(**options))
    return made.input_ids, made.document_starts, asdict(made.report)


def write_rows(path: Path, rows: list[list[int]], starts: list[list[int]], about: dict[str, Any]) -> None:
    """Write a Parquet file with `input_ids` and `document_starts`, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(rows, kind), "document_starts": pa.array(starts, kind)})
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about).encode()}), partial)
