"""How a file holds records: by its name, and for JSON by what it begins with."""

from __future__ import annotations

from enum import StrEnum

from chatmill.errors import DataError
from chatmill.read.compressed import PACKINGS
from chatmill.read.places import Place
from chatmill.read.sniff import check_text, head_of, is_laid_out, is_lines


class FileFormat(StrEnum):
    """How a file holds records, by its name; all but Parquet and Arrow may be packed by gzip or Zstandard."""

    JSONL = "jsonl"
    """One record a line."""
    JSON = "json"
    """One list of records."""
    PARQUET = "parquet"
    """One record a row."""
    TABLE = "table"
    """One record a row: CSV, TSV and Arrow."""

    @classmethod
    def of(cls, path: Place) -> FileFormat:
        """The format by the file's ending; an unknown ending is an error that lists the known ones."""
        name = path.name.lower().replace(".ndjson", ".jsonl")
        for ending, format in _FORMATS.items():
            if name.endswith(ending):
                return format
        raise DataError(f"{path}: cannot tell the format from the name; known endings: {', '.join(SUFFIXES)}")


_FORMATS = {
    **{f".jsonl{packing}": FileFormat.JSONL for packing in PACKINGS},
    **{f".json{packing}": FileFormat.JSON for packing in PACKINGS},
    ".parquet": FileFormat.PARQUET,
    **{f".csv{packing}": FileFormat.TABLE for packing in PACKINGS},
    **{f".tsv{packing}": FileFormat.TABLE for packing in PACKINGS},
    ".arrow": FileFormat.TABLE,
    ".feather": FileFormat.TABLE,
}
SUFFIXES = tuple(_FORMATS)
"""File names that are read; `.ndjson` counts as `.jsonl`."""


def file_format(path: Place) -> FileFormat:
    """The format by the ending, and for JSON by what the file begins with.

    A file of lines may be laid out over several ones (pretty-printed), a file that should be a list may have a record a
    line. Text that is not UTF-8 but UTF-16, and packed files under a wrong name, are errors.
    """
    named = FileFormat.of(path)
    if named in (FileFormat.JSONL, FileFormat.JSON):
        head = head_of(path)
        check_text(head, path)
        if named is FileFormat.JSONL and is_laid_out(head):
            return FileFormat.JSON
        if named is FileFormat.JSON and is_lines(head):
            return FileFormat.JSONL
    return named
