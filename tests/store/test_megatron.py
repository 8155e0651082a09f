"""Megatron's indexed datasets: byte for byte what its own builder writes, checked when read; and shards of them."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store.kd import KDDocuments, _check_listed, check_added
from chatmill.store.kd_shard import KDShard
from chatmill.store.megatron import DTYPE_CODES, MegatronIndex, MegatronWriter, bin_path, idx_path


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Megatron's own module; imported when the first test asks for it, since that takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def by_the_builder(megatron: Any, prefix: Path, dtype: str, pieces: list[np.ndarray]) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=np.dtype(dtype).type)
    for piece in pieces:
        builder.add_item(torch.tensor(piece.astype(np.float64)))
        builder.end_document()
    builder.finalize(str(idx_path(prefix)))


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_the_bytes_are_those_of_the_builder(megatron: Any, tmp_path: Path, dtype: str) -> None:
    rng = np.random.RandomState(1)
    lengths = rng.randint(1, 40, 50)
    values = rng.randint(0, 100, lengths.sum()).astype(dtype)
    by_the_builder(megatron, tmp_path / "theirs", dtype, np.split(values, np.cumsum(lengths)[:-1]))
    at = int(lengths[:20].sum())
    with MegatronWriter(tmp_path / "ours", dtype) as writer:
        writer.append(values[:at], lengths[:20])
        writer.append(values[at:], lengths[20:])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "theirs").read_bytes()
    assert (writer.documents, writer.values) == (50, len(values))
    assert writer.records["bin"].bytes == len(values) * np.dtype(dtype).itemsize
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert len(read) == 50
    assert np.array_equal(np.concatenate([read[i] for i in range(50)]), values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


def test_without_documents_there_is_an_index_of_none(megatron: Any, tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "ours", np.int32):
        pass
    by_the_builder(megatron, tmp_path / "theirs", "int32", [])
    assert idx_path(tmp_path / "ours").read_bytes() == idx_path(tmp_path / "theirs").read_bytes()
    index = MegatronIndex.open(tmp_path / "ours")
    assert (index.documents, index.values, len(index.read())) == (0, 0, 0)


def test_what_the_builder_would_let_pass_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for values, lengths, message in (
        ([1, 70000], [2], r"value 70000 \(number 1\) does not fit into uint16"),
        ([1, 2, 3], [2], "3 values, but the lengths add up to 2"),
        ([1, 2, 3], [3, 0], "document 1 has 0 values"),
    ):
        with pytest.raises(DataError, match=message), MegatronWriter(tmp_path / "x", np.uint16) as writer:
            writer.append(np.array(values), np.array(lengths))
        assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="no code for uint32"):
        MegatronWriter(tmp_path / "x", np.uint32)
    with MegatronWriter(tmp_path / "x", np.uint16) as writer:
        writer.append(np.array([65535]), np.array([1]))
    with pytest.raises(ConfigError, match="is there already"):
        MegatronWriter(tmp_path / "x", np.uint16)


def broken(at: int, content: bytes) -> Any:
    def damage(prefix: Path) -> None:
        data = bytearray(idx_path(prefix).read_bytes())
        data[at : at + len(content)] = content
        idx_path(prefix).write_bytes(data)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken(0, b"X"), "no index of Megatron Core"),
        (broken(9, b"\x02"), "version 2, dtype code 4"),
        (broken(17, b"\x0b"), "dtype code 11"),
        (broken(17, b"\x05"), "begins at byte"),
        (broken(18, b"\x04"), "4 sequences and 3 documents need"),
        (broken(26, b"\x00"), " 0 document indices"),
        (broken(34, b"\xff\xff\xff\xff"), "sequence 0 has the length -1"),
        (broken(34, b"\x03"), "sequence 1 begins at byte 8, but the lengths before it make 12"),
        (broken(34 + 12 * 3 + 8, b"\x09"), "document 1 ends before it begins"),
        (broken(34 + 12 * 3, b"\x01"), "run from 1 to 3, not from 0 to 3"),
        (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:-1]), "the file was cut or changed"),
        (lambda p: idx_path(p).write_bytes(b"MMID"), "4 bytes; an index has at least 34"),
        (lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes()[:-1]), r"35 bytes, but its index .* \(36 bytes\)"),
        (lambda p: bin_path(p).unlink(), "not complete"),
        (lambda p: idx_path(p).unlink(), "not complete"),
    ],
)
def test_a_damaged_dataset_is_refused_with_the_numbers(tmp_path: Path, damage: Any, message: str) -> None:
    prefix = tmp_path / "x"
    with MegatronWriter(prefix, np.int32) as writer:
        writer.append(np.arange(9), np.array([2, 3, 4]))
    assert MegatronIndex.open(prefix).values == 9
    damage(prefix)
    with pytest.raises(FormatError, match=message):
        MegatronIndex.open(prefix)


def test_memory_of_a_long_index(tmp_path: Path) -> None:
    """4 bytes a document while writing; 2 million documents here, 19 million in a shard of the real input."""
    count = 2_000_000
    tracemalloc.start()
    try:
        with MegatronWriter(tmp_path / "x", np.uint8) as writer:
            for _ in range(20):
                writer.append(np.zeros(count // 20, np.uint8), np.ones(count // 20, np.int32))
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert MegatronIndex.open(tmp_path / "x").documents == count
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 60_000_000
    assert read < 60_000_000


def write_kd(
    folder: Path, lengths: list[int], *, span: str = "uint8", dtype: str = "int32", shard: str = "shard_00"
) -> Path:
    """A shard without labels, as an export has it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (("tokens", dtype), ("lossmask", "uint8"), ("span", span), ("weight", "float32")):
        with MegatronWriter(folder / f"{shard}_{name}", kind) as writer:
            values = np.arange(sum(lengths)) if name == "tokens" else np.zeros(sum(lengths))
            writer.append(values.astype(kind), np.array(lengths, dtype=np.int32))
    return folder / f"{shard}_tokens"


def test_a_shard_of_documents_and_sidecars_is_opened_whole_or_refused(tmp_path: Path) -> None:
    for dtype, folder in (("int32", tmp_path / "a" / "train"), ("uint16", tmp_path / "b" / "train")):
        shard = KDShard.open(write_kd(folder, [3, 2], dtype=dtype), ["weight"])
        assert shard.document(1)[0].tolist() == [3, 4]
        documents = KDDocuments([shard.prefix]).gather(np.array([1, 0]))
        assert (documents.ids.dtype, documents.ids.tolist()) == (np.uint32, [3, 4, 0, 1, 2])
    emptied = write_kd(tmp_path / "c", [2, 1, 1])
    broken(34, np.array([2, 2, 0], dtype="<i4").tobytes())(emptied)
    broken(62, np.array([16], dtype="<i8").tobytes())(emptied)  # where the third one begins
    for prefix, message in (
        (emptied, "document 2 is empty"),
        (write_kd(tmp_path / "d", []), "holds no document"),
        (write_kd(tmp_path / "e", [2], dtype="float32"), "token ids are integers"),
        (write_kd(tmp_path / "f", [2], span="int32"), "a sidecar holds uint8"),
    ):
        with pytest.raises(FormatError, match=message):
            KDShard.open(prefix)
    both = KDDocuments([shard.prefix, str(write_kd(folder, [1, 1], shard="shard_01"))])
    assert both.facts("source", np.array([3, 1, 2, 0])) == ["shard_01", "shard_00", "shard_01", "shard_00"]
    assert both.gather(np.array([3, 1])).ids.tolist() == [1, 3, 4]
    assert both.facts("record_id", np.array([0])) is None
    names = ["train/shard_00_weight.bin", "train/shard_00_weight.idx", "train/x"]
    assert check_added(tmp_path / "a", names) == ({"train/x": ""}, ["train/shard_00_weight"], [])


def test_files_have_the_sizes_that_a_receipt_states(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    _check_listed(tmp_path, {"files": {"x": {"bytes": 3}}})
    in_shards = {"splits": {"train": {"shards": [{"files": [{"path": "x", "bytes": 2}]}]}}}
    for manifest in ({"files": {"x": {"bytes": 4}}}, in_shards):
        with pytest.raises(FormatError, match=r"x: 3 bytes, but the manifest says [24]"):
            _check_listed(tmp_path, manifest)
