"""The checks before a ratio can fail: each is shown a peer that does almost the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import compile as compiling
from benchmarks.compile import Recorder, against_gigatoken
from benchmarks.harness import Report, WorkDiffersError
from benchmarks.inputs import records, write_tiled
from benchmarks.loader import BATCH, HuggingFace, PlainLoop, same_batches, write_set
from benchmarks.peers import conversations_of
from benchmarks.plan import check_same_work, lengths_of, ours_pack
from benchmarks.render import newlines_more
from chatmill.core.tokens import offsets_of
from chatmill.label.presets import find_policy
from chatmill.render.render import render


def test_a_packer_must_hold_every_token_once_and_every_document_whole() -> None:
    """Rows as TRL stores them: one document a row."""
    import datasets

    lengths = lengths_of(30)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    packed = ours_pack(ids, lengths)
    rows = [part.tolist() for part in np.split(ids, offsets_of(lengths)[1:-1])]
    lost, repeated = ([*rows[:3], row, *rows[4:]] for row in (rows[3][1:], rows[5]))
    sets = [
        datasets.Dataset.from_dict({"input_ids": one, "seq_lengths": [[len(row)] for row in one]})
        for one in (rows, lost, repeated)
    ]
    check_same_work(lengths, packed, sets[0])
    for theirs in sets[1:]:
        with pytest.raises(WorkDiffersError, match="TRL"):
            check_same_work(lengths, packed, theirs)


class Wrong(PlainLoop):
    """A loader whose mask is wrong at one place of its second batch."""

    steps = 0

    def get_batch(self) -> tuple[torch.Tensor, ...]:
        x, y, mask = super().get_batch()
        self.steps += 1
        mask[7, 5] += self.steps == 2
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
    with pytest.raises(WorkDiffersError, match="newline"):
        newlines_more(tokens, tokens.per_token(find_policy("all").run_weights(tokens)))
    trained[np.flatnonzero(tokens.ids == qwen3.control("<|im_end|>"))[-1] + 1] = 0
    with pytest.raises(WorkDiffersError, match=f"{more - 1} newlines"):
        newlines_more(tokens, trained)


def test_gigatoken_must_give_the_ids_of_the_build(tmp_path: Path, qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = write_tiled(tmp_path / "chats.jsonl", 300_000, originals=records()[::40])
    monkeypatch.setattr(compiling, "load_tokenizer", lambda _: qwen3)
    report = Report()
    against_gigatoken(report, [chats], tmp_path)
    assert [row.target for row in report.rows] == ["<= 1.8", ""]
    assert report.rows[0].value > 1
    assert "pieces equal (" in report.rows[0].detail
    original = Recorder.encode_batch

    def changed(self: Recorder, texts: Any) -> Any:
        made = original(self, texts)
        last = self.calls[-1]
        self.calls[-1] = replace(last, ids=last.ids + (np.arange(len(last.ids)) == len(last.ids) - 1))
        return made

    for encode, says in (
        (lambda self, texts: self.backend.encode_batch(texts), r"0 of .* tokens came out of the recorded calls"),
        (changed, "ids of the pieces: 1 of"),
    ):
        monkeypatch.setattr(Recorder, "encode_batch", encode)
        with pytest.raises(WorkDiffersError, match=says):
            against_gigatoken(Report(), [chats], tmp_path)
