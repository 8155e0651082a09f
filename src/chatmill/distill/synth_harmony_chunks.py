"""The work of `synth-harmony` that executors run: chunks of the input become rows, and rows become Parquet shards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import SHARDS, ChunkOutput, publish_with_receipt
from chatmill.compiler.spools import PartWriter
from chatmill.core.checksums import Hash
from chatmill.core.publish import GrowingFile
from chatmill.distill.outputs import OutputJob, publish_output
from chatmill.distill.synth_harmony_rows import HarmonyFrame, RowFields
from chatmill.errors import RecordError
from chatmill.read.files import Raw
from chatmill.read.ranges import Chunk, ChunkKind, chunk_records
from chatmill.store.parquet import ArrowSink

OUTPUT_COLUMNS = ("messages_json", "metadata_json", "synth_id", "language", "exercise")
ROW_GROUP = 4096
"""Rows that are in memory at a time, and rows of a row group."""
ROWS = "000000.arrow"
"""In the folder of a chunk that has rows: an Arrow stream of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob:
    """The order to count the records of a range; small and picklable."""

    range: Chunk

    @property
    def label(self) -> str:
        """The job in words."""
        return f"counting {self.range.describe()}"


def count_records(job: CountJob) -> int:
    """Records of a range, as `synth-harmony` counts them: blank lines are none."""
    if job.range.kind is not ChunkKind.LINES:
        return job.range.count
    return sum(1 for _ in chunk_records(job.range))


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyChunk:
    """Everything a worker needs to know about one chunk; small and picklable."""

    number: int
    range: Chunk
    first: int
    """The number of its first record in the whole input, where rows get ids by it."""
    frame: HarmonyFrame
    fields: RowFields
    quarantine: bool
    work: str

    @property
    def label(self) -> str:
        """The chunk in words."""
        return self.range.describe()

    @property
    def bytes(self) -> int:
        """Bytes of its input, unpacked."""
        return self.range.bytes

    @property
    def folder(self) -> Path:
        """Where its rows are published."""
        return Path(self.work) / SHARDS / f"{self.number:06d}"


def convert_chunk(job: HarmonyChunk) -> dict[str, Any]:
    """Turn the records of a chunk into rows and publish them; gives the receipt."""
    return publish_with_receipt(job.folder, lambda folder: _convert(job, folder))


def _convert(job: HarmonyChunk, folder: Path) -> dict[str, Any]:
    import pyarrow as pa

    errors: list[str] = []
    with ChunkOutput(folder) as output, closing(PartWriter(folder, ".arrow")) as out:
        rows, count = _rows(job, output, errors), 0
        while some := list(itertools.islice(rows, ROW_GROUP)):
            columns = [pa.array(column, type=pa.string()) for column in zip(*some, strict=True)]
            out.write_rows(pa.RecordBatch.from_arrays(columns, schema=_schema()))
            count += len(some)
        if count:
            out.end_part(count)
        return output.receipt(job.number, files=out.files, rows=count, first_error=errors[0] if errors else "")


def _rows(job: HarmonyChunk, output: ChunkOutput, errors: list[str]) -> Iterator[tuple[str, ...]]:
    """The records of a chunk as rows; those that cannot be used go to the rejected ones and to `errors`."""
    records, source = output.ledger.records, job.range.source
    for number, raw in enumerate(chunk_records(job.range), start=job.first):
        records[source, "read", ""] += 1
        try:
            if raw.error is not None:
                raise raw.error
            row = job.fields.row(raw.value, number, job.frame)
        except RecordError as error:
            output.write_rejected(_refused(error, raw, job, number))
            errors.append(str(error))
            records[source, "quarantined", error.code] += 1
            continue
        records[source, "built", ""] += 1
        yield row


def _refused(error: RecordError, raw: Raw, job: HarmonyChunk, number: int) -> str:
    """The entry of a row that cannot be used; without quarantine the error itself."""
    error.where = raw.where
    if isinstance(raw.value, Mapping) and error.code != "no_synth_id":
        try:
            error.record_id = job.fields.synth_id(raw.value, number)
        except RecordError:
            error.record_id = ""
    if not job.quarantine:
        raise error
    entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
    return json.dumps({**entry, "message": error.message}, ensure_ascii=True)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.string()) for name in OUTPUT_COLUMNS])


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyShard(OutputJob):
    """The order to write one Parquet shard of rows that are made, by the name of its file."""

    parts: tuple[tuple[str, int, int], ...]
    """Files of rows, in order: of each the first row that is taken, and how many are."""


def write_parquet_shard(job: HarmonyShard) -> dict[str, Any]:
    """Write one shard in even row groups and publish it; gives the receipt."""
    return publish_output(job, lambda folder: _write_parquet(job, folder))


def _write_parquet(job: HarmonyShard, folder: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq

    file, rows = GrowingFile(folder / job.name, hash=Hash.SHA256), 0
    try:
        with pq.ParquetWriter(ArrowSink(file.write), _schema(), compression="zstd", write_page_checksum=True) as writer:
            for group in _row_groups(job.parts):
                writer.write_table(group.combine_chunks(), row_group_size=ROW_GROUP)
                rows += group.num_rows
        return {"rows": rows, "files": {job.name: file.finish().to_json()}}
    except BaseException:
        file.discard()
        raise


def _row_groups(parts: tuple[tuple[str, int, int], ...]) -> Iterator[Any]:
    """The rows of all parts in tables that make a row group each; the files are mapped, not read."""
    import pyarrow
    import pyarrow.ipc

    waiting = _schema().empty_table()
    for path, first, count in parts:
        with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
            waiting = pyarrow.concat_tables([waiting, stream.read_all().slice(first, count)])
        while waiting.num_rows >= ROW_GROUP:
            yield waiting.slice(0, ROW_GROUP)
            waiting = waiting.slice(ROW_GROUP)
    if waiting.num_rows:
        yield waiting
