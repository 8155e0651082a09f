"""What verify says of inputs, tokenizers and templates that changed, and of builds that go wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.core.tokens import Tokens
from chatmill.label.policy import Policy
from chatmill.prove.verify import verify
from chatmill.tokenizer.byte_level import ByteTokenizer
from tests.compiler.verify_sets import (
    build_into,
    files_named,
    records,
    small_recipe,
    write_lines,
    write_source,
)
from tests.data.tokenizer_files import unpacked


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    return write_source(fast_module)


def test_a_changed_input_is_named_and_a_missing_one_cannot_be_checked(fast: Path) -> None:
    source = fast / "chats.jsonl"
    write_lines(source, records("oasst_en100", 5))
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


OWN_TEMPLATE = """
from chatmill.core.conversation import Role
from chatmill.render.template import DOCUMENT, KINDS_OF, Template

class Own(Template):
    name = "own"
    control_tokens = ("<|bos|>", "<|eos|>")

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._bos, self._eos = self.literal("<|bos|>"), self.literal("<|eos|>")

    def emit(self, conversation, out):
        out.message(-1)
        for _ in range(BOS_COUNT):
            out.put(self._bos, DOCUMENT)
        COUNTED
        for index, message in enumerate(conversation.messages):
            kinds = KINDS_OF[message.role]
            out.message(index)
            out.text(message.role.value + ": ", kinds.header)
            out.text(message.content, kinds.content)
            out.put(self._eos, kinds.terminator)

    def emit_generation_prompt(self, conversation, out):
        out.text("assistant: ", KINDS_OF[Role.ASSISTANT].header)
"""
COUNTED = 'out.text(f"{len(conversation.messages)} messages ", DOCUMENT)'


def own_template(path: Path, bos: int, counted: str) -> Path:
    path.write_text(OWN_TEMPLATE.replace("BOS_COUNT", str(bos)).replace("COUNTED", counted or "pass"))
    return path


def test_a_template_of_ones_own_is_held_to_what_it_claims(fast: Path, source: Path) -> None:
    honest = own_template(fast / "honest.py", 1, "")
    folder = build_into(fast / "honest", small_recipe(source, template=str(honest)))
    report = verify(folder, deep=True, template=honest)
    assert report.passed
    assert report.counts["contexts_equal"] > 50
    assert not report.unchecked
    twice = own_template(fast / "twice.py", 2, "")
    report = verify(build_into(fast / "twice", small_recipe(source, template=str(twice))))
    assert report.counts["double_bos"] == report.counts["episodes"] == 40
    assert report.findings[0].message == "256: one BOS token follows another"
    liar = own_template(fast / "liar.py", 1, COUNTED)
    report = verify(build_into(fast / "liar", small_recipe(source, template=str(liar))), deep=True, template=liar)
    assert all("is not its generation prompt" in finding.message for finding in report.findings)
    assert report.differences > 40
    honest.write_text(honest.read_text().replace("assistant: ", "model: "))
    assert files_named(verify(folder, template=honest)) == {str(honest)}


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
