"""The planner, and rows gathered by its plan, against TRL's best-fit packing and torchtune's `PackedDataset`.

    python -m benchmarks.plan [--quick] [--json]    against the peers, alternating
    python -m benchmarks.plan --real                every strategy and overflow policy on the real conversations

200,000 documents with lognormal lengths (median 403 tokens), rows of 4,096 tokens. TRL packs inside the batches of
`Dataset.map`, 1,000 documents each by default: it runs with these, and with all documents in one batch, which fills
rows as well as a global plan does. Its planner cannot be called alone, so for the plan its documents are as cheap as
can be (one byte a token). Before anything is timed, both sides must hold every token exactly once and every document
whole. torchtune packs in input order, with labels and positions: against it runs the strategy `greedy`, which must give
the same rows, labels and positions, token by token.
"""

from __future__ import annotations

import os

os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; torchtune has no switch for its bar

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.harness import Comparison, Contestants, Report, alternate, compare, missing, require_equal, run_one, si
from benchmarks.peers import torchtune_packs
from chatmill.core.blocks import Boundaries
from chatmill.core.native.gather import gathered
from chatmill.core.tokens import offsets_of
from chatmill.pack.plan import Plan, Strategy, plan

CAPACITY = 4096
OURS, STREAM = "chatmill", "chatmill, rows in groups"
IGNORED = -100
GROUP = 512
REAL = Path(__file__).parents[1] / "tests" / "data" / "conversations"


def lengths_of(count: int) -> NDArray[np.int64]:
    """Lognormal document lengths, at most one row."""
    rng = np.random.RandomState(0)
    return np.clip(np.exp(rng.normal(6.0, 1.0, count)).astype(np.int64), 1, CAPACITY)


def dataset_of(lengths: NDArray[np.int64], *, wide: bool) -> Any:
    """A dataset of those documents: token ids that count up, or one-byte zeros."""
    import datasets

    offsets = offsets_of(lengths)
    values = np.arange(offsets[-1], dtype=np.int32) if wide else np.zeros(offsets[-1], dtype=np.int8)
    column = pa.ListArray.from_arrays(offsets.astype(np.int32), values)
    return datasets.Dataset(pa.table({"input_ids": column}))


def trl_pack(dataset: Any, batch: int) -> Any:
    """TRL's packing of a dataset held in memory, nothing cached."""
    from trl import pack_dataset

    kept = {"batch_size": batch, "load_from_cache_file": False, "keep_in_memory": True}
    return pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=kept)


class PackedRows(NamedTuple):
    """Rows of `CAPACITY` tokens, padded on the right."""

    columns: list[NDArray[np.int32]]
    row_lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Where each document starts in its row, all rows after one another."""
    documents: NDArray[np.int64]
    """How many each row has."""


def packed_rows(
    made: Plan, columns: Sequence[tuple[NDArray[np.int32], int]], offsets: NDArray[np.int64], first: int, last: int
) -> PackedRows:
    """The rows `first .. last` of a plan; `columns` are flat values and what pads them. One gather a column."""
    ends = made.bin_offsets[first : last + 1] - made.bin_offsets[first]
    chosen = made.order[made.bin_offsets[first] : made.bin_offsets[last]]
    lengths = offsets[chosen + 1] - offsets[chosen]
    flat = offsets_of(lengths)
    row_lengths = np.diff(flat[ends])
    which = np.insert(np.zeros_like(chosen), ends[1:], 1)  # after the documents of a row comes its padding
    starts = np.insert(offsets[chosen], ends[1:], 0)
    counts = np.insert(lengths, ends[1:], made.capacity - row_lengths)
    dense = [
        gathered([values, np.full(made.capacity, pad, dtype=values.dtype)], which, starts, counts).reshape(
            last - first, made.capacity
        )
        for values, pad in columns
    ]
    return PackedRows(dense, row_lengths, flat[:-1] - np.repeat(flat[ends[:-1]], np.diff(ends)), np.diff(ends))


def ours_pack(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> PackedRows:
    """Plan and rows, from lengths and flat ids."""
    made = plan(lengths, CAPACITY)
    return packed_rows(made, [(ids, 0)], offsets_of(lengths), 0, made.bins)


def ours_stream(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> int:
    """The same rows in groups of 512, as a writer takes them: memory is used again instead of fetched anew."""
    made, offsets = plan(lengths, CAPACITY), offsets_of(lengths)
    groups = (
        packed_rows(made, [(ids, 0)], offsets, first, min(first + GROUP, made.bins))
        for first in range(0, made.bins, GROUP)
    )
    return sum(len(group.row_lengths) for group in groups)


def check_same_work(lengths: NDArray[np.int64], packed: PackedRows, theirs: Any) -> None:
    """Every token once and every document whole, on both sides (ids count up through all documents)."""
    offsets, total = offsets_of(lengths), int(lengths.sum())
    real = np.arange(CAPACITY) < packed.row_lengths[:, None]
    sides = {OURS: (packed.columns[0][real], np.diff(np.append(_flat_starts(packed), total)))}
    table = theirs.with_format("arrow")[:]
    ids, pieces = (table[name].combine_chunks() for name in ("input_ids", "seq_lengths"))
    sides["TRL"] = (ids.flatten().to_numpy(), pieces.flatten().to_numpy())
    for name, (tokens, documents) in sides.items():
        ends = offsets_of(documents)
        require_equal(f"tokens held by {name}", total, len(tokens))
        require_equal(f"tokens in the documents of {name}", total, ends[-1])
        starts = tokens[ends[:-1]].astype(np.int64)
        order = np.argsort(starts)
        require_equal(f"first tokens of the documents of {name}", offsets[:-1], starts[order])
        require_equal(f"lengths of the documents of {name}", lengths, documents[order])
        counting_up = np.arange(total) + np.repeat(starts - ends[:-1], documents)
        require_equal(f"tokens inside the documents of {name}", counting_up, tokens)


def _flat_starts(packed: PackedRows) -> NDArray[np.int64]:
    """Document starts, counted over all rows without padding."""
    before = offsets_of(packed.row_lengths)[:-1]
    return packed.starts + np.repeat(before, packed.documents)


def against_trl(report: Report, *, quick: bool) -> None:
    """The plan alone, and plan + rows, against TRL in both its forms; the fill of each side."""
    import datasets

    datasets.disable_progress_bars()
    lengths = lengths_of(10_000 if quick else 200_000)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    wide, narrow = dataset_of(lengths, wide=True), dataset_of(lengths, wide=False)
    count, rounds = len(lengths), 2 if quick else 3
    batched, whole = trl_pack(wide, 1000), trl_pack(wide, count)
    made = plan(lengths, CAPACITY)

    require_equal("rows in groups", made.bins, ours_stream(ids, lengths))
    for theirs in (batched, whole):
        check_same_work(lengths, ours_pack(ids, lengths), theirs)
    checked = f"every token once and {count:,} documents whole on all sides"

    peers = {"TRL bfd, batches of 1,000": 1000, "TRL bfd, one batch": count}

    def against(contestants: Contestants, documents: Any) -> dict[str, Comparison]:
        theirs = {name: (lambda size=size: trl_pack(documents, size), count) for name, size in peers.items()}
        return compare({**contestants, **theirs}, ours=OURS, check=lambda: checked, rounds=rounds)

    planned = against({OURS: (lambda: plan(lengths, CAPACITY), count)}, narrow)
    rows = against(
        {OURS: (lambda: ours_pack(ids, lengths), count), STREAM: (lambda: ours_stream(ids, lengths), count)}, wide
    )
    report.compared("plan / TRL bfd", planned["TRL bfd, batches of 1,000"], unit="documents", target=">= 30")
    report.compared("plan / TRL bfd in one batch", planned["TRL bfd, one batch"], unit="documents", target=">= 30")
    stream = rows.pop(STREAM).peer
    for name, comparison in rows.items():
        short = name.removeprefix("TRL ").replace("batches of 1,000", "default")
        report.compared(f"rows at once / {short}", comparison, unit="documents", target=">= 8")
        grouped = Comparison(ours=stream, peer=comparison.peer, checked=comparison.checked)
        report.compared(f"rows in groups / {short}", grouped, unit="documents", target=">= 8")
    bins = {OURS: made.bins, "TRL bfd, batches of 1,000": len(batched), "TRL bfd, one batch": len(whole)}
    fills = {name: made.tokens / (count_of * CAPACITY) for name, count_of in bins.items()}
    report.notes.append("rows filled: " + ", ".join(f"{name} {fill:.3%}" for name, fill in fills.items()))
    report.figures["fill"] = {"bins": bins, "lower_bound": made.lower_bound, "tokens": made.tokens}


def at_scale(report: Report, *, quick: bool) -> None:
    """Seconds of every strategy on a million lengths (less with `quick`), and the fill of the default one."""
    lengths = lengths_of(100_000 if quick else 1_000_000)
    contestants = {str(s): (lambda s=s: plan(lengths, CAPACITY, s), float(len(lengths))) for s in Strategy}
    timings = alternate(contestants, rounds=3)
    made, timing = plan(lengths, CAPACITY), timings[str(Strategy.BEST_FIT)]
    report.measured(
        f"plan {len(lengths):,} documents", timing.median, "s", target="< 1", ours=f"{si(timing.rate)}/s",
        detail=f"{len(timing.seconds)} rounds, spread {timing.spread:.0%}",
    )  # fmt: skip
    over = 100 * (made.bins / made.lower_bound - 1)
    report.measured(
        "rows above the lower bound", over, "%", target="<= 0.1",
        detail=f"{made.bins:,} rows, no plan has fewer than {made.lower_bound:,}",
    )  # fmt: skip
    report.notes.append(
        f"seconds for {len(lengths):,} documents: "
        + ", ".join(f"{name} {one.median:.3f}" for name, one in timings.items())
    )
    report.figures["scale"] = {name: one.as_json() for name, one in timings.items()}


class Documents:
    """Tokens and labels of documents, as torchtune takes them: lists of Python integers."""

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Every third token is not trained."""
        labels = np.where(np.arange(len(ids)) % 3 == 0, IGNORED, ids)
        ends = offsets_of(lengths)
        self.rows = [
            {"tokens": ids[a:b].tolist(), "labels": labels[a:b].tolist()} for a, b in itertools.pairwise(ends.tolist())
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows)


def greedy_rows(
    ids: NDArray[np.int32], labels: NDArray[np.int32], lengths: NDArray[np.int64]
) -> tuple[PackedRows, NDArray[np.int64]]:
    """Rows in input order with labels, and the place of each token in its document."""
    made = plan(lengths, CAPACITY, Strategy.GREEDY)
    packed = packed_rows(made, [(ids, 0), (labels, IGNORED)], offsets_of(lengths), 0, made.bins)
    boundaries = Boundaries(starts=packed.starts, counts=packed.documents, lengths=packed.row_lengths)
    return packed, boundaries.segments(CAPACITY).position_ids


def against_torchtune(report: Report, *, quick: bool) -> None:
    """Rows with labels and positions; the same rows on both sides."""
    if missing("torchtune", "torchao"):
        report.notes.append("torchtune is not installed: not compared")
        return
    lengths = lengths_of(2_000 if quick else 20_000)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    labels = np.where(np.arange(len(ids)) % 3 == 0, IGNORED, ids).astype(np.int32)
    documents = Documents(ids, lengths)

    def check() -> str:
        packs = torchtune_packs(documents, CAPACITY)
        packed, positions = greedy_rows(ids, labels, lengths)
        real = np.arange(CAPACITY) < packed.row_lengths[:, None]
        require_equal("rows", packed.columns[0], np.stack([pack["tokens"].numpy() for pack in packs]))
        require_equal("labels", packed.columns[1], np.stack([pack["labels"].numpy() for pack in packs]))
        require_equal("positions", positions[real], np.stack([pack["input_pos"].numpy() for pack in packs])[real])
        return f"all {len(packs):,} rows equal: ids, labels, positions"

    work = float(len(lengths))
    found = compare(
        {
            OURS: (lambda: greedy_rows(ids, labels, lengths), work),
            "torchtune": (lambda: torchtune_packs(documents, CAPACITY), work),
        },
        ours=OURS, check=check, rounds=2 if quick else 3,
    )  # fmt: skip
    report.compared("rows / torchtune PackedDataset", found["torchtune"], unit="documents")


def on_real_conversations() -> None:
    """Strategies and overflow policies on the bundled conversations, with the Qwen3 tokenizer and template."""
    from chatmill.label.presets import find_policy
    from chatmill.pack.overflow import Overflow, apply_overflow
    from chatmill.read.conversations import read_conversations
    from chatmill.render.render import render
    from chatmill.tokenizer.load import load_tokenizer
    from tests.data.tokenizer_files import unpacked

    conversations = list(read_conversations(sorted(REAL.glob("*.jsonl.gz"))))
    tokens = render(conversations, "qwen3", load_tokenizer(unpacked("qwen3"))).tokens
    weights = find_policy("assistant").run_weights(tokens)
    print(f"{len(tokens):,} conversations, {len(tokens.ids):,} tokens, longest {tokens.lengths.max():,}")
    for capacity in (2048, 4096, 16384):
        print(f"\nrows of {capacity:,} tokens")
        print(
            f"  {'overflow':<20}{'over-long':>10}{'episodes':>10}{'lost trained':>14}{'lost other':>12}{'injected':>10}"
        )
        for policy in (Overflow.DROP, Overflow.CUT, Overflow.DROP_OLDEST_TURNS, Overflow.WINDOWS):
            result = apply_overflow(tokens, weights, capacity, policy)
            over_long = int(np.count_nonzero(tokens.lengths > capacity))
            episodes = len(result.tokens) - len(tokens) + over_long
            lost = tokens.run_lengths - result.kept_of_run
            injected = int(result.tokens.run_lengths[result.injected_runs].sum())
            numbers = (episodes, int(lost[weights > 0].sum()), int(lost[weights == 0].sum()), injected)
            columns = "".join(f"{n:>{w},}" for n, w in zip(numbers, (10, 14, 12, 10), strict=True))
            print(f"  {policy:<20}{over_long:>10,}{columns}")
        lengths = result.tokens.lengths
        print(f"  {'strategy (windows)':<20}{'rows':>10}{'bound':>10}{'fill':>14}")
        one_each = Plan(
            order=np.arange(len(lengths)), bin_offsets=np.arange(len(lengths) + 1), capacity=capacity,
            strategy=Strategy.GREEDY, tokens=int(lengths.sum()), lower_bound=0,
        )  # fmt: skip
        print(f"  {'(one per row)':<20}{one_each.bins:>10,}{'':>10}{one_each.fill:>14.3%}")
        for strategy in (Strategy.GREEDY, Strategy.FIRST_FIT, Strategy.BEST_FIT):
            made = plan(lengths, capacity, strategy)
            print(f"  {strategy:<20}{made.bins:>10,}{made.lower_bound:>10,}{made.fill:>14.3%}")


def measure(*, quick: bool) -> Report:
    """All of them."""
    report = Report()
    if missing("trl", "datasets"):
        report.notes.append("trl or datasets is not installed: not compared")
    else:
        against_trl(report, quick=quick)
    at_scale(report, quick=quick)
    against_torchtune(report, quick=quick)
    return report


if __name__ == "__main__":
    if "--real" in sys.argv:
        on_real_conversations()
    else:
        sys.exit(run_one("plan", str(__doc__), measure))
