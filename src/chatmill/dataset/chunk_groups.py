"""Chunks of the input, compiled when they are needed: the same jobs that a build runs, a few shards at a time."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import ChunkJob, ChunkPiece, compile_chunk
from chatmill.compiler.chunk_output import STATE
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.publish import canonical_json, write_atomic
from chatmill.compiler.shards import JOINED, Made, gather_splits, made_shard
from chatmill.core.scratch import Borrowed, Scratch
from chatmill.dataset.objects import RecordFile
from chatmill.errors import ChatmillError
from chatmill.load.order import epoch_order
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
    answers: ProbeAnswers | None
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
        jobs = [
            ChunkJob(
                number=number,
                pieces=self.chunks[number],
                recipe=self.recipe,
                work=str(folder),
                fingerprint=self.fingerprint,
                answers=self.answers,
            )
            for number in numbers
        ]
        found: dict[int, Receipt] = {}
        try:
            executor.run(compile_chunk, jobs, found.__setitem__)
        except ChatmillError as error:
            if self.records is not None:
                self.records.explain(error)
            raise
        receipts = [found[place] for place in range(len(jobs))]
        made: dict[str, list[Made]] = {}
        for job, receipt in zip(jobs, receipts, strict=True):
            for split in receipt["splits"]:
                shard = made_shard(job.folder, receipt, split)
                assert shard is not None
                made.setdefault(split, []).append(shard)
        gather_splits(folder, made)
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


@dataclass(slots=True, kw_only=True)
class ChunkGroups:
    """The groups of a streamed dataset for one loader: some chunks each, in an order that the seed decides.

    A thread has them compiled, in a process of its own where `workers` is not 0, so that training does not wait.
    """

    work: ChunkWork
    split: str
    seed: int
    shuffle: bool
    chunks: int
    """Chunks of a group."""
    workers: int
    seen: Callable[[Sequence[int], Sequence[Receipt]], None] | None = None
    """Told what was compiled; not in other processes."""
    _made: dict[int, Future[Path]] = field(default_factory=dict)
    _thread: ThreadPoolExecutor | None = None
    _executor: LocalExecutor | None = None
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """Groups of an epoch."""
        return -(-len(self.work.chunks) // self.chunks)

    @property
    def fingerprint(self) -> str:
        """That of the build."""
        return self.work.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """What gives a number its meaning."""
        return {"chunks": len(self.work.chunks), "group_chunks": self.chunks, "split": self.split}

    def numbers(self, group: int) -> list[int]:
        """The chunks of a group, by the number of the group over all epochs."""
        epoch, place = divmod(group, self.count)
        order = epoch_order(self.seed, epoch, len(self.work.chunks), shuffle=self.shuffle)
        return [int(number) for number in order[place * self.chunks : (place + 1) * self.chunks]]

    def open(self, number: int) -> EpisodeDataset | None:
        """A group, as soon as it is compiled."""
        return open_split(self._begun(number).result(), self.split)

    def prepare(self, number: int) -> None:
        """Begin to compile a group."""
        self._begun(number)

    def _begun(self, number: int) -> Future[Path]:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatmill-compiles")
            if number not in self._made:
                self._made[number] = self._thread.submit(self._compile, number)
            return self._made[number]

    def _compile(self, number: int) -> Path:
        if self._executor is None:
            self._executor = LocalExecutor(self.workers, keep=True)
        chunks, folder = self.numbers(number), self.work.new_folder()
        receipts = self.work.make(chunks, folder, self._executor)
        if self.seen is not None:
            self.seen(chunks, receipts)
        return folder

    def drop(self, number: int) -> None:
        """Remove a group that was read."""
        made = self._made.pop(number, None)
        if made is not None and made.done() and made.exception() is None:
            shutil.rmtree(made.result(), ignore_errors=True)

    def restart(self) -> None:
        """Forget threads and processes, which belong to the process that this one was forked from."""
        self._made, self._thread, self._executor, self._lock = {}, None, None, threading.Lock()
        self.seen = None

    def close(self) -> None:
        """End the thread and its process, and remove what is there."""
        thread, executor = self._thread, self._executor
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)
        if executor is not None:
            executor.close()
        for number in list(self._made):
            if self._made[number].cancelled():
                del self._made[number]
        self._thread = self._executor = None

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs."""
        names = ("work", "split", "seed", "shuffle", "chunks", "workers")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.restart()
