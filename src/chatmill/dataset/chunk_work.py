"""Chunks of the input, compiled when they are needed: the same jobs that a build runs, a few shards at a time."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import ChunkPiece, chunk_jobs, compile_chunk
from chatmill.compiler.chunk_output import STATE
from chatmill.compiler.chunk_runs import run_jobs
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.publish import canonical_json, write_atomic
from chatmill.compiler.shards import JOINED, gather_splits, made_shards
from chatmill.core.scratch import Borrowed, Scratch
from chatmill.dataset.objects import RecordFile
from chatmill.errors import ChatmillError
from chatmill.store.durable import Durability
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer.probe import ProbeAnswers

Receipt = Mapping[str, Any]
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """What it takes to compile any chunk of an input; picklable, and the same in every process."""

    chunks: tuple[tuple[ChunkPiece, ...], ...]
    recipe: str
    fingerprint: str
    files: str
    """What the tokenizer's and the template's files held when the input was read."""
    answers: ProbeAnswers
    scratch: Scratch | Borrowed
    records: RecordFile | None
    """The file of records that were given as objects, which errors name by their index."""

    def new_folder(self) -> Path:
        """A folder for some shards that no other process or thread has."""
        folder = self.scratch.folder / "groups" / f"{os.getpid()}-{next(_NUMBERS):06d}"
        folder.mkdir(parents=True)
        return folder

    def make(self, numbers: Sequence[int], folder: Path, executor: LocalExecutor) -> list[Receipt]:
        """Compile chunks into a folder that is then opened by `open_split`; their receipts, in order."""
        state = canonical_json({"fingerprint": self.fingerprint})
        write_atomic(folder / STATE, state, step="state", durability=Durability.SCRATCH)
        chunks = {number: self.chunks[number] for number in numbers}
        seen = {"files": self.files, "answers": self.answers}
        jobs = chunk_jobs(chunks, folder, recipe=self.recipe, fingerprint=self.fingerprint, **seen)
        try:
            receipts = run_jobs(compile_chunk, jobs, executor)
        except ChatmillError as error:
            if self.records is not None:
                self.records.explain(error)
            raise
        gather_splits(folder, made_shards((job.folder, receipt) for job, receipt in zip(jobs, receipts, strict=True)))
        return receipts

    def folders(self, numbers: Sequence[int]) -> Iterator[tuple[Path, list[Receipt]]]:
        """Chunks one after the other, compiled in this process into a folder that is removed behind each."""
        executor = LocalExecutor(0)
        for number in numbers:
            folder = self.new_folder()
            try:
                yield folder, self.make([number], folder, executor)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def open_split(folder: Path, split: str) -> EpisodeDataset | None:
    """A split of what `ChunkWork.make` made; None where it has no episodes."""
    return EpisodeDataset(folder / JOINED, split) if (folder / JOINED / split).is_dir() else None
