"""The command `chatmill transcripts`: what it writes, what it reports, and that a failed run leaves nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from chatmill.cli import transcripts
from chatmill.errors import ChatmillError, DataError, RecordError
from chatmill.read.transcripts import read_transcripts
from chatmill.systems.post_training import MARKERS, conversation_to_transcript
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.cli.run import invoke
from tests.compiler.builds import talk, write_jsonl

CONVERSATIONS = Path(__file__).parent.parent / "data" / "conversations"


def run(path: Path, length: int, out: Path, *more: str) -> Any:
    return invoke("transcripts", path, "--tokenizer", "bytes", "--context-length", length, "--out", out, *more)


def exchange(*contents: str, **fields: Any) -> dict[str, Any]:
    return {"messages": talk(*contents), **fields}


def test_lines_and_counts(tmp_path: Path) -> None:
    reasoned = exchange("u", "é")
    reasoned["messages"][1]["reasoning_content"] = "r"
    records = [
        exchange("hi", "yo"),
        exchange("a" * 20, "b"),
        exchange("a", "b", "c" * 20, "d"),
        exchange("a", "b", "c"),
        exchange("only a question"),
        exchange("a", "say <|END|>", id="r6"),
        reasoned,
    ]
    out = tmp_path / "out.jsonl"
    result = run(write_jsonl(tmp_path / "in.jsonl", records), 20, out, "--json")
    assert result.exit_code == 0, result.output
    pairs = [("hi", "yo"), ("a", "b"), ("a", "b"), ("u", "é")]
    wanted = [{"text": f"<|USER|>{asked}<|END|><|ASSISTANT|>{said}<|END|>"} for asked, said in pairs]
    assert [json.loads(line) for line in out.read_text().splitlines()] == wanted
    report = json.loads(result.stdout)
    (example,) = report.pop("examples")
    assert "record 'r6'" in example
    assert "spells <|END|>" in example
    left = {"messages_left_out": 2 + 2 + 1 + 1 + 2, "reasoning_left_out": 1, "weights_left_out": 0, "tools_left_out": 0}
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
        **left,
        "tokens": 8 + 6 + 6 + 7,
    }
    assert result.stderr == "", "no progress if there is no terminal"


def test_batches_do_not_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = CONVERSATIONS / "oasst_realistic.jsonl.gz"
    outs = []
    for size in (1024, 7, 1):
        monkeypatch.setattr(transcripts, "BATCH", size)
        outs.append(tmp_path / f"{size}.jsonl")
        result = run(source, 700, outs[-1])
        assert result.exit_code == 0, result.output
    assert len({out.read_bytes() for out in outs}) == 1
    tokenizer = byte_tokenizer(MARKERS)
    with gzip.open(source, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    expected = [conversation_to_transcript(record, tokenizer=tokenizer, context_length=700) for record in records]
    kept = [text for text in expected if text is not None]
    assert 10 < len(kept) < len(records)
    assert [transcript.text for transcript in read_transcripts(outs[0])] == kept


@pytest.mark.parametrize(
    ("records", "error", "words"),
    [
        ([exchange("hi", "yo"), {"messages": 3}], RecordError, "in.jsonl:2"),
        ([exchange("hi")], DataError, "skipped no pair"),
    ],
)
def test_a_failed_run_leaves_the_old_file(
    tmp_path: Path, records: list[Any], error: type[ChatmillError], words: str
) -> None:
    path, out = write_jsonl(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    out.write_text("old")
    result = run(path, 99, out)
    assert isinstance(result.exception, error)
    assert words in str(result.exception)
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [path, out]


def test_bad_records_may_be_skipped_and_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [exchange("hi", "yo"), {"messages": 3}])
    report = json.loads(run(path, 99, tmp_path / "out.jsonl", "--skip-bad", "--json").stdout)
    assert (report["written"], report["bad_records"], len(report["examples"])) == (1, 1, 1)
