"""How a file holds records: by its name, and for JSON by what it begins with, which may speak against the name."""

from __future__ import annotations

import json
from enum import StrEnum

from chatmill.errors import DataError, FormatError
from chatmill.read.agents.registry import format_of_head
from chatmill.read.lines import BOM, PACKINGS, open_bytes
from chatmill.read.places import Place

HEAD = 1 << 16
"""Bytes at the start of a file that are examined."""
_ENCODINGS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_KINDS = (
    (b"\x1f\x8b", "packed with gzip", ".gz at its end"),
    (b"\x28\xb5\x2f\xfd", "packed with Zstandard", ".zst at its end"),
    (b"PAR1", "Parquet", ".parquet"),
    (b"ARROW1", "an Arrow file", ".arrow"),
    (b"PK\x03\x04", "a zip archive", ""),
    (b"BZh", "packed with bzip2", ""),
    (b"\xfd7zXZ", "packed with xz", ""),
)
_NEXT = {b"{": (b'"', b"}"), b"[": (b"{", b"]"), b"[{": (b'"',)}
"""First lines of JSON that is laid out over several ones, and what the next line begins with."""


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
    AGENT = "agent"
    """A file that an agent left: it is read as a whole, and becomes records of conversations."""

    @classmethod
    def of(cls, path: Place) -> FileFormat:
        """Return the format by the file's ending; an unknown ending is an error that lists the known ones."""
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
    ".traj": FileFormat.AGENT,
}
SUFFIXES = tuple(_FORMATS)
"""File names that are read; `.ndjson` counts as `.jsonl`."""


def file_format(path: Place, *, is_agent: bool = True) -> FileFormat:
    """Return the format by the ending, and for JSON by what the file begins with.

    A file of lines may be laid out over several ones (pretty-printed), a file that should be a list may have a record a
    line. Text that is not UTF-8 but UTF-16, and packed files under a wrong name, are errors. `is_agent`: False for a
    file whose records have another format than those of agents.
    """
    named = FileFormat.of(path)
    if named is FileFormat.AGENT:
        return named
    if named in (FileFormat.JSONL, FileFormat.JSON):
        head = head_of(path)
        check_text(head, path)
        if is_agent and agent_format(path, head):
            return FileFormat.AGENT
        if named is FileFormat.JSONL and is_laid_out(head):
            return FileFormat.JSON
        if named is FileFormat.JSON and is_lines(head):
            return FileFormat.JSONL
    return named


def agent_format(path: Place, head: bytes | None = None) -> str:
    """Return the name of the record format of an agent's file; empty for any other file."""
    start = head_of(path) if head is None else head
    return format_of_head(start, lambda size: head_of(path, size))


def head_of(where: Place, size: int = HEAD) -> bytes:
    """Return the first bytes of a file, unpacked."""
    with open_bytes(where) as file:
        return file.read(size)


def check_text(head: bytes, where: Place) -> None:
    """Raise a `FormatError` if a file that should be UTF-8 text begins like something else."""
    for start, name in _ENCODINGS:
        if head.startswith(start):
            raise _encoded(where, name, f"begins with the bytes {head[: len(start)].hex(' ').upper()}")
    for start, kind, ending in _KINDS:
        if head.startswith(start):
            way_out = f"its name needs {ending}" if ending else "unpack it first"
            raise FormatError(f"{where} is {kind}, not text: {way_out}")
    zeros = [place for place, byte in enumerate(head[:4]) if byte == 0]
    if zeros in ([1, 3], [0, 2]):
        name = "UTF-16LE" if zeros == [1, 3] else "UTF-16BE"
        raise _encoded(where, name, "has a zero byte in every character")


def _encoded(where: Place, name: str, fact: str) -> FormatError:
    return FormatError(
        f"{where} is {name}, not UTF-8 (it {fact}). Convert it: iconv -f {name} -t UTF-8 {where} > NEW-FILE"
    )


def is_laid_out(head: bytes) -> bool:
    """Return whether what should be a record a line is a JSON list, or objects that go over several lines."""
    text = head.removeprefix(BOM).lstrip()
    line, _, rest = text.partition(b"\n")
    if line.strip() in _NEXT:
        return rest.lstrip().startswith(_NEXT[line.strip()])
    return line.startswith(b"[") and line[1:].lstrip().startswith(b"{") and not rest.strip()


def is_lines(head: bytes) -> bool:
    """Return whether what should be a JSON list is a record a line."""
    text = head.removeprefix(BOM).lstrip()
    if not text.startswith(b"{"):
        return False
    line, newline, rest = text.partition(b"\n")
    try:
        return bool(newline and rest.strip()) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
