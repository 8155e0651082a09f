"""Inputs as fingerprints and chunks: chunks give what whole files give, and depend on bytes and sizes alone."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from chatmill.compiler import cuts, inputs
from chatmill.errors import FormatError
from chatmill.read.file_format import check_text, is_laid_out
from chatmill.read.files import read_records
from chatmill.read.ranges import ChunkKind
from tests.compiler.scanned import CHAT, PACKERS, in_chunks, parquet, scan, told


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one example, without waiting for the disk."""
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        yield Path(name)


# --- chunks give what the whole file gives --------------------------------------------------------------------------

LINES = st.one_of(
    st.sampled_from(
        [
            b"",
            b" \t",
            b"\x0c",
            b"\r",
            b"\x00",
            b"\xef\xbb\xbf{}",
            CHAT,
            b'{"n": 1}\x0b',
            b'{"n": 1} {"n": 2}',
            b'{"messages": 1, "messages": 2}',
            b'{"n": "\\ud800"}',
            b'{"n": "\xff"}',
            b'{"n": "\x00"}',
            b'{"n": NaN}',
            b"[" * 1200,
        ]
    ),
    st.integers(0, 60).map(lambda n: b'{"n": "' + b"x" * n + b'"}'),
    st.integers(300, 900).map(lambda n: b'{"giant": "' + b"y" * n + b'"}'),
    st.binary(max_size=12),
)


def begins_like_lines(data: bytes) -> bool:
    """Whether a file begins like neither another encoding, nor a packed file, nor pretty-printed JSON."""
    try:
        check_text(data, Path("a.jsonl"))
    except FormatError:
        return False
    return not is_laid_out(data)


@st.composite
def jsonl(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\n", b"\r\n"])), max_size=14))
    marks = st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf" * 2])
    data = draw(marks) + b"".join(line + end for line, end in lines)
    assume(begins_like_lines(data))
    return data.removesuffix(b"\n") if draw(st.booleans()) else data


SIZES = st.one_of(st.integers(1, 12), st.integers(13, 400), st.sampled_from([1000, 5000, 1 << 25]))


@given(data=jsonl(), chunk_bytes=SIZES, block=st.sampled_from([1, 2, 7, 64, 1 << 20]))
@settings(max_examples=150)
def test_chunks_of_jsonl_are_the_file(data: bytes, chunk_bytes: int, block: int) -> None:
    with folder() as home, mock.patch.object(cuts, "BLOCK", block):
        path = home / "a.jsonl"
        path.write_bytes(data)
        scanned = scan(path, chunk_bytes=chunk_bytes)
        assert in_chunks(scanned) == told(read_records(path))
    file = scanned.file
    assert (file.bytes, file.xxh128) == (len(data), xxh3_128_hexdigest(data))
    assert [(c.start, c.stop, c.first, c.count) for c in scanned.chunks] == slow_cuts(data, chunk_bytes)
    assert all(chunk.bytes == chunk.stop - chunk.start for chunk in scanned.chunks)
    assert file.lines == len(data.split(b"\n")) - (data.endswith(b"\n") or not data)
    assert file.records is None


def slow_cuts(data: bytes, chunk_bytes: int) -> list[tuple[int, int, int, int]]:
    """Line by line: a line belongs to the chunk in which its first byte lies."""
    chunks: dict[int, list[int]] = {}
    start = 0
    for number, line in enumerate(data.split(b"\n"), 1):
        stop = min(start + len(line) + 1, len(data))
        if start < len(data):
            chunk = chunks.setdefault(start // chunk_bytes, [start, stop, number, 0])
            chunk[1], chunk[3] = stop, chunk[3] + 1
        start = stop
    return [(start, stop, first, count) for start, stop, first, count in chunks.values()]


@pytest.mark.parametrize("kind", PACKERS)
@given(data=jsonl(), chunk_bytes=SIZES, block=st.sampled_from([1, 7, 64, 1 << 22]))
@settings(max_examples=80)
def test_chunks_of_packed_files_are_those_of_the_plain_file(
    kind: str, data: bytes, chunk_bytes: int, block: int
) -> None:
    with folder() as home, mock.patch.object(inputs, "BLOCK", block):
        plain, path = home / "a.jsonl", home / f"a.jsonl.{kind}"
        plain.write_bytes(data)
        path.write_bytes(PACKERS[kind](data))
        scanned, unpacked = scan(path, chunk_bytes=chunk_bytes), scan(plain, chunk_bytes=chunk_bytes)
        assert in_chunks(scanned) == told(read_records(path))
        assert scanned.file.xxh128 == xxh3_128_hexdigest(path.read_bytes())
        assert scanned.file.bytes == path.stat().st_size
        assert scanned.file.lines == unpacked.file.lines
        assert [(c.first, c.count, c.bytes) for c in scanned.chunks] == [
            (c.first, c.count, c.bytes) for c in unpacked.chunks
        ]


ROWS = st.fixed_dictionaries(
    {
        "id": st.none() | st.text(max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.text(max_size=2), "content": st.none() | st.text(max_size=9)}), max_size=3
        ),
    }
)
SCHEMA = pyarrow.schema(
    {"id": pyarrow.string(), "messages": pyarrow.list_(pyarrow.struct({"role": "string", "content": "string"}))}
)


@given(rows=st.lists(ROWS, max_size=30), group=st.integers(1, 12), chunk_bytes=st.integers(1, 700))
@settings(max_examples=80)
def test_chunks_of_parquet_are_the_file(rows: list[Any], group: int, chunk_bytes: int) -> None:
    with folder() as home:
        path = home / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=group)
        scanned = scan(path, chunk_bytes=chunk_bytes)
        assert in_chunks(scanned) == told(read_records(path))
    assert scanned.file.records == len(rows)
    assert scanned.file.lines is None
    assert all(chunk.kind is ChunkKind.ROWS for chunk in scanned.chunks)


ENTRIES = st.sampled_from(
    [
        b"{}",
        CHAT,
        b'{"a": [1, "]", ","]}',
        b'"x,[]"',
        b"3",
        b'{"m":\n 1 }',
        b'{"n": "\xff"}',
        b'{"messages":1,"messages":2}',
    ]
)
BLANK = st.sampled_from([b"", b" ", b"\n", b"\r\n\t"])


@given(
    entries=st.lists(st.tuples(BLANK, ENTRIES, BLANK), max_size=10),
    bom=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    surrogate=st.booleans(),
    chunk_bytes=SIZES,
)
@settings(max_examples=150)
def test_chunks_of_a_json_list_are_the_file(
    entries: list[tuple[bytes, bytes, bytes]], bom: bytes, surrogate: bool, chunk_bytes: int
) -> None:
    texts = [b"".join(parts) for parts in entries]
    if surrogate:  # the fast decoder refuses such a list, so that it is read by the slow one
        texts = [text for text in texts if b"\xff" not in text]
        texts.insert(len(texts) // 2, b'{"n": "\\ud800", "t": "\xc3\xa9"}')
    with folder() as home:
        path = home / "a.json"
        path.write_bytes(bom + b" [" + b",".join(texts) + b"] \n")
        scanned = scan(path, chunk_bytes=chunk_bytes)
        assert in_chunks(scanned) == told(read_records(path))
    assert scanned.file.records == len(texts)
    assert all(chunk.is_list for chunk in scanned.chunks)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_files_without_records_have_no_chunks_or_empty_ones(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], "string")}), path)
    else:
        path.write_bytes({"a.jsonl": b"", "a.jsonl.gz": gzip.compress(b""), "a.json": b" [ ]\n"}[name])
    scanned = scan(path, shape=None)
    assert scanned.chunks == ()
    assert (scanned.file.lines or 0) + (scanned.file.records or 0) == 0
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    blank = scan(tmp_path / "b.jsonl", shape=None)
    assert (blank.file.lines, len(blank.chunks), in_chunks(blank)) == (2, 1, [])


def test_a_row_group_of_many_chunks_is_spooled(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", 5000, 5000)
    scanned = scan(path, chunk_bytes=20_000)
    assert len(scanned.chunks) > 10
    assert all(chunk.data.endswith(".arrow") for chunk in scanned.chunks)
    assert in_chunks(scanned) == told(read_records(path))
    few = scan(path, chunk_bytes=200_000)
    assert {chunk.data for chunk in few.chunks} == {str(path)}
    assert in_chunks(few) == in_chunks(scanned)


def test_rows_that_are_not_utf8_keep_their_places(tmp_path: Path) -> None:
    raw = pyarrow.array([b"ok", b"b\xffd"] * 10, pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 20, raw.buffers())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=7)
    expected = told(read_records(path))
    assert sum(error is not None for _, _, error in expected) == 10
    for size in (1, 30, 60):
        assert in_chunks(scan(path, chunk_bytes=size)) == expected


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_the_shape_is_told_from_the_first_records_that_can_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.b.jsonl"
    path.write_bytes(b"broken\n" * 40 + b'{"instruction": "q", "output": "a"}\n')
    scanned = scan(path, shape=None, chunk_bytes=50)
    assert scanned.file.shape == "alpaca"
    assert {chunk.shape for chunk in scanned.chunks} == {"alpaca"}
    assert {chunk.source for chunk in scanned.chunks} == {"a"}
    assert scan(path, shape="sharegpt", source="mine").chunks[0].shape == "sharegpt"
    assert scan(path, shape="sharegpt", source="mine").file.source == "mine"
