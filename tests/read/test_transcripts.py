"""Reading transcripts from files: JSONL, text with and without `<|EOS|>`, packed files, bad input."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import ChatmillError, RecordError
from chatmill.read.transcripts import read_transcripts

PAIR = "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"


def save(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def texts(*paths: Path) -> list[str]:
    return [transcript.text for transcript in read_transcripts(paths)]


def test_jsonl_has_one_record_a_line(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", f'{{"text": "{PAIR}", "id": 4}}\n\n{{"text": "<|USER|>\\n<|EOS|>"}}')
    assert list(read_transcripts(path)) == [(PAIR, f"{path}:1"), ("<|USER|>\n<|EOS|>", f"{path}:3")]


def test_text_without_eos_has_one_record_a_line(tmp_path: Path) -> None:
    path = save(tmp_path, "a.txt", f"\ufeff{PAIR}\n\n  \n<|SYSTEM|>s\rt<|END|>{PAIR}\r\n{PAIR}")
    assert texts(path) == [PAIR, f"<|SYSTEM|>s\rt<|END|>{PAIR}\r", PAIR]
    assert [t.where for t in read_transcripts(path)] == [f"{path}:{line}" for line in (1, 4, 5)]


def test_a_line_without_a_user_marker_is_an_error_that_says_to_use_eos(tmp_path: Path) -> None:
    path = save(tmp_path, "a.txt", f"{PAIR}\n<|USER|>over\ntwo lines<|END|>\n")
    reading = read_transcripts(path)
    next(reading)
    next(reading)
    with pytest.raises(RecordError, match=r"a\.txt:3: the line has no <\|USER\|>.*end each of them with <\|EOS\|>"):
        next(reading)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "x"}', "missing required field `text`"),
        ('{"text": 5}', "Expected `str`"),
        ('{"messages": []}', "'chatmill transcripts' makes such lines of conversations"),
        ('{"text": "x"', "truncated"),
        ("[1]", "Expected `object`"),
        ('{"text": " \\n"}', "holds no span"),
        ('{"text": "\\ud800 and more text"}', "surrogate"),
    ],
)
def test_bad_jsonl_lines_are_errors_with_their_place(tmp_path: Path, line: str, message: str) -> None:
    path = save(tmp_path, "a.jsonl", f'{{"text": "{PAIR}"}}\n{line}\n')
    with pytest.raises(RecordError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


def test_packed_files_and_many_files(tmp_path: Path) -> None:
    line = f'{{"text": "{PAIR}"}}\n'.encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line) + gzip.compress(line))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(line) + zstandard.compress(line))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(f"{PAIR}<|EOS|>{PAIR}".encode()))
    (tmp_path / "d.zst").write_bytes(zstandard.compress(f"{PAIR}\n".encode()))
    assert texts(*sorted(tmp_path.iterdir())) == [PAIR] * 7


def test_damaged_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "no.txt.gz").write_bytes(b"plain")
    (tmp_path / "latin.txt").write_bytes(b"<|USER|>\xe9\xff")
    for name, message in (
        ("no.txt.gz", "no.txt.gz"),
        ("latin.txt", "not UTF-8.*e9 ff"),
        ("missing.txt", "missing.txt"),
    ):
        with pytest.raises(ChatmillError, match=message):
            texts(tmp_path / name)


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    assert texts(save(tmp_path, "a.txt", ""), save(tmp_path, "a.jsonl", "\n")) == []


pieces = st.lists(st.sampled_from(["<|USER|>", "é", "\n", " ", "<|EOS", "<|EOS|>", "|>", "\r", "x"]), max_size=30)


@settings(max_examples=150)
@given(pieces)
def test_records_are_what_is_between_the_markers(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    whole = "".join(["<|EOS|>", *parts])
    path = save(tmp_path_factory.getbasetemp(), "chunks.txt", whole)
    found = list(read_transcripts(path))
    assert [t.text for t in found] == [piece for piece in whole.split("<|EOS|>") if piece.strip()]
    lines = whole.split("\n")
    for transcript in found:
        line = int(transcript.where.rsplit(":", 1)[1])
        assert transcript.text.strip()[0] in lines[line - 1]
