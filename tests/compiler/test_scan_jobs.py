"""Scan jobs: the driver reads no input, and parts of files are put together."""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler import group_borders, scan_jobs
from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.group_borders import Chunks, whole_groups
from chatmill.compiler.inputs import InputScan
from chatmill.compiler.recipe import Source
from chatmill.compiler.run import run_build
from chatmill.compiler.scan_jobs import scan_inputs
from chatmill.errors import DataError
from chatmill.read.groups import record_groups
from tests.compiler.builds import chats, digest, mixed_recipe, plain_recipe, write_inputs, write_jsonl
from tests.forked import Forked

WATCHED = """
import json, os, sys
import pyarrow.parquet
from chatmill.compiler import scan_jobs
from chatmill.compiler.run import run_build

home, out, workers = sys.argv[1:]
recipe = json.loads(open(home + "/recipe.json").read())
scan_jobs.PART_BYTES = 3000
opened = []
sys.addaudithook(lambda event, about: opened.append(str(about[0])) if event == "open" else None)
opens_parquet = pyarrow.parquet.ParquetFile
pyarrow.parquet.ParquetFile = lambda path, **options: opened.append(str(path)) or opens_parquet(path, **options)
run_build(recipe, out, workers=int(workers))
print(json.dumps([name for name in opened if name.startswith((home + "/in/", out + "/.build/spool/"))]))
"""


def test_the_driver_opens_no_input_and_no_spool(fast: Path) -> None:
    recipe = mixed_recipe(write_inputs(fast / "in"))
    recipe["sources"][0]["pick"] = {"group": "id"}
    recipe["sources"][0]["path"] = str(fast / "in" / "plain.jsonl")
    (fast / "recipe.json").write_text(json.dumps(recipe))
    (fast / "watched.py").write_text(WATCHED)
    for workers, reads in (("0", True), ("2", False)):
        child = Forked(fast / "watched.py", str(fast), str(fast / workers), workers)
        stdout, stderr = child.communicate()
        assert child.returncode == 0, stderr
        assert bool(json.loads(stdout)) == reads, "one process reads, of several the driver does not"
    run_build(recipe, fast / "whole", workers=0)
    assert digest(fast / "0") == digest(fast / "2") == digest(fast / "whole")


def test_parts_share_jobs_in_order_and_files_that_must_be_unpacked_weigh_more(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"{number:03d}.jsonl").write_bytes(b"{}\n")
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(5 * scan_jobs.PART_BYTES + 1)
    (tmp_path / "packed.jsonl.gz").write_bytes(bytes(scan_jobs.PART_BYTES // scan_jobs.UNPACK_COST))
    paths = sorted(map(str, tmp_path.iterdir()))
    parts = [part for path in paths for part in scan_jobs._parts(InputScan(path=path, spool="", chunk_bytes=1 << 20))]
    jobs = scan_jobs._jobs(parts)
    assert [part for job in jobs for part in job.parts] == parts
    large = [part for part in parts if "large" in part.scan.path]
    assert len(large) == 6
    assert [part.start for part in large] == [part * scan_jobs.PART_BYTES for part in range(6)]
    assert [(part.stop, part.file_bytes) for part in large][-1] == (large[0].file_bytes,) * 2
    small = [job for job in jobs if len(job.parts) > 1]
    assert 3 <= len(small) <= 6
    assert {len(job.parts) for job in jobs if job not in small} == {1}


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b'{"n": 0}\n'])
def test_a_line_longer_than_many_parts_is_one_record(tmp_path: Path, before: bytes, end: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(before + b'{"n": "' + b"x" * 5000 + b'"}' + end + b'{"n": 2}\n' * bool(end))
    with mock.patch.object(scan_jobs, "PART_BYTES", 100):
        assert len(scan_jobs._parts(InputScan(path=str(path), spool="", chunk_bytes=9))) > 50
        (scanned,) = scan_inputs([InputScan(path=str(path), spool="", chunk_bytes=9, shape="openai")])
    assert scanned.file.lines == (before.endswith(b"\n")) + 1 + bool(end)
    borders = [0, *itertools.accumulate(map(len, path.read_bytes().splitlines(keepends=True)))]
    assert [(chunk.start, chunk.stop) for chunk in scanned.chunks] == list(itertools.pairwise(borders))
    assert [chunk.first for chunk in scanned.chunks] == list(range(1, len(borders)))


def test_files_give_the_same_scanned_by_workers_in_parts_and_here(fast: Path) -> None:
    folder = write_inputs(fast / "in", 60)
    write_jsonl(folder / "laid_out.jsonl", []).write_text(json.dumps(chats(40, 3), indent=2))
    write_jsonl(folder / "lines.json", chats(40, 4))
    paths = sorted(str(path) for path in folder.iterdir())
    scans = [InputScan(path=path, spool=str(fast / "spool"), chunk_bytes=2000) for path in paths]
    here = scan_inputs(scans)
    assert len(here) == 6
    with mock.patch.object(scan_jobs, "PART_BYTES", 5000), LocalExecutor(2) as executor:
        assert scan_inputs(scans, executor) == here
        with pytest.raises(DataError, match="no such file: none"):
            scan_inputs([InputScan(path="none.jsonl", spool="")], executor)


def test_a_file_that_changes_between_scan_and_chunks_is_an_error(fast: Path) -> None:
    path = write_jsonl(fast / "a.jsonl", chats(20, 1))

    def on_start() -> None:
        write_jsonl(path, chats(21, 1))

    with pytest.raises(DataError, match=r"a\.jsonl has changed since the build began: it had"):
        run_build(plain_recipe(path, shard_bytes=1000), fast / "out", workers=2, on_start=on_start)
    assert not (fast / "out" / "manifest.json").exists()


# Groups: what the driver makes of summaries is what a reader of all records makes of them.


def slow_whole_groups(chunks: Chunks, field: str) -> Chunks:
    """Record by record, in one go."""
    result: list[list[ChunkPiece]] = []
    seen: dict[bytes, int] = {}
    last, last_source = None, None
    for pieces in chunks:
        current: list[ChunkPiece] = []
        if pieces[0].rules is not last_source:
            last, last_source = None, pieces[0].rules
        for piece in pieces:
            groups = list(record_groups(piece.range, field))[: piece.max_records]
            leading = 0
            if last is not None and not current:
                leading = next((at for at, group in enumerate(groups) if group not in (None, last)), len(groups))
            if leading:
                result[-1].append(piece if leading == len(groups) else piece._replace(max_records=leading))
            if leading == len(groups):
                continue
            current.append(piece._replace(skip=leading))
            for at, group in enumerate(groups[leading:], piece.range.first + leading):
                if group is not None and group != last:
                    key = hashlib.sha256(f"{id(piece.rules)} {group}".encode()).digest()
                    if seen.setdefault(key, len(result)) != len(result):
                        raise DataError(f"{piece.range.before}{at}: an earlier record has the same {field}")
                    last = group
        if current:
            result.append(current)
    return tuple(map(tuple, result))


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        yield Path(name)


RUNS = st.lists(st.tuples(st.none() | st.integers(0, 9), st.integers(1, 4)), min_size=4, max_size=12)
SORTED = RUNS.map(lambda runs: sorted(runs, key=lambda run: -1 if run[0] is None else run[0]))
FILES = st.lists(st.one_of(RUNS, SORTED, SORTED, SORTED), min_size=1, max_size=2)


@given(files=FILES, data=st.data(), size=st.sampled_from([1, 30, 30, 50, 1000]))
@settings(max_examples=300)
def test_borders_of_groups_are_those_of_a_reader_of_all_records(files: Any, data: st.DataObject, size: int) -> None:
    chunks: list[tuple[ChunkPiece, ...]] = []
    sources = [Source(path="a"), Source(path="b")]
    with folder() as home, mock.patch.object(group_borders, "JOB_BYTES", data.draw(st.sampled_from([1, 1 << 24]))):
        owners = sorted(data.draw(st.integers(0, 1)) for _ in files)
        for number, (runs, owner) in enumerate(zip(files, owners, strict=True)):
            path = home / f"{number}.jsonl"
            groups = [group for group, count in runs for _ in range(count)]
            path.write_text("".join("\n" if group is None else json.dumps({"of": group}) + "\n" for group in groups))
            scan = InputScan(path=str(path), spool="", shape="openai", source="s", chunk_bytes=size)
            most = data.draw(st.sampled_from([None, None, None, 1, 2]))
            for chunk in scan_inputs([scan])[0].chunks:
                piece = ChunkPiece(chunk, sources[owner], most if most is not None and most < chunk.count else None)
                joins = chunks and chunks[-1][0].rules is piece.rules and data.draw(st.integers(0, 3)) == 0
                chunks[-1:] = [(*chunks[-1], piece)] if joins else [*chunks[-1:], (piece,)]
        try:
            wanted: Any = slow_whole_groups(tuple(chunks), "of")
        except DataError as error:
            wanted = str(error)
        try:
            found: Any = whole_groups(tuple(chunks), lambda source: "of")
        except DataError as error:
            found = str(error).partition(", ")[0]
    assert found == wanted


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["", "", ""], r"a\.jsonl:3: an earlier record has the same q, '0', .* sort the input by q, or"),
        (["x", "y", "x"], r"a\.jsonl:3: an earlier record of the source 'x' has .* sort the input by source and q, or"),
    ],
)
def test_a_group_in_two_chunks_is_an_error_that_says_how_to_sort(fast: Path, sources: list[str], message: str) -> None:
    """Records of two sources in one file are in groups of their own."""
    groups = [0, 0 if sources[1] else 1, 0]
    records = [
        {**chat, "q": group} | ({"source": source} if source else {})
        for chat, group, source in zip(chats(3, 1), groups, sources, strict=True)
    ]
    path = write_jsonl(fast / "a.jsonl", records)
    recipe = plain_recipe(path, shard_bytes=1)
    recipe["sources"][0]["pick"] = {"group": "q"}
    with pytest.raises(DataError, match=message):
        run_build(recipe, fast / "out", workers=0)
