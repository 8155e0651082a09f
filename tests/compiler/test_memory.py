"""The memory of a build does not grow with its input: peak RSS of the driver and of a worker at 1x and 8x."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.builds import chats, plain_recipe

CODE = """
import json, os, sys
from pathlib import Path

from chatmill.compiler.run import run_build

def peak(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)

def below(pid):
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from below(child)

worker = 0

def look(state):
    global worker
    worker = max(worker, *map(peak, below(os.getpid())), 0)

order = json.load(sys.stdin)
result = run_build(order["recipe"], order["out"], workers=1, on_progress=look)
tokens = sum(split["tokens"] for split in result.manifest["splits"].values())
print(json.dumps({"driver": peak("self"), "worker": worker, "tokens": tokens}))
"""
"""Runs one build and prints the largest RSS in KiB; `VmHWM`, since `ru_maxrss` of a child begins with its parent's."""


def write_input(path: Path, size: int) -> Path:
    lines = [json.dumps(record) for record in chats(500, 4, ids=False, words=150)]
    with path.open("w") as file:
        written = number = 0
        while written < size:
            written += file.write(f'{{"id": "n{number}", {lines[number % len(lines)][1:]}\n')
            number += 1
    return path


def measured(home: Path, size: int) -> dict[str, Any]:
    path = write_input(home / f"{size}.jsonl", size)
    packing = {"max_length": 2048, "overflow": "windows"}
    recipe = plain_recipe(path, packing=packing, split={"val_fraction": 0.1}, shard_bytes=120_000)
    order, command = json.dumps({"recipe": recipe, "out": str(home / f"out{size}")}), [sys.executable, "-c", CODE]
    done = subprocess.run(command, input=order, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["worker"] > 10_000, "no worker was seen"
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_flat_memory(fast: Path) -> None:
    """Everything smaller than usual."""
    once, eight = (measured(fast, times * 450_000) for times in (1, 8))
    assert eight["tokens"] > 7.5 * once["tokens"]
    for process in ("driver", "worker"):
        assert eight[process] < 1.2 * once[process], (process, once, eight)
