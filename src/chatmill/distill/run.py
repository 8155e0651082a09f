"""The driver of the distillation build: input shards to chunks, chunks to shards as in any build, shards exported to
Megatron, manifest last.

It runs on the engines of every build. Chunks have fixed borders, so workers, engine and interruptions change no byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import rejected_files
from chatmill.compiler.chunk_runs import OnProgress, run_chunks, whole_folders
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.engines.named import named_executor
from chatmill.compiler.recipe import OnError
from chatmill.compiler.run import Outcome
from chatmill.compiler.work import begin_work, clean_up, folder_lock, refuse_other, what_it_holds, work_folder
from chatmill.core.checksums import Hash
from chatmill.core.publish import join_files, remove_path, storing, sweep_orphans, write_whole
from chatmill.distill.audit import AUDIT_RATE, check_rate
from chatmill.distill.caps import cap_tokens
from chatmill.distill.chunk import KDChunk, render_chunk, renderer_of
from chatmill.distill.input_shards import KDInput, read_input
from chatmill.distill.manifest import KDConfig, failures, kd_fingerprint, ledger_of, make_manifest
from chatmill.distill.outputs import move_outputs, run_outputs, whole_outputs
from chatmill.distill.shard_export import QUARANTINE, KDExport, export_shard
from chatmill.errors import ConfigError, DataError, member
from chatmill.store.kd_blend import BlendFiles, write_blend_arguments
from chatmill.store.receipts import MANIFEST, read_kd_manifest, receipt_bytes
from chatmill.systems.synth_kd import valid_threshold, vocabulary_file

DEFAULT_INPUT = "data/synth_harmony"
DEFAULT_ROOT = "data/megatron/synth_kd_v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthKDResult:
    """What a build gives back."""

    outcome: Outcome
    root: Path
    manifest: dict[str, Any]
    blend: BlendFiles
    """Its shards as arguments for Megatron-LM, in two files beside the root."""
    audited: int
    """Rows that were compared with the official renderer, in this run and those that it resumed."""
    seconds: float


def build_synth_kd(
    inputs: str | os.PathLike[str] = DEFAULT_INPUT,
    out: str | os.PathLike[str] = DEFAULT_ROOT,
    *,
    valid_fraction: float = 0.001,
    max_rows: int | None = None,
    max_rows_per_shard: int | None = None,
    max_tokens: int | None = None,
    max_tokens_per_shard: int | None = None,
    record_ids: bool = False,
    workers: int | None = None,
    engine: str = "local",
    audit: float = AUDIT_RATE,
    on_error: str = OnError.FAIL,
    resume: bool = False,
    tokenizer_path: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
) -> SynthKDResult:
    """Build Megatron datasets (tokens, loss mask, span) from a folder of Harmony conversations in Parquet.

    `inputs` holds `manifest.json` and `synth_harmony_shard_NN.parquet`. `out` must not exist, or be empty, or hold an
    unfinished build of the same with `resume`. Caps count input rows in shard order, and the tokens of whole rows.
    `record_ids` stores the `synth_id` of every document in `shard_NN_ids`. `audit` is the share of rows that
    is compared with the official renderer (0: none). The bytes do not depend on workers, engine or audit.
    """
    started = time.monotonic()
    config = KDConfig(
        valid_fraction=float(valid_fraction),
        max_rows=max_rows,
        max_rows_per_shard=max_rows_per_shard,
        max_tokens=max_tokens,
        max_tokens_per_shard=max_tokens_per_shard,
        record_ids=record_ids,
    )
    build = _Build(
        root=Path(out),
        config=config,
        threshold=valid_threshold(config.valid_fraction),
        on_error=member(OnError, "on_error", on_error),
        audit=check_rate(audit),
        vocabulary=vocabulary_file(tokenizer_path),
        executor=executor or named_executor(engine, workers) or LocalExecutor(workers),
        on_progress=on_progress,
    )
    there = what_it_holds(build.root)
    if there and not resume:
        raise ConfigError(
            f"{build.root} is there already and holds {there}: nothing is ever overwritten. Choose another folder, or "
            "go on with --resume (resume=True)"
        )
    source = build.read_source(inputs)
    with storing(build.root, "create the folder"):
        build.root.mkdir(parents=True, exist_ok=True)
    with folder_lock(build.root, shared=False), build.executor:
        outcome, manifest, audited = build.run(source, kd_fingerprint(config, source))
    with storing(build.root, "write the blend arguments beside"):
        blend = write_blend_arguments(build.root)
    seconds = time.monotonic() - started
    return SynthKDResult(
        outcome=outcome, root=build.root, manifest=manifest, audited=audited, seconds=seconds, blend=blend
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """One build, in a folder that is held by this process while it runs."""

    root: Path
    config: KDConfig
    threshold: int
    on_error: OnError
    audit: float
    vocabulary: tuple[Path, str]
    """The checked file, and its name for the manifest."""
    executor: Executor
    on_progress: OnProgress | None

    def read_source(self, inputs: str | os.PathLike[str]) -> KDInput:
        """The input, as far as the caps let it through."""
        config = self.config
        source = read_input(inputs, max_rows=config.max_rows, max_rows_per_shard=config.max_rows_per_shard)
        caps = {"max_tokens": config.max_tokens, "max_tokens_per_shard": config.max_tokens_per_shard}
        if any(cap is not None for cap in caps.values()):
            render = renderer_of(str(self.vocabulary[0].absolute())).render
            source = cap_tokens(source, render, **caps)
        return source

    def run(self, source: KDInput, fingerprint: str) -> tuple[Outcome, dict[str, Any], int]:
        """Outcome, manifest, and the number of audited rows (0 where nothing was done)."""
        work = work_folder(self.root)
        finished = read_kd_manifest(self.root)
        refuse_other(self.root, fingerprint, finished)
        if finished is not None:
            clean_up(self.root)
            return Outcome.ALREADY_BUILT, finished, 0
        sweep_orphans(self.root)
        begin_work(work, {"fingerprint": fingerprint})
        chunks = self._chunks(source, str(work.absolute()))
        jobs = self._exports(source, chunks, str(work.absolute()))
        receipts = whole_outputs(jobs, self.root)
        todo = [job for job in jobs if job.name not in receipts]
        self._render([chunk for chunk in chunks if any(chunk.shard.name == job.name for job in todo)])
        source.check_unchanged()
        receipts |= run_outputs(export_shard, todo, self.executor, _remove_parts)
        return Outcome.BUILT, *self._publish(source, jobs, {job.name: receipts[job.name] for job in jobs})

    def _chunks(self, source: KDInput, work: str) -> list[KDChunk]:
        """The chunks of all shards, in order."""
        cuts = [(replace(shard, starts=()), *cut) for shard in source.shards for cut in shard.chunks]
        return [
            KDChunk(
                number=number,
                shard=shard,
                start=start,
                stop=stop,
                valid_threshold=self.threshold,
                audit_rate=self.audit,
                quarantine=self.on_error is OnError.QUARANTINE,
                record_ids=self.config.record_ids,
                vocabulary=str(self.vocabulary[0].absolute()),
                work=work,
            )
            for number, (shard, start, stop) in enumerate(cuts)
        ]

    def _render(self, chunks: Sequence[KDChunk]) -> None:
        """Make the chunks that are not there yet; one that put rows aside is made again where these are to fail."""
        quarantine = self.on_error is OnError.QUARANTINE
        there = whole_folders(chunks).items()
        receipts = {number: one for number, one in there if quarantine or one["rejected"] is None}
        run_chunks(render_chunk, chunks, self.executor, self.on_progress, receipts, stage="render")

    def _exports(self, source: KDInput, chunks: Sequence[KDChunk], work: str) -> list[KDExport]:
        """The orders to export all shards."""
        return [
            KDExport(
                name=shard.name,
                parts=tuple(str(chunk.folder) for chunk in chunks if chunk.shard.name == shard.name),
                work=work,
                record_ids=self.config.record_ids,
            )
            for shard in source.shards
        ]

    def _publish(
        self, source: KDInput, jobs: Sequence[KDExport], receipts: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], int]:
        """Move all files to their places and write the manifest."""
        reasons = failures(ledger_of(receipts.values()))
        if not any(counts["rows"] for receipt in receipts.values() for counts in receipt["splits"].values()):
            why = f"all failed: {', '.join(reasons)}" if reasons else "there are none"
            raise DataError(f"{source.folder}: no row could be used ({why}), so there is no dataset to write")
        if reasons and self.on_error is OnError.FAIL:
            raise ConfigError(
                f"{self.root}: {sum(reasons.values()):,} rows were put aside by an earlier run with --on-error "
                "quarantine: resume with the same option, or build into another folder to see the first of them fail"
            )
        with storing(self.root, "write the dataset in"):
            move_outputs(jobs, receipts, self.root)
            quarantine = join_files(rejected_files(job.folder for job in jobs), self.root / QUARANTINE, Hash.SHA256)
            manifest = make_manifest(self.config, source, self.vocabulary[1], receipts, quarantine)
            write_whole(self.root / MANIFEST, receipt_bytes(manifest))
            clean_up(self.root)
        return manifest, sum(receipt["audited"] for receipt in receipts.values())


def _remove_parts(job: KDExport) -> None:
    """The chunks of an exported shard are removed at once."""
    for part in job.parts:
        remove_path(Path(part))
