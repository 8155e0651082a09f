"""Reads raw records from JSONL (plain, .gz, .zst), JSON lists and Parquet, each with the place it stands at."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from chatmill.errors import DataError, RecordError

BOM = b"\xef\xbb\xbf"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
"""File names that are read; `.ndjson` counts as `.jsonl`."""
TOO_DEEP = "the JSON is nested too deeply"
ZSTD_CHUNK = 1 << 17
"""Packed bytes that are unpacked at a time."""


class Raw(NamedTuple):
    """One record as decoded, or the error that decoding it gave."""

    where: str
    """`file:line`, or `file:row N` for Parquet and JSON lists, counted from 1."""
    value: Any
    error: RecordError | None = None


def read_records(path: str | os.PathLike[str]) -> Iterator[Raw]:
    """The records of one file in order; blank lines are passed over."""
    path = Path(path)
    name = path.name.replace(".ndjson", ".jsonl")
    if not path.is_file():
        raise DataError(f"no such file: {path}")
    if name.endswith(".parquet"):
        return _parquet(path)
    if name.endswith(".json"):
        return _json_list(path)
    if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return _jsonl(path)
    raise DataError(f"{path}: cannot tell the format from the name; known endings: {', '.join(SUFFIXES)}")


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file as a stream of bytes, unpacked when its name ends in .gz or .zst."""
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        try:
            if path.suffix == ".gz":
                yield cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
            elif path.suffix == ".zst":
                yield io.BufferedReader(_ZstdFrames(raw))
            else:
                yield raw
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is damaged: {error}") from error


class _ZstdFrames(io.RawIOBase):
    """Unpacks all frames of a file; unlike the library's own reader it notices a last one that is cut off."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._frame: Any = None
        self._unread = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Give the next unpacked bytes; 0 at the end."""
        import zstandard

        while not self._ready:
            data = self._unread or self._packed.read(ZSTD_CHUNK)
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready, self._unread = self._frame.decompress(data), b""
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _jsonl(path: Path) -> Iterator[Raw]:
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1 and line.startswith(BOM):
                line = line[len(BOM) :]
            if not line or line.isspace():
                continue
            yield decode_line(line, f"{path}:{number}")


def decode_line(line: bytes, where: str) -> Raw:
    """One line of JSONL; what the fast decoder refuses is read again slowly, for the reason."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        return _decode_slowly(line, where, error)
    return _without_repeated_key(line, where, value)


def _without_repeated_key(line: bytes, where: str, value: Any) -> Raw:
    """The decoded record, or the error that a key of the outermost object which holds messages stands twice."""
    if line.count(b'"messages"') > 1 or line.count(b'"conversations"') > 1:
        try:
            repeated = _repeated_key(line)
        except RecursionError:
            return Raw(where, None, RecordError(TOO_DEEP, code="invalid_json", where=where))
        if repeated:
            message = f"the key {repeated!r} stands twice in the record; only one of them could be kept"
            return Raw(where, None, RecordError(message, code="duplicate_key", path=repeated, where=where))
    return Raw(where, value)


def _decode_slowly(line: bytes, where: str, error: Exception) -> Raw:
    """The standard library decodes lone surrogates, so that the check of the texts can name them."""
    try:
        value = json.loads(line.rstrip().decode(), parse_constant=_refuse_constant)
        return _without_repeated_key(line, where, value)
    except UnicodeDecodeError as broken:
        message, code = (
            f"not UTF-8: byte 0x{line[broken.start]:02X} at byte {broken.start} of the line",
            "not_utf8",
        )
    except RecursionError:
        message, code = TOO_DEEP, "invalid_json"
    except ValueError as invalid:
        message, code = f"not JSON: {invalid or error}", "invalid_json"
    return Raw(where, None, RecordError(message, code=code, where=where))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _repeated_key(line: bytes) -> str | None:
    """The first key that stands twice in the outermost object."""
    repeated: list[str] = []

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        repeated[:] = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        return {}

    json.loads(line.decode(), object_pairs_hook=hook)  # the outermost object is hooked last
    return repeated[0] if repeated else None


def _json_list(path: Path) -> Iterator[Raw]:
    """The entries of one list; each is decoded by itself, so that a bad one is one bad record."""
    data = path.read_bytes().removeprefix(BOM)
    try:
        records = [bytes(raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except msgspec.ValidationError:
        raise DataError(f"{path} must hold a list of records; for one record a line, name it .jsonl") from None
    except (ValueError, RecursionError) as error:
        whole = _decode_slowly(data, str(path), error)
        if whole.error is not None:
            raise DataError(f"{whole.error}. Is it JSONL? Then name it .jsonl.") from None
        records = [json.dumps(value).encode() for value in whole.value]
    for number, record in enumerate(records, 1):
        yield decode_line(record, f"{path}:row {number}")


def _parquet(path: Path) -> Iterator[Raw]:
    """Rows of a Parquet file; fields that are null are taken as absent, since Arrow gives every struct all fields."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in _rows(batch):
                    number += 1
                    where = f"{path}:row {number}"
                    if isinstance(row, UnicodeDecodeError):
                        message = f"a text is not UTF-8: byte 0x{row.object[row.start]:02X} at byte {row.start} of it"
                        yield Raw(where, None, RecordError(message, code="not_utf8", where=where))
                    else:
                        yield Raw(where, _without_nulls(row))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None


def _rows(batch: Any) -> list[Any]:
    """The rows of an Arrow batch as objects; the error in the place of a row that holds text which is not UTF-8."""
    try:
        return cast(list[Any], batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        return [row for start in range(batch.num_rows) for row in _rows(batch.slice(start, 1))]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
