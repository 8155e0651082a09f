"""Inputs as fingerprints and chunks: chunks give what whole files give, or one clear error; spools are whole or not."""

from __future__ import annotations

import gzip
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from chatmill.compiler import chunk_job, scan_jobs, spools
from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.inputs import InputScan, ScannedInput
from chatmill.compiler.recipe import Source
from chatmill.compiler.run import BuildProgress, run_build
from chatmill.compiler.scan_jobs import scan_input
from chatmill.core import checksums
from chatmill.core.checksums import Hash
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError, DataError, FormatError
from chatmill.read.file_format import check_text, is_laid_out
from chatmill.read.files import Raw, read_records
from chatmill.read.ranges import ChunkKind, chunk_records
from tests.compiler.builds import chats, plain_recipe, write_jsonl
from tests.faults import active

CHAT = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}'
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
NUMBERS = b"".join(b'{"n": %d}\n' % n for n in range(9000))


def told(records: Iterator[Raw]) -> list[tuple[Any, ...]]:
    """Records in a form that can be compared, errors included."""
    return [(raw.where, raw.value, raw.error and raw.error.__reduce__()[1]) for raw in records]


def in_chunks(scanned: ScannedInput) -> list[tuple[Any, ...]]:
    return told(itertools.chain.from_iterable(map(chunk_records, scanned.chunks)))


def scan(path: Path, **options: Any) -> ScannedInput:
    return scan_input(InputScan(path=str(path), **{"spool": str(path.parent / "spool"), "shape": "openai", **options}))


def parquet(path: Path, rows: int) -> Path:
    """One row group."""
    table = pyarrow.table({"n": list(range(rows)), "text": [f"row {n} " * 20 for n in range(rows)]})
    pyarrow.parquet.write_table(table, path, row_group_size=rows, use_dictionary=False)
    return path


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one example, without waiting for the disk."""
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        yield Path(name)


# Chunks give what the whole file gives.

ODD_LINES = [
    *(b"", b" \t", b"\x0c", b"\r", b"\x00", b"\xef\xbb\xbf{}", CHAT, b'{"n": 1}\x0b', b'{"n": 1} {"n": 2}'),
    *(b'{"messages": 1, "messages": 2}', b'{"n": "\\ud800"}', b'{"n": "\xff"}', b'{"n": "\x00"}', b'{"n": NaN}'),
    b"[" * 1200,
]
LINES = st.one_of(
    st.sampled_from(ODD_LINES),
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
BLOCKS = st.sampled_from([1, 2, 7, 64, 1 << 20])


@contextmanager
def in_steps(block: int, tree_block: int, part: int) -> Iterator[None]:
    """Files are read, hashed and handed to jobs in steps of these sizes."""
    with (
        mock.patch.object(scan_jobs, "BLOCK", block),
        mock.patch.object(spools, "BLOCK", block),
        mock.patch.object(checksums, "TREE_BLOCK", tree_block),
        mock.patch.object(scan_jobs, "PART_BYTES", part),
    ):
        yield


def slow_digest(data: bytes, block: int) -> str:
    """The hash of the hashes of blocks."""
    hashes = [xxh3_128_digest(data[start : start + block]) for start in range(0, len(data), block)]
    return xxh3_128_hexdigest(b"".join(hashes))


@pytest.mark.parametrize("ending", ["", *PACKERS])
@given(data=jsonl(), chunk_bytes=SIZES, block=BLOCKS, tree_block=BLOCKS, part=SIZES)
@settings(max_examples=150)
def test_chunks_of_jsonl_are_the_file_packed_or_not_whatever_its_parts(
    ending: str, data: bytes, chunk_bytes: int, block: int, tree_block: int, part: int
) -> None:
    with folder() as home, in_steps(block, tree_block, part):
        path = home / f"a.jsonl{ending}"
        path.write_bytes(PACKERS.get(ending, bytes)(data))
        scanned = scan(path, chunk_bytes=chunk_bytes)
        assert in_chunks(scanned) == told(read_records(path))
        file, on_disk = scanned.file, path.read_bytes()
        assert file.digest == Hash.TREE_XXH128.of_file(path)
    assert (file.bytes, file.digest) == (len(on_disk), slow_digest(on_disk, tree_block))
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


MESSAGE = st.fixed_dictionaries({"role": st.text(max_size=2), "content": st.none() | st.text(max_size=9)})
ROWS = st.fixed_dictionaries({"id": st.none() | st.text(max_size=3), "messages": st.lists(MESSAGE, max_size=3)})
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
    assert (scanned.file.records, scanned.file.lines) == (len(rows), None)
    assert all(chunk.kind is ChunkKind.ROWS for chunk in scanned.chunks)


BLANK = st.sampled_from([b"", b" ", b"\n", b"\r\n\t"])
JSON_VALUES = [b"{}", CHAT, b'{"a": [1, "]", ","]}', b'"x,[]"', b"3", b'{"m":\n 1 }', b'{"n": "\xff"}', ODD_LINES[9]]
ENTRIES = st.lists(st.tuples(BLANK, st.sampled_from(JSON_VALUES), BLANK).map(b"".join), max_size=10)


@given(texts=ENTRIES, bom=st.sampled_from([b"", b"\xef\xbb\xbf"]), surrogate=st.booleans(), chunk_bytes=SIZES)
@settings(max_examples=150)
def test_chunks_of_a_json_list_are_the_file(texts: list[bytes], bom: bytes, surrogate: bool, chunk_bytes: int) -> None:
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


def test_files_without_records_have_no_chunks_or_empty_ones(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], "string")}), tmp_path / "a.parquet")
    for name, data in (("a.jsonl", b""), ("a.jsonl.gz", gzip.compress(b"")), ("a.json", b" [ ]\n")):
        (tmp_path / name).write_bytes(data)
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"):
        scanned = scan(tmp_path / name, shape=None)
        assert scanned.chunks == ()
        assert (scanned.file.lines or 0) + (scanned.file.records or 0) == 0
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    blank = scan(tmp_path / "b.jsonl", shape=None)
    assert (blank.file.lines, len(blank.chunks), in_chunks(blank)) == (2, 1, [])


def test_tables_of_many_kinds_keep_their_rows(tmp_path: Path) -> None:
    """Rows that are not UTF-8, other dictionaries in each batch, the same bytes under two endings."""
    raw = pyarrow.array([b"ok", b"b\xffd"] * 10, pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 20, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=7)
    assert sum(error is not None for _, _, error in told(read_records(tmp_path / "a.parquet"))) == 10
    columns = [pyarrow.array([f"{k}-{n % 3}" for n in range(90)]).dictionary_encode() for k in range(4)]
    batches = [pyarrow.record_batch({"n": column}) for column in columns]
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    for name in ("a.csv", "a.tsv", "empty.csv"):
        (tmp_path / name).write_bytes(b"" if name == "empty.csv" else b"a,b\tc\n1,2\t3\n")
    for name in ("a.parquet", "a.arrow", "a.csv", "a.tsv", "empty.csv"):
        for size in (1, 30, 60, 100, 1 << 20):
            assert in_chunks(scan(tmp_path / name, chunk_bytes=size)) == told(read_records(tmp_path / name))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_piece_has_the_lines_or_rows_from_its_skip_to_its_end(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_job, "BATCH_BYTES", 300)
    records = chats(7, 1, turns=1, words=4)
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        write_jsonl(path, records)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    (chunk,) = scan(path).chunks
    for skip, end in itertools.combinations(range(8), 2):
        piece = ChunkPiece(chunk, Source(path="a"), end if end < 7 else None, skip)
        read = list(chunk_job._read(piece, (), itertools.repeat(300), lambda *rows: None))
        assert [name for batch, _ in read for name in batch.ids[:]] == [record["id"] for record in records[skip:end]]


def test_the_shape_is_told_from_the_first_records_that_can_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.b.jsonl"
    path.write_bytes(b"broken\n" * 40 + b'{"instruction": "q", "output": "a"}\n')
    scanned = scan(path, shape=None, chunk_bytes=50)
    assert scanned.file.shape == "alpaca"
    assert {(chunk.shape, chunk.source) for chunk in scanned.chunks} == {("alpaca", "a")}
    named = scan(path, shape="sharegpt", source="mine")
    assert (named.chunks[0].shape, named.file.shape, named.file.source) == ("sharegpt", "sharegpt", "mine")


# Files that cannot be used, and files that change.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", r"no such file: .*none\.jsonl"),
        ("folder.jsonl", r"folder\.jsonl is a folder; name its files"),
        ("pipe.jsonl", r"pipe\.jsonl is no regular file"),
        ("a.xlsx", r"a\.xlsx: cannot tell the format from the name"),
        ("x" * 300 + ".jsonl", "cannot read .*File name too long"),
        ("nul\0.jsonl", "cannot read .*null"),
        ("a.xlsx/b.jsonl", "cannot read .*Not a directory"),
        ("refused.jsonl", r"refused\.jsonl: Permission"),
    ],
)
def test_files_that_cannot_be_opened_are_told_apart(tmp_path: Path, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "a.xlsx").write_text("x")
    (tmp_path / "refused.jsonl").write_text("{}\n")
    (tmp_path / "folder.jsonl").mkdir()
    refused = PermissionError(13, "Permission denied")
    with mock.patch("builtins.open", side_effect=refused), pytest.raises(DataError, match=message):
        scan(tmp_path / name)


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("damage", ["cut", "flip", "foreign"])
def test_damaged_archives_are_errors_and_leave_no_spool(tmp_path: Path, ending: str, damage: str) -> None:
    packed = bytearray(PACKERS[ending](NUMBERS))
    if damage == "flip":
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes({"cut": packed[:-9], "flip": packed, "foreign": b"this is no archive"}[damage])
    with pytest.raises(FormatError, match=r"a\.jsonl\.\w+ cannot be unpacked"):
        scan(path, chunk_bytes=1000)
    assert list((tmp_path / "spool").rglob("*")) == []


def test_damaged_parquet_files_are_errors(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", 3000)
    data = path.read_bytes()
    flipped = data[:100] + bytes(byte ^ 0xFF for byte in data[100:400]) + data[400:]
    for broken, size in ((data[: len(data) // 2], 1), (b"PAR1", 1), (b"", 1), (flipped, 200_000), (flipped, 20_000)):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
            in_chunks(scan(path, chunk_bytes=size))  # the last one is spooled
    assert list((tmp_path / "spool").rglob("*")) == []


def test_a_file_that_changes_while_it_is_scanned_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' * 100)

    read = scan_jobs._read

    def changed(*given: Any) -> bytes:
        path.write_bytes(b"{}\n")
        return read(*given)

    monkeypatch.setattr(scan_jobs, "_read", changed)
    with pytest.raises(DataError, match=r"a\.jsonl has changed .* it had 900 bytes and now has 3"):
        scan(path)


@pytest.mark.parametrize("change", ["grows", "is written to", "is removed"])
def test_a_build_whose_input_changes_while_it_is_read_is_not_published(fast: Path, change: str) -> None:
    """What was read may have been half of the old file and half of the new one."""
    path, out = fast / "a.jsonl", fast / "out"
    path.write_bytes((CHAT + b"\n") * 50)

    def on_progress(state: BuildProgress) -> None:
        if state.chunks_done != 1:
            return
        if change == "grows":
            path.write_bytes((CHAT + b"\n") * 51)
        elif change == "is written to":
            os.utime(path, ns=(5, path.stat().st_mtime_ns + 2_000_000_000))
        else:
            path.unlink()

    said = "was there when the build began" if change == "is removed" else "has changed"
    with pytest.raises(DataError, match=rf"a\.jsonl {said}"):
        run_build(plain_recipe(path, shard_bytes=1000), out, workers=0, on_progress=on_progress)
    assert not (out / "manifest.json").exists()


# Spools: the plain file that an input which cannot be cut in place is written as, whole or not at all.


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(NUMBERS))
    return path


def test_a_spool_is_used_again_and_other_bytes_have_another(packed: Path) -> None:
    scanned = scan(packed, chunk_bytes=9000)
    assert len(scanned.chunks) > 5
    with mock.patch.object(spools, "whole_file", side_effect=AssertionError("unpacked again")):
        assert scan(packed, chunk_bytes=9000) == scanned
        os.utime(packed, ns=(1, 1))  # another time, the same bytes
        assert scan(packed, chunk_bytes=9000).chunks == scanned.chunks
        assert in_chunks(scan(packed, chunk_bytes=20_000)) == in_chunks(scanned) == told(read_records(packed))
    (spool,) = (packed.parent / "spool").iterdir()
    spool.unlink()
    assert scan(packed, chunk_bytes=9000).chunks == scanned.chunks, "another build may have written it at the same time"
    packed.write_bytes(gzip.compress(b"{}\n"))
    assert len(in_chunks(scan(packed))) == 1
    assert len(list((packed.parent / "spool").iterdir())) == 2


def test_a_row_group_of_many_chunks_is_spooled(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", 5000)
    scanned = scan(path, chunk_bytes=20_000)
    assert len(scanned.chunks) > 10
    assert all(chunk.data.endswith(".arrow") for chunk in scanned.chunks)
    assert in_chunks(scanned) == told(read_records(path))
    few = scan(path, chunk_bytes=200_000)
    assert {chunk.data for chunk in few.chunks} == {str(path)}
    assert in_chunks(few) == in_chunks(scanned)
    size = sum(len(f"row {n} " * 20) for n in range(5000))
    for chunks in (scanned.chunks, few.chunks):
        assert size < sum(chunk.bytes for chunk in chunks) < 2 * size, "what progress is counted in"


def test_a_disk_that_is_full_or_refuses_is_a_clear_error_and_leaves_no_half_spool(packed: Path) -> None:
    full = pytest.raises(StorageError, match=r"spool/[0-9a-f]+-jsonl\.jsonl: cannot write: No space left")
    with active("before:jsonl:1:enospc"), full as caught:
        scan(packed, chunk_bytes=4000)
    assert isinstance(caught.value, ChatmillError)
    assert list((packed.parent / "spool").rglob("*")) == []
    (packed.parent / "file").write_text("")
    with pytest.raises(StorageError, match="a part of this path is a file"):
        scan(packed, spool=str(packed.parent / "file" / "spool"))
