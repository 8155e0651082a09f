"""Files of texts to a Parquet file of packed rows: what `chatmill pack` does (spec 3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatmill.core.publish import whole_file
from chatmill.errors import UnknownNameError
from chatmill.structs import typed
from chatmill.systems.document_boundaries import Blocks, PackOptions

ABOUT = b"chatmill_packed_rows"
"""Key of the description in a Parquet file's metadata."""


def packing_options(options: dict[str, Any], where: str) -> dict[str, Any]:
    """Check packing options of a YAML file or the command line."""
    for name in options:
        if name not in PackOptions.__struct_fields__:
            raise UnknownNameError(f"option of {where}", name, list(PackOptions.__struct_fields__))
    typed(PackOptions, options, where)
    return dict(options)


def write_rows(path: Path, blocks: Blocks, about: dict[str, Any]) -> None:
    """Write a Parquet file with `input_ids` and `document_starts`, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"input_ids": blocks.input_ids, "document_starts": blocks.document_starts}
    table = pa.table({name: pa.array(rows, pa.list_(pa.int32())) for name, rows in columns.items()})
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about).encode()}), partial)
