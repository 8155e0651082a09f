"""Numbers about a dataset: counted in runs and batches, equal to counting token by token."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import KINDS, RoleCode, kind_name, role_of
from chatmill.core.ledger import LEFT_OUT
from chatmill.look.counting import MOST_TURNS, SplitStats, TokenCounts, count_tokens
from chatmill.look.dataset import open_for_looking
from chatmill.look.splits import LookSplit, TokenBatch
from chatmill.look.stats import dataset_stats, doubling_bins, split_stats
from chatmill.store.episode_writer import EpisodeWriter
from tests.look.sets import folder, records


def stats_of(split: LookSplit) -> SplitStats:
    return split_stats(split, count_tokens(split))


DOCUMENT = st.lists(st.tuples(st.integers(0, KINDS - 1), st.booleans()), max_size=12)


@settings(max_examples=60)
@given(st.lists(DOCUMENT, min_size=1, max_size=6))
def test_batches_of_any_documents(documents: list[list[tuple[int, bool]]]) -> None:
    flat = [token for document in documents for token in document]
    batch = TokenBatch(
        items=np.arange(len(documents)),
        offsets=np.cumsum([0, *map(len, documents)]),
        ids=np.zeros(len(flat), dtype=np.uint32),
        weights=np.array([trained for _, trained in flat], dtype=np.uint8),
        kinds=np.array([kind for kind, _ in flat], dtype=np.uint8),
    )
    counts = TokenCounts(len(documents))
    counts.add(batch)
    kinds: Counter[Any] = Counter()
    turns: Counter[Any] = Counter()
    for document in documents:
        turn, before = 0, None
        for kind, _ in document:
            role = role_of(kind)
            turn += role is RoleCode.USER and before is not RoleCode.USER
            before = role
            kinds[kind] += 1
            turns[turn] += 1
    assert {k: n for k, n in enumerate(counts.kinds[:, 0].tolist()) if n} == dict(kinds)
    assert {k: n for k, n in enumerate(counts.turns[:, 0].tolist()) if n} == dict(turns)
    targets = Counter(kind for kind, trained in flat if trained)
    assert {k: n for k, n in enumerate(counts.kinds[:, 1].tolist()) if n} == dict(targets)
    assert counts.trained.tolist() == [sum(trained for _, trained in document) for document in documents]


def test_stats_add_up() -> None:
    dataset = open_for_looking(folder() / "episodes")
    progress: list[tuple[int, int]] = []
    stats = dataset_stats(dataset, None, lambda done, total: progress.append((done, total)))
    assert [split.name for split in stats.splits] == ["train", "val"]
    assert progress[-1] == (progress[-1][1], sum(split.tokens for split in stats.splits))
    for split in stats.splits:
        for shares in (split.roles, split.kinds, split.turns, split.sources):
            assert sum(one.tokens for one in shares) == split.tokens
            assert sum(one.trained for one in shares) == split.trained
        assert sum(one.items or 0 for one in split.sources) == split.items
        for bins, count in ((split.length_bins, split.documents), (split.trained_bins, split.items)):
            assert sum(one.count for one in bins) == count
        assert {one.name: one.trained for one in split.roles}["user"] == 0
    assert dataset.ledger is not None
    fates = dataset.ledger.fates()
    assert fates["trained"] == sum(split.trained for split in stats.splits)
    assert fates["trained"] + fates["context"] == sum(split.tokens for split in stats.splits)
    assert dataset.ledger.reasons(*LEFT_OUT) == {"unknown_role": 1}
    assert dataset.ledger.total_notes("episodes") == len(records()) - 1
    made = stats.as_json()
    assert made["ledger"]["tokens"] == fates
    assert made["splits"]["train"]["roles"][0]["share"] == stats.splits[0].roles[0].share


def test_rows_have_padding_and_distillation_sets_have_spans() -> None:
    stats = stats_of(open_for_looking(folder() / "rows").split("train"))
    assert (stats.capacity, stats.item) == (1024, "row")
    assert stats.padding == 1024 * stats.items - stats.tokens > 0
    assert sum(one.count for one in stats.fill_bins) == sum(one.count for one in stats.documents_bins) == stats.items
    assert stats.fill["mean"] == pytest.approx(stats.tokens / (1024 * stats.items))
    stats = stats_of(open_for_looking(folder() / "kd").split("train"))
    context, analysis, final = stats.spans
    assert [one.name for one in stats.spans] == ["context", "analysis", "final"]
    assert (context.trained, analysis.trained + final.trained) == (0, stats.trained)
    assert stats.trained > 0
    assert stats.roles == stats.turns == ()


def test_many_turns_are_counted_together(tmp_path: Path) -> None:
    kinds = [26, 34] * (MOST_TURNS + 5)
    with EpisodeWriter(tmp_path / "set", "train") as writer:
        writer.append(list(range(len(kinds))), [0, 1] * (len(kinds) // 2), kinds=kinds)
    stats = stats_of(open_for_looking(tmp_path / "set").split())
    assert len(stats.turns) == MOST_TURNS
    assert (stats.turns[-1].name, stats.turns[-1].tokens) == ("64 and later", 12)
    assert [kind_name(26), kind_name(34)] == [one.name for one in stats.kinds]


@given(st.lists(st.integers(0, 5000), max_size=40), st.sampled_from([1, 2]))
def test_doublings(values: list[int], parts: int) -> None:
    bins = doubling_bins(np.array(values, dtype=np.int64), parts)
    assert sum(one.count for one in bins) == len(values)
    for one in bins:
        assert one.count == sum(one.low <= value < one.high for value in values)
    assert all(a.high == b.low for a, b in pairwise(bins))
