"""The planner against obvious sequential references, its guarantees and its errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, DataError
from chatmill.pack import bins
from chatmill.pack.plan import Plan, Strategy, plan


def reference(lengths: list[int], capacity: int, strategy: str) -> list[list[int]]:
    """One document after another, every bin looked at: slow and plainly right."""
    documents = list(range(len(lengths)))
    if strategy in ("best_fit", "first_fit"):
        documents.sort(key=lambda d: (-lengths[d], d))
    bins: list[list[int]] = []
    rooms: list[int] = []
    for document in documents:
        length = lengths[document]
        fitting = [b for b in range(len(bins)) if rooms[b] >= length]
        if strategy == "greedy":
            fitting = [b for b in fitting if b == len(bins) - 1]
        if not fitting:
            bins.append([])
            rooms.append(capacity)
            chosen = len(bins) - 1
        elif strategy == "best_fit":
            chosen = min(fitting, key=lambda b: (rooms[b], b))
        else:
            chosen = fitting[0]
        bins[chosen].append(document)
        rooms[chosen] -= length
    return bins


def bins_of(made: Plan) -> list[list[int]]:
    return [made.bin(b).tolist() for b in range(made.bins)]


def lognormal(count: int, capacity: int = 4096, seed: int = 0) -> np.ndarray:
    rng = np.random.RandomState(seed)
    return np.clip(np.exp(rng.normal(6.0, 1.0, count)).astype(np.int64), 1, capacity)


@st.composite
def planned_input(draw: st.DrawFn) -> tuple[list[int], int]:
    """Documents of few lengths, several of each, in any order: equal documents open equal bins."""
    capacity = draw(st.one_of(st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65]), st.integers(1, 200)))
    groups = draw(st.lists(st.tuples(st.integers(1, capacity), st.integers(1, 12)), max_size=12))
    return draw(st.permutations([length for length, count in groups for _ in range(count)])), capacity


@pytest.mark.parametrize("strategy", list(Strategy))
@settings(max_examples=250)
@given(planned_input())
@example(([3, 2, 3], 10))
@example(([6, 6, 6, 2, 2, 2, 1, 1, 1], 10))  # of equal bins some are filled, one in part, the rest not
@example(([], 5))
def test_same_bins_in_the_same_order_as_the_reference(strategy: Strategy, data: tuple[list[int], int]) -> None:
    lengths, capacity = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bins, "CHUNK", 7)  # a large plan is carried out in chunks
        made = plan(lengths, capacity, strategy)
    assert bins_of(made) == reference(lengths, capacity, strategy)
    assert sorted(made.order.tolist()) == list(range(len(lengths)))
    assert all(0 < size <= capacity for size in made.bin_lengths(lengths))
    assert made.tokens == sum(lengths)
    assert (len(made), len(made.order)) == (made.bins, len(lengths))
    assert made.lower_bound <= made.bins
    assert made.lower_bound >= -(-sum(lengths) // capacity)
    assert made.order.dtype == made.bin_offsets.dtype == np.int64


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("capacity", [255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_000_000, 2**31 - 1])
def test_equal_to_the_reference_on_many_documents(strategy: Strategy, capacity: int) -> None:
    many = np.clip(lognormal(1500, seed=capacity % 1000) // 4 + 1, 1, capacity)
    large = np.random.RandomState(capacity % 1000).randint(1, capacity, 300)
    lengths = np.concatenate(
        [large, many, [capacity, capacity - 1, 1, 1]] if capacity < 5000 else [large, [capacity, 1]]
    )
    made = plan(lengths, capacity, strategy)
    assert bins_of(made) == reference(lengths.tolist(), capacity, strategy)


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """The true optimum, over all subsets: (bins, least fill of the last) of each."""
    best = [(0, capacity)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)
    for chosen in range(1, 2 ** len(lengths)):
        for document, length in enumerate(lengths):
            if chosen >> document & 1:
                bins, used = best[chosen ^ 1 << document]
                step = (bins, used + length) if used + length <= capacity else (bins + 1, length)
                best[chosen] = min(best[chosen], step)
    return best[-1][0]


@settings(max_examples=80)
@given(st.integers(2, 30).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=8), st.just(c))))
def test_the_lower_bound_and_the_guarantee_against_the_true_optimum(data: tuple[list[int], int]) -> None:
    lengths, capacity = data
    optimum = fewest_bins(lengths, capacity)
    for strategy in (Strategy.BEST_FIT, Strategy.FIRST_FIT):
        made = plan(lengths, capacity, strategy)
        assert made.lower_bound <= optimum <= made.bins
        assert 9 * made.bins <= 11 * optimum + 6


def test_the_lower_bound_sees_more_than_the_sum_of_tokens() -> None:
    """In the second neither 4 fits next to a 7."""
    for lengths, bound in (([6] * 10, 10), ([7, 7, 4, 4], 3), ([7, 7, 3, 3], 2), ([5, 5, 5], 2)):
        assert plan(lengths, 10).lower_bound == bound


MEMORY = """
import resource, sys
import numpy as np
from chatmill.pack.plan import plan
rng = np.random.RandomState(1)
lengths = np.clip(np.exp(rng.normal(6.0, 1.0, int(sys.argv[2]))), 1, 4096).astype(np.int32)
if sys.argv[1] == "equal":
    lengths[:] = 1500
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = plan(lengths, 4096)
memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / len(lengths)
assert (np.bincount(made.order, minlength=len(lengths)) == 1).all()
assert made.bin_lengths(lengths).max() <= 4096
print(memory, made.bins / made.lower_bound, made.bins * 4096 / made.tokens)
"""


@pytest.mark.parametrize("count", [2_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("data", "waste"), [("lognormal", 1.001), ("equal", 1.37)])
def test_millions_of_documents_close_to_the_bound_in_bounded_memory(data: str, waste: float, count: int) -> None:
    """In less than half a second; `benchmarks.plan` measures it."""
    command = [sys.executable, "-c", MEMORY, data, str(count)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    bytes_per_document, over_the_bound, over_the_tokens = map(float, out)
    assert bytes_per_document < 60
    assert over_the_bound <= waste
    assert over_the_tokens < waste


@pytest.mark.parametrize(
    ("lengths", "capacity", "error", "says"),
    [
        ([3, 11, 12], 10, DataError, r"document 1 has length 11.*capacity of 10 \(2 such documents of 3\)"),
        ([3, 0], 10, DataError, "document 1 has length 0"),
        ([3, -2], 10, DataError, "document 1 has length -2"),
        ([3.0, 2.0], 10, DataError, "integers.*float64"),
        ([True], 10, DataError, "integers.*bool"),
        ([[1, 2]], 10, DataError, r"shape \(1, 2\)"),
        ([1], 0, ConfigError, "not 0"),
        ([1], 2.5, ConfigError, "not 2.5"),
        ([1], True, ConfigError, "not True"),
        ([1], 2**31, ConfigError, "2147483648"),
    ],
)
def test_errors_say_what_and_where(lengths: Any, capacity: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        plan(lengths, capacity)
    with pytest.raises(ConfigError, match="best_fit, first_fit, greedy"):
        plan(lengths, capacity, "bestfit")


def test_what_a_plan_reports() -> None:
    made = plan([6, 4, 9, 3], 10)
    assert bins_of(made) == [[2], [0, 1], [3]]
    assert made.fill == pytest.approx(22 / 30)
    assert made.bin_lengths([6, 4, 9, 3]).tolist() == [9, 10, 3]
    with pytest.raises(IndexError):
        made.bin(3)
    nothing = plan(np.empty(0), 8)
    assert (nothing.bins, len(nothing.order), nothing.tokens, nothing.lower_bound, nothing.fill) == (0, 0, 0, 0, 1.0)
