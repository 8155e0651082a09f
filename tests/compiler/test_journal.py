"""The journal of a join: lines that come back, ends that are cut off, lines taken away; and parts that go at once."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.journal import Journal, JournalLine
from chatmill.compiler.publish import TEMPORARY, StorageError, remove_at_once, sweep_orphans
from chatmill.store.episode_manifest import FileRecord, ShardRecord
from chatmill.store.episode_writer import WriterProgress


def file_record(*key: object) -> FileRecord:
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return FileRecord(bytes=int(digest[:6], 16), sha256=digest)


def shard(split: str, number: int, label: str) -> ShardRecord:
    """A shard with a hash of its own; `label` tells apart those of one number."""
    name = f"shard_{number:05d}"
    files = {file: file_record(split, number, label, file) for file in ("tokens.bin", "episodes.idx", "mask.bin")}
    return ShardRecord(name=name, episodes=number + 1, tokens=10 * number + len(label), files=files)


Step = tuple[Mapping[str, int], bool, dict[str, Any]]
"""Shards that each split publishes with a part, whether the part has rejected records, and its receipt."""


def lines_of(steps: list[Step], label: str = "", before: JournalLine | None = None) -> list[JournalLine]:
    """The lines of parts: all splits so far with all shards so far, and one of each that grows."""
    published = {split: list(progress.published) for split, progress in before.splits.items()} if before else {}
    rejected = before.rejected if before else None
    lines: list[JournalLine] = []
    for number, (new, rejects, receipt) in enumerate(steps):
        for split, count in new.items():
            known = published.setdefault(split, [])
            known += [shard(split, len(known) + extra, label) for extra in range(count)]
        rejected = file_record(label, number) if rejects else rejected
        splits = {
            split: WriterProgress(
                names=("mask", "source", "record_id"),
                sources=tuple(f"source {code} ü" for code in range(number % 3)),
                published=tuple(known),
                growing=shard(split, len(known), f"{label} growing {number}"),
            )
            for split, known in published.items()
        }
        lines.append(JournalLine(receipt=receipt, rejected=rejected, splits=splits))
    return lines


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
step = st.tuples(
    st.dictionaries(st.sampled_from(["train", "val", "tést\n"]), st.integers(0, 3), max_size=3),
    st.booleans(),
    st.dictionaries(st.text(max_size=3), values, max_size=3),
)
some_steps = st.lists(step, min_size=1, max_size=8)

STEPS: list[Step] = [
    ({"train": 0}, False, {"chunk": 0}),
    ({"train": 2}, False, {"chunk": 1}),
    ({"val": 0}, True, {"chunk": 2}),
    ({"train": 1, "val": 3}, True, {"chunk": 3}),
    ({}, False, {"chunk": 4}),
]
LINES = lines_of(STEPS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, lines: list[JournalLine]) -> None:
    journal = Journal(path)
    for line in lines:
        journal.append(line)
    journal.close()


def check(journal: Journal, lines: list[JournalLine]) -> None:
    """That a journal has these lines and no others."""
    assert len(journal) == len(lines)
    assert list(journal.receipts()) == [line.receipt for line in lines]
    assert not lines or journal.last() == lines[-1]


def check_file(path: Path, lines: list[JournalLine]) -> None:
    """That a journal opened anew has these lines, seen from every one of them."""
    journal = Journal(path)
    for number in range(len(lines), 0, -1):
        check(journal, lines[:number])
        journal.drop_last()
    check(journal, [])
    journal.close()
    assert path.read_bytes() == b""


def check_then_append(path: Path, lines: list[JournalLine], more: JournalLine) -> None:
    """That a damaged journal has these lines, is cut behind them, and that the next one can be read."""
    journal = Journal(path)
    check(journal, lines)
    assert path.read_bytes().count(b"\n") == len(lines)
    assert path.read_bytes()[-1:] in (b"", b"\n")
    journal.append(more)
    check(journal, [*lines, more])
    journal.close()
    check_file(path, [*lines, more])


def test_an_empty_journal(path: Path) -> None:
    journal = Journal(path)
    check(journal, [])
    journal.close()
    check_file(path, [])


@settings(max_examples=60, deadline=None)
@given(some_steps, st.integers(0, 8))
def test_lines_come_back(steps: list[Step], opened: int) -> None:
    """In the journal that wrote them, and in one opened later, which may go on."""
    lines = lines_of(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        journal = Journal(path)
        for number, line in enumerate(lines):
            if number == opened:
                journal.close()
                journal = Journal(path)
            journal.append(line)
            check(journal, lines[: number + 1])
        journal.close()
        check_file(path, lines)


@settings(max_examples=60, deadline=None)
@given(some_steps, st.integers(0, 10_000), step)
def test_a_torn_line_is_cut_off(steps: list[Step], cut: int, more: Step) -> None:
    lines = lines_of(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        write(path, lines)
        data = path.read_bytes()
        torn = data[: cut % len(data)]
        path.write_bytes(torn)
        whole = lines[: torn.count(b"\n")]
        check_then_append(path, whole, lines_of([more], "more", whole[-1] if whole else None)[0])


def test_a_line_torn_at_every_byte(path: Path) -> None:
    write(path, LINES[:2])
    data = path.read_bytes()
    last = data.index(b"\n") + 1
    for cut in range(last, len(data)):
        path.write_bytes(data[:cut])
        journal = Journal(path)
        check(journal, LINES[:1])
        journal.close()
        assert path.read_bytes() == data[:last]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, len(LINES)),
    st.binary(min_size=1, max_size=30) | st.sampled_from([b"\0", b"\0" * 5000, b"\xff" * 4096, b"\n", b'"', b"{"]),
    st.sampled_from([b"", b"\n", b"\0\n", b"\n\n"]),
    st.booleans(),
)
def test_garbage_is_cut_off_with_all_behind_it(count: int, garbage: bytes, end: bytes, followed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        write(path, LINES[:count])
        before = path.read_bytes()
        if followed:  # by whole lines
            other = Path(folder, "other")
            write(other, LINES)
            end = b"\n" + other.read_bytes()
        path.write_bytes(before + garbage + end)
        more = lines_of([({"train": 2}, False, {"more": 1})], "more", LINES[count - 1] if count else None)[0]
        check_then_append(path, LINES[:count], more)


@pytest.mark.parametrize(
    "garbage",
    [
        b"null\n",
        b"[]\n",
        b"{}\n",
        b"7\n",
        b'{"receipt":{},"rejected":null}\n',
        b'{"receipt":{},"rejected":null,"splits":[]}\n',
        b'{"receipt":{},"rejected":{"bytes":"x","sha256":""},"splits":{}}\n',
        b'{"receipt":{},"rejected":null,"splits":{"train":{"names":[],"sources":[],"published":[]}}}\n',
        b'{"receipt":3,"rejected":null,"splits":{}}\n',
        b"9" * 5000 + b"\n",
        b"[" * 100_000 + b"\n",
        b'{"receipt":{},"rejected":{"bytes":1e999,"sha256":""},"splits":{}}\n',
    ],
    ids=lambda garbage: garbage[:60].decode().strip(),
)
def test_json_that_is_no_line_is_cut_off(path: Path, garbage: bytes) -> None:
    write(path, LINES[:2])
    before = path.read_bytes()
    path.write_bytes(before + garbage)
    check_then_append(path, LINES[:2], LINES[2])


@settings(max_examples=60, deadline=None)
@given(some_steps, st.integers(0, 8), st.lists(step, max_size=4), st.booleans())
def test_lines_are_taken_away(steps: list[Step], dropped: int, more: list[Step], anew: bool) -> None:
    """Also lines with published shards: others of the same numbers come in their place."""
    lines = lines_of(steps)
    dropped = min(dropped, len(lines))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        write(path, lines)
        journal = Journal(path)
        for _ in range(dropped):
            journal.drop_last()
            lines.pop()
            check(journal, lines)
        if anew:
            journal.close()
            journal = Journal(path)
        for line in lines_of(more, "other", lines[-1] if lines else None):
            journal.append(line)
            lines.append(line)
            check(journal, lines)
        journal.close()
        check_file(path, lines)


def test_lines_with_published_shards_are_taken_away(path: Path) -> None:
    """The same, spelled out."""
    write(path, LINES)
    journal = Journal(path)
    for count, train, val in ((5, 3, 3), (4, 3, 3), (3, 2, 0), (2, 2, None), (1, 0, None)):
        splits = journal.last().splits
        assert len(journal) == count
        assert [s.name for s in splits["train"].published] == [f"shard_{n:05d}" for n in range(train)]
        assert (len(splits["val"].published) if "val" in splits else None) == val
        journal.drop_last()
    assert len(journal) == 0
    journal.close()


def test_a_shard_stands_in_one_line(path: Path) -> None:
    """Lines do not get longer with the number of shards that were published before."""
    lines = lines_of([({"train": 1}, False, {}) for _ in range(50)])
    write(path, lines)
    data = path.read_bytes()
    for published in lines[-1].splits["train"].published:
        assert data.count(published.files["tokens.bin"].sha256.encode()) == 1
    sizes = [len(line) for line in data.splitlines()]
    assert max(sizes) < min(sizes) * 1.2


def test_a_line_is_with_the_system_when_it_is_appended(path: Path) -> None:
    journal = Journal(path)
    for number, line in enumerate(LINES, 1):
        journal.append(line)
        copy = path.with_name(f"killed {number}")
        shutil.copy(path, copy)
        check_file(copy, LINES[:number])
    journal.close()


def test_receipts_are_not_kept_in_memory(path: Path) -> None:
    """Neither while lines are added nor when the file is opened again; 6 MB of receipts."""
    line = lines_of([({"train": 1}, True, {"ledger": "x" * 20_000})])[0]
    tracemalloc.start()
    try:
        for opened in range(2):
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            journal = Journal(path)
            while len(journal) < 300:
                journal.append(line)
            assert sum(1 for _ in journal.receipts()) == 300
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0] - before
            assert kept < 200_000, opened
            journal.close()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 6_000_000


@pytest.mark.parametrize("again", [2, 3])
def test_a_disk_that_is_full_in_the_middle_of_a_line(path: Path, monkeypatch: pytest.MonkeyPatch, again: int) -> None:
    """The line that failed does not count; the next one, longer or shorter, stands in its place."""
    write(path, LINES[:2])
    journal = Journal(path)
    pwrite = os.pwrite
    room = [100]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = pwrite(descriptor, data[: room[0]], offset)
        room[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append(LINES[3])
    monkeypatch.undo()
    check(journal, LINES[:2])
    more = LINES[2] if again == 2 else JournalLine(receipt={}, rejected=None, splits={})
    journal.append(more)
    check(journal, [*LINES[:2], more])
    journal.close()
    check_then_append(path, [*LINES[:2], more], LINES[3])


def test_a_system_that_takes_a_line_bit_by_bit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:7], offset))
    write(path, LINES)
    monkeypatch.undo()
    check_file(path, LINES)


def test_a_part_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "part"
    (part / "train").mkdir(parents=True)
    (part / "train/tokens.bin").write_bytes(b"x")
    seen: list[list[str]] = []

    def failing(*arguments: Any, **options: Any) -> None:
        seen.append([path.name for path in tmp_path.iterdir()])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "unlink", failing)
    with pytest.raises(StorageError, match="part: cannot remove: Input/output error"):
        remove_at_once(part)
    monkeypatch.undo()
    assert len(seen) == 1
    assert [bool(TEMPORARY.fullmatch(name)) for name in seen[0]] == [True]
    assert len(sweep_orphans(tmp_path)) == 1
    (part / "train").mkdir(parents=True)
    remove_at_once(part)
    assert not list(tmp_path.iterdir())
    with pytest.raises(StorageError, match="part: cannot remove: No such file"):
        remove_at_once(part)
