"""`verify` at the borders: between two episodes, after the last one, and at the last question of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler import chunk_job
from chatmill.core.kinds import RoleCode
from chatmill.prove.columns import ColumnCheck, open_split
from chatmill.prove.report import VerifyReport
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.verify_sets import build_into, records, small_recipe, write_lines
from tests.load.sets import Item, write_set

BOS = 7


def test_an_episode_that_ends_with_bos_before_one_that_begins_with_it_is_no_double(tmp_path: Path) -> None:
    """GPT-2 has one token for both ends: only two of them in one episode are a mistake."""
    sound = [[BOS, 1, 2, BOS], [BOS, 3, BOS], [BOS]]
    folder = write_set(tmp_path / "sound", [Item(ids=ids, weights=[1] * len(ids)) for ids in sound])
    report = VerifyReport(directory=folder)
    ColumnCheck(report, vocab_size=9, bos_id=BOS).check(open_split(folder, "train"), "train")
    assert (report.findings, report.counts["double_bos"], report.counts["episodes"]) == ([], 0, 3)
    doubled = [[BOS, 1, BOS], [BOS, BOS, 3, BOS], [BOS, 2, BOS, BOS]]
    folder = write_set(tmp_path / "doubled", [Item(ids=ids, weights=[1] * len(ids)) for ids in doubled])
    report = VerifyReport(directory=folder)
    ColumnCheck(report, vocab_size=9, bos_id=BOS).check(open_split(folder, "train"), "train")
    assert report.counts["double_bos"] == 2
    assert [(finding.episode, finding.token) for finding in report.findings] == [(1, 1)]
    assert report.findings[0].message == "7: one BOS token follows another"


def test_episodes_that_no_input_gives_are_found(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that writes its last record three times stores more than its inputs give."""
    rows = records("oasst_en100", 12)
    write_lines(fast / "chats.jsonl", rows)
    more: dict[str, Any] = {"packing": {"max_length": 6000, "overflow": "cut"}}
    more["sources"] = [{"path": str(fast / "chats.jsonl"), "weight": 1.000001}]  # not 1: copies are counted
    with monkeypatch.context() as patch:
        patch.setattr(chunk_job, "copies_of", lambda key, weight: 3 if key == rows[-1]["id"] else 1)
        folder = build_into(fast / "out", small_recipe(fast / "chats.jsonl", **more))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["splits"]["train"]["episodes"] == 14
    assert verify(folder).passed
    found = [finding for finding in verify(folder, deep=True).findings if "its ledger says" not in finding.message]
    surplus = "has 2 episodes more than its input gives, from 12 on"
    assert [(finding.file, finding.message) for finding in found] == [("train/shard_00001", surplus)]


def test_the_last_question_is_not_trained_on_either_path(fast: Path) -> None:
    """A policy that trains questions too, but only after the last of them: build and slow derivation agree."""
    write_lines(fast / "chats.jsonl", records("oasst_en100", 6))
    parts = ("header", "content", "terminator", "separator")
    weights = {f"{role}.{part}": 1 for role in ("user", "assistant") for part in parts}
    (fast / "late.json").write_text(json.dumps({"weights": weights, "scope": "last_turn"}))
    folder = build_into(fast / "out", small_recipe(fast / "chats.jsonl", policy=str(fast / "late.json")))
    report = verify(folder, deep=True)
    assert [str(finding) for finding in report.findings] == []
    assert report.counts["records_derived"] == 6
    for episode in EpisodeDataset(folder):
        assert episode.weights is not None
        assert episode.kinds is not None
        assert set(np.unique(episode.kinds[episode.weights > 0] // 8).tolist()) == {RoleCode.ASSISTANT}
