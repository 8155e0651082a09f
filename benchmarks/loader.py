"""`get_batch` against a plain per-episode loop, a torch DataLoader over a Hugging Face dataset, and memcpy.

    python -m benchmarks.loader [--quick] [--json]

Batch 32, block 2048, masks. Lengths are lognormal (median 1,100 tokens). All sides return torch
tensors in the same order, and every batch of one pass is compared before anything is timed. The DataLoader reads
`input_ids` and `mask` of a `datasets.Dataset` in Arrow files, in this process and with 2 worker processes. The share of
memcpy bandwidth counts the bytes that a batch must move: tokens and mask read once, x, y and mask written once. Opening
is measured in a process of its own, on 5,000,000 episodes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from benchmarks.harness import Report, WorkDiffersError, compare, missing, run_one
from benchmarks.inputs import work_folder
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
            weights = (rng.rand(tokens) < 0.4).astype(np.uint8)
            for start, end in pairwise((part - part[0]).tolist()):
                writer.append(ids[start:end], weights[start:end])
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


def collated(rows: list[dict[str, NDArray[Any]]]) -> tuple[torch.Tensor, ...]:
    """What a user's collate function does with the rows of a dataset: cut, pad, shift."""
    ids = torch.full((len(rows), BLOCK + 1), PAD, dtype=torch.int64)
    mask = torch.zeros((len(rows), BLOCK + 1), dtype=torch.float32)
    for number, row in enumerate(rows):
        length = min(len(row["input_ids"]), BLOCK + 1)
        ids[number, :length] = torch.from_numpy(row["input_ids"][:length].astype(np.int64))
        mask[number, :length] = torch.from_numpy(row["mask"][:length].astype(np.float32))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask[:, 1:].contiguous()


class HuggingFace:
    """A torch DataLoader over the same episodes as a `datasets.Dataset` on disk, in the same order."""

    def __init__(self, directory: Path, workers: int) -> None:
        """Write the dataset once, and open it."""
        import datasets

        datasets.disable_progress_bars()
        plain, saved = PlainLoop(directory), directory / "hf"
        if not saved.exists():
            lengths = plain.index[:, 1].astype(np.int64)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            columns = {
                name: pa.LargeListArray.from_arrays(offsets, np.asarray(values))
                for name, values in (("input_ids", plain.tokens), ("mask", plain.mask))
            }
            datasets.Dataset(pa.table(columns)).save_to_disk(saved)
        dataset = datasets.load_from_disk(str(saved)).with_format("numpy")
        self._loader = torch.utils.data.DataLoader(
            dataset, batch_size=BATCH, sampler=plain.order.tolist(), collate_fn=collated, drop_last=True,
            num_workers=workers, persistent_workers=workers > 0,
        )  # fmt: skip
        self._batches = iter(self._loader)

    def get_batch(self) -> tuple[torch.Tensor, ...]:
        """The next batch; begins again at the end of an epoch."""
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)


def same_batches(directory: Path, peers: dict[str, Any], steps: int) -> str:
    """The same batches on all sides, each from the beginning of its first epoch."""
    for name, peer in peers.items():
        ours = GPTEpisodeDataLoader(CONFIG, None, directory)
        for step in range(steps):
            for part, a, b in zip(("x", "y", "mask"), ours.get_batch(), peer.get_batch(), strict=True):
                if not (torch.equal(a, b) and a.dtype == b.dtype and a.is_contiguous()):
                    raise WorkDiffersError(f"{name}: {part} of batch {step} differs")
    return f"{steps} batches equal: x, y and mask"


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
made = GPTEpisodeDataLoader(json.loads(sys.argv[1]), None, sys.argv[2])
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


def measure(*, quick: bool) -> Report:
    """Write, compare, time, open."""
    report = Report()
    torch.set_num_threads(1)
    episodes, steps, rounds = (3_000, 30, 3) if quick else (20_000, 300, 7)
    with work_folder() as folder:
        directory = folder / "set"
        tokens = write_set(directory, episodes)
        against_peers(report, directory, steps=steps, rounds=rounds)
        report.notes.append(f"batch {BATCH}, block {BLOCK}, masks, {episodes:,} episodes, {tokens:,} tokens")
        opened = opening(folder / "large", 300_000 if quick else 5_000_000)
    report.measured(
        f"open {opened['episodes']:,} episodes", opened["seconds"], "s", target="< 2",
        ours=f"{opened['resident'] / 1e6:.0f} MB", peer=f"{opened['index_bytes'] / 1e6:.0f} MB",
        detail="resident, and the index alone; "
        f"first batch with the epoch's order {opened['first_batch_seconds']:.2f} s, peak {opened['peak'] / 1e6:.0f} MB",
    )  # fmt: skip
    report.figures["opening"] = opened
    return report


def against_peers(report: Report, directory: Path, *, steps: int, rounds: int) -> None:
    """All loaders, taking turns; then memcpy."""
    ours = GPTEpisodeDataLoader(CONFIG, None, directory)
    peers: dict[str, Any] = {"per-episode loop": PlainLoop(directory)}
    if missing("datasets"):
        report.notes.append("datasets is not installed: not compared")
    else:
        peers |= {"DataLoader": HuggingFace(directory, 0), "DataLoader, 2 proc.": HuggingFace(directory, 2)}

    def run(loader: Any) -> None:
        for _ in range(steps):
            loader.get_batch()

    work = float(steps * BATCH * BLOCK)
    found = compare(
        {name: (lambda one=one: run(one), work) for name, one in {"get_batch": ours, **peers}.items()},
        ours="get_batch", check=lambda: same_batches(directory, peers, min(steps, 100)), rounds=rounds,
    )  # fmt: skip
    for name, comparison in found.items():
        target = ">= 5" if name == "per-episode loop" else ""
        report.compared(f"get_batch / {name}", comparison, unit="positions", target=target)
    lengths = np.minimum(ours.dataset().lengths, BLOCK + 1)
    moved = BATCH * (float(lengths.mean()) * 5 + BLOCK * 20)
    rate, bandwidth = moved * steps / found["per-episode loop"].ours.median, memcpy_rate()
    report.measured(
        "get_batch, share of memcpy", 100 * rate / 2 / bandwidth, "%",
        ours=f"{rate / 2e9:.1f} GB/s", peer=f"{bandwidth / 1e9:.1f} GB/s",
        detail=f"a batch moves {moved / 1e6:.2f} MB: what is read and written, halved, as memcpy counts a byte once",
    )  # fmt: skip
    report.figures |= {"memcpy_bytes_per_second": bandwidth, "bytes_per_batch": moved}


if __name__ == "__main__":
    sys.exit(run_one("loader", str(__doc__), measure))
