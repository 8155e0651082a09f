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


def packing_options(options: dict[str, Any], where: str) -> dict[str, Any]:
    """Check packing options of a YAML file or the command line."""
    for name in options:
        if name not in PackOptions.__struct_fields__:
            raise UnknownNameError(f"option of {where}", name, list(PackOptions.__struct_fields__))
    typed(PackOptions, options, where)
    return dict(options)


def pack_texts(
    paths: list[Path], tokenizer: Any, options: dict[str, Any], field: str = "text"
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Pack the texts of JSONL files; rows, document starts and the report."""
    blocks = tokenize_blocks({field: list(read_texts(paths, field=field))}, tokenizer, field, PackOptions(**options))
    return blocks.input_ids, blocks.document_starts, asdict(blocks.report)


def write_rows(path: Path, rows: list[list[int]], starts: list[list[int]], about: dict[str, Any]) -> None:
    """Write a Parquet file with `input_ids` and `document_starts`, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(rows, kind), "document_starts": pa.array(starts, kind)})
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about).encode()}), partial)
