"""Turn SYNTH-like rows (query, reasoning, answer) into Harmony conversations: `synth_harmony_v1` Parquet shards.

Every conversation is system, developer, user, assistant/analysis and assistant/final; the JSON of a row is spelled as
in the published shards. A worker writes a whole shard, of input files that follow each other. The same input and
options give the same bytes for any number of workers; the folder appears whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.paths import local_paths
from chatmill.compiler.recipe import OnError
from chatmill.core.publish import join_files, sha256_file, storing, whole_folder
from chatmill.distill.harmony_rows import DEFAULT_OPENING, HarmonyRows, all_columns, opening_messages
from chatmill.distill.input_shards import GLOB, INPUT_SCHEMA
from chatmill.errors import ConfigError, DataError, RecordError, member
from chatmill.read.files import read_records
from chatmill.store.episode_layout import MANIFEST

OUTPUT_COLUMNS = ("messages_json", "metadata_json", "synth_id", "language", "exercise")
ROW_GROUP = 4096
"""Rows in memory at a time, and rows of a row group."""
SHARDS = 4
"""Each shard becomes one prefix for Megatron, which is served best by a few large ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthHarmonyResult:
    """What was written."""

    directory: Path
    rows: int
    rejected: int
    manifest: Mapping[str, Any]
    """What is in manifest.json."""


def write_synth_harmony(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    opening: Mapping[str, Any] = DEFAULT_OPENING,
    columns: Mapping[str, str] | None = None,
    allow_no_reasoning: bool = False,
    shards: int = SHARDS,
    on_error: str = OnError.FAIL,
    workers: int | None = None,
) -> SynthHarmonyResult:
    """Write `out/synth_harmony_shard_NN.parquet` and `out/manifest.json`; rows keep the order of the input.

    - `inputs`: files (Parquet, JSONL also packed, JSON), globs, or folders of such files, read in this order.
    - `opening`: the `system` message, by its fields, and the text of the `developer` message; one may be missing.
    - `columns`: names of the input's columns if they are not those of `COLUMNS`, as {"answer": "response"}.
    - `allow_no_reasoning`: a row without reasoning becomes a conversation without an analysis message.
    - `shards`: Parquet files, at most one for each input file; so many workers can be busy.
    - `on_error`: a row that cannot be used ends the run (`fail`), or goes to `rejected.jsonl` (`quarantine`).
    """
    policy = member(OnError, "on_error", on_error)
    config: dict[str, Any] = {"columns": all_columns(columns or {}), "allow_no_reasoning": allow_no_reasoning}
    rows = HarmonyRows(opening=opening_messages(opening), **config)
    sources = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files = [str(path) for path in local_paths([os.fspath(path) for path in sources])]
    if shards < 1:
        raise ConfigError(f"shards is {shards}; it must be 1 or more")
    final = Path(out)
    if final.exists():
        raise ConfigError(f"{final}: is there already and is not overwritten; choose another --out")
    with storing(final, "write the shards"), whole_folder(final) as folder, LocalExecutor(workers) as executor:
        jobs = [
            ShardJob(folder=folder, number=number, files=tuple(paths), rows=rows, on_error=policy)
            for number, paths in enumerate(_shares(files, shards))
        ]
        receipts = dict(executor.map(write_shard, jobs))
        manifest = _manifest(
            files, [receipts[number] for number in range(len(jobs))], {"opening": dict(opening), **config}
        )
        if manifest["rejected"]:
            join_files([job.rejected for job in jobs], folder / REJECTED)
        for job in jobs:
            job.rejected.unlink()
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    rejected = sum(manifest["rejected"].values())
    return SynthHarmonyResult(directory=final, rows=manifest["total_rows"], rejected=rejected, manifest=manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """The order to write one shard; small and picklable."""

    folder: Path
    number: int
    files: tuple[str, ...]
    """Its input."""
    rows: HarmonyRows
    on_error: OnError

    @property
    def name(self) -> str:
        """Name of the shard's file."""
        return GLOB.replace("*", f"{self.number:02d}")

    @property
    def label(self) -> str:
        """The job in words."""
        return f"writing {self.name}"

    @property
    def rejected(self) -> Path:
        """The rows that cannot be used."""
        return self.folder / f"{self.number:02d}.rejected"


def _shares(files: Sequence[str], most: int) -> list[list[str]]:
    """Files that follow each other for each shard, of about the same size together."""
    sizes = [os.path.getsize(path) for path in files]
    ends, total = itertools.accumulate(sizes), max(sum(sizes), 1)
    numbers = [min((end - size // 2) * most // total, most - 1) for end, size in zip(ends, sizes, strict=True)]
    shares = itertools.groupby(zip(numbers, files, strict=True), key=lambda numbered: numbered[0])
    return [[path for _, path in share] for _, share in shares]


def write_shard(job: ShardJob) -> dict[str, Any]:
    """In a worker: write one shard in even row groups, and return what the manifest says of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in OUTPUT_COLUMNS])
    receipt: dict[str, Any] = {"rows": 0, "rejected": Counter(), "first_error": "", "inputs": []}
    path = job.folder / job.name
    with (
        storing(path),
        job.rejected.open("w", encoding="utf-8") as rejected,
        pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        rows = _rows(job, rejected, receipt)
        while batch := list(itertools.islice(rows, ROW_GROUP)):
            columns = [pa.array(column, type=pa.string()) for column in zip(*batch, strict=True)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROW_GROUP)
            receipt["rows"] += len(batch)
    return {"path": job.name, "bytes": path.stat().st_size, "sha256": sha256_file(path), **receipt}


def _rows(job: ShardJob, rejected: Any, receipt: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rows of all files; those that cannot be used go to `rejected`, or end the run."""
    for path in job.files:
        for raw in read_records(path):
            try:
                if raw.error is not None:
                    raise raw.error
                yield job.rows.row(raw.value)
            except RecordError as error:
                error.where = raw.where
                if job.on_error is OnError.FAIL:
                    raise
                entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
                rejected.write(json.dumps({**entry, "message": error.message}) + "\n")
                receipt["rejected"][error.code] += 1
                receipt["first_error"] = receipt["first_error"] or str(error)
        receipt["inputs"].append({"path": path, "bytes": os.path.getsize(path), "sha256": sha256_file(path)})


def _manifest(files: Sequence[str], receipts: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """What the shards hold; an error if that is nothing."""
    rows, rejected = sum(receipt["rows"] for receipt in receipts), Counter[str]()
    for receipt in receipts:
        rejected.update(receipt["rejected"])
    if not rows:
        why = next((receipt["first_error"] for receipt in receipts if receipt["first_error"]), "")
        bad = f"none of the {rejected.total():,} rows could be used; the first: {why}"
        raise DataError(bad if why else f"there is no row in {', '.join(files)}")
    return {
        "schema_version": INPUT_SCHEMA,
        "columns": list(OUTPUT_COLUMNS),
        "glob": GLOB,
        "total_rows": rows,
        "shards": [{name: receipt[name] for name in ("path", "rows", "bytes", "sha256")} for receipt in receipts],
        "rejected": dict(sorted(rejected.items())),
        "config": dict(config),
        "inputs": [entry for receipt in receipts for entry in receipt["inputs"]],
        "package_version": __version__,
    }
