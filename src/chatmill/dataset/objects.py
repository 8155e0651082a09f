"""Records that people hold as Python objects become a file, which then takes the same road as every other file.

Lists and iterators become JSON lines, tables become Parquet: what the reader knows of nulls, shapes and bad records
holds for both. The file has a fixed name, so that the bytes of a dataset depend on the records alone.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, ConfigError, DataError, RecordError

TABLE_ROWS = 8192
"""Rows of a `datasets.Dataset` that are copied at a time."""
RECORDS = "records"
"""What records without a file are called."""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """Objects, written to a file."""

    base: Path
    """The folder of the file."""
    name: str
    """Its name, such as records.jsonl."""

    @property
    def path(self) -> Path:
        """The file itself."""
        return self.base / self.name

    @property
    def _place(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.name)}:(?:row )?(\d+)\b")

    def in_python(self, text: str) -> str:
        """Rewrite places such as `records.jsonl:4` as Python counts: `records[3]`."""
        stem = self.name.split(".")[0]
        return self._place.sub(lambda match: f"{stem}[{int(match[1]) - 1}]", text)

    def index(self, where: str) -> int | None:
        """Find the index of the record at a place; None for another place."""
        match = self._place.fullmatch(where)
        return int(match[1]) - 1 if match else None

    def explain(self, error: ChatmillError) -> None:
        """Name records in an error as Python counts them."""
        error.args = tuple(self.in_python(item) if isinstance(item, str) else item for item in error.args)
        if isinstance(error, RecordError):
            error.where, error.message = self.in_python(error.where), self.in_python(error.message)


def paths_of(source: Any) -> list[str] | None:
    """List the file names, if the source is one or a list of them; None for objects."""
    if isinstance(source, str | os.PathLike):
        return [os.fspath(source)]
    if isinstance(source, list | tuple) and source and all(isinstance(path, str | os.PathLike) for path in source):
        return [os.fspath(path) for path in source]
    return None


def write_objects(source: Any, base: Path, name: str = RECORDS) -> RecordFile:
    """Write records, whatever they are held in, to a file in the folder `base`."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"the name of records is made of letters, digits, '_' and '-', not {name!r}")
    base.mkdir(parents=True, exist_ok=True)
    tables = _tables(source)
    file = RecordFile(base, f"{name}.jsonl" if tables is None else f"{name}.parquet")
    if tables is None:
        _write_lines(_records(source), file)
    else:
        _write_tables(tables, file)
    return file


def _records(source: Any) -> Iterator[Any]:
    """Iterate over the records of a list or iterator; refuse anything else."""
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, list(source)[:6]))
        if all(hasattr(value, "column_names") for value in source.values()):
            raise ConfigError(
                f"this holds several datasets ({keys}): choose one, such as source[{next(iter(source))!r}]"
            )
        raise ConfigError(f"a single dict (with {keys}) is one record: give a list, such as [record]")
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise ConfigError(
            f"cannot read records from {type(source).__name__}: give a path, a list of dicts, an iterator, a "
            "datasets.Dataset, or a pandas or polars frame"
        )
    return iter(source)


def _write_lines(records: Iterator[Any], file: RecordFile) -> None:
    count = 0
    with file.path.open("wb") as out:
        for count, record in enumerate(records, 1):
            if count == 1:
                _refuse_messages(record)
            out.write(_line(record, file.in_python(f"{file.name}:{count}")))
            out.write(b"\n")
    if not count:
        raise DataError("there are no records: the list is empty, or the iterator was read before")


def _refuse_messages(first: Any) -> None:
    """Refuse a list of messages, or of objects, in place of a list of records: an easy mistake."""
    for item in (first, next(iter(first), None) if isinstance(first, list | tuple) else None):
        if isinstance(item, tuple) and hasattr(item, "_fields"):  # JSON would have it as a list, without its names
            raise ConfigError(
                f"objects of {type(item).__name__} cannot be read: give dicts, such as "
                '{"messages": [{"role": "user", "content": "..."}]}'
            )
    if isinstance(first, Mapping) and "role" in first and "content" in first and "messages" not in first:
        raise ConfigError(
            "this is a list of messages, so one conversation: give a list of conversations, such as [messages] or "
            '[{"messages": messages}]'
        )


def _line(record: Any, where: str) -> bytes:
    """Return a record as JSON; a value that JSON does not have is an error, for it would be written as another one."""
    if isinstance(record, list | tuple):  # a list of messages is a conversation, too
        record = {"messages": record}
    if isinstance(record, Mapping):
        record = {name: _cell(value) for name, value in record.items()}
    try:
        try:
            return json.dumps(record, default=_plain, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a text that has no UTF-8 form is written all the same: the reader says where it is
            return json.dumps(record, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"the record has no form in JSON: {error}", code="invalid_json", where=where) from None


def _cell(value: Any) -> Any:
    """A field of a record: NaN is a missing one, and bytes are no text, so that only a record that uses them fails."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": len(value)}
    return None if isinstance(value, float) and math.isnan(value) else value


def _plain(value: Any) -> Any:
    """Convert values of numpy and pandas, and messages of API clients (pydantic models), to JSON values."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes are no text: decode them, such as value.decode()")
    for method in ("tolist", "model_dump", "isoformat"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON (found {str(value)[:60]!r})")


def _tables(source: Any) -> Iterator[Any] | None:
    """Arrow tables of a frame or dataset; None for other objects."""
    room = type(source).__module__.partition(".")[0]
    if room == "datasets" and isinstance(getattr(source, "num_rows", None), int):  # an IterableDataset gives dicts
        tables: Iterator[Any] = iter(source.with_format("arrow").iter(batch_size=TABLE_ROWS))
        return tables
    if hasattr(source, "collect_schema") and hasattr(source, "collect"):  # a lazy frame of polars
        source = source.collect()
    if not hasattr(source, "__arrow_c_stream__"):
        return None
    import pyarrow as pa

    try:
        is_pandas = room == "pandas" and hasattr(source, "columns")
        return iter([pa.Table.from_pandas(source, preserve_index=False) if is_pandas else pa.table(source)])
    except pa.ArrowException as error:
        raise DataError(
            f"the {type(source).__name__} cannot be read as a table: {error}. A frame whose columns hold values of "
            'different types can be given as its rows: frame.to_dict("records")'
        ) from None


def _write_tables(tables: Iterator[Any], file: RecordFile) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(tables, None)
    if first is None or not first.num_rows:
        raise DataError("there are no records: the table is empty")
    schema = first.schema.remove_metadata()
    try:
        with pq.ParquetWriter(file.path, schema, compression="none") as writer:
            writer.write_table(first.replace_schema_metadata())
            for table in tables:
                writer.write_table(table.replace_schema_metadata().cast(schema))
    except pa.ArrowException as error:
        raise DataError(f"the table cannot be written as Parquet: {error}") from None
