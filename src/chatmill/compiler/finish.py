"""The end of a build: gates, validation shards, everything to its place in the dataset, and the manifest last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import ChunkJob, chunk_jobs, recipe_json
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.chunk_runs import run_jobs
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.faults import fault_point
from chatmill.compiler.gates import GateError, gates_of
from chatmill.compiler.manifest import make_manifest, split_files
from chatmill.compiler.pack_plan import write_pack_plan
from chatmill.compiler.pipeline import NAMED, Pipeline
from chatmill.compiler.publish import storing, write_atomic
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.shards import (
    JOINED,
    VAL,
    DiskSync,
    Made,
    ValJob,
    gather_splits,
    join_rejected,
    join_val,
    made_shards,
    scatter_splits,
    val_groups,
)
from chatmill.compiler.sources import SourcePlan
from chatmill.compiler.work import remove_work, work_folder
from chatmill.core.ledger import Ledger
from chatmill.core.whole_file import sync_folder
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store.checksums import FileRecord
from chatmill.store.durable import remove_path
from chatmill.store.episode_layout import SPLITS
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import PACK
from chatmill.store.receipts import MANIFEST, receipt_bytes


def take_back(directory: Path) -> None:
    """Move what has no manifest back to where its shards were made."""
    work = work_folder(directory)
    for name in (*SPLITS, REJECTED):
        if (directory / name).is_symlink():
            raise ConfigError(f"{directory / name} is a link, and no build made it: remove it")
        if (directory / name).exists():
            (work / JOINED).mkdir(exist_ok=True)
            remove_path(work / JOINED / name)
            os.replace(directory / name, work / JOINED / name)
    scatter_splits(work)


@dataclass(frozen=True, slots=True)
class PlannedBuild:
    """A build whose input is read: the jobs of its chunks, and how their shards become the dataset."""

    directory: Path
    recipe: Recipe
    pipeline: Pipeline
    planned: SourcePlan
    fingerprint: str

    @property
    def work(self) -> Path:
        """Where its unfinished work is."""
        return work_folder(self.directory).absolute()

    def jobs(self) -> list[ChunkJob]:
        """One for each chunk."""
        chunks = dict(enumerate(self.planned.chunks))
        seen = {"files": self.pipeline.files, "answers": self.pipeline.answers}
        recipe, fingerprint = recipe_json(self.recipe), self.fingerprint
        return chunk_jobs(chunks, self.work, recipe=recipe, fingerprint=fingerprint, **seen)

    def publish(
        self, jobs: Sequence[ChunkJob], receipts: dict[int, dict[str, Any]], executor: Executor, disk: DiskSync
    ) -> dict[str, Any]:
        """Make the dataset of the shards of all chunks."""
        directory, work = self.directory, self.work
        ledger = self._ledger(receipts)
        with storing(directory, "write the dataset in"):
            made = self._made(jobs, receipts, executor, disk, work)
            if not made:
                raise DataError("no record of the input could be built: there is no dataset to write (see the ledger)")
            stored = sum(shard.record.tokens for shards in made.values() for shard in shards)
            problems = ledger.imbalance(stored)
            if problems:
                raise FormatError("the ledger does not balance: " + "; ".join(problems))
            disk.wait()
            fault_point("before_publish")
            try:
                files: dict[str, FileRecord] = {}
                for gathered in gather_splits(work, made).values():
                    files |= split_files(work / JOINED, gathered)
                splits = self._held(work, made, files)
                ledger.padding += sum(held.get("padding", 0) for held in splits.values())
                rejected = join_rejected((job.folder for job in jobs), work / JOINED / REJECTED)
                if rejected is not None:
                    files[REJECTED] = rejected
                _move(directory, [*made, *([REJECTED] if rejected else [])])
                manifest = make_manifest(
                    self.recipe, self.planned, self.pipeline, self.fingerprint, splits, ledger, files
                )
                fault_point("before_manifest")
                write_atomic(directory / MANIFEST, receipt_bytes(manifest), step="manifest_file")
            except BaseException:
                if not (directory / MANIFEST).exists():
                    take_back(directory)
                raise
            fault_point("after_manifest")
            remove_work(directory)
        return manifest

    def _held(
        self, work: Path, made: Mapping[str, Sequence[Made]], files: dict[str, FileRecord]
    ) -> dict[str, dict[str, Any]]:
        """What the manifest says of each split; rows are planned here, and the files of the plan are added."""
        splits: dict[str, dict[str, Any]] = {}
        for split, shards in sorted(made.items()):
            records = [shard.record for shard in shards]
            splits[split] = {"episodes": sum(r.episodes for r in records), "tokens": sum(r.tokens for r in records)}
            folder = work / JOINED / split
            remove_path(folder / PACK)
            pack = self.recipe.pack
            if pack is not None:
                assert pack.length is not None
                lengths = EpisodeDataset(folder.parent, split).lengths
                splits[split] |= write_pack_plan(folder, lengths, pack.length, pack.strategy)
                for path in sorted((folder / PACK).iterdir()):
                    files[f"{split}/{PACK}/{path.name}"] = FileRecord.of_file(path)
        return splits

    def _ledger(self, receipts: dict[int, dict[str, Any]]) -> Ledger:
        ledger = Ledger()
        for number in sorted(receipts):
            ledger.add(Ledger.from_json(receipts[number]["ledger"]))
        for source, count in self.planned.capped.items():
            ledger.notes[source, "records_beyond_max_records"] += count
        named: dict[str, list[str]] = {}
        for number in sorted(receipts):
            for gate, names in receipts[number].get("named", {}).items():
                named[gate] = [*named.get(gate, []), *names][:NAMED]
        check_gates(self.recipe, ledger, CHANGE_GATE, named)
        return ledger

    def _made(
        self,
        jobs: Sequence[ChunkJob],
        receipts: dict[int, dict[str, Any]],
        executor: Executor,
        disk: DiskSync,
        work: Path,
    ) -> dict[str, list[Made]]:
        """All shards of all splits, in order; validation episodes of neighbours share one."""
        made = made_shards((job.folder, receipts[job.number]) for job in jobs)
        if VAL in made:
            made[VAL] = self._shared_val(made[VAL], executor, disk, work)
        return made

    def _shared_val(self, parts: Sequence[Made], executor: Executor, disk: DiskSync, work: Path) -> list[Made]:
        groups = val_groups([part.record.tokens for part in parts], most=self.recipe.shard_bytes)
        shards = [parts[group[0]] for group in groups]  # right for those that are alone
        places = [place for place, group in enumerate(groups) if len(group) > 1]
        todo = [
            ValJob(number=place, parts=tuple(str(parts[i].folder.parent) for i in groups[place]), work=str(work))
            for place in places
        ]
        for place, job, receipt in zip(places, todo, run_jobs(join_val, todo, executor), strict=True):
            (shards[place],) = made_shards([(job.folder, receipt)])[VAL]
            disk.add(job.folder, receipt)
        return shards


CHANGE_GATE = (
    "Change the data or the recipe, or the gate (gates in the recipe, --set gates.NAME=LIMIT): with a changed gate "
    "alone, --resume continues from here."
)


def check_gates(recipe: Recipe, ledger: Ledger, hint: str, named: Mapping[str, Sequence[str]] | None = None) -> None:
    """Raise when a gate of the recipe fails; `hint` says what to do, `named` has the first records of each gate."""
    failed = [gate for gate in gates_of(recipe.gates, ledger) if not gate.passed]
    if failed:
        raise GateError(failed, hint, named)


def _move(directory: Path, names: Sequence[str]) -> None:
    """Move splits, and the rejected records, out of the work folder."""
    joined = work_folder(directory) / JOINED
    for name in names:
        fault_point("before_move")
        os.replace(joined / name, directory / name)
        fault_point("after_move")
    sync_folder(directory)
