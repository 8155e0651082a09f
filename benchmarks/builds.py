"""What the benchmarks build: the recipe, its chunks one by one in this process, and whole builds with workers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk, pipeline_of
from chatmill.compiler.chunk_output import STATE
from chatmill.compiler.chunk_shards import ChunkPlace
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe, recipe_of
from chatmill.compiler.run import run_build
from chatmill.compiler.sources import plan_sources
from chatmill.store.episode_layout import WORK
from chatmill.store.episodes import EpisodeDataset
from tests.data.tokenizer_files import unpacked


def recipe_for(paths: Sequence[Path], template: str = "qwen3_training") -> Recipe:
    """JSONL chats to episodes with the Qwen3 tokenizer; records without an answer are kept, as the peers keep them."""
    return recipe_of(
        {
            "sources": [{"path": [str(path) for path in paths]}],
            "tokenizer": str(unpacked("qwen3")),
            "template": template,
            "expand": "none",  # a row a record, as the peers have it
            "gates": {"records_without_trained_tokens": None},
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The chunks of a build, ready to be compiled one by one in this process."""

    pipeline: Pipeline
    jobs: tuple[ChunkJob, ...]
    load_seconds: float
    """What loading the tokenizer and binding the template took; in no timing."""

    @classmethod
    def of(
        cls, recipe: Recipe, work: Path, *, shard_bytes: int | None = None, executor: Executor | None = None
    ) -> Bench:
        """Plan the chunks, on an executor if there is one, and load the tokenizer.

        The pipeline's recipe names no sources of its own: benches over other files share what it loads.
        """
        text = json.dumps({**recipe.as_json(), "sources": [{"path": "-"}]}, sort_keys=True)
        start = time.perf_counter()
        pipeline = pipeline_of(text)
        load = time.perf_counter() - start
        cut = recipe if shard_bytes is None else structs.replace(recipe, shard_bytes=shard_bytes)
        planned = plan_sources(cut, work / "spool", executor=executor)
        (work / WORK).mkdir(parents=True, exist_ok=True)
        (work / WORK / STATE).write_text(json.dumps({"fingerprint": "bench"}))
        jobs = tuple(
            ChunkJob(
                number=number,
                pieces=pieces,
                recipe=text,
                place=ChunkPlace(directory=work, number=number, is_only=False),
                fingerprint="bench",
                build="bench",
                files=pipeline.files,
                answers=pipeline.answers,
            )
            for number, pieces in enumerate(planned.chunks)
        )
        return cls(pipeline=pipeline, jobs=jobs, load_seconds=load)

    def compile(self, job: ChunkJob) -> tuple[float, int]:
        """Seconds and tokens of one chunk: read, render, label, write, hash, publish."""
        start = time.perf_counter()
        receipt = compile_chunk(job)
        seconds = time.perf_counter() - start
        shutil.rmtree(job.place.shard("train"))
        return seconds, sum(split["tokens"] for split in receipt["splits"].values())

    def compile_all(self) -> int:
        """Compile every chunk; tokens."""
        return sum(self.compile(job)[1] for job in self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One build in a process of its own."""

    seconds: float
    driver: float
    """Processor seconds of the driver."""
    total: float
    """Of the driver and its workers."""
    tokens: int
    files: dict[str, Any]


def build(recipe: Recipe, out: Path, workers: int) -> dict[str, Any]:
    """A whole build, start of the workers, tokenizer included; its manifest."""
    shutil.rmtree(out, ignore_errors=True)
    return run_build(recipe, out, workers=workers).manifest


def tokens_of(manifest: dict[str, Any]) -> int:
    """Tokens that a build stored."""
    return sum(split["tokens"] for split in manifest["splits"].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Ids, weights and lengths of some consecutive episodes, flat."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    lengths: NDArray[np.int64]


def episodes(directory: Path, first: int, count: int) -> Columns:
    """What a build stored for the records `first .. first + count`."""
    dataset = EpisodeDataset(directory)
    taken = [dataset[index] for index in range(first, first + count)]
    return Columns(
        ids=np.concatenate([episode.ids for episode in taken]).astype(np.int64),
        weights=np.concatenate([episode.weights for episode in taken]).astype(np.float32),
        lengths=np.array([len(episode) for episode in taken]),
    )


def decoded(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The records of JSONL files."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
