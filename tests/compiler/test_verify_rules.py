"""What verify says of inputs, tokenizers and templates that changed, and of builds that go wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler import chunk_job
from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.core.tokens import Tokens
from chatmill.label.policy import Policy
from chatmill.prove.columns import check_columns
from chatmill.prove.report import VerifyReport
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer.byte_level import ByteTokenizer
from tests.compiler.builds import write_jsonl
from tests.compiler.verify_sets import (
    build_into,
    files_named,
    records,
    small_recipe,
    write_source,
)
from tests.data.tokenizer_files import unpacked
from tests.load.sets import Item, write_set


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    return write_source(fast_module)


def test_a_changed_input_is_named_and_a_missing_one_cannot_be_checked(fast: Path) -> None:
    source = write_jsonl(fast / "chats.jsonl", records("oasst_en100", 5))
    folder = build_into(fast / "out", small_recipe(source))
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b"a", b"b", 1))
    report = verify(folder, deep=True)
    assert files_named(report) == {str(source)}
    assert "1 of 1 inputs have changed" in report.blocked
    source.write_bytes(whole[:-10])
    assert files_named(verify(folder, deep=True)) == {str(source)}
    source.unlink()
    report = verify(folder, deep=True)
    assert (report.exit_status, report.passed, report.differences) == (2, False, 0)
    assert str(source) in report.blocked
    assert verify(folder).exit_status == 0


def test_a_changed_tokenizer_file_is_named(fast: Path, source: Path) -> None:
    tokenizer = Path(shutil.copytree(unpacked("tiny_torchtitan"), fast / "tokenizer"))
    folder = build_into(fast / "out", small_recipe(source, tokenizer=str(tokenizer)))
    assert verify(folder, deep=True).passed
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    report = verify(folder, deep=True)
    assert files_named(report) == {str(file)}
    assert "tokenizer has changed since the build" in report.findings[0].message
    assert "not derived again" in report.blocked
    file.write_text("{")
    assert files_named(verify(folder)) == {str(file)}
    shutil.rmtree(tokenizer)
    assert verify(folder).passed
    assert any("is not here" in sentence for sentence in verify(folder).unchecked)
    assert verify(folder, deep=True).exit_status == 2


OWN_TEMPLATE = """{#-
chatmill: template
tokens: <|bos|> <|eos|>
stops: <|eos|>
bos: <|bos|>
-#}
{{- BOS -}}
{%- for message in messages -%}{{- message.role ~ ': ' ~ message.content ~ '<|eos|>' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant: ' -}}{% endif -%}
"""


def test_a_template_of_ones_own_is_a_file(fast: Path, source: Path) -> None:
    own = fast / "own.jinja"
    own.write_text(OWN_TEMPLATE.replace("BOS", "'<|bos|>'"))
    folder = build_into(fast / "own", small_recipe(source, template=str(own)))
    report = verify(folder, deep=True)
    assert report.passed
    assert report.counts["answers_proved"] > 50
    assert not report.unchecked
    twice = fast / "twice.jinja"
    twice.write_text(OWN_TEMPLATE.replace("BOS", "'<|bos|><|bos|>'"))
    report = verify(build_into(fast / "twice", small_recipe(source, template=str(twice))))
    assert report.counts["double_bos"] == report.counts["episodes"] == 40
    assert report.findings[0].message == "256: one BOS token follows another"
    own.write_text(own.read_text().replace("assistant: ", "model: "))
    assert files_named(verify(folder)) == {str(own)}


def _wrong_labels(monkeypatch: pytest.MonkeyPatch) -> str:
    real = Policy.run_weights

    def run_weights(policy: Policy, tokens: Tokens) -> Any:
        header = tokens.run_kinds == kind(RoleCode.ASSISTANT, Part.HEADER)
        return np.where(header, np.float32(1), real(policy, tokens))

    monkeypatch.setattr(Policy, "run_weights", run_weights)
    return "mask.bin"


def _wrong_ids(monkeypatch: pytest.MonkeyPatch) -> str:
    real = ByteTokenizer.encode_batch

    def encode_batch(tokenizer: ByteTokenizer, texts: list[str]) -> Any:
        ids, offsets = real(tokenizer, texts)
        return np.where(ids == ord("q"), ord("p"), ids), offsets

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    return "tokens.bin"


@pytest.mark.parametrize("mistake", [_wrong_labels, _wrong_ids])
def test_a_build_that_goes_wrong_is_caught(
    mistake: Callable[[pytest.MonkeyPatch], str], fast: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = mistake(monkeypatch)
    folder = build_into(fast / "out", small_recipe(source))
    monkeypatch.undo()
    assert verify(folder).passed
    report = verify(folder, deep=True)
    assert report.differences > 20
    assert {Path(finding.file).name for finding in report.findings if finding.token is not None} == {column}
    assert all(finding.record and finding.where for finding in report.findings if finding.token is not None)


BOS = 7


def test_an_episode_that_ends_with_bos_before_one_that_begins_with_it_is_no_double(tmp_path: Path) -> None:
    """GPT-2 has one token for both ends: only two of them in one episode are a mistake."""
    sound = [[BOS, 1, 2, BOS], [BOS, 3, BOS], [BOS]]
    folder = write_set(tmp_path / "sound", [Item(ids=ids, weights=[1] * len(ids)) for ids in sound])
    report = VerifyReport(directory=folder)
    check_columns(EpisodeDataset(folder), report, vocab_size=9, bos_id=BOS)
    assert (report.findings, report.counts["double_bos"], report.counts["episodes"]) == ([], 0, 3)
    doubled = [[BOS, 1, BOS], [BOS, BOS, 3, BOS], [BOS, 2, BOS, BOS]]
    folder = write_set(tmp_path / "doubled", [Item(ids=ids, weights=[1] * len(ids)) for ids in doubled])
    report = VerifyReport(directory=folder)
    check_columns(EpisodeDataset(folder), report, vocab_size=9, bos_id=BOS)
    assert report.counts["double_bos"] == 2
    assert [(finding.episode, finding.token) for finding in report.findings] == [(1, 1)]
    assert report.findings[0].message == "7: one BOS token follows another"


def test_episodes_that_no_input_gives_are_found(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that writes its last record three times stores more than its inputs give."""
    rows = records("oasst_en100", 12)
    write_jsonl(fast / "chats.jsonl", rows)
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
    write_jsonl(fast / "chats.jsonl", records("oasst_en100", 6))
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
