"""The distillation build: a recipe for the ordinary pipeline, an export for each shard, an audit, the manifest last.

The chunks of the recipe are built in the work folder, as any dataset is, so workers, engine and interruptions change no
byte. What an input shard became is exported to Megatron's files, and rows are compared with the official renderer.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import compile_chunk, pipeline_of, recipe_json
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.chunk_shards import CHUNKS, ChunkPlace, Receipt
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.engines.ray_engine import named_executor
from chatmill.compiler.progress import OnProgress
from chatmill.compiler.recipe import OnError, Recipe, recipe_of
from chatmill.compiler.run import Outcome, run_build
from chatmill.compiler.work import begin_work, clean_up, folder_lock, refuse_other, what_it_holds, work_folder
from chatmill.core.checksums import Hash
from chatmill.core.publish import join_files, remove_path, storing, sweep_orphans, write_whole
from chatmill.distill.audit import (
    AUDIT_RATE,
    QUARANTINE,
    RowRange,
    audit_rows,
    compile_and_keep,
    kept_rows,
)
from chatmill.distill.input_shards import KDInput, cap_rows, cap_tokens, read_input
from chatmill.distill.manifest import KDConfig, kd_fingerprint, make_manifest
from chatmill.distill.shard_export import KDExport, export_shard
from chatmill.errors import ConfigError, RecordError, member
from chatmill.store.episode_layout import MANIFEST
from chatmill.store.receipts import read_kd_manifest, receipt_bytes
from chatmill.systems.synth_kd import KDSplit, valid_threshold, vocabulary_file

DEFAULT_INPUT = "data/synth_harmony"
DEFAULT_ROOT = "data/megatron/synth_kd_v1"
DATASET = "dataset"
"""In the work folder: the dataset of the recipe."""
CHUNK_BYTES = 64 << 20
"""Bytes of rows that become one chunk, unpacked: whole row groups, as a rule."""
SPLIT_NAMES = {KDSplit.TRAIN: "train", KDSplit.VALID: "val"}
"""What a build calls the splits."""
HINT = "--on-error quarantine writes such rows to a file and goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthKDResult:
    """What a build gives back."""

    outcome: Outcome
    root: Path
    manifest: dict[str, Any]
    audited: int
    """Rows that were compared with the official renderer."""
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
    `audit` is the share of rows that is compared with the official renderer (0: none). The bytes do not depend on
    workers, engine or audit.
    """
    started = time.monotonic()
    config = KDConfig(
        valid_fraction=float(valid_fraction),
        max_rows=max_rows,
        max_rows_per_shard=max_rows_per_shard,
        max_tokens=max_tokens,
        max_tokens_per_shard=max_tokens_per_shard,
    )
    valid_threshold(config.valid_fraction)
    policy = member(OnError, "on_error", on_error)
    if not 0 <= audit <= 1:
        raise ConfigError(f"audit is {audit}; it is the share of rows to compare, from 0 to 1 (0.005: 1 in 200)")
    vocabulary = vocabulary_file(tokenizer_path)
    chosen = executor or named_executor(engine, workers)
    root = Path(out)
    there = what_it_holds(root)
    if there and not resume:
        raise ConfigError(
            f"{root} is there already and holds {there}: nothing is ever overwritten. Choose another folder, or "
            "go on with --resume (resume=True)"
        )
    source = capped_input(inputs, config)
    build = _Build(root, config, source, policy, vocabulary)
    with storing(root, "create the folder"):
        root.mkdir(parents=True, exist_ok=True)
    with folder_lock(root, shared=False):
        outcome, manifest, audited = build.run(chosen, workers, audit, on_progress)
    seconds = time.monotonic() - started
    return SynthKDResult(outcome=outcome, root=root, manifest=manifest, audited=audited, seconds=seconds)


def capped_input(inputs: str | os.PathLike[str], config: KDConfig) -> KDInput:
    """Return the input, as far as the caps let it through."""
    source = cap_rows(read_input(inputs), config.max_rows, config.max_rows_per_shard)
    if config.max_tokens or config.max_tokens_per_shard:
        pipeline = pipeline_of(recipe_json(kd_recipe(config, source)))
        source = cap_tokens(source, pipeline, config.max_tokens, config.max_tokens_per_shard)
    return source


def kd_recipe(config: KDConfig, source: KDInput, on_error: OnError = OnError.FAIL) -> Recipe:
    """Return the dataset as an ordinary recipe: a source for each shard, which then has chunks of its own."""
    sources = [
        {"path": shard.path, "name": shard.name, "shape": "synth_kd"}
        | ({"max_records": shard.taken} if shard.taken < shard.rows else {})
        for shard in source.shards
        if shard.taken
    ]
    return recipe_of(
        {
            "sources": sources,
            "tokenizer": "o200k",
            "template": "harmony",
            "template_options": {"end_of_document": True},
            "policy": "synth_kd",
            "expand": "none",
            "thinking": "as_given",
            "split": {"val_fraction": config.valid_fraction},
            "keep_kinds": False,
            "shard_bytes": CHUNK_BYTES,
            "on_error": on_error,
            "gates": {"records_without_trained_tokens": None, "records_left_out": None, "max_lost_reasoning": None},
        }
    )


@dataclass(frozen=True, slots=True)
class _Build:
    """One build, in a folder that is held by this process while it runs."""

    root: Path
    config: KDConfig
    source: KDInput
    on_error: OnError
    vocabulary: tuple[Path, str]
    """The checked file, and its name for the manifest."""

    def run(
        self, executor: Executor | None, workers: int | None, rate: float, on_progress: OnProgress | None
    ) -> tuple[Outcome, dict[str, Any], int]:
        """Outcome, manifest, and the number of audited rows (0 where nothing was done)."""
        fingerprint, work = kd_fingerprint(self.config, self.source), work_folder(self.root)
        finished = read_kd_manifest(self.root)
        refuse_other(self.root, fingerprint, finished)
        if finished is not None:
            clean_up(self.root)
            return Outcome.ALREADY_BUILT, finished, 0
        sweep_orphans(self.root)
        begin_work(work, {"fingerprint": fingerprint})
        dataset = (work / DATASET).absolute()
        recipe = kd_recipe(self.config, self.source, self.on_error)
        try:
            built = run_build(
                recipe,
                dataset,
                workers=workers,
                executor=executor,
                resume=True,
                on_progress=on_progress,
                job=partial(compile_and_keep, rate) if rate else compile_chunk,
            ).manifest
        except RecordError as error:
            error.message = f"{error.message} ({HINT})"
            raise
        exports, ranges = self._jobs(dataset, rate)
        with storing(self.root, "write the dataset in"):
            for split in KDSplit:  # by a run that was killed
                remove_path(self.root / split)
        with executor or LocalExecutor(workers) as jobs:
            exported = dict(jobs.map(export_shard, exports))
            audited = sum(count for _, count in jobs.map(audit_rows, ranges if rate else []))
        shards = [exported[number] for number in range(len(self.source.shards))]
        with storing(self.root, "write the dataset in"):
            rejected = [path for path in [dataset / REJECTED] if path.is_file()]
            quarantine = join_files(rejected, self.root / QUARANTINE, Hash.SHA256)
            manifest = make_manifest(self.config, self.source, self.vocabulary[1], shards, built["ledger"], quarantine)
            write_whole(self.root / MANIFEST, receipt_bytes(manifest))
            clean_up(self.root)
        return Outcome.BUILT, manifest, audited

    def _jobs(self, dataset: Path, rate: float) -> tuple[list[KDExport], list[RowRange]]:
        """Return the orders to export all shards, and to compare the rows of every chunk with what it became."""
        root, refused = str(self.root.absolute()), refused_rows(dataset / REJECTED)
        receipts = [json.loads(line) for line in (dataset / CHUNKS).read_bytes().splitlines()]
        chunks: dict[str, list[Receipt]] = defaultdict(list)
        for receipt in receipts:
            chunks[receipt["pieces"][0]["path"]].append(receipt)
        exports, ranges = list[KDExport](), list[RowRange]()
        for shard in self.source.shards:
            before = dict.fromkeys(KDSplit, 0)
            parts: dict[KDSplit, list[str]] = {split: [] for split in KDSplit}
            for receipt in chunks[shard.path]:
                (piece,), number = receipt["pieces"], receipt["number"]
                start, count = piece["first"] - 1, piece.get("max_records") or piece["count"]
                kept = kept_rows(dataset, number, rate)
                ranges.append(
                    RowRange(
                        root=root,
                        name=shard.name,
                        path=os.path.abspath(shard.path),
                        start=start,
                        stop=start + count,
                        documents=dict(before),
                        refused=frozenset(row for row in refused[shard.path] if start <= row < start + count),
                        threshold=valid_threshold(self.config.valid_fraction),
                        vocabulary=str(self.vocabulary[0].absolute()),
                        rate=rate,
                        kept=str(kept) if kept.exists() else None,
                    )
                )
                place = ChunkPlace(directory=dataset, number=number, is_only=len(receipts) == 1)
                for split, name in SPLIT_NAMES.items():
                    if documents := receipt["splits"].get(name, {}).get("episodes"):
                        parts[split].append(str(place.shard(name)))
                        before[split] += documents
            exports.append(KDExport(name=shard.name, root=root, parts=parts))
        return exports, ranges


def refused_rows(path: Path) -> dict[str, list[int]]:
    """Return the rows of each input file that were put aside, counted from 0, from the file that lists them."""
    refused: dict[str, list[int]] = defaultdict(list)
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        name, _, row = json.loads(line)["where"].rpartition(":row ")
        refused[name].append(int(row) - 1)
    return refused
