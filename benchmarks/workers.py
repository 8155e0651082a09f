"""Whole builds with several numbers of workers, next to the same chunk work in as many independent processes.

    python -m benchmarks.workers [--quick] [--json] [--size BYTES]
    python -m benchmarks.workers --curve 1,2,4,8,12,16 [--size BYTES] [--rounds 2] [--inputs many,one] [--out FILE]

The first is a part of `make bench`: 1 and 2 workers, on input that takes one worker a minute and more. The second
prints a curve as JSON lines (`benchmarks/worker_curve.py`). A build is a process of its own, timed from
its start to its end: interpreter, tokenizer, hashing of the input, publishing. *Independent processes* are the limit:
each has loaded its tokenizer before the clock starts, and does its share of the chunks (read, render, label, write,
hash, rename) without a driver. `driver` is the share of the driver in the processor time of the whole build.

The input is that of `benchmarks.compile`; where one worker would be done too soon, the same files are listed several
times. All builds must store the same bytes (by the hashes of their manifests), and as many tokens as the chunks.
Needs nothing but Chatmill and its dependencies; no network.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.builds import Bench, Built, recipe_for
from benchmarks.harness import Comparison, Report, Timing, WorkDiffersError, run_one
from benchmarks.inputs import again, inputs_folder, plain_records, work_folder, write_shards
from benchmarks.worker_curve import INPUTS, Measures, WorkerCurve
from chatmill.compiler.chunk_job import compile_chunk, pipeline_of
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build

SIZE, QUICK_SIZE = 520_000_000, 4_000_000
LONG_ENOUGH = 60.0
"""Seconds that one worker must take."""
RECIPE, JOBS = "recipe.json", "jobs.pickle"


def built(home: Path, workers: int) -> Built:
    """Build the recipe in `home`, in a new interpreter."""
    shutil.rmtree(home / "out", ignore_errors=True)
    start = time.perf_counter()
    done = _python("--build", home, str(workers)).communicate()[0]
    seconds = time.perf_counter() - start
    found = json.loads(done)
    files = json.loads((home / "out" / "manifest.json").read_bytes())["files"]
    shutil.rmtree(home / "out")
    return Built(seconds=seconds, driver=found["driver"], total=found["total"], tokens=found["tokens"], files=files)


def _python(what: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.workers", what, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _build_here(home: Path, workers: int) -> None:
    """In that interpreter: build, and say what it took."""
    result = run_build(recipe_of(json.loads((home / RECIPE).read_text())), home / "out", workers=workers)
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    driver = own.ru_utime + own.ru_stime
    tokens = sum(split["tokens"] for split in result.manifest["splits"].values())
    print(json.dumps({"driver": driver, "total": driver + others.ru_utime + others.ru_stime, "tokens": tokens}))


def independent(home: Path, processes: int) -> tuple[float, int]:
    """Seconds and tokens of all chunks in so many processes, from the word go to the end of the last one."""
    shares = [_python("--share", home, str(number), str(processes)) for number in range(processes)]
    for share in shares:
        assert share.stdout is not None
        if share.stdout.readline() != "ready\n":
            raise RuntimeError("a process did not get ready")
    start = time.perf_counter()
    for share in shares:
        assert share.stdin is not None
        share.stdin.write("go\n")
        share.stdin.flush()
    tokens = sum(int(share.communicate()[0]) for share in shares)
    seconds = time.perf_counter() - start
    shutil.rmtree(home / "shards", ignore_errors=True)
    return seconds, tokens


def _share_here(home: Path, number: int, processes: int) -> None:
    """In one of those processes: the chunks `number`, `number + processes`, ..."""
    jobs = pickle.loads((home / JOBS).read_bytes())
    pipeline_of(jobs[0].recipe)
    print("ready", flush=True)
    sys.stdin.readline()
    receipts = [compile_chunk(job) for job in jobs[number::processes]]
    print(sum(split["tokens"] for receipt in receipts for split in receipt["splits"].values()), flush=True)


def prepare(home: Path, paths: Sequence[Path]) -> None:
    """Write down the recipe, and the chunks of its input."""
    home.mkdir(parents=True, exist_ok=True)
    recipe = recipe_for(paths)
    (home / RECIPE).write_text(json.dumps(recipe.as_json()))
    with LocalExecutor() as executor:
        jobs = Bench.of(recipe, home, executor=executor).jobs
    (home / JOBS).write_bytes(pickle.dumps(jobs))


def measure(*, quick: bool, size: int | None = None) -> Report:
    """Builds with 1 and 2 workers, and 2 independent processes."""
    report = Report()
    size = size or (QUICK_SIZE if quick else SIZE)
    with work_folder() as work, inputs_folder() as folder:
        paths, times = write_shards(folder, size, originals=plain_records()), 1
        prepare(work, paths)
        one = [built(work, 1)]
        while one[0].seconds < LONG_ENOUGH and not quick:  # starting up takes its share: perhaps more than once
            times = math.ceil(1.15 * times * LONG_ENOUGH / one[0].seconds)
            prepare(work, again(paths, times))
            one = [built(work, 1)]
        two, limit = [], []
        for number in range(1 if quick else 2):
            one += [built(work, 1)] if number else []
            two.append(built(work, 2))
            limit.append(independent(work, 2))
    tokens = _same([*one, *two], [made for _, made in limit])
    ours = Timing(seconds=tuple(run.seconds for run in two), work=tokens)
    checked = f"the same {len(one[0].files)} files by hash"
    took, listings = min(run.seconds for run in one), "listed once" if times == 1 else f"listed {times} times"
    report.compared(
        "build, 2 workers / 1 worker",
        Comparison(ours=ours, peer=Timing(seconds=tuple(run.seconds for run in one), work=tokens), checked=checked),
        unit="tokens", target=">= 1.5", in_chart=False,
        note=f"1 worker took {took:.1f} s; {size / 1e6:,.0f} MB of input, {listings}",
    )  # fmt: skip
    peer = Timing(seconds=tuple(seconds for seconds, _ in limit), work=tokens)
    report.compared(
        "build, 2 workers / 2 independent proc.",
        Comparison(ours=ours, peer=peer, checked="as many tokens"),
        unit="tokens", target=">= 0.9", in_chart=False,
        note=f"driver {two[0].driver / two[0].total:.1%} of the processor time",
    )  # fmt: skip
    if took < LONG_ENOUGH:
        report.notes.append(f"workers: the target is for input that takes 1 worker a minute; here it took {took:.1f} s")
    return report


def _same(builds: Sequence[Built], tokens: Sequence[int]) -> int:
    """The tokens that all builds stored, which are those of the chunks."""
    if any(run.files != builds[0].files for run in builds):
        raise WorkDiffersError("other numbers of workers stored other bytes")
    if any(made != builds[0].tokens for made in tokens):
        raise WorkDiffersError(f"the chunks made {tokens} tokens, the builds {builds[0].tokens}")
    return builds[0].tokens


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", nargs=2)
    parser.add_argument("--share", nargs=3)
    parser.add_argument("--curve")
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--inputs", default=",".join(INPUTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    asked, _ = parser.parse_known_args()
    if asked.build:
        _build_here(Path(asked.build[0]), int(asked.build[1]))
    elif asked.share:
        _share_here(Path(asked.share[0]), int(asked.share[1]), int(asked.share[2]))
    elif asked.curve:
        measures = Measures(prepare=prepare, independent=independent, build=built)
        counts = [int(count) for count in asked.curve.split(",")]
        WorkerCurve(measures, counts, asked.size, asked.out).run(asked.inputs.split(","), asked.rounds, asked.seconds)
    else:
        return run_one("workers", str(__doc__), measure, sizes={"size": (SIZE, "bytes of input")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
