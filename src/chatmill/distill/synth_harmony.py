"""SYNTH-like rows (query, reasoning, answer) become Harmony conversations: `synth_harmony_v1` Parquet shards.

Every conversation is system, developer, user, assistant/analysis and assistant/final; the JSON of a row is spelled as
in the published shards. Workers turn chunks of the input into rows, and the rows into shards. The same input and
options give the same bytes for any workers and after any interruption; the manifest is written last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.compiler.chunk_output import REJECTED, SHARDS, rejected_files
from chatmill.compiler.chunk_runs import OnProgress, run_chunks, run_jobs, whole_folders
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.inputs import ANY_SHAPE, InputScan, ScannedInput, check_inputs, check_inputs_unchanged
from chatmill.compiler.paths import local_paths
from chatmill.compiler.recipe import SHARD_BYTES, OnError
from chatmill.compiler.sources import scan_all
from chatmill.compiler.work import (
    FINISHED,
    begin_work,
    folder_lock,
    refuse_other,
    remove_work,
    what_it_holds,
    work_folder,
)
from chatmill.core.canonical import canonical_json
from chatmill.core.ledger import Ledger
from chatmill.core.publish import join_files, storing, sweep_orphans, write_whole
from chatmill.distill.input_shards import GLOB, INPUT_SCHEMA
from chatmill.distill.manifest import failures
from chatmill.distill.outputs import move_outputs, run_outputs, whole_outputs
from chatmill.distill.synth_harmony_chunks import (
    OUTPUT_COLUMNS,
    ROWS,
    CountJob,
    HarmonyChunk,
    HarmonyShard,
    convert_chunk,
    count_records,
    write_parquet_shard,
)
from chatmill.distill.synth_harmony_rows import DEFAULT_DEVELOPER, DEFAULT_SYSTEM, HarmonyFrame, RowFields, column_names
from chatmill.errors import ConfigError, DataError, member
from chatmill.store.receipts import MANIFEST

ROWS_PER_SHARD = 20_000_000
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
    system: Mapping[str, Any] | None = DEFAULT_SYSTEM,
    developer: str | None = DEFAULT_DEVELOPER,
    columns: Mapping[str, str] | None = None,
    metadata: Sequence[str] = (),
    dataset: str | None = None,
    id_prefix: str | None = None,
    allow_no_reasoning: bool = False,
    rows_per_shard: int = ROWS_PER_SHARD,
    on_error: str = OnError.FAIL,
    workers: int | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> SynthHarmonyResult:
    """Write `out/synth_harmony_shard_NN.parquet` and, last, `out/manifest.json`; rows keep the order of the input.

    - `inputs`: files (Parquet, JSONL also packed, JSON), globs, or folders of such files, read in this order.
    - `system`: the fields of the system message, `developer`: the text of the developer message; None leaves it out.
    - `columns`: names of the input's columns where they are not those of `COLUMNS`, as {"answer": "response"}.
    - `metadata`: further columns to keep in `metadata_json`; `dataset`: a name for the manifest.
    - `id_prefix`: rows get ids made of it and their number in the input; by default each row has its own.
    - `allow_no_reasoning`: a row without reasoning becomes a conversation without an analysis message.
    - `on_error`: a row that cannot be used ends the run (`fail`), or goes to `rejected.jsonl` (`quarantine`).
    - `workers`: processes; 0 does everything in this one, as does by default input that is a single chunk.
    - `resume`: go on with a run that was stopped. Otherwise `out` must not be there.
    """
    policy = member(OnError, "on_error", on_error)
    frame = HarmonyFrame(system=system, developer=developer)
    fields = RowFields(
        columns=column_names(columns or {}), metadata=tuple(metadata), id_prefix=id_prefix,
        allow_no_reasoning=allow_no_reasoning,
    )  # fmt: skip
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files = local_paths([os.fspath(path) for path in given])
    if rows_per_shard < 1:
        raise ConfigError(f"rows_per_shard is {rows_per_shard}; it must be 1 or more")
    final = Path(out)
    _refuse_existing(final, resume=resume)
    config = {"system": system, "developer": developer, **fields.as_dict(), "rows_per_shard": rows_per_shard}
    with storing(final, "create the folder"):
        final.mkdir(parents=True, exist_ok=True)
    with folder_lock(final, shared=False):
        run = _HarmonyRun(final, files, frame, fields, config, dataset, policy, workers, on_progress)
        rows, ledger, manifest = run.run()
    return SynthHarmonyResult(
        directory=final, rows=rows, rejected=ledger.total_records("quarantined"), manifest=manifest
    )


def _refuse_existing(final: Path, *, resume: bool) -> None:
    """A folder that is there is refused, or an unfinished run in it is continued."""
    if final.exists():
        is_finished = what_it_holds(final) == FINISHED
        if is_finished or not resume:
            way_out = "" if is_finished else "continue with --resume (resume=True), or "
            raise ConfigError(f"{final}: is there already and is not overwritten; {way_out}choose another --out")


@dataclass
class _HarmonyRun:
    """One run in a folder that is held by this process."""

    out: Path
    files: list[Path]
    frame: HarmonyFrame
    fields: RowFields
    config: Mapping[str, Any]
    dataset: str | None
    on_error: OnError
    workers: int | None
    on_progress: OnProgress | None

    def run(self) -> tuple[int, Ledger, dict[str, Any]]:
        """Rows, ledger and manifest."""
        self._work = work_folder(self.out)
        sweep_orphans(self.out)
        with self._or_nothing():
            scanned = self._scan()
        executor = self._executor(scanned)
        self._claim(scanned)
        quarantine = self.on_error is OnError.QUARANTINE
        with self._or_nothing():
            chunks = self._chunks(scanned, executor)
            there = whole_folders(chunks).items()
            receipts = {number: one for number, one in there if quarantine or one["rejected"] is None}
            run_chunks(convert_chunk, chunks, executor, self.on_progress, receipts, stage="convert")
        check_inputs_unchanged(one.file for one in scanned)
        ledger = Ledger()
        for chunk in chunks:
            ledger.add(Ledger.from_json(receipts[chunk.number]["ledger"]))
        rows = [int(receipts[chunk.number]["rows"]) for chunk in chunks]
        if not sum(rows):
            self._give_up()
            errors = [text for chunk in chunks if (text := receipts[chunk.number]["first_error"])]
            raise DataError(_nothing_written(self.files, ledger.total_records("read"), errors))
        jobs = self._shards(chunks, rows)
        shards = whole_outputs(jobs, self.out)
        todo = [job for job in jobs if job.name not in shards]
        shards |= run_outputs(write_parquet_shard, todo, executor)
        return sum(rows), ledger, self._publish(scanned, chunks, jobs, shards, ledger)

    def _scan(self) -> list[ScannedInput]:
        scans = [
            InputScan(
                path=str(path),
                spool=str(self._work / "spool"),
                shape=ANY_SHAPE,
                source=path.name,
                chunk_bytes=SHARD_BYTES,
            )
            for path in self.files
        ]
        check_inputs(scans)
        scanned = scan_all(scans)
        if not any(one.chunks for one in scanned):
            raise DataError(_nothing_written(self.files, 0, []))
        return scanned

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """After an error leave no folder behind, unless there are chunks to go on with."""
        try:
            yield
        except BaseException:
            if not any((self._work / SHARDS).glob("[0-9]*")):
                self._give_up()
            raise

    def _give_up(self) -> None:
        """Remove all work, and the folder where there is nothing else in it."""
        remove_work(self.out)
        if not any(self.out.iterdir()):
            self.out.rmdir()

    def _executor(self, scanned: Sequence[ScannedInput]) -> Executor:
        few = sum(len(one.chunks) for one in scanned) == 1
        return LocalExecutor(0 if self.workers is None and few else self.workers)

    def _claim(self, scanned: Sequence[ScannedInput]) -> None:
        """Note which run this is; an unfinished other one is refused."""
        content = {
            "package": __version__,
            "config": self.config,
            "inputs": [[one.file.path, one.file.sha256] for one in scanned],
        }
        fingerprint = hashlib.sha256(canonical_json(content)).hexdigest()
        refuse_other(self.out, fingerprint, None)
        begin_work(self._work, {"fingerprint": fingerprint})

    def _chunks(self, scanned: Sequence[ScannedInput], executor: Executor) -> list[HarmonyChunk]:
        ranges = [chunk for one in scanned for chunk in one.chunks]
        firsts = [0] * len(ranges)
        if self.fields.id_prefix is not None:
            counts = run_jobs(count_records, [CountJob(range=chunk) for chunk in ranges], executor)
            firsts = [0, *itertools.accumulate(counts)]
        return [
            HarmonyChunk(
                number=number,
                range=chunk,
                first=firsts[number],
                frame=self.frame,
                fields=self.fields,
                quarantine=self.on_error is OnError.QUARANTINE,
                work=str(self._work.absolute()),
            )
            for number, chunk in enumerate(ranges)
        ]

    def _shards(self, chunks: Sequence[HarmonyChunk], rows: Sequence[int]) -> list[HarmonyShard]:
        """The orders to write the Parquet shards."""
        return [
            HarmonyShard(
                name=GLOB.replace("*", f"{number:02d}"),
                parts=tuple((str(chunks[place].folder / ROWS), first, count) for place, first, count in parts),
                work=str(self._work.absolute()),
            )
            for number, parts in enumerate(_shares(rows, int(self.config["rows_per_shard"])))
        ]

    def _publish(
        self,
        scanned: Sequence[ScannedInput],
        chunks: Sequence[HarmonyChunk],
        jobs: Sequence[HarmonyShard],
        receipts: Mapping[str, Mapping[str, Any]],
        ledger: Ledger,
    ) -> dict[str, Any]:
        """Move all files to their places; the manifest last."""
        written = [(job.name, receipts[job.name]["rows"], receipts[job.name]["files"][job.name]) for job in jobs]
        with storing(self.out, "write the shards"):
            join_files(rejected_files(chunk.folder for chunk in chunks), self.out / REJECTED)
            move_outputs(jobs, receipts, self.out)
            manifest = {
                "schema_version": INPUT_SCHEMA,
                "dataset": self.dataset,
                "columns": list(OUTPUT_COLUMNS),
                "glob": GLOB,
                "total_rows": sum(rows for _, rows, _ in written),
                "shards": [
                    {"path": name, "bytes": file["bytes"], "rows": rows, "sha256": file["sha256"]}
                    for name, rows, file in written
                ],
                "rejected": failures(ledger),
                "config": dict(self.config),
                "inputs": [
                    {"path": one.file.path, "bytes": one.file.bytes, "sha256": one.file.sha256} for one in scanned
                ],
                "package_version": __version__,
            }
            text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
            write_whole(self.out / MANIFEST, text.encode())
            remove_work(self.out)
        return manifest


def _shares(rows: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """The chunks of each shard: place, first row and number of rows; every shard but the last has `most` rows."""
    shares: list[list[tuple[int, int, int]]] = []
    room = 0
    for place, count in enumerate(rows):
        first = 0
        while first < count:
            if not room:
                shares.append([])
                room = most
            taken = min(room, count - first)
            shares[-1].append((place, first, taken))
            first, room = first + taken, room - taken
    return shares


def _nothing_written(files: list[Path], read: int, errors: list[str]) -> str:
    if not read:
        return f"there is no row in {', '.join(map(str, files))}"
    return f"none of the {read:,} rows could be used; the first: {errors[0] if errors else 'no reason is known'}"
