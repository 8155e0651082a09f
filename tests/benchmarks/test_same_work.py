"""The checks before a ratio can fail: each is shown a peer that does almost the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import compile as compiling
from benchmarks.builds import Bench, build, episodes, recipe_for, tokens_of
from benchmarks.compile import Recorder, against_gigatoken
from benchmarks.harness import Report, WorkDiffersError
from benchmarks.inputs import records, write_tiled
from benchmarks.loader import BATCH, HuggingFace, PlainLoop, same_batches, write_set
from benchmarks.peers import conversations_of
from benchmarks.plan import check_same_work, greedy_rows, lengths_of, ours_pack
from benchmarks.render import newlines_more
from chatmill.core.tokens import offsets_of
from chatmill.label.presets import find_policy
from chatmill.render.render import render


def packed_by_somebody(lengths: np.ndarray, *, lost: int = 0, repeated: bool = False) -> Any:
    """Rows as TRL stores them: one document a row, every token in place, but for what is asked."""
    import datasets

    ends = offsets_of(lengths)
    rows = [list(range(a, b)) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    if lost:
        rows[3] = rows[3][lost:]
    if repeated:
        rows[4] = rows[5]
    return datasets.Dataset.from_dict({"input_ids": rows, "seq_lengths": [[len(row)] for row in rows]})


def test_a_packer_must_hold_every_token_once_and_every_document_whole() -> None:
    lengths = lengths_of(30)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    packed = ours_pack(ids, lengths)
    check_same_work(lengths, packed, packed_by_somebody(lengths))
    with pytest.raises(WorkDiffersError, match="TRL"):
        check_same_work(lengths, packed, packed_by_somebody(lengths, lost=1))
    with pytest.raises(WorkDiffersError, match="TRL"):
        check_same_work(lengths, packed, packed_by_somebody(lengths, repeated=True))


def test_rows_in_input_order_have_positions_that_begin_again() -> None:
    lengths = lengths_of(40)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    packed, positions = greedy_rows(ids, ids + 1, lengths)
    real = np.arange(packed.columns[0].shape[1]) < packed.row_lengths[:, None]
    assert np.array_equal(packed.columns[0][real], ids)
    assert np.array_equal(packed.columns[1][real], ids + 1)
    assert np.array_equal(positions[real], np.concatenate([np.arange(n) for n in lengths]))


class Wrong:
    """A loader whose mask is wrong at one place of its second batch."""

    def __init__(self, directory: Path) -> None:
        self.plain, self.step = PlainLoop(directory), 0

    def get_batch(self) -> tuple[torch.Tensor, ...]:
        x, y, mask = self.plain.get_batch()
        self.step += 1
        if self.step == 2:
            mask[7, 5] = 1 - mask[7, 5]
        return x, y, mask


def test_loaders_must_give_the_same_batches(tmp_path: Path) -> None:
    write_set(tmp_path, 3 * BATCH + 5)
    peers = {"loop": PlainLoop(tmp_path), "DataLoader": HuggingFace(tmp_path, 0)}
    assert "3 batches equal" in same_batches(tmp_path, peers, 3)
    with pytest.raises(WorkDiffersError, match="wrong: mask of batch 1 differs"):
        same_batches(tmp_path, {"wrong": Wrong(tmp_path)}, 3)


def test_trl_trains_the_newline_after_a_turn_and_nothing_else_more(
    tmp_path: Path, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiled(tmp_path / "chats.jsonl", 30_000, originals=records()[::500])
    tokens = render(conversations_of([path]), "qwen3_training", qwen3).tokens
    monkeypatch.setattr("benchmarks.render.load_tokenizer", lambda _: qwen3)
    trained = tokens.per_token(find_policy("trl").run_weights(tokens))
    more = newlines_more(tokens, trained)
    assert more > 20
    everything = tokens.per_token(find_policy("all").run_weights(tokens))
    with pytest.raises(WorkDiffersError, match="newline"):
        newlines_more(tokens, everything)
    trained[np.flatnonzero(tokens.ids == qwen3.control("<|im_end|>"))[-1] + 1] = 0
    with pytest.raises(WorkDiffersError, match=f"{more - 1} newlines"):
        newlines_more(tokens, trained)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiled(tmp_path_factory.mktemp("chats") / "chats.jsonl", 300_000, originals=records()[::40])


def test_gigatoken_must_give_the_ids_of_the_build(
    chats: Path, tmp_path: Path, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "load_tokenizer", lambda _: qwen3)
    report = Report()
    against_gigatoken(report, [chats], tmp_path)
    assert [row.target for row in report.rows] == ["<= 1.8"]
    assert report.rows[0].value > 1
    assert "pieces equal (" in report.rows[0].detail
    monkeypatch.setattr(Recorder, "encode_batch", lambda self, texts: self.backend.encode_batch(texts))
    with pytest.raises(WorkDiffersError, match=r"0 of .* tokens came out of the recorded calls"):
        against_gigatoken(Report(), [chats], tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "load_tokenizer", lambda _: qwen3)
    original = Recorder.encode_batch

    def changed(self: Recorder, texts: Any) -> Any:
        made = original(self, texts)
        ids = self.calls[-1].ids.copy()
        ids[-1] += 1
        self.calls[-1] = replace(self.calls[-1], ids=ids)
        return made

    monkeypatch.setattr(Recorder, "encode_batch", changed)
    with pytest.raises(WorkDiffersError, match="ids of the pieces: 1 of"):
        against_gigatoken(Report(), [chats], tmp_path)


def test_chunks_and_whole_builds_make_the_same_tokens(chats: Path, tmp_path: Path) -> None:
    recipe = recipe_for([chats])
    bench = Bench.of(recipe, tmp_path / "bench", shard_bytes=100_000)
    assert len(bench.jobs) >= 3
    manifest = build(recipe, tmp_path / "built", 1)
    assert bench.compile_all() == tokens_of(manifest) > 10_000
    records_read = sum(piece.range.count for job in bench.jobs for piece in job.pieces)
    stored = episodes(tmp_path / "built", 1, records_read - 1)
    assert len(stored.lengths) == records_read - 1
    assert len(stored.ids) == len(stored.weights) == stored.lengths.sum() < tokens_of(manifest)
