"""A whole build with 1 worker and with 2, on input that takes one worker 30 seconds and more.

    python -m benchmarks.workers [--quick] [--json] [--size BYTES]

The input is that of `benchmarks.compile`; where one worker would be done too soon, the same files are listed several
times. Both builds must store the same bytes (by the hashes of their manifests).
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.builds import build, recipe_for, tokens_of
from benchmarks.harness import Comparison, Report, Timing, WorkDiffersError, run_one
from benchmarks.inputs import again, inputs_folder, records, without_control_text, write_shards
from chatmill.tokenizer.load import load_tokenizer
from tests.data.tokenizer_files import unpacked

SIZE, QUICK_SIZE = 520_000_000, 4_000_000
LONG_ENOUGH = 30.0
"""Seconds that one worker must take."""


def timed(paths: list[Path], out: Path, workers: int) -> tuple[float, dict[str, Any]]:
    """Wall seconds and manifest of a build."""
    start = time.perf_counter()
    manifest = build(recipe_for(paths), out, workers)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds, manifest


def measure(*, quick: bool, size: int | None = None) -> Report:
    """Take turns with 1 and 2 workers."""
    report = Report()
    size = size or (QUICK_SIZE if quick else SIZE)
    originals = without_control_text(records(), list(load_tokenizer(unpacked("qwen3")).control_ids))
    work = Path(tempfile.mkdtemp(prefix="chatmill-bench-"))
    try:
        with inputs_folder() as folder:
            paths = write_shards(folder, size, originals=originals)
            times, listed = 1, paths
            seconds, manifest = timed(listed, work / "one", 1)
            while seconds < LONG_ENOUGH and not quick:  # starting up takes its share, so one step may not be enough
                times = math.ceil(1.15 * times * LONG_ENOUGH / seconds)
                listed = again(paths, times)
                seconds, manifest = timed(listed, work / "one", 1)
            one, two = [seconds], []
            for number in range(1 if quick else 2):
                if number:
                    one.append(timed(listed, work / "one", 1)[0])
                seconds, other = timed(listed, work / "two", 2)
                two.append(seconds)
                if manifest["files"] != other["files"]:
                    raise WorkDiffersError("1 and 2 workers stored other bytes")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tokens = tokens_of(manifest)
    comparison = Comparison(
        ours=Timing(seconds=tuple(two), work=tokens),
        peer=Timing(seconds=tuple(one), work=tokens),
        checked=f"the same {len(manifest['files'])} files by sha256",
    )
    took, listings = comparison.peer.median, "listed once" if times == 1 else f"listed {times} times"
    report.compared(
        "build, 2 workers / 1 worker", comparison, unit="tokens", target=">= 1.5", in_chart=False,
        note=f"1 worker took {took:.1f} s; {size / 1e6:,.0f} MB of input, {listings}",
    )  # fmt: skip
    if took < LONG_ENOUGH:
        report.notes.append(f"workers: the target is for input that takes 1 worker 30 s; here it took {took:.1f} s")
    return report


if __name__ == "__main__":
    sys.exit(run_one("workers", str(__doc__), measure, sizes={"size": (SIZE, "bytes of input")}))
