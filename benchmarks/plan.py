"""The planner and the row assembly against TRL's best-fit-decreasing packing, on the same documents.

    python -m benchmarks.plan [--quick] [--json]    against TRL, alternating
    python -m benchmarks.plan --real                every strategy and overflow policy on the real conversations

200,000 documents with lognormal lengths (median 403 tokens), rows of 4,096 tokens. TRL packs inside the batches of
`Dataset.map`, 1,000 documents each by default: it runs with these, and with all documents in one batch, which fills
rows as well as a global plan does. Its planner cannot be called alone, so for the plan its documents are as cheap as
can be (one byte a token). Before anything is timed, both sides must hold every token exactly once and every document
whole.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.harness import Timing, alternate, dump, options, print_timings
from chatmill.core.tokens import offsets_of
from chatmill.pack.assemble import PackedRows, assemble_rows, iter_rows
from chatmill.pack.plan import Plan, Strategy, plan

CAPACITY = 4096
OURS = "chatmill"
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


def ours_pack(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> PackedRows:
    """Plan and rows, from lengths and flat ids."""
    return assemble_rows(plan(lengths, CAPACITY), ids, offsets_of(lengths), 0)


def ours_stream(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> int:
    """The same rows in groups of 512, as a writer takes them: memory is used again instead of fetched anew."""
    groups = iter_rows(plan(lengths, CAPACITY), ids, offsets_of(lengths), 0, rows_at_a_time=512)
    return sum(len(group) for group in groups)


def check_same_work(lengths: NDArray[np.int64], packed: PackedRows, theirs: Any) -> None:
    """Every token once and every document whole, on both sides (ids count up through all documents)."""
    offsets, total = offsets_of(lengths), int(lengths.sum())
    real = np.arange(CAPACITY) < packed.row_lengths[:, None]
    sides = {OURS: (packed.ids[real], np.diff(np.append(_flat_starts(packed), total)))}
    table = theirs.with_format("arrow")[:]
    ids, pieces = (table[name].combine_chunks() for name in ("input_ids", "seq_lengths"))
    sides["TRL"] = (ids.flatten().to_numpy(), pieces.flatten().to_numpy())
    for name, (tokens, documents) in sides.items():
        starts = tokens[offsets_of(documents)[:-1]]
        assert len(tokens) == total, f"{name} holds {len(tokens)} of {total} tokens"
        assert np.array_equal(np.sort(starts), offsets[:-1]), f"{name} does not hold every document once"
        assert np.array_equal(np.sort(tokens), np.arange(total)), f"{name} does not hold every token once"


def _flat_starts(packed: PackedRows) -> NDArray[np.int64]:
    """Document starts, counted over all rows without padding."""
    before = offsets_of(packed.row_lengths)[:-1]
    return packed.start_values + np.repeat(before, np.diff(packed.start_offsets))


def against_trl(*, quick: bool) -> dict[str, Any]:
    """Timings of the plan alone and of plan + rows, and the fill of each side."""
    import datasets

    datasets.disable_progress_bars()
    lengths = lengths_of(20_000 if quick else 200_000)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    wide, narrow = dataset_of(lengths, wide=True), dataset_of(lengths, wide=False)
    count, rounds = len(lengths), 2 if quick else 5
    batched, whole = trl_pack(wide, 1000), trl_pack(wide, count)
    made = plan(lengths, CAPACITY)
    assert ours_stream(ids, lengths) == made.bins
    check_same_work(lengths, ours_pack(ids, lengths), batched)
    check_same_work(lengths, ours_pack(ids, lengths), whole)
    planned = alternate(
        {
            OURS: (lambda: plan(lengths, CAPACITY), count),
            "TRL bfd, batches of 1,000": (lambda: trl_pack(narrow, 1000), count),
            "TRL bfd, one batch": (lambda: trl_pack(narrow, count), count),
        },
        rounds=rounds,
    )
    rows = alternate(
        {
            OURS: (lambda: ours_pack(ids, lengths), count),
            "chatmill, rows in groups": (lambda: ours_stream(ids, lengths), count),
            "TRL bfd, batches of 1,000": (lambda: trl_pack(wide, 1000), count),
            "TRL bfd, one batch": (lambda: trl_pack(wide, count), count),
        },
        rounds=rounds,
    )
    return {
        "documents": count,
        "plan": planned,
        "rows": rows,
        "bins": {OURS: made.bins, "TRL bfd, batches of 1,000": len(batched), "TRL bfd, one batch": len(whole)},
        "lower_bound": made.lower_bound,
        "tokens": made.tokens,
    }


def at_scale(*, quick: bool) -> dict[str, Timing]:
    """Seconds of every strategy on a million lengths (less with `quick`)."""
    lengths = lengths_of(100_000 if quick else 1_000_000)
    contestants = {str(s): (lambda s=s: plan(lengths, CAPACITY, s), float(len(lengths))) for s in Strategy}
    return alternate(contestants, rounds=3)


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
            report = result.report
            numbers = (report.episodes, report.lost_trained, report.lost_untrained, report.injected)
            columns = "".join(f"{n:>{w},}" for n, w in zip(numbers, (10, 14, 12, 10), strict=True))
            print(f"  {policy:<20}{report.over_long:>10,}{columns}")
        lengths = result.tokens.lengths
        print(f"  {'strategy (windows)':<20}{'rows':>10}{'bound':>10}{'fill':>14}")
        one_each = Plan(
            order=np.arange(len(lengths)), bin_offsets=np.arange(len(lengths) + 1), capacity=capacity,
            strategy=Strategy.GREEDY, tokens=int(lengths.sum()), lower_bound=0,
        )  # fmt: skip
        print(f"  {'(one per row)':<20}{one_each.bins:>10,}{'':>10}{one_each.fill:>14.3%}")
        for strategy in (Strategy.GREEDY, Strategy.IN_ORDER, Strategy.FIRST_FIT, Strategy.BEST_FIT):
            made = plan(lengths, capacity, strategy)
            print(f"  {strategy:<20}{made.bins:>10,}{made.lower_bound:>10,}{made.fill:>14.3%}")


def main(argv: list[str] | None = None) -> None:
    """Run and print."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="the real conversations, without TRL")
    chosen = parser.parse_args(argv)
    if chosen.real:
        on_real_conversations()
        return
    found, scale = against_trl(quick=chosen.quick), at_scale(quick=chosen.quick)
    if chosen.json:
        for name in ("plan", "rows"):
            found[name] = {who: timing.as_json() for who, timing in found[name].items()}
        dump("plan", **found, scale={who: timing.as_json() for who, timing in scale.items()})
        return
    print_timings(f"plan of {found['documents']:,} documents", found["plan"], unit="documents", ours=OURS)
    print_timings("plan and assembled rows", found["rows"], unit="documents", ours=OURS)
    print(f"rows of {CAPACITY:,} (lower bound {found['lower_bound']:,})")
    for who, bins in found["bins"].items():
        print(f"  {who:<34}{bins:>14,}{found['tokens'] / (bins * CAPACITY):>12.3%} full")
    print_timings("strategies on more lengths", scale, unit="documents", ours=str(Strategy.BEST_FIT))


if __name__ == "__main__":
    main(sys.argv[1:])
