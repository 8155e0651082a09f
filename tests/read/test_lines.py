"""Lines have a limit: no file, packed or plain, can fill the memory or the disk with one line."""

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

from chatmill.compiler.inputs import InputScan, scan_input
from chatmill.errors import FormatError
from chatmill.read import lines
from chatmill.read.files import read_records
from chatmill.read.transcripts import read_transcripts

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": partial(gzip.compress, compresslevel=1),
    ".jsonl.zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lines, "LINE_LIMIT", 100)
    return 100


def line_of(size: int) -> bytes:
    """One record in a line of so many bytes, without its end."""
    line = json.dumps({"messages": [{"role": "user", "content": ""}]}).encode()
    return line.replace(b'"content": "', b'"content": "' + b"x" * (size - len(line)))


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_over_the_limit_is_one_error_that_names_file_line_limit_and_way_out(
    tmp_path: Path, limit: int, ending: str, end: bytes
) -> None:
    path = tmp_path / f"a{ending}"
    fits, too_long = line_of(limit), line_of(limit + 1)
    assert (len(fits), len(too_long)) == (100, 101)
    path.write_bytes(PACKERS[ending](fits + b"\n\n" + fits + end))
    assert len(list(read_records(path))) == 2
    assert scan_input(InputScan(path=str(path), spool=str(tmp_path / "spool"))).file.lines == 3
    path.write_bytes(PACKERS[ending](fits + b"\n\n" + too_long + end))
    for read in (
        lambda: list(read_records(path)),
        lambda: scan_input(InputScan(path=str(path), spool=str(tmp_path / "spool"))),
    ):
        with pytest.raises(FormatError) as caught:
            read()
        message = str(caught.value)
        assert message.startswith(f"{path}:3: "), message
        assert "100 bytes" in message


@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])
def test_a_long_line_is_found_in_chunks_of_any_size(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    short, long = "<|USER|>a<|END|>", "<|USER|>" + "a" * 100 + "<|END|>"
    (tmp_path / "lines.txt").write_text(f"{short}\n{long}\n")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": short}) + "\n" + json.dumps({"text": long}) + "\n")
    for name in ("lines.txt", "lines.jsonl"):
        with pytest.raises(FormatError, match=f"{name}:2: "):
            list(read_transcripts(tmp_path / name))


@pytest.mark.parametrize("end", ["", "<|EOS|>"])
def test_a_transcript_over_several_lines_keeps_the_limit(tmp_path: Path, limit: int, end: str) -> None:
    path = tmp_path / "a.txt"
    for extra in (0, 1):
        long = "<|USER|>" + "a\n" * 42 + "a" * (1 + extra) + "<|END|>"
        path.write_text(f"<|USER|>\n<|END|><|EOS|>{long}{end}")
        if extra:
            with pytest.raises(FormatError, match=r"a\.txt:2: the transcript that begins here is longer than 100"):
                list(read_transcripts(path))
        else:
            assert len(list(read_transcripts(path))) == 2


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
