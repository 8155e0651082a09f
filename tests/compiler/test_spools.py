"""Spools: the plain file that an input which cannot be cut in place is written as, whole or not at all."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.ipc
import pytest

from chatmill.compiler import inputs
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError
from chatmill.read.files import read_records
from tests.compiler.scanned import in_chunks, scan, told
from tests.faults import active


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
