"""Inputs that cannot be used, have no known shape, or change while they are read."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.ipc
import pytest

from chatmill.compiler import inputs
from chatmill.compiler.cuts import ChunkCut, line_cuts
from chatmill.compiler.run import BuildProgress, run_build
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError, DataError, FormatError
from chatmill.read.files import read_records
from tests.compiler.builds import plain_recipe
from tests.compiler.scanned import CHAT, PACKERS, in_chunks, parquet, scan, told
from tests.faults import active

# --- files that cannot be used --------------------------------------------------------------------------------------


def test_missing_files_folders_and_pipes_are_told_apart(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "a.xlsx").write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in (
        ("none.jsonl", r"no such file: .*none\.jsonl"),
        ("folder.jsonl", r"folder\.jsonl is a folder; name its files"),
        ("pipe.jsonl", r"pipe\.jsonl is no regular file"),
        ("a.xlsx", r"a\.xlsx: cannot tell the format from the name"),
        ("x" * 300 + ".jsonl", "cannot read .*File name too long"),
        ("nul\0.jsonl", "cannot read .*null"),
        ("a.xlsx/b.jsonl", "cannot read .*Not a directory"),
    ):
        with pytest.raises(DataError, match=message):
            scan(tmp_path / name)


def test_a_file_that_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n")
    refused = PermissionError(13, "Permission denied")
    with mock.patch("builtins.open", side_effect=refused), pytest.raises(DataError, match=r"a\.jsonl: Permission"):
        scan(path)


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("damage", ["cut", "flip", "foreign"])
def test_damaged_archives_are_errors_and_leave_no_spool(tmp_path: Path, kind: str, damage: str) -> None:
    packed = bytearray(PACKERS[kind](b"".join(b'{"n": %d}\n' % n for n in range(9000))))
    if damage == "flip":
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes({"cut": packed[:-9], "flip": packed, "foreign": b"this is no archive"}[damage])
    with pytest.raises(FormatError, match=r"a\.jsonl\.\w+ cannot be unpacked"):
        scan(path, chunk_bytes=1000)
    assert list((tmp_path / "spool").rglob("*")) == []


def test_damaged_parquet_files_are_errors(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", 3000, 3000)
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], b"PAR1", b""):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
            scan(path)
    flipped = bytearray(data)
    for at in range(100, 400):
        flipped[at] ^= 0xFF
    path.write_bytes(flipped)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        in_chunks(scan(path, chunk_bytes=200_000))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        scan(path, chunk_bytes=20_000)  # spooled
    assert list((tmp_path / "spool").rglob("*")) == []


# --- files that change ----------------------------------------------------------------------------------------------


def test_a_file_that_changes_while_it_is_scanned_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' * 100)

    def cuts(*given: Any) -> Iterator[ChunkCut]:
        path.write_bytes(b"{}\n")
        return line_cuts(*given)

    monkeypatch.setattr(inputs, "line_cuts", cuts)
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
    path.write_bytes(gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(3000))))
    return path


def test_a_spool_is_used_again_and_other_bytes_have_another(packed: Path) -> None:
    scanned = scan(packed, chunk_bytes=4000)
    assert len(scanned.chunks) > 5
    with mock.patch.object(inputs, "open_bytes", side_effect=AssertionError("unpacked again")):
        assert scan(packed, chunk_bytes=4000) == scanned
        os.utime(packed, ns=(1, 1))  # another time, the same bytes
        assert scan(packed, chunk_bytes=4000).chunks == scanned.chunks
        assert in_chunks(scan(packed, chunk_bytes=9000)) == in_chunks(scanned) == told(read_records(packed))
    (spool,) = (packed.parent / "spool").iterdir()
    spool.unlink()
    assert scan(packed, chunk_bytes=4000).chunks == scanned.chunks, "another build may have written it at the same time"
    packed.write_bytes(gzip.compress(b"{}\n"))
    assert len(in_chunks(scan(packed))) == 1
    assert len(list((packed.parent / "spool").iterdir())) == 2


def test_the_same_bytes_under_two_endings(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "empty.csv"):
        (tmp_path / name).write_bytes(b"" if name == "empty.csv" else b"a,b\tc\n1,2\t3\n")
        assert in_chunks(scan(tmp_path / name)) == told(read_records(tmp_path / name))


def test_rows_with_other_dictionaries_in_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    batches = [
        pyarrow.record_batch({"n": pyarrow.array([f"{k}-{n % 3}" for n in range(90)]).dictionary_encode()})
        for k in range(4)
    ]
    with pyarrow.ipc.new_stream(str(path), batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    for size in (1, 100, 1 << 20):
        assert in_chunks(scan(path, chunk_bytes=size)) == told(read_records(path))


def test_a_disk_that_is_full_or_refuses_is_a_clear_error_and_leaves_no_half_spool(packed: Path) -> None:
    full = pytest.raises(StorageError, match=r"spool/[0-9a-f]+-jsonl\.jsonl: cannot write: No space left")
    with active("before:jsonl:1:enospc"), full as caught:
        scan(packed, chunk_bytes=4000)
    assert isinstance(caught.value, ChatmillError)
    assert list((packed.parent / "spool").rglob("*")) == []
    (packed.parent / "file").write_text("")
    with pytest.raises(StorageError, match="a part of this path is a file"):
        scan(packed, spool=str(packed.parent / "file" / "spool"))
