"""Datasets in a bucket: what opening, streaming and building cost, in requests, bytes and time.

    python -m benchmarks.stores [open] [load] [build] [--quick] [--rate MB]

The store is a small server of S3's protocol in a process of its own, with a delay for each request and a rate for all
bytes together (`tests/files/small_store.py`); it holds objects in memory. Lines of JSON come out, one for each part:

- `open`: a dataset of 10,000 shards, the first time and again.
- `load`: a consumer that takes half of the store's rate reads two epochs in windows, from a folder and from a store,
  with a cache of a third of the dataset; also in global order, with room for all.
- `build`: the same build into a folder and into a store.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh128

from benchmarks.inputs import records, write_tiled
from chatmill.compiler.run import run_build
from chatmill.core.checksums import FileRecord
from chatmill.files import stores
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.files.small_store import counts, small_store

DELAY, RATE = 0.05, 60e6
BATCH, BLOCK = 16, 2048
TOKEN_BYTES = 5
"""Of a token with its mask."""


def say(part: str, **facts: Any) -> None:
    """Print a line of results."""
    print(json.dumps({"part": part, **facts}), flush=True)


@contextmanager
def cache_at(folder: Path, limit: int | None = None) -> Iterator[None]:
    """Let the cache be a new folder, with a limit in bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    before = {name: os.environ.pop(name, None) for name in ("CHATMILL_CACHE", "CHATMILL_CACHE_LIMIT")}
    os.environ["CHATMILL_CACHE"] = str(folder)
    if limit is not None:
        os.environ["CHATMILL_CACHE_LIMIT"] = str(limit)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def write_set(folder: Path, shards: int, shard_tokens: int) -> int:
    """Write episodes with masks, and the receipt that a dataset at a URL needs; return the bytes of its tokens."""
    rng = np.random.RandomState(0)
    with EpisodeWriter(folder, "train", shard_tokens=shard_tokens) as writer:
        for _ in range(shards):
            sizes = np.full(shard_tokens // 1000, 1000)
            ids = rng.randint(0, 50_000, int(sizes.sum())).astype(np.uint32)
            weights = (ids % 2).astype(np.uint8)
            for start, end in pairwise(np.concatenate([[0], np.cumsum(sizes)]).tolist()):
                writer.append(ids[start:end], weights[start:end])
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = {path.relative_to(folder).as_posix(): FileRecord.of_file(path).to_json() for path in paths}
    (folder / "export.json").write_text(json.dumps({"files": files}))
    return sum(path.stat().st_size for path in paths if path.suffix == ".bin")


def put(folder: Path, url: str) -> None:
    """Copy a folder to a URL."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    stores.in_parallel(lambda path: stores.upload(path, f"{url}/{path.relative_to(folder).as_posix()}"), paths, 32)


def asked(before: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how many requests of each kind came since then, and the bytes that were sent."""
    now = counts()
    found = {name: count - before["requests"].get(name, 0) for name, count in now["requests"].items()}
    found = {name: count for name, count in found.items() if count}
    found["bytes"] = sum(now["sent"].values()) - sum(before["sent"].values())
    return found


def open_many(home: Path, shards: int) -> None:
    """Open a dataset of many shards, of which there is no more than opening asks for."""
    write_set(home / "few", 2, 1000)
    split = json.loads((home / "few" / "train" / "episodes.json").read_bytes())
    first = split["shards"][0]
    split["shards"], files, indexes = [], {}, b""
    for number in range(shards):
        sizes = np.array([900 + number % 100, 100])
        index = np.stack([np.array([0, sizes[0]]), sizes], axis=1).astype("<u8").tobytes()
        tokens = int(sizes.sum())
        stated = {
            "tokens.bin": {"bytes": 4 * tokens, "xxh128": f"{number:032x}"},
            "mask.bin": {"bytes": tokens, "xxh128": f"{shards + number:032x}"},
            "episodes.idx": {"bytes": len(index), "xxh128": xxh128(index).hexdigest()},
        }
        stated["trained.u32"] = {"bytes": 8, "xxh128": f"{2 * shards + number:032x}"}
        assert set(stated) == set(first["files"])
        name = f"shard_{number:05d}"
        split["shards"].append({**first, "name": name, "episodes": 2, "tokens": tokens, "files": stated})
        files |= {f"train/{name}/{file}": record for file, record in stated.items()}
        indexes += index
    data = json.dumps(split).encode()
    files["train/episodes.json"] = {"bytes": len(data), "xxh128": xxh128(data).hexdigest()}
    with small_store(delay=DELAY, rate=RATE) as bucket, cache_at(home / "cache"):
        url = f"{bucket}/many"
        objects = {
            "train/episodes.json": data,
            ".indexes": indexes,
            "export.json": json.dumps({"files": files}).encode(),
        }
        for name, content in objects.items():
            stores.write_object(f"{url}/{name}", content)
        for when in ("first", "again"):
            before = counts()
            began, used = time.perf_counter(), cpu_seconds()
            dataset = EpisodeDataset(url)  # type: ignore[arg-type]
            seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
            say("open", shards=len(dataset.shards), when=when, seconds=seconds, cpu=cpu, **asked(before))


def consume(loader: GPTEpisodeDataLoader, steps: int, seconds: float) -> tuple[float, float, int]:
    """Take batches at a fixed pace; return the seconds of all, those after the first tenth, and a sum of the ids."""
    started = time.perf_counter()
    late = started
    began = started
    total = 0
    for step in range(steps):
        if step == steps // 10:
            late = time.perf_counter()
        x, *_ = loader.get_batch()
        total += int(x.sum())
        wanted = began + (step + 1) * seconds
        time.sleep(max(0.0, wanted - time.perf_counter()))
        if time.perf_counter() > wanted + seconds:  # what was lost is not caught up with
            began += time.perf_counter() - wanted
    end = time.perf_counter()
    return end - started, end - late, total


def anonymous_memory() -> int:
    """Return the bytes that this process has for itself; mapped files are not among them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def load(home: Path, shards: int, rate: float) -> None:
    """Read epochs at half of the store's rate."""
    size = write_set(home / "set", shards, 1_000_000)
    config: dict[str, Any] = {
        "batch_size": BATCH,
        "block_size": BLOCK,
        "pad_token_id": 0,
        "use_loss_mask": True,
        "pack": True,
        "order": "windows",
        "window": 2,
    }
    pace = BATCH * BLOCK * TOKEN_BYTES / (rate / 2)
    local = GPTEpisodeDataLoader(config, dataset_dir=home / "set")
    steps = 2 * local.steps_per_epoch()
    whole, late, expected = consume(local, steps, pace)
    facts = {"rate": rate, "bytes_of_tokens": size, "steps": steps, "at_this_pace": steps * pace}
    say("load", place="folder", order="windows", **facts, seconds=whole, late_seconds=late)
    with small_store(delay=DELAY, rate=rate) as bucket:
        os.environ["CHATMILL_STORE_TIMEOUT"] = "600"
        put(home / "set", f"{bucket}/set")
        heads = sum(path.stat().st_size for path in (home / "set").rglob("*") if path.suffix in (".idx", ".json"))
        for order, limit in (("windows", heads + size // 3), ("global", None)):
            with cache_at(home / "cache", limit):
                before = counts()
                memory = anonymous_memory()
                began = time.perf_counter()
                loader = GPTEpisodeDataLoader({**config, "order": order}, dataset_dir=f"{bucket}/set")
                opened = time.perf_counter() - began
                far_whole, far_late, total = consume(loader, steps, pace)
                assert order == "global" or total == expected
                say(
                    "load",
                    place="store",
                    order=order,
                    cache=limit,
                    opening=opened,
                    seconds=far_whole,
                    late_seconds=far_late,
                    of_local=late / far_late,
                    more_memory=anonymous_memory() - memory,
                    epochs_of_bytes=(counts_of_tokens(before)) / size,
                    **asked(before),
                )
                del loader


def counts_of_tokens(before: dict[str, dict[str, int]]) -> int:
    """Return the bytes of tokens and masks that were sent since then."""
    now = counts()["sent"]
    return sum(count - before["sent"].get(name, 0) for name, count in now.items() if name.endswith(".bin"))


def is_plain(record: dict[str, Any]) -> bool:
    """Return whether a conversation has texts alone, which every template takes."""
    if record.get("tools"):
        return False
    return all(set(turn) == {"role", "content"} and isinstance(turn["content"], str) for turn in record["messages"])


def build(home: Path, size_of_input: int) -> None:
    """Build into a folder and into stores, in turn."""
    path = home / "in.jsonl"
    write_tiled(path, size_of_input, originals=[record for record in records() if is_plain(record)])
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "o200k", "template": "chatml", "add_control_tokens": True}
    recipe["shard_bytes"] = max(path.stat().st_size // 16, 1 << 16)
    for _ in range(3):
        shutil.rmtree(home / "built", ignore_errors=True)
        began, used = time.perf_counter(), cpu_seconds()
        run_build(recipe, home / "built", workers=2)
        local, local_cpu = time.perf_counter() - began, cpu_seconds() - used
        size = sum(file.stat().st_size for file in (home / "built").rglob("*") if file.is_file())
        for name, options in (("no delay", {}), ("50 ms, 60 MB/s", {"delay": DELAY, "rate": RATE})):
            with small_store(**options) as bucket, cache_at(home / "cache"):  # type: ignore[arg-type]
                before = counts()
                began, used = time.perf_counter(), cpu_seconds()
                run_build(recipe, f"{bucket}/built", workers=2)
                seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
                say(
                    "build",
                    store=name,
                    input_bytes=path.stat().st_size,
                    bytes_built=size,
                    files_built=sum(file.is_file() for file in (home / "built").rglob("*")),
                    seconds=seconds,
                    folder_seconds=local,
                    of_folder=local / seconds,
                    cpu=cpu,
                    folder_cpu=local_cpu,
                    **asked(before),
                )


def cpu_seconds() -> float:
    """Return the processor time of this process and its children that have ended."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in times)


def main() -> None:
    """Measure the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["open", "load", "build", []])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rate", type=float, default=RATE / 1e6, help="of `load`, where the machine is busy")
    given = parser.parse_args()
    parts = given.parts or ["open", "load", "build"]
    home = Path(tempfile.mkdtemp(prefix="chatmill-stores-"))
    try:
        if "open" in parts:
            open_many(home, 300 if given.quick else 10_000)
        if "load" in parts:
            load(home, 12 if given.quick else 36, given.rate * 1e6)
        if "build" in parts:
            build(home, (4 << 20) if given.quick else (64 << 20))
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
