"""Reads raw records from JSONL (plain, .gz, .zst), JSON lists, Parquet and tables, each with its place."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.errors import DataError, FormatError, RecordError
from chatmill.json_values import decoded, decoded_slowly, refuse_constant
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.agents.registry import AGENT_FORMATS, agent_records
from chatmill.read.arrow_names import refuse_repeated_fields
from chatmill.read.file_format import FileFormat, agent_format, file_format
from chatmill.read.folders import folder_files
from chatmill.read.lines import BOM, numbered_lines, open_bytes
from chatmill.read.places import Elsewhere, Place, place

_SPACE = re.compile(r"[ \t\r\n]*")
ROW_BATCH_BYTES = 4 << 20
MOST_ROWS, FEWEST_ROWS = 32_768, 256
"""Rows of a Parquet file that are decoded at a time: about `ROW_BATCH_BYTES`, within these limits."""


class Raw(NamedTuple):
    """One record as decoded, or the error that decoding it gave."""

    where: str
    """`file:line`, or `file:row N` for Parquet and JSON lists, counted from 1."""
    value: Any
    error: RecordError | None = None


def read_records(
    path: str | os.PathLike[str], agent: AgentOptions | None = None, shape: str | None = None
) -> Iterator[Raw]:
    """Return the records of one file in order, or of all files of a folder; blank lines are passed over.

    Args:
        path: The file or folder.
        agent: What a recipe says of files that agents left.
        shape: Record format that was named, if any.
    """
    where = place(path)
    if isinstance(where, Path) and where.is_dir():
        return itertools.chain.from_iterable(read_records(one, agent, shape) for one in folder_files(path))
    if not where.is_file():
        raise DataError(f"no such file: {where}")
    match read_format(where, shape):
        case FileFormat.AGENT:
            return agent_raws(where, agent, shape)
        case FileFormat.PARQUET:
            return batch_records(parquet_batches(where), where, itertools.count(1))
        case FileFormat.TABLE:
            from chatmill.read.tables import table_batches  # pyarrow takes its time

            return batch_records(table_batches(where), where, itertools.count(1))
        case FileFormat.JSON:
            return _json_list(where)
        case FileFormat.JSONL:
            return (decode_line(line, f"{where}:{number}") for number, line in numbered_lines(where))


def read_format(path: Place, shape: str | None) -> FileFormat:
    """Return how a file holds records, where a record format may have been named.

    The name of a format of agents makes a file one of theirs, that of another format makes it none.
    """
    if shape is None:
        return file_format(path)
    return FileFormat.AGENT if shape in AGENT_FORMATS else file_format(path, is_agent=False)


def agent_raws(path: Place, agent: AgentOptions | None, shape: str | None) -> Iterator[Raw]:
    """Yield the records of a file that an agent left."""
    name = shape if shape in AGENT_FORMATS else agent_format(path)
    if not name:
        raise FormatError(
            f"{path}: cannot tell which agent left it, or it is damaged; name its format: {', '.join(AGENT_FORMATS)}"
        )
    for number, record in enumerate(agent_records(path, name, agent), 1):
        yield Raw(f"{path}:row {number}", record)


def decode_line(line: bytes, where: str) -> Raw:
    """Return one line of JSONL as a record, or the error that decoding it gave."""
    try:
        return Raw(where, decoded(line))
    except RecordError as error:
        error.where = where
        return Raw(where, None, error)


def _json_list(path: Place) -> Iterator[Raw]:
    with open_bytes(path) as stream:
        entries = list_entries(stream.read(), path)
    for number, entry in enumerate(entries, 1):
        yield decode_line(entry, f"{path}:row {number}")


def list_entries(data: bytes, path: str | Place) -> list[bytes]:
    """Return the entries of a JSON list, each as JSON, decoded by itself, so that a bad one is one bad record."""
    data = data.removeprefix(BOM)
    if data.lstrip()[:1] == b"{":
        return list(_objects(data, path))
    try:
        return [bytes(raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except msgspec.ValidationError:
        raise DataError(f"{path} must hold a list of records; for one record a line, name it .jsonl") from None
    except (ValueError, RecursionError) as error:
        try:
            decoded_slowly(data, error)
        except RecordError as reason:
            raise DataError(f"{path}: {reason.message}. Is it JSONL? Then name it .jsonl.") from None
        return list(_entries_slowly(data.decode()))


def _entries_slowly(text: str) -> Iterator[bytes]:
    """Yield the entries of a JSON list, which is known to be one, as they are written."""
    decoder = json.JSONDecoder()
    at = _after_space(text, text.index("[") + 1)
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        yield text[at:end].encode()
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _objects(data: bytes, path: str | Place) -> Iterator[bytes]:
    """Objects that follow each other, each over as many lines as it likes."""
    try:
        text = data.decode().rstrip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte 0x{data[error.start]:02X} at byte {error.start}") from None
    decoder, at = json.JSONDecoder(parse_constant=refuse_constant), 0
    while at < len(text):
        begin = _after_space(text, at)
        try:
            _, at = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, getattr(error, "pos", begin)) + 1
            raise DataError(
                f"{path}: the objects go over several lines, and line {line} is not JSON: {error}. Write one object a "
                "line, or one list"
            ) from None
        yield text[begin:at].encode()


def parquet_batches(
    path: Place,
    start: int = 0,
    stop: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    batch_bytes: int = ROW_BATCH_BYTES,
) -> Iterator[Any]:
    """Arrow batches of the rows from `start` up to `stop` (counted from 0; None: the end) of a Parquet file.

    `columns`: only these are read. `batch_bytes`: how many a batch is wanted to have, unpacked.

    Row groups outside of the range are not read; inside of one the rows before `start` are decoded and passed over.
    """
    with parquet_file(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        stop = sum(sizes) if stop is None else stop
        ends = list(itertools.accumulate(sizes))
        groups = [i for i, end in enumerate(ends) if end > start and end - sizes[i] < stop]
        at = ends[groups[0]] - sizes[groups[0]] if groups else stop
        unpacked = sum(file.metadata.row_group(i).total_byte_size for i in groups)
        wanted = batch_bytes * sum(sizes[i] for i in groups) // max(unpacked, 1)
        rows = min(max(wanted, FEWEST_ROWS), MOST_ROWS)
        batches = file.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False) if groups else ()
        for batch in batches:
            low, high = max(start - at, 0), min(stop - at, batch.num_rows)
            at += batch.num_rows
            if low < high:
                yield batch.slice(low, high - low)
            if at >= stop:
                return


def parquet_groups(path: Place) -> list[tuple[int, int]]:
    """Rows and unpacked bytes of each row group of a Parquet file."""
    with parquet_file(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


@contextmanager
def parquet_file(path: Place) -> Iterator[Any]:
    """A Parquet file, open; what is wrong with it is a `DataError`."""
    import pyarrow
    import pyarrow.parquet

    try:
        # Without pre-buffering a row group is never in memory as a whole, however large it is.
        source = path.copy() if isinstance(path, Elsewhere) else path
        with pyarrow.parquet.ParquetFile(
            source, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as file:
            refuse_repeated_fields(file.schema_arrow, path)
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        refuse_out_of_memory(error, f"{path} cannot be read")
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None


def batch_records(batches: Iterable[Any], path: str | Place, numbers: Iterable[int]) -> Iterator[Raw]:
    """Yield the records of Arrow batches, whose rows have these numbers in their file.

    Fields that are null are taken as absent, since Arrow gives every struct all fields.
    """
    rows = (row for batch in batches for row in _rows(batch))
    for number, row in zip(numbers, rows, strict=False):
        where = f"{path}:row {number}"
        if isinstance(row, UnicodeDecodeError):
            message = f"a text is not UTF-8: byte 0x{row.object[row.start]:02X} at byte {row.start} of it"
            yield Raw(where, None, RecordError(message, code="not_utf8", where=where))
        else:
            yield Raw(where, without_nulls(row))


def _rows(batch: Any) -> list[Any]:
    """The rows of an Arrow batch as objects; the error in the place of a row that holds text which is not UTF-8."""
    try:
        return cast(list[Any], batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        return [row for start in range(batch.num_rows) for row in _rows(batch.slice(start, 1))]


def without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the fields that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
