"""Exports to Megatron Core's indexed datasets: every value where spec 5 wants it, and what is lost is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.harmony_ids import EOD
from chatmill.core.kinds import MARK, Part, RoleCode, kind, role_of
from chatmill.core.tokens import offsets_of
from chatmill.export.export import export_dataset
from chatmill.export.megatron import spans_of
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import find_kd_root, synth_kd_blend
from chatmill.store.kd_shard import KDShard
from chatmill.store.split import Documents
from tests.conftest import DATA
from tests.load.sets import state_rows


def obvious_spans(kinds: list[int] | None, weights: list[float]) -> list[int]:
    """The span of each token of one document, by looking at one token after the other."""
    spans = []
    for place, weight in enumerate(weights):
        if not weight:
            spans.append(0)
        elif kinds is None or role_of(kinds[place]) is not RoleCode.ASSISTANT:
            spans.append(2)
        else:
            opened = place
            while opened < len(kinds) and kinds[opened] == kind(RoleCode.ASSISTANT, Part.HEADER):
                opened += 1
            is_reasoning = opened < len(kinds) and kinds[opened] & ~MARK == kind(RoleCode.ASSISTANT, Part.REASONING)
            spans.append(1 if is_reasoning else 2)
    return spans


@settings(max_examples=150)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(
                    [kind(role, part) for role in (RoleCode.USER, RoleCode.ASSISTANT) for part in Part][1:]
                ),
                st.sampled_from([0, 1]),
            ),
            min_size=1,
            max_size=9,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_spans_equal_a_walk_over_single_tokens(documents: list[list[tuple[int, int]]]) -> None:
    kinds = np.array([k for document in documents for k, _ in document], dtype=np.uint8)
    weights = np.array([w for document in documents for _, w in document], dtype=np.uint8)
    offsets = offsets_of(np.array([len(document) for document in documents]))
    some = Documents(ids=np.zeros(len(kinds), np.uint32), offsets=offsets, weights=weights, kinds=kinds)
    wanted = [span for d in documents for span in obvious_spans([k for k, _ in d], [w for _, w in d])]
    assert spans_of(some).tolist() == wanted
    bare = Documents(ids=some.ids, offsets=offsets, weights=weights, kinds=None)
    assert spans_of(bare).tolist() == (2 * weights).tolist()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real Harmony conversations: analysis, final, wrappers trained."""
    out = tmp_path_factory.mktemp("built") / "harmony"
    recipe: dict[str, Any] = {
        "sources": [{"path": str(DATA / "synth_harmony" / "synth_harmony_shard_00.parquet"), "max_records": 60}],
        "tokenizer": "o200k",
        "template": "harmony",
        "policy": "synth_kd",
        "split": {"val_fraction": 0.2},
    }
    run_build(recipe, out, workers=0)
    return out


def test_every_value_of_a_real_dataset(built: Path, tmp_path: Path) -> None:
    result = export_dataset(built, "megatron", tmp_path / "out", eod_id=EOD)
    root = find_kd_root(tmp_path / "out")
    assert list(root.splits) == ["train", "val"]
    seen = set()
    for split, prefixes in root.splits.items():
        (prefix,) = prefixes
        shard, episodes = KDShard.open(prefix), EpisodeDataset(built, split)
        assert len(shard) == len(episodes) > 3
        assert shard.tokens.dtype == np.int32
        for number, episode in enumerate(episodes):
            ids, mask, span = shard.document(number)
            assert episode.weights is not None
            spans = [*obvious_spans(episode.kinds.tolist(), episode.weights.tolist()), 0]  # type: ignore[union-attr]
            assert ids.tolist() == [*episode.ids.tolist(), EOD]
            assert span.tolist() == [*spans[1:], 0]
            assert mask.tolist() == [int(value > 0) for value in span]
            seen |= set(span.tolist())
        assert result.splits[split]["documents"] == len(shard)
    assert seen == {0, 1, 2}
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert manifest["options"]["eod_id"] == EOD
    assert set(manifest["files"]) == {
        f"{split}/shard_00_{column}.{kind}"
        for split in root.splits
        for column in ("tokens", "lossmask", "span")
        for kind in ("bin", "idx")
    }
    assert [sentence.split(":")[0] for sentence in result.not_held] == [
        "record_id, source, turns",
        "kinds are not kept",
    ]
    assert synth_kd_blend(tmp_path / "out", "val").weights[0] == result.splits["val"]["tokens"] + len(shard)


def write(
    folder: Path, documents: list[tuple[list[int], list[float] | None]], kinds: list[list[int]] | None = None
) -> None:
    with EpisodeWriter(folder, "train") as writer:
        for number, (ids, weights) in enumerate(documents):
            writer.append(ids, weights, kinds=None if kinds is None else kinds[number])


def test_what_cannot_be_held_is_said(tmp_path: Path) -> None:
    write(tmp_path / "set", [([5, 6, 7, 9], [1, 0.5, 0, 1]), ([8, 9], [0, 0.25])])
    result = export_dataset(tmp_path / "set", "megatron", eod_id=9)
    assert result.directory == tmp_path / "set-megatron"
    shard = KDShard.open(result.directory / "train" / "shard_00_tokens")
    assert shard.document(0)[0].tolist() == [5, 6, 7, 9]  # ends in the EOD already
    assert shard.document(1)[0].tolist() == [8, 9]
    assert shard.document(0)[1].tolist() == [1, 0, 1, 0]
    assert shard.document(0)[2].tolist() == [2, 0, 2, 0]
    said = " ".join(result.not_held)
    assert "2 tokens have another weight than 0 and 1" in said
    assert "1 trained tokens are the first of a document" in said
    assert "every trained token has the span 2" in said
    assert "--eod-id" not in said


def test_without_masks_and_without_an_end(tmp_path: Path) -> None:
    write(tmp_path / "set", [([5, 6, 7], None)])
    result = export_dataset(tmp_path / "set", "megatron", tmp_path / "out")
    shard = KDShard.open(tmp_path / "out" / "train" / "shard_00_tokens")
    assert [column.tolist() for column in shard.document(0)] == [[5, 6, 7], [1, 1, 0], [2, 2, 0]]
    said = " ".join(result.not_held)
    assert "stores no masks" in said
    assert "--eod-id" in said


@pytest.mark.parametrize("shard_tokens", [1, 7, 12, 10_000])
def test_shards_hold_whole_documents_in_order(tmp_path: Path, shard_tokens: int) -> None:
    documents = [([10 * n + i for i in range(1 + n % 5)], [0.0] * (1 + n % 5)) for n in range(1, 20)]
    write(tmp_path / "set", documents)
    export_dataset(tmp_path / "set", "megatron", tmp_path / "out", shard_tokens=shard_tokens)
    prefixes = synth_kd_blend(tmp_path / "out").prefixes
    shards = [KDShard.open(prefix) for prefix in prefixes]
    back = [shard.document(n)[0].tolist() for shard in shards for n in range(len(shard))]
    assert back == [ids for ids, _ in documents]
    sizes = [shard.tokens.values for shard in shards]
    assert all(size <= shard_tokens or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    for (one, size), after in zip(zip(shards, sizes, strict=True), shards[1:], strict=False):
        assert size + int(after.tokens.lengths[0]) > shard_tokens, one.prefix
    assert len(shards) == {1: 19, 10_000: 1}.get(shard_tokens, len(shards)) > 0


def test_a_packed_dataset_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "rows")
    for split in ("train", "val"):
        state_rows(tmp_path / "rows" / split, 8000)
    result = export_dataset(tmp_path / "rows", "megatron", tmp_path / "one", eod_id=EOD)
    assert "Megatron packs again" in result.not_held[0]
    export_dataset(built, "megatron", tmp_path / "two", eod_id=EOD)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("shard_*"))
    assert len(files) == 12
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
