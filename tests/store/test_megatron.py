"""Megatron's indexed datasets written with NumPy: byte for byte what its own builder writes, and checked when read."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store.megatron import DTYPE_CODES, MegatronIndex, MegatronWriter, bin_path, idx_path


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Megatron's own module; imported when the first test asks for it, since that takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def documents(seed: int, count: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    lengths = rng.randint(1, 40, count)
    return rng.randint(0, 100, lengths.sum()).astype(dtype), lengths


def by_the_builder(megatron: Any, prefix: Path, values: np.ndarray, lengths: np.ndarray, dtype: Any) -> Path:
    import torch

    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=np.dtype(dtype).type)
    for piece in np.split(values, np.cumsum(lengths)[:-1]):
        builder.add_item(torch.tensor(piece.astype(np.float64)))
        builder.end_document()
    builder.finalize(str(idx_path(prefix)))
    return prefix


def same_files(one: Path, other: Path) -> bool:
    pairs = [(path(one).read_bytes(), path(other).read_bytes()) for path in (bin_path, idx_path)]
    assert all(len(first) > 30 for first, _ in pairs)
    return all(first == second for first, second in pairs)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_the_bytes_are_those_of_the_builder(megatron: Any, tmp_path: Path, dtype: str) -> None:
    values, lengths = documents(1, 50, dtype)
    by_the_builder(megatron, tmp_path / "theirs", values, lengths, dtype)
    with MegatronWriter(tmp_path / "ours", dtype) as writer:
        cut = 20
        at = int(lengths[:cut].sum())
        writer.append(values[:at], lengths[:cut])
        writer.append(values[at:], lengths[cut:])
    assert same_files(tmp_path / "ours", tmp_path / "theirs")
    assert (writer.documents, writer.values) == (50, len(values))
    assert writer.records["bin"].bytes == len(values) * np.dtype(dtype).itemsize
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert len(read) == 50
    assert np.array_equal(np.concatenate([read[i] for i in range(50)]), values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


def test_without_documents_there_is_an_index_of_none(megatron: Any, tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "ours", np.int32):
        pass
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert idx_path(tmp_path / "ours").read_bytes() == idx_path(tmp_path / "theirs").read_bytes()
    index = MegatronIndex.open(tmp_path / "ours")
    assert (index.documents, index.values, len(index.read())) == (0, 0, 0)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        ([1, 70000], [2], r"value 70000 \(number 1\) does not fit into uint16"),
        ([1, 2, 3], [2], "3 values, but the lengths add up to 2"),
        ([1, 2, 3], [3, 0], "document 1 has 0 values"),
    ],
)
def test_what_the_builder_would_let_pass_is_refused_and_nothing_is_left(
    tmp_path: Path, values: list[int], lengths: list[int], message: str
) -> None:
    with pytest.raises(DataError, match=message), MegatronWriter(tmp_path / "x", np.uint16) as writer:
        writer.append(np.array(values), np.array(lengths))
    assert not list(tmp_path.iterdir())


def test_a_prefix_is_written_once_in_a_dtype_of_megatron(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no code for uint32"):
        MegatronWriter(tmp_path / "x", np.uint32)
    with MegatronWriter(tmp_path / "x", np.uint16) as writer:
        writer.append(np.array([65535]), np.array([1]))
    with pytest.raises(ConfigError, match="is there already"):
        MegatronWriter(tmp_path / "x", np.uint16)


def broken(path: Path, at: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: broken(idx_path(p), 0, b"X"), "no index of Megatron Core"),
        (lambda p: broken(idx_path(p), 9, b"\x02"), "version 2, dtype code 4"),
        (lambda p: broken(idx_path(p), 17, b"\x0b"), "dtype code 11"),
        (lambda p: broken(idx_path(p), 17, b"\x05"), "begins at byte"),
        (lambda p: broken(idx_path(p), 18, b"\x04"), "4 sequences and 3 documents need"),
        (lambda p: broken(idx_path(p), 26, b"\x00"), " 0 document indices"),
        (lambda p: broken(idx_path(p), 34, b"\xff\xff\xff\xff"), "sequence 0 has the length -1"),
        (lambda p: broken(idx_path(p), 34, b"\x03"), "sequence 1 begins at byte 8, but the lengths before it make 12"),
        (lambda p: broken(idx_path(p), 34 + 12 * 3 + 8, b"\x09"), "document 1 ends before it begins"),
        (lambda p: broken(idx_path(p), 34 + 12 * 3, b"\x01"), "run from 1 to 3, not from 0 to 3"),
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
