"""Where the time of the hot paths goes: shares of the stages of a build, and of the functions of the other paths.

    python -m benchmarks.profile [--quick] [--json] [--size BYTES]

A timer interrupts the work every millisecond, and the time since the last interruption is put down to the function of
Chatmill that is running (a call into a library counts for the function that made it). It is taken over whole chunks of
the input of `benchmarks.compile`, in one process, after a warm-up chunk. Beside the stages of a build stand their
floors, measured alone on the same chunk: scanning its lines into columns, encoding its pieces, hashing its output once,
and writing it with a sync.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import xxhash

import chatmill
from benchmarks.builds import Bench, recipe_for
from benchmarks.compile import Recorder
from benchmarks.harness import Report, run_one
from benchmarks.inputs import inputs_folder, records, work_folder, write_tiled
from benchmarks.loader import CONFIG, write_set
from benchmarks.plan import CAPACITY, lengths_of, ours_pack
from benchmarks.publish import profile_tables
from benchmarks.synth_kd import write_input
from chatmill.compiler.chunk_job import compile_chunk
from chatmill.core.native.scan import scan_lines
from chatmill.distill.run import build_synth_kd
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.pack.plan import plan
from chatmill.read.columns import scanner_names
from chatmill.read.shapes import find_shape

PACKAGE = f"{Path(chatmill.__file__).parent}{os.sep}"
INTERVAL = 0.001
SIZE, QUICK_SIZE = 104_000_000, 4_000_000
KD_ROWS = 10_000
"""Rows of each shard of the distillation build."""
TOP = 8
STAGES = (
    ("encode text", ("tokenizer/backends.py",)),
    ("check and cut tokens", ("tokenizer/",)),
    ("read records", ("read/",)),
    ("render", ("render/",)),
    ("label", ("label/",)),
    ("overflow", ("pack/",)),
    ("write columns", ("store/",)),
    ("hash and publish", ("core/publish.py", "core/checksums.py")),
    ("ledger", ("core/ledger.py",)),
    ("account", ("compiler/pipeline.py",)),
    ("drive", ("compiler/",)),
)
"""Stages of a build by the files that do them; the first that fits. `core` counts for whoever called it."""


class Sampler:
    """Adds up seconds by the innermost function of Chatmill."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.by_function: Counter[str] = Counter()
        self.by_file: Counter[str] = Counter()
        self._places: dict[CodeType, tuple[str, str] | None] = {}
        self._last = 0.0
        self._busy = False

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        """File (in the package) and function of a code object of Chatmill; None for all others."""
        if code not in self._places:
            name = code.co_filename
            inside = name.startswith(PACKAGE)
            file = name[len(PACKAGE) :].replace(os.sep, "/")
            self._places[code] = (file, f"{file.removesuffix('.py')}:{code.co_qualname}") if inside else None
        return self._places[code]

    def _note(self, _number: int, frame: FrameType | None) -> None:
        if self._busy:  # the next interruption came before this one was put down
            return
        self._busy = True
        file, function = "", ""
        while frame is not None:
            place = self._place(frame.f_code)
            if place is not None:
                function = function or place[1]
                if not place[0].startswith("core/"):
                    file = place[0]
                    break
            frame = frame.f_back
        now = time.perf_counter()
        self.by_function[function or "(elsewhere)"] += now - self._last
        self.by_file[file] += now - self._last
        self._last = now
        self._busy = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample what happens inside."""
        previous = signal.signal(signal.SIGALRM, self._note)
        self._last = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def stages(self) -> dict[str, float]:
        """Seconds by stage of a build."""
        found: Counter[str] = Counter()
        for file, seconds in self.by_file.items():
            stage = next((name for name, places in STAGES if file.startswith(places)), "elsewhere")
            found[stage] += seconds
        return dict(found.most_common())

    def functions(self) -> dict[str, float]:
        """Seconds of the functions that took most."""
        return dict(self.by_function.most_common(TOP))


def profile_compile(path: Path, work: Path) -> dict[str, Any]:
    """Stages of compiling the chunks of a file, and their floors."""
    bench = Bench.of(recipe_for([path]), work, shard_bytes=max(1 << 20, path.stat().st_size // 7))
    bench.compile(bench.jobs[0])
    sampler = Sampler()
    tokens, seconds = 0, 0.0
    with sampler.running():
        for job in bench.jobs[1:]:
            took, made = bench.compile(job)
            tokens, seconds = tokens + made, seconds + took
    total = sum(sampler.by_file.values())
    return {
        "bytes": sum(job.bytes for job in bench.jobs[1:]),
        "tokens": tokens,
        "seconds": seconds,
        "stages": {name: value / total for name, value in sampler.stages().items()},
        "functions": {name: value / total for name, value in sampler.functions().items()},
        "floors_seconds_per_million_tokens": floors(bench, work),
        "seconds_per_million_tokens": seconds / tokens * 1e6,
    }


def floors(bench: Bench, work: Path) -> dict[str, float]:
    """What the parts of a chunk's work cost alone, in seconds per million tokens; the best of three."""
    job = bench.jobs[-1]
    tokenizer: Any = bench.pipeline.template.tokenizer
    recorder = Recorder(tokenizer.backend)
    object.__setattr__(tokenizer, "backend", recorder)  # a tokenizer is frozen
    receipt = compile_chunk(job)
    object.__setattr__(tokenizer, "backend", recorder.backend)
    tokens = sum(split["tokens"] for split in receipt["splits"].values())
    stored = b"".join(file.read_bytes() for file in sorted(job.place.shard("train").rglob("*")) if file.is_file())
    shutil.rmtree(job.place.shard("train"))
    with open(job.pieces[0].range.data, "rb") as file:
        file.seek(job.pieces[0].range.start)
        lines = file.read(job.pieces[0].range.stop - job.pieces[0].range.start)

    def write() -> None:
        with open(work / "floor.bin", "wb") as file:
            file.write(stored)
            file.flush()
            os.fsync(file.fileno())

    names = scanner_names(find_shape("openai"))
    assert names is not None
    alone = {
        "scan the lines (compiled)": lambda: scan_lines(lines, 0, len(lines), names),
        "encode the pieces (gigatoken)": lambda: [recorder.backend.encode_batch(call.texts) for call in recorder.calls],
        "hash the output once (xxh128)": lambda: xxhash.xxh3_128_digest(stored),
        "write the output and sync": write,
    }
    return {name: best_of_three(run) / tokens * 1e6 for name, run in alone.items()}


def best_of_three(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of three runs."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def profile_calls(run: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Shares of the functions of a path that is called again and again for some time."""
    run()
    sampler, calls, start = Sampler(), 0, time.perf_counter()
    with sampler.running():
        while time.perf_counter() - start < seconds:
            run()
            calls += 1
    took, total = time.perf_counter() - start, sum(sampler.by_function.values())
    return {
        "seconds_per_call": took / calls,
        "functions": {name: value / total for name, value in sampler.functions().items()},
    }


def profile_synth_kd(source: Path, work: Path) -> dict[str, Any]:
    """Shares of the functions of a whole distillation build in this process; a small build warms it up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron's import
        build_synth_kd(source, work / "warm", max_rows_per_shard=100, workers=0)
    sampler, start = Sampler(), time.perf_counter()
    with sampler.running():
        build_synth_kd(source, work / "whole", workers=0)
    took, total = time.perf_counter() - start, sum(sampler.by_function.values())
    return {
        "seconds_per_call": took,
        "functions": {name: value / total for name, value in sampler.functions().items()},
    }


def profiles(*, quick: bool, size: int) -> dict[str, Any]:
    """Every hot path."""
    seconds = 0.5 if quick else 4.0
    found: dict[str, Any] = {}
    lengths = lengths_of(20_000 if quick else 200_000)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    with inputs_folder() as folder, work_folder() as work:
        found["compile"] = profile_compile(
            write_tiled(folder / f"profile-{size}.jsonl", size, originals=records()), work
        )
        write_set(work / "set", 3_000 if quick else 20_000)
        loader = GPTEpisodeDataLoader(CONFIG, None, work / "set", prefetch=False)
        source = write_input(folder, KD_ROWS // 10 if quick else KD_ROWS)
        found["synth_kd"] = profile_synth_kd(source, work)
        found["plan"] = profile_calls(lambda: plan(lengths, CAPACITY), seconds)
        found["rows"] = profile_calls(lambda: ours_pack(ids, lengths), seconds)
        found["get_batch"] = profile_calls(loader.get_batch, seconds)
    return found


def measure(*, quick: bool, size: int | None = None) -> Report:
    """The profiles as figures and tables, without rows."""
    found = profiles(quick=quick, size=size or (QUICK_SIZE if quick else SIZE))
    return Report(figures=found, tables=profile_tables(found))


if __name__ == "__main__":
    sys.exit(run_one("profile", str(__doc__), measure, sizes={"size": (SIZE, "bytes of input")}))
