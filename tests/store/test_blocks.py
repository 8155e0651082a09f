"""The blocks store: exact bytes, round trips, nothing half-published, and one clear error for every fault."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.pack.assemble import PackedRows, assemble_rows
from chatmill.pack.plan import plan
from chatmill.store import block_writer, blocks
from chatmill.store.block_manifest import block_manifest_from_json
from chatmill.store.block_writer import BlockWriter
from chatmill.store.blocks import BlockDataset, check_blocks
from chatmill.store.episode_writer import EpisodeWriter

PAGE = Path(__file__).parents[2] / "docs/formats/blocks.md"
CAPACITY, PAD = 6, 0


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes what is synced, by its path, and saves the time of doing it."""
    paths: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return paths


def files(folder: Path) -> dict[str, str]:
    """Relative name -> sha256 of every file below a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def packed(lengths: Sequence[int], capacity: int = CAPACITY, fraction_at: int | None = None) -> PackedRows:
    """Documents of these lengths, with ids and kinds that count up, in rows."""
    offsets = offsets_of(np.array(lengths, dtype=np.int64))
    ids = np.arange(1, 1 + offsets[-1], dtype=np.int32)
    weights = (ids % 3).astype(np.float32)
    if fraction_at is not None:
        weights[fraction_at] = 0.25
    columns = {"weights": (weights, 0.0), "kinds": ((1 + ids % 40).astype(np.uint8), 0)}
    return assemble_rows(plan(np.array(lengths), capacity), ids, offsets, PAD, columns=columns)


def fields(rows: PackedRows, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Rows as the arguments of `append`; the slicing is a plain loop over rows."""
    chosen = range(len(rows))[first:last]
    starts = [rows.starts(r).tolist() for r in chosen]
    begin, end = rows.start_offsets[chosen.start], rows.start_offsets[chosen.stop]
    return {
        "ids": rows.ids[first:last],
        "row_lengths": rows.row_lengths[first:last],
        "start_values": [s for row in starts for s in row],
        "start_offsets": np.cumsum([0] + [len(row) for row in starts]),
        "documents": rows.documents[begin:end],
        **{name: values[first:last] for name, values in rows.columns.items()},
    }


def make(
    directory: Path, rows: PackedRows, rows_per_shard: int = 2, sizes: Sequence[int] = (1,), **options: Any
) -> Path:
    """Write a split in appends of the given sizes, over and over; the folder of the split."""
    capacity = rows.ids.shape[1]
    with BlockWriter(
        directory, "train", capacity=capacity, pad_id=PAD, rows_per_shard=rows_per_shard, **options
    ) as writer:
        done = turn = 0
        while done < len(rows):
            upto = done + sizes[turn % len(sizes)]
            writer.append(**fields(rows, done, upto))
            done, turn = upto, turn + 1
    return directory / "train"


def small(directory: Path, **options: Any) -> Path:
    """Five rows in three shards: the split that the tests damage."""
    return make(directory, packed([6, 2, 3, 1, 4, 2, 6, 5]), **options)


# ---------------------------------------------------------------- exact bytes and round trips


def test_the_files_to_the_byte(tmp_path: Path) -> None:
    with BlockWriter(tmp_path, "train", capacity=4, pad_id=0, rows_per_shard=10) as writer:
        writer.append(
            ids=[[7, 8, 9, 0], [5, 6, 300, 301]],
            row_lengths=[3, 4],
            start_values=[0, 0, 2],
            start_offsets=[0, 1, 3],
            documents=[2, 0, 1],
            weights=[[0, 0, 1, 0], [0, 1, 0, 1]],
        )
    shard = tmp_path / "train/shard_00000"
    shown = re.findall(r"^(\w+\.\w+) +((?:[0-9a-f]{2,16} *)+)$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) == 6
    assert {name: hexes.replace(" ", "") for name, hexes in shown} == {
        path.name: path.read_bytes().hex() for path in shard.iterdir()
    }
    manifest = json.loads((tmp_path / "train/blocks.json").read_text())
    named = {name: (c["file"], c["dtype"], c["per"]) for name, c in manifest.pop("columns").items()}
    assert named == {
        "ids": ("ids.u32", "<u4", "token"),
        "weights": ("weights.u8", "|u1", "token"),
        "row_lengths": ("row_lengths.i32", "<i4", "row"),
        "starts": ("starts.i32", "<i4", "document"),
        "starts_offsets": ("starts_offsets.i64", "<i8", "row_border"),
        "documents": ("documents.i64", "<i8", "document"),
    }
    (entry,) = manifest.pop("shards")
    hashes = files(shard)
    assert entry.pop("files") == {
        p.name: {"bytes": p.stat().st_size, "sha256": hashes[p.name]} for p in sorted(shard.iterdir())
    }
    assert entry == {"name": "shard_00000", "rows": 2, "tokens": 7, "documents": 3}
    assert manifest == {
        "format": "chatmill-blocks", "version": 1, "split": "train", "capacity": 4, "pad_id": 0,
        "rows_per_shard": 10, "rows": 2, "tokens": 7, "documents": 3,
    }  # fmt: skip


@dataclass(frozen=True)
class Made:
    rows: PackedRows
    weights: list[list[float]] | None
    kinds: bool


@st.composite
def made_rows(draw: st.DrawFn) -> Made:
    """Random packed rows, straight from the rules: cut points in rows, any ids, any document numbers."""
    capacity = draw(st.integers(1, 8))
    row_lengths, starts, ids, weights, kinds = [], [], [], [], []
    choices = draw(st.sampled_from([[[0, 1, 255]], [[0, 1], [0.0, -0.0, 1.0, 0.25]], [[0, 1], [0, 1], [0, 300]]]))
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, capacity))
        values = draw(st.sampled_from(choices))  # most splits have whole rows and rows with fractions
        row_lengths.append(length)
        starts.append([0, *sorted(draw(st.sets(st.integers(1, length - 1)) if length > 1 else st.just(set())))])
        ids.append([draw(st.integers(0, 2**31 - 1)) for _ in range(length)] + [PAD] * (capacity - length))
        weights.append([draw(st.sampled_from(values)) for _ in range(length)] + [0] * (capacity - length))
        kinds.append([draw(st.integers(0, 47)) for _ in range(length)] + [0] * (capacity - length))
    columns: dict[str, Any] = {}
    if with_weights := draw(st.booleans()):
        columns["weights"] = np.array(weights, dtype=draw(st.sampled_from([np.float64, np.float32])))
    if with_kinds := draw(st.booleans()):
        columns["kinds"] = np.array(kinds)
    flat = [s for row in starts for s in row]
    numbers = draw(st.lists(st.integers(0, 2**62), min_size=len(flat), max_size=len(flat)))
    rows = PackedRows(
        ids=np.array(ids, dtype=np.int32),
        row_lengths=np.array(row_lengths),
        start_values=np.array(flat),
        start_offsets=offsets_of(np.array([len(row) for row in starts])),
        documents=np.array(numbers, dtype=np.int64),
        columns=columns,
    )
    return Made(rows=rows, weights=weights if with_weights else None, kinds=with_kinds)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made_rows(), st.sampled_from([1, 2, 3, 5, 100]), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_what_goes_in_comes_out_and_calls_do_not_change_a_byte(
    tmp_path_factory: pytest.TempPathFactory, made: Made, rows_per_shard: int, sizes: list[int], data: st.DataObject
) -> None:
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    rows = made.rows
    make(one, rows, rows_per_shard, [len(rows)])
    make(many, rows, rows_per_shard, sizes)
    assert files(one) == files(many)
    assert not list(one.rglob(".*"))
    assert check_blocks(one) == ()

    dataset = BlockDataset(one)
    assert len(dataset) == len(rows) > 0
    assert [len(s) for s in dataset.shards[:-1]] == [rows_per_shard] * (len(dataset.shards) - 1)
    assert dataset.tokens == rows.row_lengths.sum()
    assert dataset.row_lengths.tolist() == rows.row_lengths.tolist()
    assert dataset.fingerprint == BlockDataset(many).fingerprint
    fractional = made.weights is not None and any(w != int(w) or w > 255 for row in made.weights for w in row)
    expected = None if made.weights is None else np.dtype("f4" if fractional else "u1")
    assert dataset.weights_dtype == expected
    for r, block in enumerate(dataset):
        assert block.index == r
        assert block.ids.tolist() == rows.ids[r].tolist()
        assert block.row_length == rows.row_lengths[r]
        assert block.document_starts.tolist() == rows.starts(r).tolist()
        assert block.documents.tolist() == rows.documents[rows.start_offsets[r] : rows.start_offsets[r + 1]].tolist()
        assert (block.weights is None) == (made.weights is None)
        if block.weights is not None and made.weights is not None:
            assert block.weights.tolist() == made.weights[r]
            assert not np.signbit(block.weights).any()
        assert (block.kinds is not None) == made.kinds
        if block.kinds is not None:
            assert block.kinds.tolist() == rows.columns["kinds"][r].tolist()
    numbers = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=9))
    for which in (numbers, slice(None), slice(None, None, -2), slice(1, 4)):
        same_as_single_rows(dataset, which)


def same_as_single_rows(dataset: BlockDataset, which: Any) -> None:
    """`rows` against a loop over `[i]`."""
    got = dataset.rows(which)
    blocks = [dataset[i] for i in (range(len(dataset))[which] if isinstance(which, slice) else which)]
    assert len(got) == len(blocks) == len(got.ids)
    assert got.ids.tolist() == [b.ids.tolist() for b in blocks]
    assert got.row_lengths.tolist() == [b.row_length for b in blocks]
    assert got.start_values.tolist() == [s for b in blocks for s in b.document_starts.tolist()]
    assert got.documents.tolist() == [d for b in blocks for d in b.documents.tolist()]
    assert got.start_offsets.tolist() == np.cumsum([0] + [len(b.documents) for b in blocks]).tolist()
    for name in ("weights", "kinds"):
        column = getattr(got, name)
        if column is not None:
            assert column.tolist() == [getattr(b, name).tolist() for b in blocks]
        else:
            assert all(getattr(b, name) is None for b in blocks)


def test_a_block_leads_back_to_its_documents(tmp_path: Path) -> None:
    lengths = [6, 2, 3, 1, 4, 2, 6, 5]
    offsets = offsets_of(np.array(lengths))
    dataset = BlockDataset(make(tmp_path, packed(lengths)).parent)
    seen = []
    for block in dataset:
        ends = [*block.document_starts[1:].tolist(), block.row_length]
        for number, start, end in zip(block.documents, block.document_starts, ends, strict=True):
            assert block.ids[start:end].tolist() == list(range(1 + offsets[number], 1 + offsets[number + 1]))
            seen.append(int(number))
    assert sorted(seen) == list(range(len(lengths)))


def test_positions_and_cu_seqlens_of_stored_rows(tmp_path: Path) -> None:
    dataset = BlockDataset(small(tmp_path).parent)
    segments = dataset.rows(slice(0, 2)).boundaries.segments(CAPACITY)
    wanted = []
    for block in (dataset[0], dataset[1]):
        borders = [*block.document_starts.tolist(), *([block.row_length] if block.row_length < CAPACITY else [])]
        lengths = np.diff([*borders, CAPACITY])
        wanted.append([t for n in lengths for t in range(n)])
    assert segments.position_ids.tolist() == wanted
    assert segments.cu_seqlens()[-1] == 2 * CAPACITY


# ---------------------------------------------------------------- weights: one type for the whole split


def weights_files(split: Path) -> set[str]:
    return {path.name for path in split.rglob("weights.*")}


@pytest.mark.parametrize("rows_per_shard", [1, 3])
@pytest.mark.parametrize("fraction_at", [0, 14, 28], ids=["first", "middle", "last"])
def test_one_fraction_anywhere_makes_all_weights_float32(tmp_path: Path, fraction_at: int, rows_per_shard: int) -> None:
    lengths = [6, 2, 3, 1, 4, 2, 6, 5]
    rows = packed(lengths, fraction_at=fraction_at)
    found = {tuple(files(make(tmp_path / str(n), rows, rows_per_shard, [n])).items()) for n in (1, 2, 100)}
    found.add(tuple(files(make(tmp_path / "said", rows, rows_per_shard, [1], fractional=True)).items()))
    assert len(found) == 1
    dataset = BlockDataset(tmp_path / "1")
    assert weights_files(dataset.folder) == {"weights.f32"}
    assert len(dataset.shards) == -(-len(rows) // rows_per_shard) >= 2
    assert dataset.rows(slice(None)).weights.tolist() == rows.columns["weights"].tolist()  # type: ignore[union-attr]
    assert check_blocks(tmp_path / "1") == ()


@pytest.mark.parametrize(("fractional", "file"), [(None, "weights.u8"), (False, "weights.u8"), (True, "weights.f32")])
def test_whole_weights_are_bytes_unless_floats_are_asked_for(
    tmp_path: Path, fractional: bool | None, file: str
) -> None:
    assert weights_files(small(tmp_path, fractional=fractional)) == {file}


@pytest.mark.parametrize("dtype", [bool, np.int64, np.uint8, np.float16])
def test_weights_of_any_number_type(tmp_path: Path, dtype: Any) -> None:
    with BlockWriter(tmp_path, "train", capacity=2, pad_id=0, rows_per_shard=1) as writer:
        writer.append([[5, 6]], [2], [0], [0, 1], [0], np.array([[0, 1]], dtype=dtype))
    (block,) = BlockDataset(tmp_path)
    assert block.weights is not None
    assert (block.weights.dtype, block.weights.tolist()) == (np.uint8, [0, 1])


def test_a_fraction_is_refused_where_bytes_were_promised(tmp_path: Path) -> None:
    rows = packed([6, 6, 6], fraction_at=9)
    with BlockWriter(tmp_path, "train", capacity=6, pad_id=0, rows_per_shard=9, fractional=False) as writer:
        writer.append(**fields(rows, 0, 1))
        with pytest.raises(DataError, match=r"row 1: weights at position 3 is 0\.25.*fractional=False"):
            writer.append(**fields(rows, 1, 3))
        writer.append(**fields(packed([6])))
        for large in (256, 256.0):
            with pytest.raises(DataError, match=r"row 2: weights at position 5 is 256.*fractional=False"):
                writer.append(**fields(packed([6])) | {"weights": [[0, 1, 2, 255, 0, large]]})
        writer.append(**fields(packed([6])) | {"weights": [[0, 1, 2, 255, 0, 255.0]]})
    assert len(BlockDataset(tmp_path)) == 3


# ---------------------------------------------------------------- the writer refuses and cleans up

GOOD: dict[str, Any] = {
    "ids": [[1, 2, 3, 0], [4, 5, 0, 0]],
    "row_lengths": [3, 2],
    "start_values": [0, 2, 0],
    "start_offsets": [0, 2, 3],
    "documents": [1, 0, 2],
    "weights": [[0, 1, 1, 0], [0, 1, 0, 0]],
    "kinds": [[1, 2, 3, 0], [1, 2, 0, 0]],
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": [[1, 2, 3], [4, 5, 0]]}, r"ids are int64 of shape \(2, 3\).*capacity 4"),
        ({"ids": [1, 2, 3, 0]}, "ids are int64 of shape"),
        ({"ids": [[1.5, 2, 3, 0], [4, 5, 0, 0]]}, "ids are float64"),
        ({"ids": [[1, 2, -3, 0], [4, 5, 0, 0]]}, "row 2: ids at position 2 is -3"),
        ({"ids": [[1, 2, 3, 0], [4, 2**32, 0, 0]]}, "row 3: ids at position 1 is 4294967296"),
        ({"ids": [[1, 2, 3, 0], [4, 5, 9, 0]]}, "row 3: ids at position 2 is 9; .*pad id 0.*2 tokens"),
        ({"row_lengths": [3]}, "row_lengths are int64 of shape"),
        ({"row_lengths": [3.0, 2.0]}, "row_lengths are float64"),
        ({"row_lengths": [0, 2]}, "row 2: row_lengths says 0 tokens"),
        ({"row_lengths": [3, 5]}, r"row 3: row_lengths says 5 tokens; a row has 1 to 4"),
        ({"row_lengths": [2, 2]}, "row 2: starts entry 1 is 2; a document starts inside its row"),
        ({"start_values": [0, 0, 0]}, "row 2: starts entry 1 is 0; starts increase"),
        ({"start_values": [1, 2, 0]}, "row 2: starts entry 0 is 1; the first document of a row starts at 0"),
        ({"start_values": [0, 2, 1]}, "row 3: starts entry 0 is 1; the first document"),
        ({"start_values": [0, -1, 0]}, "row 2: starts entry 1 is -1; starts increase"),
        ({"start_values": [0, 2]}, "3 whole numbers are needed"),
        ({"start_offsets": [0, 3]}, "3 whole numbers are needed"),
        ({"start_offsets": [1, 2, 3]}, "start_offsets begin with 1"),
        ({"start_offsets": [0, 3, 3]}, "row 3: its document starts are 3 up to 3"),
        ({"start_offsets": [0, 4, 3]}, "row 3: its document starts are 4 up to 3"),
        ({"documents": [1, 0]}, "documents are int64"),
        ({"documents": [1, -4, 2]}, "row 2: documents entry 1 is -4"),
        ({"weights": [[0, 1, 1, 0]]}, r"weights are int64 of shape \(1, 4\)"),
        ({"weights": [[0, 1, 1, 1], [0, 1, 0, 0]]}, "row 2: weights at position 3 is 1; padding has the weight 0"),
        ({"weights": [[0, -1, 1, 0], [0, 1, 0, 0]]}, "row 2: weights at position 1 is -1"),
        ({"weights": [[0, 1, 1, 0], [0, float("nan"), 0, 0]]}, "row 3: weights at position 1 is nan"),
        ({"weights": [[0, 1e60, 1, 0], [0, 1, 0, 0]]}, r"row 2: weights at position 1 is 1e\+60"),
        ({"weights": [[0, 1e-60, 1, 0], [0, 1, 0, 0]]}, "row 2: weights at position 1 is 1e-60"),
        ({"weights": [["a"] * 4] * 2}, "weights are <U1"),
        ({"weights": None}, "row 2 brings the columns kinds, but the rows before it kinds, weights"),
        ({"kinds": None}, "for all rows of a split or for none"),
        ({"kinds": [[1, 2, 48, 0], [1, 2, 0, 0]]}, "row 2: kinds at position 2 is 48; kinds are codes from 0 to 47"),
        ({"kinds": [[1, 2, 127, 0], [1, 2, 0, 0]]}, "row 2: kinds at position 2 is 127; .* flags 64 and 128"),
        ({"kinds": [[1, 2, 257, 0], [1, 2, 0, 0]]}, "row 2: kinds at position 2 is 257"),
        ({"kinds": [[1, 2, 3, 0], [1, 2, 0, 5]]}, "row 3: kinds at position 3 is 5; padding has the kind 0"),
        ({"kinds": [[1, 2, 3], [1, 2, 0]]}, "kinds are int64 of shape"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with BlockWriter(tmp_path / "a", "train", capacity=4, pad_id=0, rows_per_shard=3) as writer:
        writer.append(**GOOD)
        with pytest.raises(DataError, match=says):
            writer.append(**GOOD | change)
        writer.append(**GOOD)
    with BlockWriter(tmp_path / "b", "train", capacity=4, pad_id=0, rows_per_shard=3) as writer:
        writer.append(**GOOD)
        writer.append(**GOOD)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert len(BlockDataset(tmp_path / "a")) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 2**31}, "capacity is 2147483648"),
        ({"pad_id": -1}, "pad_id is -1"),
        ({"pad_id": 2**32}, "pad_id is 4294967296"),
        ({"rows_per_shard": 0}, "rows_per_shard is 0"),
        ({"split": ""}, "no name for a split"),
        ({"split": ".train"}, "no name for a split"),
        ({"split": "a/b"}, "no name for a split"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    usual: dict[str, Any] = {"split": "train", "capacity": 4, "pad_id": 0, "rows_per_shard": 1}
    with pytest.raises(ConfigError, match=says):
        BlockWriter(tmp_path, **usual | options)
    assert not list(tmp_path.iterdir())


def test_an_empty_or_closed_writer(tmp_path: Path) -> None:
    writer = BlockWriter(tmp_path, "train", capacity=4, pad_id=0, rows_per_shard=1)
    writer.append(np.empty((0, 4), dtype=int), [], [], [0], [])
    with pytest.raises(DataError, match="no row was appended"):
        writer.close()
    assert not list(tmp_path.iterdir())
    writer = BlockWriter(tmp_path, "train", capacity=4, pad_id=0, rows_per_shard=1)
    writer.append(**GOOD)
    first = writer.close()
    assert writer.close() == first == BlockDataset(tmp_path).manifest
    writer.abort()
    assert len(BlockDataset(tmp_path)) == 2
    with pytest.raises(DataError, match="closed"):
        writer.append(**GOOD)


def test_a_shard_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    rows = packed([6] * 7)
    writer = BlockWriter(tmp_path, "train", capacity=6, pad_id=0, rows_per_shard=2)
    with pytest.raises(FormatError, match="unfinished"):
        BlockDataset(tmp_path)
    for i in range(7):
        writer.append(**fields(rows, i, i + 1))
        visible = sorted(p for p in (tmp_path / "train").iterdir() if not p.name.startswith("."))
        assert [p.name for p in visible] == [f"shard_{n:05d}" for n in range((i + 1) // 2)]
        assert all((p / "ids.u32").stat().st_size == 2 * 6 * 4 for p in visible)
        with pytest.raises(FormatError, match=r"unfinished: blocks\.json, which is written last, is missing"):
            BlockDataset(tmp_path)
    writer.close()
    assert len(BlockDataset(tmp_path)) == 7
    assert not list(tmp_path.rglob(".*"))


def test_everything_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []

    def rename(self: Path, target: Path, real: Any = Path.rename) -> Any:
        inside = [str(p) for p in self.rglob("*")] if self.is_dir() else []
        assert {str(self), *inside} <= set(synced)
        renamed.append(target.name)
        synced.clear()
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    split = small(tmp_path)
    assert renamed == ["shard_00000", "shard_00001", "shard_00002", "blocks.json"]
    assert synced == [str(split), str(tmp_path)]


@pytest.mark.parametrize("rows_per_shard", [1, 2, 100])
def test_an_exception_leaves_nothing(tmp_path: Path, rows_per_shard: int) -> None:
    rows = packed([6] * 5)

    def half() -> None:
        with BlockWriter(tmp_path, "train", capacity=6, pad_id=0, rows_per_shard=rows_per_shard) as writer:
            writer.append(**fields(rows))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        half()
    assert not list(tmp_path.iterdir())


def test_an_interrupt_in_the_middle_of_a_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed([6] * 5)
    writer = BlockWriter(tmp_path, "train", capacity=6, pad_id=0, rows_per_shard=2)
    writer.append(**fields(rows, 0, 3))

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(block_writer._Shard, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append(**fields(rows, 3, 5))
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="closed"):
        writer.append(**fields(rows, 3, 5))


def test_what_cannot_be_removed_is_hidden_and_swept_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(block_writer, "remove_path", stuck)
        writer = BlockWriter(tmp_path, "train", capacity=6, pad_id=0, rows_per_shard=2)
        writer.append(**fields(packed([6] * 5)))
        writer.abort()
    names = sorted(path.name for path in (tmp_path / "train").iterdir())
    assert names == [".shard_00000.partial", ".shard_00001.partial"]
    with pytest.raises(FormatError, match="unfinished"):
        BlockDataset(tmp_path)
    assert len(BlockDataset(small(tmp_path).parent)) == 5
    assert not list(tmp_path.rglob(".*"))


KILLED = """
import sys
import numpy as np
from chatmill.store.block_writer import BlockWriter
writer = BlockWriter(sys.argv[1], "train", capacity=8, pad_id=0, rows_per_shard=3)
for i in range(10**9):
    writer.append(np.full((1, 8), i + 1), [8], [0], [0, 1], [i], np.ones((1, 8)))
    if i == 10:
        print("ready", flush=True)
"""


def test_after_a_kill_the_split_is_unfinished_and_a_new_writer_begins_anew(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match="another process"):
            small(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / ".train.writing").exists()
    shards = list((tmp_path / "train").glob("shard_*"))
    assert len(shards) >= 3
    assert all((shard / "ids.u32").stat().st_size == 3 * 8 * 4 for shard in shards)
    with pytest.raises(FormatError, match="unfinished"):
        BlockDataset(tmp_path)
    assert files(small(tmp_path)) == files(small(tmp_path / "other"))
    assert not list(tmp_path.rglob(".*"))


def test_a_split_that_is_there_is_never_touched(tmp_path: Path) -> None:
    finished, episodes, lone = tmp_path / "finished", tmp_path / "episodes", tmp_path / "lone"
    small(finished)
    (finished / ".train.writing").touch()  # as after a kill between the manifest and the end
    with contextlib.suppress(RuntimeError), EpisodeWriter(episodes, "train", 1) as writer:
        writer.append([1])
        writer.append([2])
        raise RuntimeError
    small(lone)
    (lone / "train/blocks.json").unlink()
    assert (episodes / ".train.writing").exists()
    for directory in (finished, episodes, lone):
        before = files(directory)
        for _ in range(2):
            with pytest.raises(ConfigError, match="already holds"):
                small(directory)
        assert files(directory) == before
    assert len(BlockDataset(finished)) == 5


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed([6] * 6, fraction_at=35)
    writes = iter(range(10**6))
    space = 10**6

    def write(self: Any, values: Any, real: Any = block_writer.GrowingFile.write) -> None:
        if next(writes) >= space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, values)

    monkeypatch.setattr(block_writer.GrowingFile, "write", write)
    make(tmp_path / "probe", rows)
    needed = next(writes)
    assert needed > 40
    for space in range(needed):  # noqa: B007 (read by `write`)
        writes = iter(range(10**6))
        with pytest.raises(ConfigError, match="No space left on device; nothing of this split is left"):
            make(tmp_path / "full", rows)
        assert not list((tmp_path / "full").iterdir())


def test_each_step_of_publishing_fails_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rename and every sync of a folder, one after the other, ends in an error: nothing is left."""
    rows = packed([6] * 5, fraction_at=29)
    calls, fail_at = iter(range(10**6)), 10**6

    def maybe(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            if next(calls) == fail_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        return step

    monkeypatch.setattr(Path, "rename", maybe(Path.rename))
    monkeypatch.setattr(block_writer, "sync_folder", maybe(block_writer.sync_folder))
    make(tmp_path / "probe", rows)
    steps = next(calls)
    assert steps >= 15
    for fail_at in range(steps):  # noqa: B007 (read by `step`)
        calls = iter(range(10**6))
        with pytest.raises(ConfigError, match="Input/output error"):
            make(tmp_path / "x", rows)
        assert not list((tmp_path / "x").iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write a dataset here"):
        small(tmp_path / "file")


def test_too_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writer, "MAX_SHARDS", 2)
    with pytest.raises(ConfigError, match="more than 2 shards: choose a larger rows_per_shard"):
        small(tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- every fault of the page


def patched(path: Path, dtype: str, place: int, value: int) -> None:
    """Overwrite one value of a column."""
    values = np.fromfile(path, dtype=dtype)
    values[place] = value
    values.tofile(path)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def set_key(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        if value is None:
            del document[keys[-1]]
        else:
            document[keys[-1]] = value

    return change


MANIFEST_FAULTS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (set_key("format", value="other"), "format 'other' version 1; this package reads 'chatmill-blocks' version 1"),
    (set_key("version", value=2), "version 2; this package reads"),
    (set_key("capacity", value=0), "capacity is 0; a whole number from 1"),
    (set_key("capacity", value="6"), "capacity is '6'"),
    (set_key("pad_id", value=-1), "pad_id is -1"),
    (set_key("rows", value=6), "rows is 6, but the shards add up to 5"),
    (set_key("tokens", value=1), "tokens is 1, but the shards add up to 29"),
    (set_key("documents", value=9), "documents is 9, but the shards add up to 8"),
    (set_key("rows", value=None), r"not a manifest of a blocks split \(KeyError: 'rows'\)"),
    (set_key("shards", value=None), "not a manifest of a blocks split"),
    (set_key("shards", 1, "rows", value=-2), "shard_00001: rows is -2"),
    (set_key("shards", 1, "name", value="../x"), "no name of a shard"),
    (set_key("shards", 1, "files", "../x", value={"bytes": 1, "sha256": ""}), "no plain file name"),
    (set_key("shards", 1, "files", "starts.i32", value=None), "shard_00001 has no entry for starts.i32"),
    (set_key("columns", "ids", "dtype", value="<u2"), "column 'ids' is .*<u2.*it must be .*<u4"),
    (set_key("columns", "weights", "file", value="weights.f32"), "column 'weights' is"),
    (set_key("columns", "starts", value=None), "the columns starts are missing"),
    (set_key("capacity", value=7), r"ids\.u32: 48 bytes, but 14 records of 4 bytes"),
    (set_key("shards", 0, "files", "ids.u32", "bytes", value=47), r"ids\.u32: 48 bytes; blocks\.json says 47"),
]


@pytest.mark.parametrize(("change", "says"), MANIFEST_FAULTS, ids=[says[:40] for _, says in MANIFEST_FAULTS])
def test_a_manifest_that_is_wrong(tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str) -> None:
    split = small(tmp_path)
    edited(split / "blocks.json", change)
    with pytest.raises(FormatError, match=says) as caught:
        BlockDataset(tmp_path)
    assert str(split) in str(caught.value)
    assert check_blocks(tmp_path) == (str(caught.value),)


SHARD = "shard_00000"
FILE_FAULTS: list[tuple[Callable[[Path], Any], str]] = [
    (shutil.rmtree, "no such folder"),
    (lambda s: [shutil.rmtree(s), (s.parent / ".train.writing").touch()], "nothing is published yet"),
    (lambda s: [shutil.rmtree(s / name.name) for name in s.glob("shard_*")], "names 3 shards, 0 are there"),
    (lambda s: [shutil.rmtree(s / SHARD), (s / "blocks.json").unlink()], r"unfinished.*\(2 shards are there\)"),
    (lambda s: [p.rename(s / "x") for p in s.glob("*.json")], "unfinished"),
    (lambda s: cut(s / "blocks.json", 9), "not a manifest of a blocks split"),
    (lambda s: (s / "blocks.json").write_text("[]"), "not a manifest of a blocks split"),
    (lambda s: shutil.rmtree(s / "shard_00001"), "names 3 shards, 2 are there; missing: shard_00001"),
    (lambda s: shutil.copytree(s / SHARD, s / "shard_00007"), "4 are there; not named: shard_00007"),
    (lambda s: (s / SHARD / "starts.i32").unlink(), r"starts\.i32 is missing; .* the column 'starts'"),
    (lambda s: (s / SHARD / "kinds.u8").unlink(), r"kinds\.u8 is missing"),
    (lambda s: (s / SHARD / "weights.u8").rename(s / SHARD / "weights.f32"), r"u8 is missing.*weights\.f32 is"),
    (lambda s: cut(s / SHARD / "ids.u32", 1), r"ids\.u32: 47 bytes, but 12 records of 4 .*\(48 bytes\)"),
    (lambda s: cut(s / SHARD / "weights.u8", 4), r"weights\.u8: 8 bytes, but 12 records"),
    (lambda s: cut(s / SHARD / "starts_offsets.i64", 8), r"starts_offsets\.i64: 16 bytes, but 3 records of 8"),
    (lambda s: cut(s / SHARD / "documents.i64", 8), r"documents\.i64: .* bytes, but"),
    (lambda s: (s / SHARD / "row_lengths.i32").write_bytes(bytes(12)), r"row_lengths\.i32: 12 bytes, but 2 records"),
    (lambda s: patched(s / SHARD / "row_lengths.i32", "<i4", 1, 0), "row 1: row_lengths says 0 tokens"),
    (lambda s: patched(s / SHARD / "row_lengths.i32", "<i4", 0, 7), "row 0: row_lengths says 7 tokens; .* 6"),
    (lambda s: patched(s / SHARD / "row_lengths.i32", "<i4", 0, -9), "row 0: row_lengths says -9 tokens"),
    (lambda s: patched(s / "shard_00002/row_lengths.i32", "<i4", 0, 6), "row_lengths add up to 6 tokens; .* says 5"),
    (lambda s: patched(s / SHARD / "starts.i32", "<i4", 0, 3), "row 0: starts entry 0 is 3; the first document"),
    (lambda s: patched(s / "shard_00001/starts.i32", "<i4", 1, 0), "starts entry 1 is 0; starts increase"),
    (lambda s: patched(s / "shard_00001/starts.i32", "<i4", 1, -(2**31)), "is -2,147,483,648; starts increase"),
    (lambda s: patched(s / "shard_00001/starts.i32", "<i4", 1, 6), "is 6; a document starts inside its row"),
    (lambda s: patched(s / SHARD / "starts_offsets.i64", "<i8", 0, 1), "starts_offsets go from 1 to"),
    (lambda s: patched(s / SHARD / "starts_offsets.i64", "<i8", 2, 99), "starts_offsets go from 0 to 99; 0 to 2"),
    (lambda s: patched(s / SHARD / "starts_offsets.i64", "<i8", 1, 0), "row 0: its document starts are 0 up to 0"),
    (lambda s: patched(s / SHARD / "starts_offsets.i64", "<i8", 1, 99), "row 1: its document starts are 99 up to 2"),
    (lambda s: patched(s / SHARD / "documents.i64", "<i8", 1, -1), "documents entry 0 is -1; documents are counted"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), FILE_FAULTS, ids=[says[:40] for _, says in FILE_FAULTS])
def test_every_fault_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], Any], says: str) -> None:
    split = small(tmp_path)
    assert [s.record.documents for s in BlockDataset(tmp_path).shards] == [2, 4, 2]
    damage(split)
    with pytest.raises(FormatError, match=says) as caught:
        BlockDataset(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_checks_do_not_depend_on_how_many_rows_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "CHECK_ROWS", 1)
    split = make(tmp_path, packed([6, 2, 3, 1, 4, 2, 6, 5]), 100)
    assert len(BlockDataset(tmp_path)) == 5
    patched(split / "shard_00000/starts_offsets.i64", "<i8", 2, 99)
    with pytest.raises(FormatError, match="row 1: its document starts end at 99 of 8"):
        BlockDataset(tmp_path)


def test_values_whose_difference_does_not_fit_are_seen(tmp_path: Path) -> None:
    split = make(tmp_path, packed([2, 2, 2]))
    patched(split / SHARD / "starts.i32", "<i4", 2, -(2**31))
    with pytest.raises(FormatError, match="row 0: starts entry 2 is -2,147,483,648; starts increase"):
        BlockDataset(tmp_path)


def test_an_unknown_split_or_another_format(tmp_path: Path) -> None:
    small(tmp_path)
    with pytest.raises(FormatError, match=r"val: no such folder; .* holds train"):
        BlockDataset(tmp_path, "val")
    with EpisodeWriter(tmp_path, "val") as writer:
        writer.append([1, 2])
    with pytest.raises(FormatError, match=r"no blocks here: there is no blocks\.json \(found: episodes\.idx"):
        BlockDataset(tmp_path, "val")
    with pytest.raises(FormatError, match="no such folder"):
        BlockDataset(tmp_path / "nowhere")


def test_what_a_later_version_adds_is_left_alone(tmp_path: Path) -> None:
    split = small(tmp_path)
    before = BlockDataset(tmp_path).fingerprint
    (split / SHARD / "record_id.utf8").write_text("more")
    (split / "sources.json").write_text("{}")

    def more(value: dict[str, Any]) -> None:
        value["extra"] = 1
        value["columns"]["score"] = {"file": "score.f32", "dtype": "<f4", "per": "document"}

    edited(split / "blocks.json", more)
    dataset = BlockDataset(tmp_path)
    assert (len(dataset), dataset.fingerprint, check_blocks(tmp_path)) == (5, before, ())


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    split = small(tmp_path)
    dataset = BlockDataset(tmp_path)
    assert dataset[0].row_length == 6
    cut(split / SHARD / "ids.u32", 4)
    for use in (lambda: dataset[0], lambda: dataset.rows([0]), lambda: dataset.row_lengths):
        with pytest.raises(FormatError, match=r"ids\.u32: had 48 bytes when it was opened and has 44 now"):
            use()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: patched(s / SHARD / "ids.u32", "<u4", 3, 99), r"ids\.u32: sha256 [0-9a-f]{64}, blocks\.json says"),
        (lambda s: patched(s / "shard_00002/ids.u32", "<u4", 5, 9), "row 0: ids at position 5 is 9; .*pad id 0"),
        (lambda s: patched(s / "shard_00002/weights.f32", "<f4", 5, 1), "row 0: weights at position 5 is 1"),
        (lambda s: patched(s / SHARD / "weights.f32", "<f4", 7, -1), "row 1: weights at position 1 is -1.*finite"),
        (lambda s: patched(s / "shard_00002/kinds.u8", "u1", 5, 1), "row 0: kinds at position 5 is 1; padding"),
        (lambda s: patched(s / SHARD / "kinds.u8", "u1", 7, 48), "row 1: kinds at position 1 is 48"),
    ],
)
def test_reading_every_byte_finds_what_opening_does_not(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    split = small(tmp_path, fractional=True)
    assert check_blocks(tmp_path) == ()
    damage(split)
    assert len(BlockDataset(tmp_path)) == 5
    assert re.search(says, "\n".join(check_blocks(tmp_path)))


# ---------------------------------------------------------------- reading


def test_blocks_are_read_only_views(tmp_path: Path) -> None:
    small(tmp_path)
    block = BlockDataset(tmp_path)[-1]
    assert block.index == 4
    for array in (block.ids, block.weights, block.kinds, block.document_starts, block.documents):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        block.row_length = 3  # type: ignore[misc]
    for wrong in (5, -6):
        with pytest.raises(IndexError, match=f"row {wrong} of 5"):
            BlockDataset(tmp_path)[wrong]


def test_rows_into_arrays_of_the_caller(tmp_path: Path) -> None:
    small(tmp_path)
    dataset = BlockDataset(tmp_path)
    out = {"ids": np.full((4, CAPACITY), -1, dtype=np.int64), "weights": np.full((3, CAPACITY), -1, dtype=np.float32)}
    got = dataset.rows([4, 0, 1], out=out)
    assert np.shares_memory(got.ids, out["ids"])
    assert np.shares_memory(got.weights, out["weights"])  # type: ignore[arg-type]
    assert out["ids"].tolist() == [*(dataset[i].ids.tolist() for i in (4, 0, 1)), [-1] * CAPACITY]
    assert out["weights"].tolist() == [dataset[i].weights.tolist() for i in (4, 0, 1)]  # type: ignore[union-attr]
    assert got.kinds is not None
    for wrong, says in (
        ({"ids": np.empty((2, CAPACITY), dtype=np.int64)}, r"shape \(2, 6\); 3 rows of 6"),
        ({"ids": np.empty((3, 5), dtype=np.int64)}, r"shape \(3, 5\)"),
        ({"ids": np.empty((3, CAPACITY), dtype=np.int32)}, "int32, which does not hold every uint32"),
        ({"labels": np.empty((3, CAPACITY))}, "no column 'labels' per token; there is: ids, weights, kinds"),
    ):
        with pytest.raises(ConfigError, match=says):
            dataset.rows([0, 1, 2], out=wrong)


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    small(tmp_path)
    dataset = BlockDataset(tmp_path)
    for wrong in ([5], [-6], [0, 9]):
        with pytest.raises(IndexError, match=f"row {wrong[-1]} of 5"):
            dataset.rows(wrong)
    for wrong_kind in ([True] * 5, [0.5], [[0]], 3):
        with pytest.raises(ConfigError, match="slice or a flat list"):
            dataset.rows(wrong_kind)
    assert dataset.rows([]).ids.shape == (0, CAPACITY)


def test_more_shards_than_may_be_open(tmp_path: Path) -> None:
    rows = packed([6] * 12)
    dataset = BlockDataset(make(tmp_path, rows, 1).parent)
    dataset._open_limit = 4
    order = np.random.RandomState(0).permutation(12).tolist() * 2
    assert [dataset[i].ids.tolist() for i in order] == [rows.ids[i].tolist() for i in order]
    assert len(dataset._open) == 4
    assert sum(shard._files["ids"]._map is not None for shard in dataset.shards) == 4


def test_the_fingerprint_follows_the_data_and_not_the_place(tmp_path: Path) -> None:
    prints = {
        name: BlockDataset(make(tmp_path / name, rows, shard).parent).fingerprint
        for name, rows, shard in (
            ("a", packed([6, 5]), 2),
            ("same", packed([6, 5]), 2),
            ("shards", packed([6, 5]), 1),
            ("weights", packed([6, 5], fraction_at=3), 2),
            ("lengths", packed([5, 6]), 2),
        )
    }
    assert prints["a"] == prints.pop("same")
    assert len(set(prints.values())) == len(prints) == 4
    dataset = BlockDataset(tmp_path / "a")
    assert pickle.loads(pickle.dumps(dataset)).fingerprint == dataset.fingerprint
    manifest = dataset.manifest
    assert block_manifest_from_json(json.loads(manifest.to_bytes()), "here") == manifest


# ---------------------------------------------------------------- into batches


@dataclass(frozen=True)
class Ids:
    eos_id: int = 1
    pad_id: int = 9


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fraction_at", [None, 4])
def test_blocks_in_a_torch_data_loader(tmp_path: Path, workers: int, fraction_at: int | None) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from chatmill.load.collate import DataCollatorForCausalLM

    rows = packed([6, 2, 3, 1, 4, 2, 6, 5], fraction_at=fraction_at)
    dataset = BlockDataset(make(tmp_path, rows).parent)
    collator = DataCollatorForCausalLM(Ids(), padding="max_length", max_length=CAPACITY, return_cu_seqlens=True)
    batches = list(DataLoader(dataset.features, batch_size=2, collate_fn=collator, num_workers=workers))
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    ids, labels, positions = (
        torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels", "position_ids")
    )
    checked = 0
    for r in range(len(rows)):
        starts, length = rows.starts(r).tolist(), int(rows.row_lengths[r])
        for t in range(CAPACITY):
            begin = max(s for s in [*starts, *([length] if t >= length else [])] if s <= t)
            trained = t < length and rows.columns["weights"][r, t] != 0 and not (t and t in starts)
            assert ids[r, t] == (rows.ids[r, t] if t < length else 9)
            assert labels[r, t] == (rows.ids[r, t] if trained else -100)
            assert positions[r, t] == t - begin
            checked += bool(trained)
    assert checked > 10
    features = dataset.to_features(0)
    assert set(features) == {"input_ids", "document_starts", "loss_mask", "weights", "kinds"}
    assert features["weights"].tolist() == rows.columns["weights"][0].tolist()
    assert set(features["loss_mask"].tolist()) == {0, 1}


def test_blocks_without_weights_train_every_token(tmp_path: Path) -> None:
    with BlockWriter(tmp_path, "train", capacity=4, pad_id=0, rows_per_shard=5) as writer:
        writer.append(**{name: value for name, value in GOOD.items() if name not in ("weights", "kinds")})
    dataset = BlockDataset(tmp_path)
    assert (dataset.weights_dtype, dataset.has_kinds) == (None, False)
    assert set(dataset.to_features(0)) == {"input_ids", "document_starts"}
    assert (dataset[0].weights, dataset[0].kinds, dataset.rows([0]).weights) == (None, None, None)


def test_reading_and_writing_need_numpy_alone(tmp_path: Path) -> None:
    small(tmp_path)
    code = (
        "import sys, chatmill.store.block_writer; from chatmill.store.blocks import BlockDataset; "
        f"print(len(BlockDataset({str(tmp_path)!r}).rows([0, 1]))); "
        "print(sorted(m for m in ('torch', 'pyarrow', 'pydantic', 'msgspec', 'rich') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n[]\n"


# ---------------------------------------------------------------- the page


def python_blocks(text: str) -> Iterator[str]:
    return iter(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def test_the_code_of_the_page_runs_and_its_reader_reads_what_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    codes = list(python_blocks(PAGE.read_text()))
    assert len(codes) == 4
    for code in codes:
        exec(code, names)
    assert "torch.Size([2, 6])" in capsys.readouterr().out
    rows = packed([6, 2, 3, 1, 4, 2, 6, 5], fraction_at=3)
    split = make(tmp_path / "more", rows)
    read = list(names["read_rows"](split))
    assert len(read) == len(rows)
    for r, (ids, weights, spans) in enumerate(read):
        length = int(rows.row_lengths[r])
        assert ids.tolist() == rows.ids[r, :length].tolist()
        assert weights.tolist() == rows.columns["weights"][r, :length].tolist()
        assert [a for a, _ in spans.values()] == rows.starts(r).tolist()
        assert sum(b - a for a, b in spans.values()) == length
