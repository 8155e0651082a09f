"""Files that grow piece by piece, and disks that fail."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core import publish
from chatmill.core.publish import GrowingFile, StorageError
from tests.store.writing import (
    EIO,
    begin,
    files,
    folder,
    make,
    record_of,
)


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=12), st.booleans())
def test_files_grow_piece_by_piece(parts: list[bytes], arrays: bool) -> None:
    """The hash and the bytes of what was written, for pieces of any size."""
    whole = b"".join(parts)
    with folder() as home, pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE": 7, "BUFFER": 4}.items():
            patch.setattr(publish, name, value)
        file = GrowingFile(home / "file")
        for part in parts:
            file.write(np.frombuffer(part, dtype=np.uint8) if arrays else part)
        assert file.finish() == record_of(whole)
        assert (home / "file").read_bytes() == whole


def test_arrays_that_do_not_lie_in_a_row(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PIECE", 13)
    values = np.arange(60, dtype="<u8").reshape(6, 10)
    file = GrowingFile(home / "file")
    for array in (values[:, ::3], values.T, values[:0], values.astype("<f4")):
        file.write(array)
    expected = values[:, ::3].tobytes() + values.T.tobytes() + values.astype("<f4").tobytes()
    assert file.finish() == record_of(expected)
    assert (home / "file").read_bytes() == expected


def fail_once(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Let the next sync fail: the system reports an error of the disk only once. Empty when it did."""
    fsync, errors = os.fsync, [EIO]

    def sync(descriptor: int) -> None:
        if errors:
            raise errors.pop()
        fsync(descriptor)

    monkeypatch.setattr(publish.os, "fsync", sync)
    return errors


def test_a_split_whose_disk_failed_is_not_published(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(home / "begun", [[make(30, number=number)] for number in range(6)], 10_000)
    errors = fail_once(monkeypatch)
    with pytest.raises(StorageError, match="Input/output error"):
        writer.close()
    assert not errors
    assert files(home / "begun") == {}
