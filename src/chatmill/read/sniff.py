"""What the first bytes of a file say against its name: another encoding, a packed file, or JSON of another layout."""

from __future__ import annotations

import json

from chatmill.errors import FormatError
from chatmill.read.compressed import open_bytes
from chatmill.read.places import Place

HEAD = 1 << 16
"""Bytes at the start of a file that are examined."""
BOM = b"\xef\xbb\xbf"
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


def head_of(where: Place) -> bytes:
    """The first bytes of a file, unpacked."""
    with open_bytes(where) as file:
        return file.read(HEAD)


def check_text(head: bytes, where: Place) -> None:
    """A `FormatError` where a file that should be UTF-8 text begins like something else."""
    for start, name in _ENCODINGS:
        if head.startswith(start):
            raise _encoded(where, name, f"begins with the bytes {head[: len(start)].hex(' ').upper()}")
    for start, what, ending in _KINDS:
        if head.startswith(start):
            way_out = f"its name needs {ending}" if ending else "unpack it first"
            raise FormatError(f"{where} is {what}, not text: {way_out}")
    zeros = [place for place, byte in enumerate(head[:4]) if byte == 0]
    if zeros in ([1, 3], [0, 2]):
        name = "UTF-16LE" if zeros == [1, 3] else "UTF-16BE"
        raise _encoded(where, name, "has a zero byte in every character")


def _encoded(where: Place, name: str, fact: str) -> FormatError:
    return FormatError(
        f"{where} is {name}, not UTF-8 (it {fact}). Convert it: iconv -f {name} -t UTF-8 {where} > NEW-FILE"
    )


def is_laid_out(head: bytes) -> bool:
    """Whether what should be a record a line is a JSON list, or objects that go over several lines."""
    text = head.removeprefix(BOM).lstrip()
    line, newline, rest = text.partition(b"\n")
    line = line.strip()
    if line in _NEXT:
        return rest.lstrip()[:1] in _NEXT[line]
    if not line.startswith(b"[") or not line[1:].lstrip().startswith(b"{"):
        return False
    return not rest.strip() if newline else True


def is_lines(head: bytes) -> bool:
    """Whether what should be a JSON list is a record a line."""
    text = head.removeprefix(BOM).lstrip()
    if not text.startswith(b"{"):
        return False
    line, newline, rest = text.partition(b"\n")
    try:
        return bool(newline and rest.strip()) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
