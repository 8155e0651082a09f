"""Files that grow: piece by piece, and synced by another thread meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError
from chatmill.store import durable
from chatmill.store.durable import Durability, GrowingFile, WordSum
from chatmill.store.episode_writer import EpisodeWriter
from tests.store.writing import (
    BATCHES,
    EIO,
    append,
    begin,
    files,
    folder,
    make,
    open_files,
    record_of,
)


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=12), st.booleans())
def test_files_grow_piece_by_piece(parts: list[bytes], arrays: bool) -> None:
    """The hash and the bytes of what was written, for pieces and stretches of any size."""
    whole = b"".join(parts)
    with folder() as home, pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE": 7, "BUFFER": 4, "STRETCH": 16}.items():
            patch.setattr(durable, name, value)
        for durability in Durability:
            file = GrowingFile(home / "file", durability)
            for part in parts:
                file.write(np.frombuffer(part, dtype=np.uint8) if arrays else part)
            assert file.finish() == record_of(whole)
            assert (home / "file").read_bytes() == whole


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=12), st.data())
def test_the_sum_of_words_finds_damage(parts: list[bytes], data: st.DataObject) -> None:
    """However the bytes come, the sum is that of the whole in words; zeros in the place of some bytes change it."""

    def summed(parts: list[bytes]) -> str:
        found = WordSum()
        for part in parts:
            found.update(memoryview(part))
        return found.hexdigest()

    whole = b"".join(parts)
    words = [int.from_bytes(whole[at : at + 8], "little") for at in range(0, len(whole), 8)]
    assert summed(parts) == summed([whole]) == f"words:{sum(words) % 2**64:016x}"
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    damaged = whole[:first] + bytes(last - first) + whole[last:]
    assert (summed([damaged]) == summed([whole])) == (damaged == whole)


def test_arrays_that_do_not_lie_in_a_row(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "PIECE", 13)
    values = np.arange(60, dtype="<u8").reshape(6, 10)
    file = GrowingFile(home / "file")
    for array in (values[:, ::3], values.T, values[:0], values.astype("<f4")):
        file.write(array)
    expected = values[:, ::3].tobytes() + values.T.tobytes() + values.astype("<f4").tobytes()
    assert file.finish() == record_of(expected)
    assert (home / "file").read_bytes() == expected


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is synced (the size of the file) and what the system may forget (up to where), as it happens."""
    seen: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        seen.append(("sync", os.fstat(descriptor).st_size))

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, advice) == (0, os.POSIX_FADV_DONTNEED)
        upto = length or os.fstat(descriptor).st_size  # for the system, 0 bytes means all of them
        seen.append(("forget", upto))

    monkeypatch.setattr(durable.os, "fsync", sync)
    monkeypatch.setattr(durable.os, "posix_fadvise", advise)
    monkeypatch.setattr(durable, "STRETCH", 100)
    return seen


def test_what_is_a_stretch_behind_leaves_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    file = GrowingFile(home / "file")
    for _ in range(10):
        file.write(b"x" * 40)
    file.finish()
    assert [size for what, size in seen if what == "sync"] == [120, 240, 360, 400]
    assert [size for what, size in seen if what == "forget"] == [120, 240]
    for place, (what, size) in enumerate(seen):
        if what == "forget":
            assert seen[place - 1][0] == "sync"
            assert seen[place - 1][1] >= size + 100


def test_the_first_stretch_stays_in_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    file = GrowingFile(home / "file")
    for _ in range(6):
        file.write(b"x" * 50)
    file.finish()
    assert [size for what, size in seen if what == "sync"] == [100, 200, 300, 300]
    assert [size for what, size in seen if what == "forget"] == [100, 200]


def test_nothing_is_brought_to_the_disk_for_files_of_no_worth(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    monkeypatch.setattr(durable, "STRETCH", 1)
    file = GrowingFile(home / "file", Durability.SCRATCH)
    for _ in range(10):
        file.write(b"x" * 40)
    assert file.finish() == record_of(b"x" * 400)
    with EpisodeWriter(home / "split", "train", 9, durability=Durability.SCRATCH) as writer:
        for batch in BATCHES:
            append(writer, batch)
    assert seen == []


def test_a_writer_goes_on_while_the_disk_is_at_work_but_not_far(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stretch is on its way at a time; who has filled the next one waits."""
    watch(monkeypatch)
    at_work, done = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        at_work.set()
        assert done.wait(30)

    monkeypatch.setattr(durable.os, "fsync", slow)
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    assert at_work.wait(30)
    file.write(b"x" * 99)
    waiting = threading.Thread(target=file.write, args=(b"x",))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    done.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert file.finish() == record_of(b"x" * 200)


def fail_once(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Let the next sync behind a writer fail: the system tells an error of the disk only once. Empty when it did."""
    fsync, errors = os.fsync, [EIO]

    def sync(descriptor: int) -> None:
        if errors and threading.current_thread() is not threading.main_thread():
            raise errors.pop()
        fsync(descriptor)

    monkeypatch.setattr(durable.os, "fsync", sync)
    monkeypatch.setattr(durable, "STRETCH", 100)
    return errors


def test_an_error_of_the_disk_is_told_by_the_next_stretch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = fail_once(monkeypatch)
    now = open_files()
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    file.write(b"x" * 99)
    with pytest.raises(OSError, match="Input/output error"):
        file.write(b"x")
    assert not errors
    file.discard()
    assert open_files() == now


def test_an_error_of_the_disk_is_told_at_the_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = fail_once(monkeypatch)
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    with pytest.raises(OSError, match="Input/output error"):
        file.finish()
    assert not errors
    file.discard()


def test_discard_says_nothing_of_an_error_of_the_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = fail_once(monkeypatch)
    now = open_files()
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    file.discard()
    file.discard()
    assert not errors
    assert open_files() == now


@pytest.mark.parametrize("says", ["writing failed", "publishing failed"])
def test_a_split_whose_disk_failed_is_not_published(home: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    batches = [[make(30, number=number)] for number in range(6)]
    writer = begin(home / "begun", batches[:1], 10_000)
    errors = fail_once(monkeypatch)
    append(writer, batches[1])
    with pytest.raises(ConfigError, match=f"{says}: Input/output error"):
        append(writer, batches[2]) if says == "writing failed" else writer.close()
    assert not errors
    assert files(home / "begun") == {}


FORKED = """
import os, signal, sys
from pathlib import Path
from chatmill.store import durable

def write(path):
    file = durable.GrowingFile(Path(path))
    for _ in range(5):
        file.write(b"x" * 100)
    file.finish()

durable.STRETCH = 100
write(sys.argv[1])
child = os.fork()
if not child:
    signal.alarm(100)
    write(sys.argv[2])
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_no_thread_of_its_parent_but_writes(home: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(home / "parent"), str(home / "child")]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0, "the child hung and was stopped"
    assert files(home)["child"] == b"x" * 500
