"""What `chatmill capture` adds to each call: time until the first and the last byte, and processor time of the proxy.

    python -m benchmarks.capture [--quick] [--json]

A model server that answers at once runs in a process of its own, and so does the proxy. One client asks both in turns,
over connections that stay open. Times are medians and 99th percentiles over all calls, so other work on the machine is
in both. The processor time of the proxy is that of its process, divided by the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
CALLS, QUICK_CALLS = 200, 20
WARM_UP = 10
KINDS: dict[str, dict[str, Any]] = {
    "whole": {"stream": False},
    "stream": {"stream": True},
    "whole, 100 kB of history": {"stream": False, "padding": 100_000},
}


@contextlib.contextmanager
def started(*command: str, stdin: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a Python module, and give its first line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def processor_seconds(process: subprocess.Popen[str]) -> float:
    """Return the processor time of a process, on Linux; elsewhere 0."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(session: aiohttp.ClientSession, address: str, body: bytes) -> tuple[float, float]:
    """Return the milliseconds until the first and the last byte of an answer."""
    start = time.perf_counter()
    first = 0.0
    headers = {"content-type": "application/json"}
    async with session.post(f"{address}/v1/chat/completions", data=body, headers=headers) as answer:
        async for _ in answer.content.iter_any():
            first = first or time.perf_counter() - start
    return first * 1000, (time.perf_counter() - start) * 1000


async def compare(server: str, proxy: str, kind: dict[str, Any], calls: int) -> dict[str, list[tuple[float, float]]]:
    """Ask both in turns."""
    content = "hello" + "x" * kind.get("padding", 0)
    request = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": kind["stream"]}
    body = json.dumps(request).encode()
    times: dict[str, list[tuple[float, float]]] = {"direct": [], "proxy": []}
    async with aiohttp.ClientSession() as session:
        for number in range(calls + WARM_UP):
            for name, address in (("direct", server), ("proxy", proxy)):
                found = await ask(session, address, body)
                if number >= WARM_UP:
                    times[name].append(found)
    return times


def percentile(values: list[float], share: float) -> float:
    """Return the value that a share of the values does not exceed."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure(calls: int, options: list[str]) -> dict[str, dict[str, float]]:
    """Measure all kinds of calls through a proxy with some options."""
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        _, port = stack.enter_context(started("tests.capture.model_server", stdin=subprocess.PIPE))
        server = f"http://127.0.0.1:{port}"
        out = str(Path(folder, "calls.jsonl"))
        command = ("chatmill", "capture", server, "--out", out, "--port", "0", "--json", *options)
        process, line = stack.enter_context(started(*command))
        proxy = json.loads(line)["anthropic"]
        for name, kind in KINDS.items():
            before = processor_seconds(process)
            times = asyncio.run(compare(server, proxy, kind, calls))
            spent = processor_seconds(process) - before
            row: dict[str, float] = {"processor_ms": spent * 1000 / (calls + WARM_UP)}
            for side, found in times.items():
                for place, what in enumerate(("first", "last")):
                    values = [one[place] for one in found]
                    row[f"{side}_{what}_ms"] = statistics.median(values)
                    row[f"{side}_{what}_p99_ms"] = percentile(values, 0.99)
            rows[name] = row
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    calls = QUICK_CALLS if given.quick else CALLS
    found = {
        "as it is": measure(calls, []),
        "with token ids": measure(calls, ["--token-ids", "vllm", "--logprobs"]),
    }
    if given.json:
        print(json.dumps(found))
        return
    print(f"{calls} calls of each kind; milliseconds, median (99th percentile)")
    print(f"{'proxy':<16}{'call':<24}{'direct':>18}{'through the proxy':>20}{'added':>8}{'processor':>11}")
    for proxy, rows in found.items():
        for name, row in rows.items():
            direct = f"{row['direct_last_ms']:.2f} ({row['direct_last_p99_ms']:.1f})"
            through = f"{row['proxy_last_ms']:.2f} ({row['proxy_last_p99_ms']:.1f})"
            added = row["proxy_last_ms"] - row["direct_last_ms"]
            print(f"{proxy:<16}{name:<24}{direct:>18}{through:>20}{added:>8.2f}{row['processor_ms']:>11.2f}")


if __name__ == "__main__":
    main()
