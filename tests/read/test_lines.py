"""Transcripts from files, and the limit of lines: no file, packed or plain, can fill the memory with one line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.inputs import InputScan
from chatmill.compiler.scan_jobs import scan_input
from chatmill.errors import ChatmillError, FormatError, RecordError
from chatmill.read import lines
from chatmill.read.files import read_records
from chatmill.read.transcripts import read_transcripts

PAIR = "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": partial(gzip.compress, compresslevel=1),
    ".jsonl.zst": zstandard.compress,
}


def save(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def texts(*paths: Path) -> list[str]:
    return [transcript.text for transcript in read_transcripts(paths)]


def test_transcripts_have_one_record_a_line(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", f'{{"text": "{PAIR}", "id": 4}}\n\n{{"text": "<|USER|>\\n<|EOS|>"}}')
    assert list(read_transcripts(path)) == [(PAIR, f"{path}:1"), ("<|USER|>\n<|EOS|>", f"{path}:3")]
    path = save(tmp_path, "a.txt", f"\ufeff{PAIR}\n\n  \n<|SYSTEM|>s\rt<|END|>{PAIR}\r\n{PAIR}")
    assert texts(path) == [PAIR, f"<|SYSTEM|>s\rt<|END|>{PAIR}\r", PAIR]
    assert [t.where for t in read_transcripts(path)] == [f"{path}:{line}" for line in (1, 4, 5)]
    assert texts(save(tmp_path, "a.txt", ""), save(tmp_path, "a.jsonl", "\n")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "x"}', "missing required field `text`"),
        ('{"text": 5}', "Expected `str`"),
        ('{"messages": []}', "'chatmill transcripts' makes such lines of conversations"),
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


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("no.txt.gz", b"plain", r"no\.txt\.gz"),
        ("latin.txt", b"<|USER|>\xe9\xff", "not UTF-8.*e9 ff"),
        ("missing.txt", None, r"missing\.txt"),
        (
            *("over.txt", f"{PAIR}\n<|USER|>over\ntwo lines<|END|>\n".encode()),
            r"over\.txt:3: the line has no <\|USER\|>.*end each of them with <\|EOS\|>",
        ),
    ],
)
def test_files_of_transcripts_that_cannot_be_read(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ChatmillError, match=message):
        texts(tmp_path / name)


pieces = st.lists(st.sampled_from(["<|USER|>", "é", "\n", " ", "<|EOS", "<|EOS|>", "|>", "\r", "x"]), max_size=30)


@settings(max_examples=150)
@given(pieces)
def test_records_are_what_is_between_the_markers(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    whole = "".join(["<|EOS|>", *parts])
    path = save(tmp_path_factory.getbasetemp(), "chunks.txt", whole)
    found = list(read_transcripts(path))
    assert [t.text for t in found] == [piece for piece in whole.split("<|EOS|>") if piece.strip()]
    every = whole.split("\n")
    for transcript in found:
        line = int(transcript.where.rsplit(":", 1)[1])
        assert transcript.text.strip()[0] in every[line - 1]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lines, "LINE_LIMIT", 100)
    return 100


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_over_the_limit_is_one_error(tmp_path: Path, limit: int, ending: str, end: bytes) -> None:
    path = tmp_path / f"a{ending}"
    short = b'{"messages": []}'
    fits = short[:-1] + b" " * (limit - len(short)) + b"}"
    scan = partial(scan_input, InputScan(path=str(path), spool=str(tmp_path / "spool")))
    path.write_bytes(PACKERS[ending](fits + b"\n\n" + fits + end))
    assert len(list(read_records(path))) == 2
    assert scan().file.lines == 3
    path.write_bytes(PACKERS[ending](fits + b"\n\n " + fits + end))
    for read in (lambda: list(read_records(path)), scan):
        with pytest.raises(FormatError) as caught:
            read()
        assert str(caught.value).startswith(f"{path}:3: ")
        assert "100 bytes" in str(caught.value)


@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])
def test_long_lines_are_found_in_any_chunks(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_LIMIT", 10)
    path = tmp_path / "a.jsonl"

    def cut(data: bytes) -> None:
        path.write_bytes(data)
        scan_input(InputScan(path=str(path), spool="", shape="openai", chunk_bytes=chunk))

    cut(b"a" * 10 + b"\n\n" + b"b" * 10 + b"\n" + b"c" * 10)
    for long, number in ((b"x" * 11 + b"\nyy\n", 1), (b"a\n\nb\n" + b"x" * 11 + b"\n", 4), (b"a\nb\n" + b"x" * 11, 3)):
        with pytest.raises(FormatError, match=rf"a\.jsonl:{number}: "):
            cut(long)


def test_transcripts_keep_the_limit_too(tmp_path: Path, limit: int) -> None:
    short, long = "<|USER|>a<|END|>", "<|USER|>" + "a" * limit + "<|END|>"
    for path in (
        save(tmp_path, "lines.txt", f"{short}\n{long}\n"),
        save(tmp_path, "lines.jsonl", json.dumps({"text": short}) + "\n" + json.dumps({"text": long}) + "\n"),
    ):
        with pytest.raises(FormatError, match=f"{path.name}:2: "):
            texts(path)
    for end in ("", "<|EOS|>"):
        begin = "<|USER|>\n<|END|><|EOS|><|USER|>" + "a\n" * 42
        assert len(texts(save(tmp_path, "a.txt", f"{begin}a<|END|>{end}"))) == 2
        with pytest.raises(FormatError, match=r"a\.txt:2: the transcript that begins here is longer than 100"):
            texts(save(tmp_path, "a.txt", f"{begin}aa<|END|>{end}"))


PEAK = """
import resource, sys
from pathlib import Path
from chatmill.errors import FormatError
from chatmill.read import lines
from chatmill.read.files import read_records
lines.LINE_LIMIT = 1 << 20
for record in read_records(Path(sys.argv[1])):  # imports what it needs, and takes the memory it always takes
    pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(next(read_records(Path(sys.argv[2]))).value)
except FormatError as error:
    print("refused")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("ending", "content", "says"), [(".jsonl.gz", b'{"n": 1}\n', "{'n': 1}"), (".jsonl.zst", b" ", "refused")]
)
def test_a_bomb_takes_no_more_memory_than_one_line(tmp_path: Path, ending: str, content: bytes, says: str) -> None:
    small, bomb = tmp_path / f"small{ending}", tmp_path / f"bomb{ending}"
    small.write_bytes(PACKERS[ending](b'{"n": 0}\n'))
    bomb.write_bytes(PACKERS[ending](content * ((96 << 20) // len(content))))
    assert bomb.stat().st_size < 2 << 20
    command = [sys.executable, "-c", PEAK, str(small), str(bomb)]
    said, grown_kib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == says
    assert int(grown_kib) < 48 << 10, "the bomb has 96 MiB"
