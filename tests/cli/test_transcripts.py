"""The command `chatmill transcripts`: what it writes, what it reports, and that a failed run leaves nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from chatmill.cli import transcripts
from chatmill.errors import DataError, RecordError
from chatmill.read.transcripts import read_transcripts
from chatmill.systems.post_training import MARKERS, conversation_to_transcript
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.chats import chat_record
from tests.cli.run import invoke
from tests.compiler.builds import write_jsonl

CONVERSATIONS = Path(__file__).parent.parent / "data" / "conversations"

run = partial(invoke, "transcripts")


def exchange(*contents: str, **fields: Any) -> dict[str, Any]:
    """A record in which user and assistant take turns."""
    return chat_record(*zip(cycle(("user", "assistant")), contents, strict=False), **fields)


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return lambda *records: write_jsonl(tmp_path / "in.jsonl", list(records))


def test_lines_and_counts(save: Save, tmp_path: Path) -> None:
    path = save(
        exchange("hi", "yo"),
        exchange("a" * 20, "b"),
        exchange("a", "b", "c" * 20, "d"),
        exchange("a", "b", "c"),
        exchange("only a question"),
        exchange("a", "say <|END|>", id="r6"),
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "é", "reasoning_content": "r"},
            ]
        },
    )
    out = tmp_path / "out.jsonl"
    result = run(path, "--tokenizer", "bytes", "--context-length", 20, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"text": "<|USER|>hi<|END|><|ASSISTANT|>yo<|END|>"},
        {"text": "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"},
        {"text": "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"},
        {"text": "<|USER|>u<|END|><|ASSISTANT|>é<|END|>"},
    ]
    report = json.loads(result.stdout)
    (example,) = report.pop("examples")
    assert "record 'r6'" in example
    assert "spells <|END|>" in example
    assert report == {
        "conversations": 7,
        "written": 4,
        "whole": 2,
        "cut_too_long": 1,
        "cut_unpaired": 1,
        "skipped_too_long": 1,
        "skipped_no_pair": 1,
        "unwritable": 1,
        "bad_records": 0,
        "messages": 8,
        "messages_left_out": 2 + 2 + 1 + 1 + 2,
        "reasoning_left_out": 1,
        "weights_left_out": 0,
        "tools_left_out": 0,
        "tokens": 8 + 6 + 6 + 7,
    }
    assert result.stderr == "", "no progress if there is no terminal"


def test_the_report_in_words(save: Save, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run(
        save(exchange("hi", "yo"), exchange("hi")), "--tokenizer", "bytes", "--context-length", 99, "--out", out
    )
    assert result.stdout.split("\n")[0].split() == ["conversations", "2"]
    assert "skipped no pair" in result.stdout
    assert "unwritable" not in result.stdout, "counts of nothing are not shown"
    assert str(out) in result.stdout


def test_batches_do_not_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = CONVERSATIONS / "oasst_realistic.jsonl.gz"
    outs = []
    for size in (1024, 7, 1):
        monkeypatch.setattr(transcripts, "BATCH", size)
        outs.append(tmp_path / f"{size}.jsonl")
        result = run(source, "--tokenizer", "bytes", "--context-length", 700, "--out", outs[-1])
        assert result.exit_code == 0, result.output
    assert len({out.read_bytes() for out in outs}) == 1
    tokenizer = byte_tokenizer(MARKERS)
    with gzip.open(source, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    expected = [conversation_to_transcript(record, tokenizer=tokenizer, context_length=700) for record in records]
    kept = [text for text in expected if text is not None]
    assert 10 < len(kept) < len(records)
    assert [transcript.text for transcript in read_transcripts(outs[0])] == kept


def test_a_bad_record_stops_the_run_and_leaves_nothing(save: Save, tmp_path: Path) -> None:
    path = save(exchange("hi", "yo"), {"messages": 3})
    out = tmp_path / "out.jsonl"
    result = run(path, "--tokenizer", "bytes", "--context-length", 99, "--out", out)
    assert isinstance(result.exception, RecordError)
    assert f"{path}:2" in str(result.exception)
    assert sorted(tmp_path.iterdir()) == [path]


def test_bad_records_may_be_skipped_and_are_counted(save: Save, tmp_path: Path) -> None:
    path, out = save(exchange("hi", "yo"), {"messages": 3}), tmp_path / "out.jsonl"
    result = run(path, "--tokenizer", "bytes", "--context-length", 99, "--out", out, "--skip-bad", "--json")
    report = json.loads(result.stdout)
    assert (report["written"], report["bad_records"], len(report["examples"])) == (1, 1, 1)


def test_a_run_that_writes_nothing_is_an_error_and_keeps_the_old_file(save: Save, tmp_path: Path) -> None:
    path, out = save(exchange("hi")), tmp_path / "out.jsonl"
    out.write_text("old")
    result = run(path, "--tokenizer", "bytes", "--context-length", 99, "--out", out)
    assert isinstance(result.exception, DataError)
    assert "skipped no pair" in str(result.exception)
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [path, out]
