"""Training a GPT on packed against padded rows, and the isolation of every attention kernel; needs a GPU.

    python -m benchmarks.packed_training [--quick] [--json] [--out RESULT.json]

Needs numpy and torch alone. Real episode lengths and tokens: benchmarks/data/episodes.npz holds every second
conversation that is bundled for the tests, in ChatML with the GPT-2 vocabulary, made by

    python -m benchmarks.packed_training --write-data

Every contestant takes the same documents in the same optimizer steps, from the same weights; so the loss curves must
lie on top of each other, and only the time may differ:

- packed: rows of 2,048 positions filled by best fit, documents kept apart by the attention kernel;
- padded: one document a row of 2,048 positions, as fixed shapes have it;
- padded to the longest: the documents of a step sorted by length, rows as wide as the longest of their micro-batch
  (rounded up to 256): the best that padding can do without changing what is in a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import machine
from chatmill.core.blocks import boundaries_from_starts
from chatmill.load.packed_batch import PackedBatch
from chatmill.pack.plan import plan
from chatmill.train.batch import TrainBatch, as_batch
from chatmill.train.config import TrainConfig
from chatmill.train.gpt import GPT, GPTConfig
from chatmill.train.isolation import check_isolation
from chatmill.train.phase import learning_rate
from chatmill.train.ranks import Ranks
from chatmill.train.step import Stepper

DATA = Path(__file__).parent / "data" / "episodes.npz"
FILL = 0.985
"""A step takes documents, in order, up to this share of the packed rows; what best fit cannot place waits."""
WIDTH_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a benchmark is."""

    model: GPTConfig
    block: int
    rows: int
    """Rows of a micro-batch; a packed step is one of them."""
    steps: int
    rate: float


FULL = Sizes(
    model=GPTConfig(vocab_size=50304, layers=24, hidden=1024, heads=16, kv_heads=8, ffn=3072),
    block=2048,
    rows=16,
    steps=50,
    rate=3e-4,
)
QUICK = Sizes(
    model=GPTConfig(vocab_size=50304, layers=1, hidden=16, heads=2, kv_heads=1, ffn=32),
    block=256,
    rows=4,
    steps=3,
    rate=1e-2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Documents as flat columns."""

    ids: NDArray[np.uint16]
    trained: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def lengths(self, width: int) -> NDArray[np.int64]:
        """Tokens per document, cut to a row of `width`."""
        return np.minimum(np.diff(self.offsets), width)


def read_episodes(path: Path = DATA) -> Episodes:
    """The bundled documents."""
    with np.load(path) as stored:
        offsets = np.concatenate([[0], np.cumsum(stored["lengths"].astype(np.int64))])
        trained = np.unpackbits(stored["trained"], count=int(offsets[-1])).astype(bool)
        return Episodes(ids=stored["ids"], trained=trained, offsets=offsets)


def write_data(path: Path = DATA) -> None:
    """Render every second bundled conversation; needs the whole package."""
    from chatmill.label.presets import find_policy
    from chatmill.read.conversations import ConversationFile
    from chatmill.render.registry import bind
    from chatmill.render.render import render
    from chatmill.tokenizer.load import load_tokenizer
    from tests.conftest import CONVERSATION_FILES
    from tests.data.tokenizer_files import unpacked

    tokenizer = load_tokenizer(unpacked("gpt2"), control_tokens=["<|im_start|>", "<|im_end|>"])
    conversations = [c for file in CONVERSATION_FILES for c in list(ConversationFile(file))[::2]]
    tokens = render(conversations, bind("chatml", tokenizer), collect_failures=True).tokens
    weights = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    path.parent.mkdir(exist_ok=True)
    columns: dict[str, Any] = {
        "ids": tokens.ids.astype(np.uint16),
        "trained": np.packbits(weights),
        "lengths": tokens.lengths.astype(np.uint16),
    }
    np.savez_compressed(path, **columns)
    print(f"{path}: {len(tokens)} episodes, {len(tokens.ids):,} tokens, {path.stat().st_size:,} bytes")


def steps_of_documents(episodes: Episodes, sizes: Sizes) -> list[NDArray[np.int64]]:
    """The documents of each step: in a shuffled order, as many as fit the packed rows; the list goes round."""
    lengths = episodes.lengths(sizes.block + 1)
    order = np.random.RandomState(0).permutation(len(lengths))
    room = int(sizes.rows * (sizes.block + 1) * FILL)
    steps, at = [], 0
    while len(steps) < sizes.steps:
        taken = order[(at + np.arange(room)) % len(order)]
        taken = taken[: int(np.searchsorted(np.cumsum(lengths[taken]), room, side="right"))]
        while plan(lengths[taken], sizes.block + 1).bins > sizes.rows:
            taken = taken[:-1]
        steps.append(taken)
        at += len(taken)
    return steps


class Contestant:
    """Lays the documents of a step into micro-batches."""

    def __init__(self, name: str, episodes: Episodes, sizes: Sizes, most: int) -> None:
        self.name, self._episodes, self._sizes, self._most = name, episodes, sizes, most

    def batches(self, documents: NDArray[np.int64], device: torch.device) -> list[TrainBatch]:
        """The micro-batches of one step."""
        return [as_batch(given, device) for given in self._laid(documents)]

    def _laid(self, documents: NDArray[np.int64]) -> Iterator[Any]:
        width, rows = self._sizes.block + 1, self._sizes.rows
        lengths = self._episodes.lengths(width)[documents]
        if self.name == "packed":
            made = plan(lengths, width)
            bins = [documents[made.bin(row)] for row in range(made.bins)]
            yield self._rows(bins + [documents[:0]] * (rows - made.bins), width, packed=True)
            return
        if self.name == "padded to the longest":
            documents = documents[np.argsort(lengths, kind="stable")]
        for first in range(0, len(documents), rows):
            own = [documents[i : i + 1] for i in range(first, min(first + rows, len(documents)))]
            if self.name == "padded to the longest":
                longest = int(self._episodes.lengths(self._sizes.block + 1)[np.concatenate(own)].max()) - 1
                width = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, self._sizes.block) + 1
            yield self._rows(own + [documents[:0]] * (rows - len(own)), width, packed=False)

    def _rows(self, bins: list[NDArray[np.int64]], width: int, *, packed: bool) -> Any:
        ids = np.zeros((len(bins), width), dtype=np.int64)
        mask = np.zeros((len(bins), width), dtype=np.float32)
        starts = np.full((len(bins), self._most), -1, dtype=np.int64)
        starts[:, 0] = 0
        used = np.zeros(len(bins), dtype=np.int64)
        offsets = self._episodes.offsets
        for row, documents in enumerate(bins):
            for number, document in enumerate(documents.tolist()):
                begin = int(used[row])
                end = begin + int(min(offsets[document + 1] - offsets[document], width - begin))
                source = slice(offsets[document], offsets[document] + end - begin)
                ids[row, begin:end] = self._episodes.ids[source]
                mask[row, begin:end] = self._episodes.trained[source]
                mask[row, begin] = 0
                if packed and begin < width - 1:
                    starts[row, number] = begin
                used[row] = end
        x, y, weights = (
            torch.from_numpy(np.ascontiguousarray(part)) for part in (ids[:, :-1], ids[:, 1:], mask[:, 1:])
        )
        if not packed:
            return x, y, weights
        return PackedBatch.of((x, y, weights, torch.from_numpy(starts)), np.minimum(used, width - 1))


def train(contestant: Contestant, steps: list[NDArray[np.int64]], sizes: Sizes, ranks: Ranks) -> dict[str, Any]:
    """Train from the same weights; every shape is run once before the clock starts."""
    torch.manual_seed(0)
    config = TrainConfig(learning_rate=sizes.rate, warmup_pct=0.1, compile=ranks.device.type == "cuda")
    laid = [contestant.batches(documents, torch.device("cpu")) for documents in steps]
    shapes = {tuple(batch.input_ids.shape): batch for batches in laid for batch in batches}
    stepper = Stepper(GPT(sizes.model), config, ranks)
    for batch in shapes.values():
        stepper.gradients([_moved(batch, ranks.device)])
        stepper.model.zero_grad(set_to_none=True)
    results, seconds, positions = [], [], 0
    for number, batches in enumerate(laid):
        moved = [_moved(batch, ranks.device) for batch in batches]
        _wait(ranks.device)
        begin = time.perf_counter()
        results.append(stepper.step(moved, learning_rate(config, number, len(steps))))
        _wait(ranks.device)
        seconds.append(time.perf_counter() - begin)
        positions += results[-1].positions
    values = [stepper.values(result) for result in results]
    trained = sum(value["trained_tokens"] for value in values)
    timed = sum(seconds[1:])
    rate = sum(value["trained_tokens"] for value in values[1:]) / timed
    peak = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else None
    return {
        "contestant": contestant.name,
        "shapes": sorted(shapes),
        "positions": positions,
        "trained_tokens": trained,
        "seconds": seconds,
        "trained_tokens_per_s": rate,
        "positions_per_s": positions / sum(seconds),
        "peak_gib": peak,
        "losses": [value["loss"] for value in values],
    }


def _moved(batch: TrainBatch, device: torch.device) -> TrainBatch:
    from dataclasses import fields, replace

    documents = batch.documents
    moved = {f.name: getattr(documents, f.name) for f in fields(documents)}
    moved = {name: None if value is None else value.to(device) for name, value in moved.items()}
    return replace(
        batch,
        input_ids=batch.input_ids.to(device),
        labels=batch.labels.to(device),
        weights=None if batch.weights is None else batch.weights.to(device),
        documents=type(documents)(**moved),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def isolation(device: torch.device) -> list[dict[str, Any]]:
    """The isolation check of a small GPT through every kernel that runs here; a 4-token leak would show."""
    paths: list[tuple[str, torch.dtype]] = [("sdpa", torch.float32)]
    if device.type == "cuda":
        paths += [
            ("sdpa", torch.bfloat16),
            ("varlen", torch.bfloat16),
            ("flex", torch.float32),
            ("flex", torch.bfloat16),
        ]
    found = []
    for kernel, dtype in paths:
        # FlexAttention compiles for every length of a document alone, so it gets few of them
        lengths = [128, 256, 128] if kernel == "flex" else [128, 1, 171, 212]
        torch.manual_seed(0)
        sizes = GPTConfig(vocab_size=512, layers=4, hidden=256, heads=4, kv_heads=2, init_std=0.2)
        model = GPT(sizes, attention=kernel).to(device, dtype).eval()
        ids = torch.randint(0, 512, (2, sum(lengths)), device=device)
        row = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        segments = boundaries_from_starts([row, row], np.full(2, sum(lengths))).segments(sum(lengths))
        positions = torch.from_numpy(segments.position_ids).to(device)
        report = check_isolation(model, {"input_ids": ids, "position_ids": positions})
        found.append(
            {
                "kernel": kernel,
                "dtype": str(dtype).removeprefix("torch."),
                "documents": len(report.documents),
                "moved": report.moved,
                "moved_tolerance": report.moved_tolerance,
                "alone": report.alone,
                "alone_tolerance": report.alone_tolerance,
                "passed": report.passed,
            }
        )
    return found


def main() -> int:
    """Run, print, and write the results; the exit status is 1 when a kernel leaks or the curves part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="also write the JSON object here")
    parser.add_argument("--write-data", action="store_true", help="make benchmarks/data/episodes.npz anew")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    arguments = parser.parse_args()
    if arguments.write_data:
        write_data()
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        print("no GPU here: the full benchmark needs one (--quick runs tiny sizes anywhere)", file=sys.stderr)
        return 0
    sizes = QUICK if arguments.quick else FULL
    if arguments.steps:
        sizes = Sizes(model=sizes.model, block=sizes.block, rows=sizes.rows, steps=arguments.steps, rate=sizes.rate)
    return report(sizes, device, arguments)


def report(sizes: Sizes, device: torch.device, arguments: argparse.Namespace) -> int:
    """Measure everything and tell it."""
    torch._dynamo.config.recompile_limit = 64  # one per width of the contestant that pads to the longest
    ranks = Ranks(rank=0, world=1, device=device, group=None)
    episodes = read_episodes()
    steps = steps_of_documents(episodes, sizes)
    lengths = episodes.lengths(sizes.block + 1)
    most = max(int(np.diff(plan(lengths[taken], sizes.block + 1).bin_offsets).max()) for taken in steps)
    result: dict[str, Any] = {
        "benchmark": "packed_training",
        "date": time.strftime("%Y-%m-%d"),
        **machine(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in GPT(sizes.model).parameters()),
        "model": sizes.model.to_json(),
        "block": sizes.block,
        "rows": sizes.rows,
        "steps": sizes.steps,
        "documents": int(sum(map(len, steps))),
        "mean_document": float(np.mean([lengths[taken].mean() for taken in steps])),
        "isolation": isolation(device),
        "training": [],
    }
    _write(result, arguments)
    for name in ("packed", "padded to the longest", "padded"):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        result["training"].append(train(Contestant(name, episodes, sizes, most), steps, sizes, ranks))
        _write(result, arguments)  # what is measured is kept, whatever comes after
    curves = [np.array(run["losses"]) for run in result["training"]]
    result["largest_difference_of_losses"] = float(max(np.abs(curve - curves[0]).max() for curve in curves))
    packed = result["training"][0]["trained_tokens_per_s"]
    for run in result["training"]:
        run["packed_is"] = packed / run["trained_tokens_per_s"]
    _write(result, arguments)
    _print(result, as_json=arguments.json)
    tolerance = 0.05 if device.type == "cuda" else 1e-4
    together = result["largest_difference_of_losses"] < tolerance
    return 0 if together and all(check["passed"] for check in result["isolation"]) else 1


def _write(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['parameters'] / 1e6:.0f} M parameters, {result['steps']} steps, {result['gpu'] or 'CPU'}")
    for run in result["training"]:
        print(
            f"  {run['contestant']:<24}{run['trained_tokens_per_s']:>12,.0f} trained tokens/s"
            f"{run['positions']:>14,} positions  loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}"
            f"  packed is {run['packed_is']:.2f}x"
        )
    print(f"  the curves differ by at most {result['largest_difference_of_losses']:.2g}")
    for check in result["isolation"]:
        verdict = "isolated" if check["passed"] else "LEAKS"
        numbers = f"moved {check['moved']:.2g} alone {check['alone']:.2g}"
        print(f"  {check['kernel']:<7}{check['dtype']:<10} {numbers} {verdict}")


if __name__ == "__main__":
    sys.exit(main())
