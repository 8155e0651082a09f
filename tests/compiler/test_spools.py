"""Spools: what an input that cannot be read from the middle is unpacked into, whole or not at all."""

from __future__ import annotations

import dataclasses
import gzip
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from chatmill.compiler import spools
from chatmill.compiler.chunk_output import whole_receipt
from chatmill.compiler.inputs import ScannedInput
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError
from chatmill.read.files import read_records
from tests.compiler.scanned import in_chunks, scan, told
from tests.faults import active, faults

# --- spools ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def spooled(tmp_path: Path) -> tuple[Path, ScannedInput]:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(3000))))
    return path, scan(path, chunk_bytes=4000)


def spool_times(path: Path) -> dict[str, int]:
    return {str(part): part.stat().st_ino for part in (path.parent / "spool").rglob("*") if part.is_file()}


def test_a_whole_spool_is_used_again(spooled: tuple[Path, ScannedInput]) -> None:
    path, scanned = spooled
    before = spool_times(path)
    assert len(before) == len(scanned.chunks) + 1 > 5
    with mock.patch.object(spools, "open_bytes", side_effect=AssertionError("unpacked again")):
        assert scan(path, chunk_bytes=4000) == scanned
        os.utime(path, ns=(1, 1))  # another time, the same bytes
        assert scan(path, chunk_bytes=4000).chunks == scanned.chunks
    assert spool_times(path) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "receipt_cut", "receipt_gone", "receipt_list"])
def test_a_damaged_spool_is_written_again(spooled: tuple[Path, ScannedInput], damage: str) -> None:
    path, scanned = spooled
    before = in_chunks(scanned)
    target = Path(scanned.chunks[2].data)
    if damage.startswith("receipt"):
        target = target.parent / "receipt.json"
    data = bytearray(target.read_bytes())
    match damage.removeprefix("receipt_"):
        case "flip":
            data[100] ^= 3
            target.write_bytes(data)
        case "cut":
            target.write_bytes(data[:-5])
        case "gone":
            target.unlink()
        case "list":
            target.write_bytes(b"[]")
    again = scan(path, chunk_bytes=4000)
    assert in_chunks(again) == before
    assert [dataclasses.replace(c, file_mtime_ns=0) for c in again.chunks] == [
        dataclasses.replace(c, file_mtime_ns=0) for c in scanned.chunks
    ]


def test_other_bytes_and_other_sizes_have_other_spools(spooled: tuple[Path, ScannedInput]) -> None:
    path, scanned = spooled
    coarse = scan(path, chunk_bytes=9000)
    path.write_bytes(gzip.compress(b"{}\n"))
    changed = scan(path, chunk_bytes=4000)
    assert len(list((path.parent / "spool").iterdir())) == 3
    assert len(in_chunks(coarse)) == len(in_chunks(scanned)) == 3000
    assert len(in_chunks(changed)) == 1


def test_a_killed_spool_is_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(3000))))
    code = (
        "import sys\nfrom chatmill.compiler.inputs import InputScan, scan_input\n"
        "scan_input(InputScan(path=sys.argv[1], spool=sys.argv[2], shape='openai', chunk_bytes=4000))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "spool")],
        env={**os.environ, **faults("before:lines:1:kill")},
        check=False,
    )
    assert ended.returncode == -9
    assert [folder.name[:5] for folder in (tmp_path / "spool").iterdir()] == [".tmp-"]
    assert in_chunks(scan(path, chunk_bytes=4000)) == told(read_records(path))


def test_two_builders_of_one_spool_do_not_disturb_each_other(spooled: tuple[Path, ScannedInput]) -> None:
    """A second builder that began before the first was done keeps what that one has published."""
    path, scanned = spooled
    before = spool_times(path)
    with mock.patch.object(spools, "whole_receipt", side_effect=[None, mock.DEFAULT], wraps=whole_receipt):
        assert scan(path, chunk_bytes=4000) == scanned
    assert spool_times(path) == before
    assert len(in_chunks(scanned)) == 3000


def test_a_full_disk_is_a_clear_error_and_leaves_no_half_spool(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n' * 3000))
    full = pytest.raises(StorageError, match=r"spool/[0-9a-f]+-lines-4000: cannot .*No space left")
    with active("before:lines:1:enospc"), full as caught:
        scan(path, chunk_bytes=4000)
    assert isinstance(caught.value, ChatmillError)
    assert list((tmp_path / "spool").rglob("*")) == []


def test_a_spool_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create the folder"):
        scan(path, spool=str(tmp_path / "file" / "spool"))
