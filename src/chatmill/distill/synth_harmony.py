"""SYNTH-like rows (query, reasoning, answer) become Harmony conversations: `synth_harmony_v1` Parquet shards.

One pass, a few thousand rows in memory. Every conversation is system, developer, user, assistant/analysis and
assistant/final; the JSON of a row is spelled as in the published shards. The same input and options give the same
bytes, and nothing is at `out` before everything is.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.compiler.paths import local_paths
from chatmill.compiler.publish import publish_folder, sha256_file, storing, temporary_folder
from chatmill.compiler.recipe import OnError
from chatmill.distill.synth_harmony_rows import DEFAULT_DEVELOPER, DEFAULT_SYSTEM, Frame, RowFields, column_names
from chatmill.errors import ConfigError, DataError, RecordError, UnknownNameError
from chatmill.read.files import SUFFIXES, Raw, read_records
from chatmill.store.durable import GrowingFile

SCHEMA_VERSION = "synth_harmony_v1"
GLOB = "synth_harmony_shard_*.parquet"
OUTPUT_COLUMNS = ("messages_json", "metadata_json", "synth_id", "language", "exercise")
ROWS_PER_SHARD = 20_000_000
"""Each shard becomes one prefix for Megatron, and few large ones serve it best."""
ROW_GROUP = 4096
"""Rows that are in memory at a time, and rows of a row group."""
REJECTED = "rejected.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthHarmonyResult:
    """What was written."""

    directory: Path
    rows: int
    rejected: int
    manifest: Mapping[str, Any]
    """What stands in manifest.json."""


def write_synth_harmony(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    system: Mapping[str, Any] | None = DEFAULT_SYSTEM,
    developer: str | None = DEFAULT_DEVELOPER,
    columns: Mapping[str, str] | None = None,
    metadata: Sequence[str] = (),
    dataset: str | None = None,
    id_prefix: str | None = None,
    allow_no_reasoning: bool = False,
    rows_per_shard: int = ROWS_PER_SHARD,
    on_error: str = OnError.FAIL,
    progress: Callable[[int], None] | None = None,
) -> SynthHarmonyResult:
    """Write `out/synth_harmony_shard_NN.parquet` and, last, `out/manifest.json`; rows keep the order of the input.

    - `inputs`: files (Parquet, JSONL also packed, JSON), globs, or folders of such files, read in this order.
    - `system`: the fields of the system message, `developer`: the text of the developer message; None leaves it out.
    - `columns`: names of the input's columns where they are not those of `COLUMNS`, as {"answer": "response"}.
    - `metadata`: further columns to keep in `metadata_json`; `dataset`: a name for the manifest.
    - `id_prefix`: rows get ids made of it and their number in the input; by default each row has its own.
    - `allow_no_reasoning`: a row without reasoning becomes a conversation without an analysis message.
    - `on_error`: a row that cannot be used ends the run (`fail`), or goes to `rejected.jsonl` (`quarantine`).
    """
    policy, frame = _on_error(on_error), Frame(system=system, developer=developer)
    fields = RowFields(
        columns=column_names(columns or {}), metadata=tuple(metadata), id_prefix=id_prefix,
        allow_no_reasoning=allow_no_reasoning,
    )  # fmt: skip
    files = _input_files(inputs)
    final = Path(out)
    if final.exists():
        raise ConfigError(f"{final}: is there already and is not overwritten; choose another --out")
    if rows_per_shard < 1:
        raise ConfigError(f"rows_per_shard is {rows_per_shard}; it must be 1 or more")
    temporary = temporary_folder(final)
    try:
        with storing(final, "write the shards"):
            with _Writer(temporary, rows_per_shard, policy) as writer:
                for raw in (raw for path in files for raw in read_records(path)):
                    writer.add(raw, frame, fields)
                    if progress is not None and writer.seen % ROW_GROUP == 0:
                        progress(writer.seen)
            if not writer.rows:
                raise DataError(_nothing_written(files, writer))
            manifest = {
                "schema_version": SCHEMA_VERSION,
                "dataset": dataset,
                "columns": list(OUTPUT_COLUMNS),
                "glob": GLOB,
                "total_rows": writer.rows,
                "shards": writer.shards,
                "rejected": dict(sorted(writer.rejected.items())),
                "config": {
                    "system": system,
                    "developer": developer,
                    **fields.as_dict(),
                    "rows_per_shard": rows_per_shard,
                },
                "inputs": [
                    {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in files
                ],
                "package_version": __version__,
            }
            text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
            (temporary / "manifest.json").write_text(text, encoding="utf-8")
        publish_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return SynthHarmonyResult(
        directory=final, rows=writer.rows, rejected=sum(writer.rejected.values()), manifest=manifest
    )


def _nothing_written(files: list[Path], writer: _Writer) -> str:
    if not writer.seen:
        return f"there is no row in {', '.join(map(str, files))}"
    return f"none of the {writer.seen:,} rows could be used; the first: {writer.first_error}"


def _on_error(name: str) -> OnError:
    try:
        return OnError(name)
    except ValueError:
        raise UnknownNameError("on_error", name, [str(policy) for policy in OnError]) from None


def _input_files(inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    patterns: list[str] = []
    for item in (os.fspath(path) for path in given):
        if not os.path.isdir(item):
            patterns.append(item)
            continue
        inside = [str(path) for path in sorted(Path(item).iterdir()) if path.name.endswith((*SUFFIXES, ".ndjson"))]
        if not inside:
            raise ConfigError(f"{item}: this folder holds no file that ends in {', '.join(SUFFIXES)}")
        patterns += inside
    return local_paths(patterns)


# --- shards ---------------------------------------------------------------------------------------------------------


class _Sink(io.RawIOBase):
    """A file for pyarrow that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = GrowingFile(path)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.file.write(bytes(data))
        return len(data)


@dataclass
class _Writer:
    """The shards while they grow, and the rows that were refused."""

    folder: Path
    rows_per_shard: int
    on_error: OnError
    seen: int = 0
    rows: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    first_error: RecordError | None = None
    _waiting: list[tuple[str, ...]] = field(default_factory=list)
    _in_shard: int = 0
    _sink: _Sink | None = None
    _parquet: Any = None
    _quarantine: GrowingFile | None = None

    def add(self, raw: Raw, frame: Frame, fields: RowFields) -> None:
        """One row of the input."""
        number, self.seen = self.seen, self.seen + 1
        try:
            if raw.error is not None:
                raise raw.error
            self._waiting.append(fields.row(raw.value, number, frame))
        except RecordError as error:
            self._reject(error, raw, fields, number)
            return
        self.rows += 1
        if len(self._waiting) == ROW_GROUP or self._in_shard + len(self._waiting) == self.rows_per_shard:
            self._flush()
            if self._in_shard == self.rows_per_shard:
                self._close_shard()

    def _reject(self, error: RecordError, raw: Raw, fields: RowFields, number: int) -> None:
        error.where = raw.where
        if isinstance(raw.value, Mapping) and error.code != "no_synth_id":
            try:
                error.record_id = fields.synth_id(raw.value, number)
            except RecordError:
                error.record_id = ""
        if self.on_error is OnError.FAIL:
            raise error
        self.first_error = self.first_error or error
        self.rejected[error.code] += 1
        entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
        if self._quarantine is None:
            self._quarantine = GrowingFile(self.folder / REJECTED)
        line = json.dumps({**entry, "message": error.message}, ensure_ascii=True)
        self._quarantine.write(line.encode() + b"\n")

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        schema = pa.schema([(name, pa.string()) for name in OUTPUT_COLUMNS])
        if self._parquet is None:
            self._sink = _Sink(self.folder / GLOB.replace("*", f"{len(self.shards):02d}"))
            self._parquet = pq.ParquetWriter(self._sink, schema, compression="zstd", write_page_checksum=True)
        arrays = [pa.array(column, type=pa.string()) for column in zip(*self._waiting, strict=True)]
        self._parquet.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema), row_group_size=ROW_GROUP)
        self._in_shard += len(self._waiting)
        self._waiting.clear()

    def _close_shard(self) -> None:
        if self._parquet is None:
            return
        assert self._sink is not None
        self._parquet.close()
        record = self._sink.file.finish()
        self.shards.append(
            {
                "path": self._sink.file.path.name,
                "bytes": record.bytes,
                "rows": self._in_shard,
                "sha256": record.sha256,
            }
        )
        self._parquet, self._sink, self._in_shard = None, None, 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._close_shard()
        if self._parquet is not None and self._sink is not None:
            self._parquet.close()
            self._sink.file.discard()
        if self._quarantine is not None:
            self._quarantine.finish()
