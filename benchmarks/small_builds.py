"""What a small build costs: the processor time of `chatmill.compile` and `chatmill build` of 300 chats.

    python -m benchmarks.small_builds [--json] [--chats N] [--rounds N] [--before FOLDER]

Nearly all of it is spent before the first record: Python, imports, the tokenizer, the template. Every run is a process
of its own, with all processes that it starts. `--before`: the folder of a checkout of another version with its compiled
part; versions take turns. Given are the least and the median of all rounds: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from itertools import islice
from pathlib import Path

from benchmarks.inputs import copies, plain_records, work_folder
from tests.data.tokenizer_files import unpacked

ROOT = Path(__file__).parents[1]
CHATS = 300
ROUNDS = 7
COMPILE = "import json, sys, chatmill; chatmill.compile(sys.argv[1], **json.loads(sys.argv[2]))"
COMMAND_LINE = "import sys, chatmill.cli; sys.argv[0] = 'chatmill'; sys.exit(chatmill.cli.main())"


def cpu_seconds(root: Path, bytecode: Path, *arguments: str) -> float:
    """Run Python with one version's code; return the processor time of it and its children."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONDONTWRITEBYTECODE": ""}  # as an installation has it
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    child = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=quiet)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"{' '.join(arguments)} failed")
    return usage.ru_utime + usage.ru_stime


def measure(chats: int, rounds: int, before: Path | None) -> dict[str, dict[str, list[float]]]:
    """Measure all rounds; returns seconds by what was run and by version."""
    roots = {"now": ROOT} if before is None else {"before": before, "now": ROOT}
    seconds: dict[str, dict[str, list[float]]] = {}
    with work_folder() as work:
        path = work / "chats.jsonl"
        records = islice(copies(plain_records()), chats)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        model = str(unpacked("qwen3"))
        options = {"template": "qwen3_training", "expand": "none", "gates": {"records_without_trained_tokens": None}}
        recipe = {"sources": [{"path": str(path)}], "tokenizer": model, **options}
        recipe_file = work / "recipe.yaml"  # JSON is YAML
        recipe_file.write_text(json.dumps(recipe))
        out = work / "out"
        commands = {
            "chatmill.compile": ["-c", COMPILE, str(path), json.dumps({"model": model, **options})],
            "chatmill build": ["-c", COMMAND_LINE, "build", str(recipe_file), "--out", str(out), "-q"],
        }
        for number in range(-1, rounds):  # the first run of all writes the bytecode
            for version in list(roots)[:: 1 if number % 2 else -1]:
                for name, command in commands.items():
                    took = cpu_seconds(roots[version], work / f"bytecode-{version}", *command)
                    if number >= 0:
                        seconds.setdefault(name, {}).setdefault(version, []).append(took)
                    shutil.rmtree(out, ignore_errors=True)
    return seconds


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--chats", type=int, default=CHATS, help=f"records of the input [{CHATS}]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs of each [{ROUNDS}]")
    parser.add_argument("--before", type=Path, help="checkout of another version")
    options = parser.parse_args()
    seconds = measure(options.chats, options.rounds, options.before)
    if options.json:
        print(json.dumps(seconds))
        return 0
    print("| CPU seconds, least (median) |", " | ".join(next(iter(seconds.values()))), "|")
    print("|---|" + "---:|" * len(next(iter(seconds.values()))))
    for name, versions in seconds.items():
        cells = [f"{min(values):.2f} ({statistics.median(values):.2f})" for values in versions.values()]
        print("|", " | ".join([name, *cells]), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
