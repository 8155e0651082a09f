"""Rows of CSV, TSV and Arrow files as Arrow batches, so that they are read the way Parquet is."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.errors import DataError
from chatmill.read.arrow_names import refuse_repeated_fields, refuse_repeated_names
from chatmill.read.file_format import check_text, head_of
from chatmill.read.lines import BOM, open_bytes
from chatmill.read.places import Place

BLOCK = 64 << 20
"""Bytes of CSV that are parsed at a time; no row may be longer."""
ROWS, ROW_BYTES = 8192, 4 << 20
"""The most rows, and bytes, that a batch has."""


def table_batches(where: Place) -> Iterator[Any]:
    """Yield the rows of a CSV, TSV or Arrow file as batches of limited size."""
    name = where.name.lower().removesuffix(".gz").removesuffix(".zst")
    batches = _csv(where, "\t" if name.endswith(".tsv") else ",") if name.endswith(("csv", "tsv")) else _arrow(where)
    for batch in batches:
        rows = min(ROWS, max(1, ROW_BYTES * batch.num_rows // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def _csv(where: Place, delimiter: str) -> Iterator[Any]:
    """All cells are texts; an empty one is an empty text."""
    import pyarrow
    from pyarrow import csv as arrow_csv

    head = head_of(where)
    check_text(head, where)
    if not head.strip():
        return
    delimiter, names = _header(head, delimiter)
    refuse_repeated_names(names, where)
    with _reading(where, "CSV"), open_bytes(where) as file:
        reader = arrow_csv.open_csv(
            file,
            arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()),
                strings_can_be_null=False,
            ),
        )
        with reader:
            yield from reader


def _header(head: bytes, delimiter: str) -> tuple[str, list[str]]:
    """Return the names of the columns; a first line with semicolons and no comma is split at these."""
    text = head.removeprefix(BOM).decode(errors="replace").lstrip("\r\n")
    first = text.splitlines()[0]
    if delimiter == "," and "," not in first and ";" in first:
        delimiter = ";"
    return delimiter, next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))


def _arrow(where: Place) -> Iterator[Any]:
    """Yield an Arrow file (Feather version 2 is one) or an Arrow stream, as `datasets` writes."""
    import pyarrow
    import pyarrow.ipc

    with _reading(where, "Arrow"), where.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            opened = pyarrow.ipc.open_file(file)
            refuse_repeated_fields(opened.schema, where)
            for number in range(opened.num_record_batches):
                yield opened.get_batch(number)
        elif magic:
            stream = pyarrow.ipc.open_stream(file)
            refuse_repeated_fields(stream.schema, where)
            yield from stream


@contextmanager
def _reading(where: Place, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        refuse_out_of_memory(error, f"{where} cannot be read")
        hint = ""
        if "UTF8" in str(error):
            hint = f". It is not UTF-8; if it comes from Excel: iconv -f WINDOWS-1252 -t UTF-8 {where} > NEW-FILE"
        raise DataError(f"{where} cannot be read as {kind}: {str(error).splitlines()[0]}{hint}") from None
