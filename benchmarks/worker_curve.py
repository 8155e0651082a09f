"""The curve of a build over numbers of workers, next to independent processes that do the same work.

    python -m benchmarks.workers --curve 1,2,4,8,12,16 --size 8000000000 --rounds 2 --seconds 500 --out curve.json

`--size` is the input of the largest number of workers. Smaller numbers get their share of it, so that every build takes
about as long and starting up has the same part in each. Input is many files of 33 MB (`many`) and the same bytes in
one file (`one`). The largest number comes first, in all rounds, and then the others as they are given; nothing is begun
that would not end within `--seconds`. Every measurement is in the file at once: a run that is stopped has what it did.

Builds of the same input must store the same bytes, whatever the number of workers: the smallest input is built with
the largest number too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.builds import Built
from benchmarks.harness import WorkDiffersError, machine
from benchmarks.inputs import SHARD, inputs_folder, joined, plain_records, work_folder, write_shards

MANY = "many"
ONE = "one"
INPUTS = (MANY, ONE)
SPARE_SECONDS = 5.0
"""For what is not measured: planning, and deleting what was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A build with one number of workers, and the independent processes that were measured next to it."""

    input: str
    round: int
    workers: int
    files: int
    bytes: int
    tokens: int
    independent_seconds: float
    build_seconds: float
    independent_m_tokens_per_s: float
    build_m_tokens_per_s: float
    ratio: float
    """The rate of the build in that of the independent processes."""
    driver_cpu_seconds: float
    total_cpu_seconds: float
    driver_cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The functions that measure; `benchmarks.workers` has them."""

    prepare: Callable[[Path, Sequence[Path]], None]
    independent: Callable[[Path, int], tuple[float, int]]
    build: Callable[[Path, int], Built]


def measure_order(counts: Sequence[int], inputs: Sequence[str], rounds: int) -> Iterator[tuple[int, str, int]]:
    """Yield (round, input, workers): the largest number in all rounds, then the others as they are given."""
    largest = max(counts)
    others = [count for count in dict.fromkeys(counts) if count != largest]
    for number in range(1, rounds + 1):
        for name in inputs:
            yield number, name, largest
    for number in range(1, rounds + 1):
        for name in inputs:
            for count in others:
                yield number, name, count


class WorkerCurve:
    """Measurements of one run, written to a file as they are made."""

    def __init__(self, measures: Measures, counts: Sequence[int], size: int, out: Path | None) -> None:
        """`size`: bytes of input for the largest number of workers."""
        self._measures = measures
        self._counts = counts
        self._size = size
        self._out = out
        self._points: list[CurvePoint] = []
        self._skipped: list[str] = []
        self._stored: dict[tuple[str, int], dict[str, Any]] = {}
        """Files by hash of each build, by its input and its bytes."""
        self._notes: dict[str, Any] = {}

    def run(self, inputs: Sequence[str], rounds: int, seconds: float) -> None:
        """Measure what fits into `seconds`, which count from now."""
        started = time.perf_counter()
        with work_folder() as work, inputs_folder() as folder:
            shards = write_shards(folder, self._size, originals=plain_records())
            self._notes["input_seconds"] = round(time.perf_counter() - started, 1)
            self._check_bytes(work, shards)
            longest = 0.0
            for number, name, count in measure_order(self._counts, inputs, rounds):
                left = seconds - (time.perf_counter() - started)
                if left < longest + SPARE_SECONDS:
                    self._skipped.append(f"{name}, {count} workers, round {number}")
                    continue
                begun = time.perf_counter()
                self._measure(work, folder, shards, name, count, number)
                longest = max(longest, time.perf_counter() - begun)
            self._notes["seconds"] = round(time.perf_counter() - started, 1)
        self._write()

    def _share(self, shards: Sequence[Path], count: int) -> list[Path]:
        """Return the files for a number of workers."""
        files = max(1, round(len(shards) * count / max(self._counts)))
        return list(shards[:files])

    def _measure(self, work: Path, folder: Path, shards: Sequence[Path], name: str, count: int, number: int) -> None:
        """Measure a build and the independent processes, in turn: every other round begins with the build."""
        paths = self._share(shards, count)
        is_whole = len(paths) == len(shards)
        if name == ONE:
            paths = [joined(paths, folder / f"one-{len(paths)}.jsonl")]
        total = sum(path.stat().st_size for path in paths)
        home = work / f"{name}-{count}-{number}"
        self._measures.prepare(home, paths)
        if number % 2:
            seconds, tokens = self._measures.independent(home, count)
            run = self._measures.build(home, count)
        else:
            run = self._measures.build(home, count)
            seconds, tokens = self._measures.independent(home, count)
        shutil.rmtree(home)
        if name == ONE and not is_whole:
            paths[0].unlink()
        self._check_same(name, total, run, tokens)
        point = CurvePoint(
            input=name,
            round=number,
            workers=count,
            files=len(paths),
            bytes=total,
            tokens=tokens,
            independent_seconds=round(seconds, 3),
            build_seconds=round(run.seconds, 3),
            independent_m_tokens_per_s=round(tokens / seconds / 1e6, 2),
            build_m_tokens_per_s=round(tokens / run.seconds / 1e6, 2),
            ratio=round(seconds / run.seconds, 4),
            driver_cpu_seconds=round(run.driver, 2),
            total_cpu_seconds=round(run.total, 2),
            driver_cpu_share=round(run.driver / run.total, 4),
        )
        self._points.append(point)
        print(json.dumps(asdict(point)), flush=True)
        self._write()

    def _check_bytes(self, work: Path, shards: Sequence[Path]) -> None:
        """Build the smallest input with the smallest and the largest number of workers; the bytes must be the same."""
        paths = self._share(shards, min(self._counts))
        home = work / "same"
        self._measures.prepare(home, paths)
        total = sum(path.stat().st_size for path in paths)
        for count in sorted({min(self._counts), max(self._counts)}, reverse=True):
            run = self._measures.build(home, count)
            self._check_same(MANY, total, run, run.tokens)
        shutil.rmtree(home)
        self._notes["same_bytes"] = {"bytes": total, "workers": [min(self._counts), max(self._counts)]}

    def _check_same(self, name: str, total: int, run: Built, tokens: int) -> None:
        """Refuse builds of one input with different bytes, and processes that made other tokens."""
        if self._stored.setdefault((name, total), run.files) != run.files:
            raise WorkDiffersError("builds of the same input stored other bytes")
        if tokens != run.tokens:
            raise WorkDiffersError(f"the chunks made {tokens} tokens, the build {run.tokens}")

    def _write(self) -> None:
        """Write all measurements."""
        if self._out is None:
            return
        result = {
            "benchmark": "worker_curve",
            **machine(),
            "size": self._size,
            "shard_bytes": SHARD,
            **self._notes,
            "skipped": self._skipped,
            "points": [asdict(point) for point in self._points],
        }
        temporary = self._out.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(self._out)
