"""All benchmarks one after the other, each in a process of its own: one table, a results file and a chart.

    python -m benchmarks.run [--quick] [--json] [--only NAME ...] [--out FOLDER]      (make bench)

A full run writes `benchmarks/results/<date>-<machine>.json` and a chart of the same name; `benchmarks.publish` puts its
figures into the docs. `--quick` (3 minutes) writes nothing unless it is given a folder: its input is so small that
starting up is most of what it measures, and it is there to see that everything still runs.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.chart import write_chart
from benchmarks.harness import machine, options
from benchmarks.inputs import FOLDER_VARIABLE
from benchmarks.table import WIDTH, Row, print_note, print_rows

BENCHMARKS = (
    "render", "templates", "compile", "workers", "trajectories", "long_chats", "memory", "synth_kd", "plan", "loader",
    "startup",
)  # fmt: skip
"""Modules of this package, in the order of the data's way."""
TOOLS = (
    "agents", "capture", "kinds", "pictures", "publish", "publish_curve", "run", "small_builds", "stores",
    "tokenizers_one", "tokens", "tree_training",
)  # fmt: skip
"""Modules that are run by themselves."""
PACKAGES = (
    "chatmill", "gigatoken", "numpy", "pyarrow", "torch", "transformers", "tokenizers", "trl", "datasets", "renderers",
    "torchtune", "torchao", "megatron-core", "openai-harmony", "tiktoken",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def rows_of(result: dict[str, Any]) -> list[Row]:
    """The rows of one benchmark's JSON."""
    known = {field.name for field in fields(Row)}
    return [Row(**{name: value for name, value in row.items() if name in known}) for row in result.get("rows", [])]


def versions() -> dict[str, str]:
    """What is installed of the packages that are compared."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_benchmark(name: str, *, quick: bool) -> dict[str, Any] | None:
    """The JSON of one benchmark; None when it failed, which it has told on standard error."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def run_all(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Run benchmarks, telling on standard error how far it is; they share the inputs that the first one writes."""
    started = time.perf_counter()
    found: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chatmill-bench-inputs-") as folder:
        os.environ.setdefault(FOLDER_VARIABLE, folder)
        for name in names:
            start = time.perf_counter()
            print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
            result = run_benchmark(name, quick=quick)
            print(f"{'FAILED' if result is None else 'done'} ({time.perf_counter() - start:.0f} s)", file=sys.stderr)
            if result is None:
                failed.append(name)
            else:
                found[name] = result
        if os.environ[FOLDER_VARIABLE] == folder:
            del os.environ[FOLDER_VARIABLE]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **machine(),
        "processor": platform.processor() or platform.machine(),
        "versions": versions(),
        "quick": quick,
        "seconds": time.perf_counter() - started,
        "failed": failed,
        "benchmarks": found,
    }


def show(results: dict[str, Any]) -> None:
    """The table and the notes."""
    where = f"{results['machine']}, {results['cores']} cores, Python {results['python']}"
    print(f"Chatmill benchmarks, {results['date']}, {where}")
    if results["quick"]:
        print("--quick: small input, mostly start-up; targets are judged in full runs only")
    rows = [row for result in results["benchmarks"].values() for row in rows_of(result)]
    print_rows(rows, judged=not results["quick"])
    print("-" * WIDTH)
    for result in results["benchmarks"].values():
        for note in result.get("notes", []):
            print_note(note)
    if not results["quick"]:
        asked = [row for row in rows if row.met is not None]
        print(f"{sum(bool(row.met) for row in asked)} of {len(asked)} targets met")
    print(f"{len(results['benchmarks'])} benchmarks in {results['seconds']:.0f} s")
    if results["failed"]:
        print(f"failed: {', '.join(results['failed'])}")


def name_of(results: dict[str, Any]) -> str:
    """Date and machine, for files."""
    quick = "-quick" if results["quick"] else ""
    return f"{results['date']}-{results['machine']}-{results['cores']}cores{quick}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run each with the same options; the exit status is 1 when one of them failed."""
    parser = options(str(__doc__))
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="run these alone")
    parser.add_argument("--out", type=Path, help="folder of the results file and the chart")
    arguments = parser.parse_args(argv)
    results = run_all(arguments.only, quick=arguments.quick)
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results)
    whole = not arguments.quick and list(arguments.only) == list(BENCHMARKS)
    folder = arguments.out or (RESULTS if whole else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name_of(results)}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        write_chart(results, path.with_suffix(".svg"))
        print(f"wrote {path} and {path.with_suffix('.svg').name}", file=sys.stderr)
    return int(bool(results["failed"]))


if __name__ == "__main__":
    sys.exit(main())
