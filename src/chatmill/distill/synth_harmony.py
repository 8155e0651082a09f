"""SYNTH-like rows (query, reasoning, answer) become Harmony conversations: `synth_harmony_v1` Parquet shards.

Every conversation is system, developer, user, assistant/analysis and assistant/final; the JSON of a row is spelled as
in the published shards. A worker writes a whole shard, of input files that follow each other. The same input and
options give the same bytes for any workers and after any interruption; the manifest is written last.
"""

from __future__ import annotations

import hashlib
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
from chatmill.compiler.chunk_runs import run_jobs
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.paths import local_paths
from chatmill.compiler.recipe import OnError
from chatmill.compiler.work import FINISHED, begin_work, folder_lock, refuse_other, remove_work, what_it_holds
from chatmill.compiler.work import work_folder as work_of
from chatmill.core.canonical import canonical_json
from chatmill.core.publish import join_files, sha256_file, storing, sweep_orphans, whole_file, write_whole
from chatmill.distill.harmony_rows import DEFAULT_OPENING, HarmonyRows, opening_json
from chatmill.distill.input_shards import GLOB, INPUT_SCHEMA
from chatmill.errors import ConfigError, DataError, RecordError, member
from chatmill.read.files import read_records
from chatmill.read.ranges import check_unchanged
from chatmill.store.receipts import MANIFEST

OUTPUT_COLUMNS = ("messages_json", "metadata_json", "synth_id", "language", "exercise")
INPUT = ("path", "bytes", "sha256")
ROW_GROUP = 4096
"""Rows that are in memory at a time, and rows of a row group."""
SHARDS = 4
"""Each shard becomes one prefix for Megatron, and few large ones serve it best."""


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
    metadata: Sequence[str] = (),
    id_prefix: str | None = None,
    allow_no_reasoning: bool = False,
    shards: int = SHARDS,
    on_error: str = OnError.FAIL,
    workers: int | None = None,
    resume: bool = False,
) -> SynthHarmonyResult:
    """Write `out/synth_harmony_shard_NN.parquet` and, last, `out/manifest.json`; rows keep the order of the input.

    - `inputs`: files (Parquet, JSONL also packed, JSON), globs, or folders of such files, read in this order.
    - `opening`: the `system` message, by its fields, and the text of the `developer` message; one may be missing.
    - `columns`: names of the input's columns where they are not those of `COLUMNS`, as {"answer": "response"}.
    - `metadata`: further columns to keep in `metadata_json`.
    - `id_prefix`: ids are made of it, the shard and the row's number; by default each row has its own.
    - `allow_no_reasoning`: a row without reasoning becomes a conversation without an analysis message.
    - `shards`: Parquet files, at most one for each input file; so many workers can be busy.
    - `on_error`: a row that cannot be used ends the run (`fail`), or goes to `rejected.jsonl` (`quarantine`).
    - `resume`: continue a run that was stopped. Otherwise `out` must not be there.
    """
    policy = member(OnError, "on_error", on_error)
    rows = HarmonyRows.of(opening_json(opening), columns or {}, tuple(metadata), id_prefix, allow_no_reasoning)
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files = [str(path) for path in local_paths([os.fspath(path) for path in given])]
    if shards < 1:
        raise ConfigError(f"shards is {shards}; it must be 1 or more")
    final = Path(out)
    if final.exists() and (not resume or what_it_holds(final) == FINISHED):
        way_out = "" if what_it_holds(final) == FINISHED else "continue with --resume (resume=True), or "
        raise ConfigError(f"{final}: is there already and is not overwritten; {way_out}choose another --out")
    with storing(final, "create the folder"):
        final.mkdir(parents=True, exist_ok=True)
    config = {"opening": dict(opening), **rows.as_json()}
    with folder_lock(final, shared=False), LocalExecutor(workers) as executor:
        try:
            jobs = _jobs(final, rows, _shares(files, shards), policy)
            _claim(final, jobs, config)
            run_jobs(write_shard, [job for job in jobs if job.done() is None], executor)
            return _publish(final, jobs, config)
        except BaseException:
            _leave_nothing(final)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """The order to write one shard; small and picklable."""

    name: str
    """Of its file."""
    out: str
    number: int
    files: tuple[tuple[str, int, int], ...]
    """Its input: path, bytes and time of change."""
    rows: HarmonyRows
    quarantine: bool

    @property
    def label(self) -> str:
        """The job in words."""
        return f"writing {self.name}"

    @property
    def receipt(self) -> Path:
        """Where its receipt goes, which is written last; that of rejected rows is beside it."""
        return work_of(Path(self.out)) / f"{self.name}.json"

    @property
    def rejected(self) -> Path:
        """The rows that cannot be used."""
        return self.receipt.with_suffix(".rejected")

    def done(self) -> dict[str, Any] | None:
        """The receipt of an earlier run whose file is whole; rows that it put aside may fail now."""
        try:
            receipt: dict[str, Any] = json.loads(self.receipt.read_bytes())
            whole = (Path(self.out) / self.name).stat().st_size == receipt["bytes"]
            return receipt if whole and (self.quarantine or not receipt["rejected"]) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _shares(files: Sequence[str], most: int) -> list[list[str]]:
    """Files that follow each other for each shard, of about the same size together."""
    sizes = [os.path.getsize(path) for path in files]
    ends, total = itertools.accumulate(sizes), max(sum(sizes), 1)
    numbers = [min((end - size // 2) * most // total, most - 1) for end, size in zip(ends, sizes, strict=True)]
    shares = itertools.groupby(zip(numbers, files, strict=True), key=lambda one: one[0])
    return [[path for _, path in share] for _, share in shares]


def _jobs(out: Path, rows: HarmonyRows, shares: Sequence[Sequence[str]], on_error: OnError) -> list[ShardJob]:
    def noted(path: str) -> tuple[str, int, int]:
        status = os.stat(path)
        return path, status.st_size, status.st_mtime_ns

    return [
        ShardJob(
            name=GLOB.replace("*", f"{number:02d}"),
            out=str(out.absolute()),
            number=number,
            files=tuple(map(noted, paths)),
            rows=rows,
            quarantine=on_error is OnError.QUARANTINE,
        )
        for number, paths in enumerate(shares)
    ]


def _claim(out: Path, jobs: Sequence[ShardJob], config: Mapping[str, Any]) -> None:
    """Note which run this is; another unfinished one is refused."""
    content = {"package": __version__, "config": config, "inputs": [job.files for job in jobs]}
    fingerprint = hashlib.sha256(canonical_json(content)).hexdigest()
    refuse_other(out, fingerprint, None)
    sweep_orphans(out)
    begin_work(work_of(out), {"fingerprint": fingerprint})


def write_shard(job: ShardJob) -> None:
    """In a worker: write one shard in even row groups at its place, and its receipt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in OUTPUT_COLUMNS])
    receipt: dict[str, Any] = {"rows": 0, "rejected": Counter(), "first_error": "", "inputs": []}
    path = Path(job.out) / job.name
    with (
        storing(path),
        whole_file(path) as temporary,
        job.rejected.open("w", encoding="utf-8") as rejected,
        pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        rows = _rows(job, rejected, receipt)
        while some := list(itertools.islice(rows, ROW_GROUP)):
            columns = [pa.array(column, type=pa.string()) for column in zip(*some, strict=True)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROW_GROUP)
            receipt["rows"] += len(some)
    file = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_whole(job.receipt, canonical_json({**receipt, **file}))


def _rows(job: ShardJob, rejected: Any, receipt: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rows of all files; those that cannot be used go to `rejected`, or end the run."""
    numbers = itertools.count()
    for path, size, mtime_ns in job.files:
        for raw, number in zip(read_records(path), numbers, strict=False):
            try:
                if raw.error is not None:
                    raise raw.error
                yield job.rows.row(raw.value, job.number, number)
            except RecordError as error:
                error.where = raw.where
                error.record_id = job.rows.known_id(raw.value, job.number, number)
                if not job.quarantine:
                    raise
                entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
                rejected.write(json.dumps({**entry, "message": error.message}) + "\n")
                receipt["rejected"][error.code] += 1
                receipt["first_error"] = receipt["first_error"] or str(error)
        receipt["inputs"].append({"path": path, "bytes": size, "sha256": sha256_file(path)})
        check_unchanged(path, size, mtime_ns)


def _publish(out: Path, jobs: Sequence[ShardJob], config: Mapping[str, Any]) -> SynthHarmonyResult:
    """Write the rejected rows of all shards and, last, the manifest."""
    made = [json.loads(job.receipt.read_bytes()) for job in jobs]
    rows, rejected = sum(one["rows"] for one in made), Counter[str]()
    for one in made:
        rejected.update(one["rejected"])
    if not rows:
        for job in jobs:
            (out / job.name).unlink()
        remove_work(out)
        names = ", ".join(path for job in jobs for path, *_ in job.files)
        why = next((one["first_error"] for one in made if one["first_error"]), "")
        bad = f"none of the {rejected.total():,} rows could be used; the first: {why}"
        raise DataError(bad if why else f"there is no row in {names}")
    manifest = {
        "schema_version": INPUT_SCHEMA,
        "columns": list(OUTPUT_COLUMNS),
        "glob": GLOB,
        "total_rows": rows,
        "shards": [
            {"path": job.name, **{name: one[name] for name in ("rows", "bytes", "sha256")}}
            for job, one in zip(jobs, made, strict=True)
        ],
        "rejected": dict(sorted(rejected.items())),
        "config": dict(config),
        "inputs": [{name: entry[name] for name in INPUT} for one in made for entry in one["inputs"]],
        "package_version": __version__,
    }
    with storing(out, "write the shards"):
        if rejected:
            join_files([job.rejected for job in jobs], out / REJECTED)
        write_whole(out / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())
        remove_work(out)
    return SynthHarmonyResult(directory=out, rows=rows, rejected=rejected.total(), manifest=manifest)


def _leave_nothing(out: Path) -> None:
    """After an error leave no folder behind, unless there are shards to go on with."""
    if not (out / MANIFEST).exists() and not any(work_of(out).glob("*.parquet.json")):
        remove_work(out)
        if not any(out.iterdir()):
            out.rmdir()
