"""Opens what a trainer reads: datasets folders, Parquet, JSONL, Megatron files, datasets and batches in memory."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from chatmill.auditor.tokenized import IDS, KNOWN, OFFSETS, Column, TokenizedSet, from_columns
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.look.packed_rows import files_of_folder, packed_parts, read_table
from chatmill.store.megatron import MegatronIndex, bin_path, idx_path

SIDECARS = ("_lossmask", "_loss_mask", "_mask")
"""Endings of the prefix of a Megatron mask; that of the tokens may end in `_tokens`."""


def open_tokenized(
    source: Any,
    *,
    split: str | None = None,
    mask: str | None = None,
    pad_id: int | None = None,
    shifted: bool = False,
) -> TokenizedSet:
    """Open a path, a dataset, or batches; see `from_columns` for the options."""
    known = frozenset(KNOWN) if mask is None else frozenset((*KNOWN, mask))
    for_labels: Sequence[str] = ()
    kind = _Rows()
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if (not path.exists() and bin_path(path).is_file()) or path.suffix in (".bin", ".idx"):
            columns, for_labels = _megatron(path)
        else:
            columns = _of_table(_table(path, split, known), known)
    elif isinstance(source, pa.Table):
        columns = _of_table(source, known)
    elif hasattr(source, "with_format") and hasattr(source, "column_names"):
        columns = _of_table(_of_dataset(source, known), known)
    elif isinstance(source, Mapping) and all(hasattr(one, "column_names") for one in source.values()):
        one = source[_split_of(list(source), split, "the dataset")]
        columns = _of_table(_of_dataset(one, known), known)
    else:
        columns = _of_rows(source, known, kind)
    return from_columns(
        columns,
        mask=mask,
        pad_id=pad_id,
        shifted=shifted,
        for_labels=for_labels,
        is_batches=kind.are_batches,
        pair_mask=kind.pair_mask,
    )


# ---- tables


def _table(path: Path, split: str | None, known: Collection[str]) -> pa.Table:
    """The known columns of a file, or of the files of a folder."""
    if path.is_file():
        return _file(path, known)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder, and no {bin_path(path).name} of Megatron")
    splits = [name for name in packed_parts(path) if name]
    folder = path / _split_of(splits, split, str(path)) if splits else path
    files = files_of_folder(folder) or sorted(one for one in folder.iterdir() if ".jsonl" in one.suffixes)
    if not files:
        raise ConfigError(f"{path} holds no tokenised set: neither state.json nor .parquet, .arrow or .jsonl files")
    return pa.concat_tables([_file(one, known) for one in files], promote_options="permissive")


def _file(path: Path, known: Collection[str]) -> pa.Table:
    """The known columns of one file."""
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith((".parquet", ".arrow")):
            return read_table(path, known)
        if name.endswith((".jsonl", ".json")):
            return _json_table(path, known)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, OverflowError, zlib.error) as error:
        raise FormatError(f"{path}: {error}") from None
    raise ConfigError(
        f"{path}: not a kind of file that is known here. Known: .parquet, .arrow, .jsonl, .jsonl.gz, .bin/.idx, and "
        "folders of datasets.save_to_disk"
    )


def _json_table(path: Path, known: Collection[str]) -> pa.Table:
    """Lines of JSON objects with the same columns."""
    rows: list[dict[str, Any]] = []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FormatError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise FormatError(f"{path}, line {number}: a row is an object with input_ids, not {type(row).__name__}")
            rows.append({name: row[name] for name in sorted(known) if row.get(name) is not None})
            _check_columns(f"{path}, line {number}", rows[-1], rows[0])
    return pa.Table.from_pylist(rows) if rows else pa.table({})


def _check_columns(where: str, row: Collection[str], first: Collection[str]) -> None:
    if set(row) != set(first):
        raise DataError(f"{where} has {', '.join(sorted(row))}, and the first one {', '.join(sorted(first))}")


def _split_of(names: Sequence[str], split: str | None, where: str) -> str:
    """The split that is meant."""
    if split is not None:
        if split not in names:
            raise ConfigError(f"{where} has no split {split!r}: there are {', '.join(names)}")
        return split
    if "train" in names:
        return "train"
    if len(names) == 1:
        return names[0]
    raise ConfigError(f"{where} has several splits, and none is 'train': name one with --split: {', '.join(names)}")


def _of_dataset(dataset: Any, known: Collection[str]) -> pa.Table:
    """The known columns of a `datasets.Dataset`, in its own order."""
    names = [one for one in dataset.column_names if one in known]
    if not names:
        raise DataError(f"no column of token ids: there are {', '.join(dataset.column_names)}")
    return dataset.select_columns(names).with_format("arrow")[:]


def _of_table(table: pa.Table, known: Collection[str]) -> dict[str, Column]:
    columns = {name: _lists(name, table.column(name)) for name in table.column_names if name in known}
    if not columns and table.column_names:
        raise DataError(f"no column of token ids: there are {', '.join(table.column_names)}")
    return columns


def _lists(name: str, column: pa.ChunkedArray) -> Column:
    """Flat values and offsets of a column of lists."""
    values: list[Any] = []
    lengths: list[Any] = []
    for chunk in column.chunks:
        if pa.types.is_fixed_size_list(chunk.type):
            chunk = chunk.cast(pa.large_list(chunk.type.value_type))
        if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
            raise DataError(f"column {name!r} holds {chunk.type}, not lists of numbers")
        if chunk.null_count:
            raise DataError(f"column {name!r}: row {int(np.flatnonzero(chunk.is_null().to_numpy(False))[0])} is null")
        flat = chunk.flatten()
        if flat.null_count or not (pa.types.is_integer(flat.type) or _is_number(flat.type)):
            raise DataError(f"column {name!r} holds {chunk.type}, or nulls, and not lists of numbers")
        values.append(flat.cast(pa.uint8()).to_numpy() if pa.types.is_boolean(flat.type) else flat.to_numpy())
        lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
    joined = np.concatenate(values) if values else np.empty(0, dtype=np.int64)
    return joined, offsets_of(np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_boolean(kind))


# ---- rows and batches in memory


@dataclass(slots=True)
class _Rows:
    """What was seen of rows in memory."""

    are_batches: bool = False
    pair_mask: bool = False


def _of_rows(source: Any, known: Collection[str], seen: _Rows) -> dict[str, Column]:
    """Rows or batches: mappings with lists, arrays or tensors of one or two dimensions."""
    if isinstance(source, Mapping):
        source = [source]
    if not isinstance(source, Iterable):
        raise ConfigError(
            f"cannot audit a {type(source).__name__}: give a path, a dataset, a DataLoader, or a list of rows"
        )
    found: dict[str, list[Any]] = {}
    for number, row in enumerate(source):
        if not isinstance(row, Mapping):
            raise DataError(f"item {number} is a {type(row).__name__}; rows and batches are mappings with input_ids")
        here = {str(name): value for name, value in row.items() if name in known and value is not None}
        ids = next((value for name, value in here.items() if name in IDS and _dimensions(value) == 2), None)
        if ids is not None:
            here = _of_batch(here, int(ids.shape[0]), int(ids.shape[1]), seen)
        if number:
            _check_columns(f"item {number}", here, found)
        for name, value in here.items():
            found.setdefault(name, []).extend(_arrays(name, value))
    return {
        name: (
            np.concatenate(rows) if rows else np.empty(0, dtype=np.int64),
            offsets_of(np.array([len(row) for row in rows], dtype=np.int64)),
        )
        for name, rows in found.items()
    }


def _dimensions(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _of_batch(columns: dict[str, Any], rows: int, width: int, seen: _Rows) -> dict[str, Any]:
    """Columns of a batch, one entry a row. A mask over pairs of tokens becomes one that numbers documents."""
    seen.are_batches = True
    mask = columns.get("attention_mask")
    if mask is not None and _dimensions(mask) > 2:
        seen.pair_mask = True
        pairs = _array(mask)
        if pairs.shape[-2:] != (width, width) or pairs.shape[0] not in (1, rows):
            raise DataError(f"attention_mask has the shape {pairs.shape} in a batch of {rows} rows of {width} tokens")
        heads = pairs.reshape(pairs.shape[0], -1, width, width)
        columns["attention_mask"] = _numbered(np.broadcast_to(heads[:, 0], (rows, width, width)))
    kept = {name: value for name, value in columns.items() if _dimensions(value) <= 2}
    for name in OFFSETS:
        if _dimensions(kept.get(name)) == 1:  # over all rows of the batch
            starts = _array(kept[name])
            kept[name] = [starts[starts // width == row] - row * width for row in range(rows)]
    return kept


def _numbered(mask: NDArray[Any]) -> NDArray[np.int64]:
    """The document of each token, from 1, by what it sees; 0 for padding, which nobody sees.

    Masks are true or 1 where a token is seen, or are added to scores and 0 there. Rows of padding may see everything:
    attention fails on rows that see nothing.
    """
    sees = mask == 0 if mask.dtype.kind == "f" and not (mask > 0).any() else mask != 0
    places = np.arange(mask.shape[-1])
    everything = sees.all(axis=2)
    everything &= ~everything.all(axis=1, keepdims=True)
    everything[:, -1] = False  # the last token may
    padding = ~sees[:, places, places] | everything
    starts = (sees.argmax(axis=2) == places) & ~padding
    numbers = np.maximum(np.cumsum(starts, axis=1), 1)
    return np.where(padding, 0, numbers)


def _arrays(name: str, value: Any) -> list[Any]:
    """The rows of one value: one of a list or vector, several of a batch."""
    if isinstance(value, list | tuple) and len(value) and isinstance(value[0], list | tuple | np.ndarray):
        return [np.asarray(one) for one in value]
    array = _array(value)
    if array.ndim == 2:
        return list(array)
    if array.ndim != 1 or array.dtype.kind not in "iubf":
        raise DataError(f"{name} holds {array.dtype} of {array.ndim} dimensions, not rows of numbers")
    return [array]


def _array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bfloat16
    return np.asarray(value)


# ---- Megatron


def _megatron(path: Path) -> tuple[dict[str, Column], Sequence[str]]:
    """Tokens of `PREFIX.bin/.idx`, and the mask beside them."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    tokens = MegatronIndex.open(prefix)
    columns: dict[str, Column] = {"input_ids": (tokens.read(), offsets_of(tokens.lengths))}
    base = str(prefix).removesuffix("_tokens")
    for ending in SIDECARS:
        beside = Path(base + ending)
        if idx_path(beside).is_file():
            mask = MegatronIndex.open(beside)
            if not np.array_equal(mask.lengths, tokens.lengths):
                raise FormatError(f"{mask.idx}: its lengths are not those of {tokens.idx}")
            columns["loss_mask"] = (mask.read(), offsets_of(mask.lengths))
            break
    return columns, ("loss_mask",)
