"""Peak memory of a build, and how it grows with the input.

    python -m benchmarks.memory [--quick] [--json] [--size BYTES]
    python -m benchmarks.memory --chats 1000000

`chatmill build` with 2 workers in a process of its own, on an input and on one of eight times its size. The peak is
that of the resident memory of all its processes together, looked at twenty times a second; the largest single process
(`VmHWM`, which misses nothing) stands next to it. Files that are mapped count as far as they are resident.

With `--chats` one process compiles so many short chats under Qwen3's own template, of which no two have the same
shape, and prints its resident memory after every tenth of them: what is remembered has a limit, and is learned again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.builds import recipe_for
from benchmarks.harness import Report, run_one
from benchmarks.inputs import inputs_folder, plain_records, work_folder, write_shards
from benchmarks.trajectories import cpu_seconds, fresh_bench

SIZE, QUICK_SIZE = 66_000_000, 1_000_000
TIMES = 8
SHARD, QUICK_SHARD = 33_000_000, 500_000
PAUSE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes at the peak."""

    together: int
    """Resident memory of all processes at the worst moment."""
    largest: int
    """Of the largest single process."""


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def resident(pid: int) -> tuple[int, int]:
    """Resident bytes of a process now, and at its worst; zero for one that is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    values = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS", "VmHWM")))
    if not values:
        return 0, 0
    now, worst = (int(values[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, worst


def peak_of(command: list[str]) -> Peak:
    """Run a command to its end and watch its processes."""
    together = largest = 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            found = [resident(pid) for pid in tree(process.pid)]
            together = max(together, sum(now for now, _ in found))
            largest = max(largest, *(worst for _, worst in found))
            time.sleep(PAUSE)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{command[0]} failed with status {process.returncode}: {errors.read()}")
    return Peak(together=together, largest=largest)


def peak_of_build(paths: list[Path], work: Path) -> Peak:
    """The peak of a build from the command line."""
    recipe = work / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_for(paths).as_json()))
    chatmill = str(Path(sys.executable).with_name("chatmill"))
    return peak_of([chatmill, "build", str(recipe), "--out", str(work / "out"), "--workers", "2"])


def measure(*, quick: bool, size: int | None = None) -> Report:
    """One and eight times the input."""
    report = Report()
    size, shard = size or (QUICK_SIZE if quick else SIZE), QUICK_SHARD if quick else SHARD
    originals = plain_records()
    with inputs_folder() as folder:
        peaks = []
        for times in (1, TIMES):
            paths = write_shards(folder, size * times, originals=originals, shard_bytes=shard)
            with work_folder() as work:
                peaks.append(peak_of_build(paths, work))
    once, often = peaks
    report.measured(
        "peak RSS, 8x input / 1x", often.together / once.together, "x", target="<= 1.2",
        ours=f"{often.together / 1e6:,.0f} MB", peer=f"{once.together / 1e6:,.0f} MB",
        detail=f"{size * TIMES / 1e6:,.0f} MB and {size / 1e6:,.0f} MB of input, 2 workers, all processes together; "
        f"largest process {often.largest / 1e6:,.0f} MB and {once.largest / 1e6:,.0f} MB "
        f"({often.largest / once.largest:.2f}x)",
    )  # fmt: skip
    report.figures["bytes"] = {
        "input": [size, size * TIMES],
        "together": [once.together, often.together],
        "largest_process": [once.largest, often.largest],
    }
    return report


def short_chats(count: int) -> Iterator[dict[str, Any]]:
    """Chats of random exchanges: reasoning or none, up to three calls with random arguments, results, answers."""
    rng = random.Random(1)
    words = sorted({word for record in plain_records()[:300] for word in record["messages"][0]["content"].split()})
    for number in range(count):
        messages: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 5)):
            messages.append({"role": "user", "content": " ".join(rng.choices(words, k=6))})
            for _ in range(rng.randint(0, 3)):
                calls = [
                    {"id": f"c{place}", "type": "function", "function": {"name": rng.choice(words), "arguments": text}}
                    for place in range(rng.randint(1, 3))
                    for text in [json.dumps(dict.fromkeys(rng.choices(words, k=rng.randint(0, 3)), rng.random()))]
                ]
                messages.append(_answer(rng, words) | {"tool_calls": calls})
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(words)} for call in calls
                ]
            messages.append(_answer(rng, words))
        yield {"id": str(number), "messages": messages}


def _answer(rng: random.Random, words: list[str]) -> dict[str, Any]:
    answer = {"role": "assistant", "content": " ".join(rng.choices(words, k=8))}
    return answer | ({"reasoning_content": " ".join(rng.choices(words, k=5))} if rng.random() < 0.5 else {})


def never_repeating(count: int) -> None:
    """Compile so many short chats in this process and print a line after every tenth of the chunks."""
    with work_folder() as work:
        path = work / "chats.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps(chat) + "\n" for chat in short_chats(count))
        bench = fresh_bench(path, work / "out", "qwen3", "turns")
        print(f"{count:,} chats, {path.stat().st_size / 1e6:,.0f} MB; before: {resident(os.getpid())[0] / 1e6:,.0f} MB")
        tokens, start = 0, cpu_seconds()
        for number, job in enumerate(bench.jobs, 1):
            tokens += bench.compile(job)[1]
            if number * 10 // len(bench.jobs) > (number - 1) * 10 // len(bench.jobs):
                now, worst = (size / 1e6 for size in resident(os.getpid()))
                seconds = cpu_seconds() - start
                print(
                    f"{number / len(bench.jobs):4.0%}  {now:6,.0f} MB (at most {worst:,.0f})  "
                    f"{tokens / 1e6:7,.1f} M tokens  {seconds:6.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--chats"]:
        never_repeating(int(sys.argv[2]))
        sys.exit()
    sys.exit(run_one("memory", str(__doc__), measure, sizes={"size": (SIZE, "bytes of the smaller input")}))
