"""Packed files that hold far more than they are, and texts that are longer than any template writes."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from chatmill.compiler import spools
from chatmill.compiler.cuts import LineCutter
from chatmill.compiler.inputs import InputScan
from chatmill.compiler.run import run_build
from chatmill.compiler.scan_jobs import scan_input
from chatmill.core import message_parser
from chatmill.errors import FormatError
from chatmill.read import columns, lines
from chatmill.render.jinja import limits
from tests.compiler.builds import plain_recipe, write_jsonl

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": lambda raw: zstandard.ZstdCompressor(write_content_size=False).compress(raw),
}
RECORD = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("before", [b"", RECORD * 9])
def test_unpacking_stops_where_a_line_exceeds_the_limit_and_leaves_nothing(
    tmp_path: Path, ending: str, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the file is damaged: whoever unpacks all of it meets that first."""
    monkeypatch.setattr(lines, "LINE_LIMIT", 1 << 16)
    monkeypatch.setattr(spools, "BLOCK", 1 << 14)
    packed = PACKERS[ending](before + bytes(1 << 26))
    path = tmp_path / f"bomb{ending}"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(FormatError, match=rf"bomb.*:{1 + before.count(10)}: the line is longer than 65536 bytes"):
        scan_input(InputScan(path=str(path), spool=str(tmp_path / "spool")))
    assert list((tmp_path / "spool").rglob("*")) == []
    with pytest.raises(FormatError, match="the line is longer"):
        run_build(plain_recipe(path), tmp_path / "out", workers=0)
    left = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in left) < 1 << 16


@pytest.mark.parametrize("ending", PACKERS)
def test_a_file_that_is_refused_after_it_was_unpacked_is_not_kept_either(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its long line lies within a block, where the cutter finds it."""
    monkeypatch.setattr(lines, "LINE_LIMIT", 1 << 10)
    path = tmp_path / f"a{ending}"
    path.write_bytes(PACKERS[ending](RECORD + b" " * 1025 + b"\n" + RECORD))
    with pytest.raises(FormatError, match=r":2: the line is longer"):
        scan_input(InputScan(path=str(path), spool=str(tmp_path / "spool")))
    assert list((tmp_path / "spool").rglob("*")) == []


def test_the_cutter_finds_the_first_line_that_is_too_long_and_no_other() -> None:
    """On drawn lines, in chunks of any size and in blocks of any size up to the limit."""
    draw, refused = random.Random(1), 0
    for _ in range(3000):
        sizes = draw.choices([0, 1, 7, 19, 20], k=draw.randrange(6))
        if draw.randrange(2):
            sizes.insert(draw.randrange(len(sizes) + 1), draw.choice([21, 22, 60]))
        data = b"\n".join(b"x" * size for size in sizes) + draw.choice([b"", b"\n"])
        step = draw.randrange(1, 21)
        blocks = [data[at : at + step] for at in range(0, len(data), step)]
        longest = next((number for number, size in enumerate(sizes, 1) if size > 20), None)
        cutter = LineCutter(draw.randrange(1, 50), 20)
        for block in blocks:
            cutter.feed(block)
        assert cutter.long_line == longest
        refused += longest is not None
    assert 1000 < refused < 2000


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (message_parser, columns, limits):
        monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)
    return 1000


def chat(name: str, content: str, answer: str = "b") -> dict[str, object]:
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"id": name, "messages": said}


def test_the_limits_of_a_text_and_of_what_a_template_writes_are_one() -> None:
    assert limits.MAX_CHARACTERS == message_parser.MAX_CHARACTERS == vars(columns)["MAX_CHARACTERS"]
    assert lines.LINE_LIMIT == 4 * limits.MAX_CHARACTERS, "a text of the longest characters still fits into a line"


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "slow"])
def test_a_text_longer_than_a_template_writes_is_refused_when_it_is_read(tmp_path: Path, form: str, limit: int) -> None:
    records = [
        chat("good", "a"),
        chat("long", "a" * (limit + 1)),
        chat("wide", "漢" * (limit // 2)),  # more bytes than the limit, and half as many characters
        chat("long answer", "a", "b" * (limit + 1)),
        chat("good too", "a"),
    ]
    if form == "slow":  # a key that is written with an escape is left to the full reader
        path = write_jsonl(tmp_path / "a.jsonl", records)
        path.write_text(path.read_text().replace('"messages"', '"mess\\u0061ges"'))
    elif form == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", records)
    elif form == "json":
        path = tmp_path / "a.json"
        path.write_text(json.dumps(records))
    else:
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    recipe = plain_recipe(path, on_error="quarantine")
    run_build(recipe, tmp_path / "out", workers=0)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(one["id"], one["reason"]) for one in rejected] == [
        ("long", "text_too_long"),
        ("long answer", "text_too_long"),
    ]
    assert all("1,001 characters; a template writes at most 1,000" in one["message"] for one in rejected)
