"""`get_batch` of the episode loader against a plain per-episode loop, and the opening of a very large set.

    python -m benchmarks.loader [--quick] [--json]

Batch 32, block 2048, masks, without prefetch. Lengths are lognormal (median 1,100 tokens). Both sides return torch
tensors, and every batch of one pass is compared before anything is timed. The share of memcpy bandwidth counts the
bytes that a batch must move: tokens and mask read once, x, y and mask written once. Opening is measured in a process
of its own, on 5,000,000 episodes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Timing, alternate, dump, options, print_timings
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.store.episode_writer import EpisodeWriter

BATCH, BLOCK, PAD = 32, 2048, 50_256
CONFIG = {
    "batch_size": BATCH, "block_size": BLOCK, "dataset_mode": "sft_episode", "use_loss_mask": True,
    "pad_token_id": PAD,
}  # fmt: skip


def write_set(directory: Path, episodes: int) -> int:
    """A set with masks; returns its tokens."""
    rng = np.random.RandomState(0)
    lengths = np.clip(rng.lognormal(7.0, 0.9, episodes), 16, 8000).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with EpisodeWriter(directory, "train") as writer:
        for first in range(0, episodes, 1000):
            part = offsets[first : first + 1001]
            tokens = int(part[-1] - part[0])
            ids = rng.randint(0, 50_000, tokens).astype(np.uint32)
            writer.append_batch(ids, part - part[0], (rng.rand(tokens) < 0.4).astype(np.uint8))
    return int(offsets[-1])


class PlainLoop:
    """The straightforward loader: one episode at a time, np.array, np.pad, np.stack."""

    def __init__(self, directory: Path) -> None:
        """Map the three files."""
        self.tokens = np.memmap(directory / "train/tokens.bin", dtype=np.uint32, mode="r")
        self.mask = np.memmap(directory / "train/mask.bin", dtype=np.uint8, mode="r")
        self.index = np.fromfile(directory / "train/episodes.idx", dtype=np.uint64).reshape(-1, 2)
        self.order = np.random.RandomState(1337).permutation(len(self.index))
        self.position = 0

    def get_batch(self) -> tuple[torch.Tensor, ...]:
        """The next rows of the epoch; begins again at its end."""
        if self.position + BATCH > len(self.order):
            self.position = 0
        rows = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        xs, ys, masks = [], [], []
        for row in rows:
            start, length = int(self.index[row, 0]), min(int(self.index[row, 1]), BLOCK + 1)
            ids = np.array(self.tokens[start : start + length], dtype=np.int64)
            mask = np.array(self.mask[start : start + length], dtype=np.float32)
            ids = np.pad(ids, (0, BLOCK + 1 - length), constant_values=PAD)
            mask = np.pad(mask, (0, BLOCK + 1 - length))
            xs.append(ids[:-1])
            ys.append(ids[1:])
            masks.append(mask[1:])
        return tuple(torch.from_numpy(np.stack(part)) for part in (xs, ys, masks))


def compare(directory: Path, steps: int) -> None:
    """The same batches on both sides."""
    ours, plain = GPTEpisodeDataLoader(CONFIG, None, directory, prefetch=False), PlainLoop(directory)
    for _ in range(steps):
        pairs = zip(ours.get_batch(), plain.get_batch(), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype and a.is_contiguous() for a, b in pairs)


def waiting(loader: GPTEpisodeDataLoader, steps: int) -> float:
    """Mean seconds in get_batch when 2 ms pass between batches, as while a device computes."""
    total = 0.0
    for _ in range(steps):
        time.sleep(0.002)
        start = time.perf_counter()
        loader.get_batch()
        total += time.perf_counter() - start
    return total / steps


def memcpy_rate(megabytes: int = 256) -> float:
    """Bytes copied per second by numpy, from one large array to another."""
    source = np.ones(megabytes << 20, dtype=np.uint8)
    target = np.empty_like(source)
    target[:] = source
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - start)
    return len(source) / sorted(seconds)[2]


OPENING = """
import json, resource, sys, time
import numpy, torch.utils.data
from chatmill.load.episodes import GPTEpisodeDataLoader

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

before, start = resident(), time.perf_counter()
made = GPTEpisodeDataLoader(json.loads(sys.argv[1]), None, sys.argv[2], prefetch=False)
opened, after = time.perf_counter() - start, resident()
start = time.perf_counter()
made.get_batch()
first = time.perf_counter() - start
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
print(json.dumps({"seconds": opened, "resident": after - before, "first_batch_seconds": first,
                  "resident_after_first_batch": resident() - before, "peak": peak - before}))
"""


def write_large_index(directory: Path, episodes: int) -> int:
    """Only the index is large: every episode is a slice of the same few tokens. Returns the index's bytes."""
    folder = directory / "train"
    folder.mkdir(parents=True)
    rng = np.random.RandomState(1)
    np.arange(1 << 20, dtype=np.uint32).tofile(folder / "tokens.bin")
    np.ones(1 << 20, dtype=np.uint8).tofile(folder / "mask.bin")
    index = np.empty((episodes, 2), dtype="<u8")
    index[:, 1] = rng.randint(2, 4000, episodes)
    index[:, 0] = rng.randint(0, (1 << 20) - 4000, episodes)
    index.tofile(folder / "episodes.idx")
    return index.nbytes


def opening(directory: Path, episodes: int) -> dict[str, Any]:
    """Seconds and resident memory of opening, in a fresh process whose imports are done before the clock starts."""
    index = write_large_index(directory, episodes)
    command = [sys.executable, "-c", OPENING, json.dumps(CONFIG), str(directory)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    run = sorted(runs, key=lambda r: r["seconds"])[1]
    return {"episodes": episodes, "index_bytes": index, **run}


def main() -> None:
    """Write, compare, time, open."""
    arguments = options(str(__doc__)).parse_args()
    torch.set_num_threads(1)
    episodes, steps, rounds = (4_000, 60, 5) if arguments.quick else (20_000, 300, 9)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tokens = write_set(directory / "set", episodes)
        compare(directory / "set", min(steps, episodes // BATCH - 1))
        ours, plain = (
            GPTEpisodeDataLoader(CONFIG, None, directory / "set", prefetch=False),
            PlainLoop(directory / "set"),
        )
        ahead = GPTEpisodeDataLoader(CONFIG, None, directory / "set", prefetch=True)
        waits = {"without prefetch": waiting(ours, steps), "with prefetch": waiting(ahead, steps)}

        def run(loader: Any) -> None:
            for _ in range(steps):
                loader.get_batch()

        work = float(steps * BATCH * BLOCK)
        contestants = {"get_batch": ours, "per-episode loop": plain}
        timings = alternate(
            {name: (lambda one=one: run(one), work) for name, one in contestants.items()}, rounds=rounds
        )
        lengths = np.minimum(ours.dataset().lengths, BLOCK + 1)
        moved = BATCH * (float(lengths.mean()) * 5 + BLOCK * 20)
        large = opening(directory / "large", 500_000 if arguments.quick else 5_000_000)
    bandwidth = memcpy_rate()
    report(
        arguments.json, timings, steps=steps, moved=moved, bandwidth=bandwidth, large=large, tokens=tokens, waits=waits
    )


def report(
    as_json: bool,
    timings: dict[str, Timing],
    *,
    steps: int,
    moved: float,
    bandwidth: float,
    large: dict[str, Any],
    tokens: int,
    waits: dict[str, float],
) -> None:
    """One table, or one JSON object."""
    rate = moved * steps / timings["get_batch"].median
    ratio = timings["per-episode loop"].median / timings["get_batch"].median
    if as_json:
        figures = {name: timing.as_json() for name, timing in timings.items()}
        share = {"memcpy_bytes_per_second": bandwidth, "memcpy_share": rate / 2 / bandwidth}
        dump("loader", ratio=ratio, timings=figures, opening=large, waiting_seconds=waits, **share)
        return
    title = f"get_batch: batch {BATCH}, block {BLOCK}, masks, {tokens:,} tokens; the same batches on both sides"
    print_timings(title, timings, unit="positions", ours="get_batch")
    print(
        f"  a batch moves {moved / 1e6:.2f} MB at {rate / 1e9:.1f} GB/s read and written: {rate / 2 / bandwidth:.0%} of"
    )
    print(f"  memcpy here ({bandwidth / 1e9:.1f} GB/s copied, which reads and writes each byte)")
    print("  waiting when 2 ms pass between batches: " + ", ".join(f"{n} {s * 1e6:.0f} us" for n, s in waits.items()))
    print(
        f"opening {large['episodes']:,} episodes: {large['seconds']:.2f} s, "
        f"{large['resident'] / 1e6:.0f} MB resident of which the index is {large['index_bytes'] / 1e6:.0f} MB; "
        f"first batch (with the epoch's order) {large['first_batch_seconds']:.2f} s, peak {large['peak'] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
