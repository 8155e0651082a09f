"""Opens what a trainer reads: datasets folders, Parquet, JSONL, Megatron files, datasets, batches and Trainers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from chatmill.auditor.live import first_batches, is_trainer
from chatmill.core.tokens import offsets_of
from chatmill.core.trainer_columns import IDS, KNOWN, OFFSETS, Column
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.look.dataset import not_shown
from chatmill.look.packed_rows import chosen_split, is_list, packed_files, packed_parts, read_table, schema_of
from chatmill.look.preference_rows import document_rows, preference_columns
from chatmill.read.files import decode_line
from chatmill.read.lines import numbered_lines
from chatmill.store.episode_layout import dataset_folder, dataset_url
from chatmill.store.megatron import MegatronIndex, bin_path, idx_path
from chatmill.store.receipts import read_export

SIDECARS = ("_lossmask", "_loss_mask", "_mask")
"""Endings of the prefix of a Megatron mask; that of the tokens may end in `_tokens`."""


class TokenizedColumns(dict[str, Column]):
    """The columns of a set by their names."""

    has_targets = True
    """Whether tokens are targets: a reward model scores whole documents."""


def open_tokenized(
    source: Any,
    *,
    split: str | None = None,
    mask: str | None = None,
    batches: int | None = None,
) -> dict[str, Column]:
    """Read the columns of a path, a dataset, or some `batches` of a loader or Trainer, `mask` among them."""
    wanted = frozenset(KNOWN) if mask is None else frozenset((*KNOWN, mask))
    if isinstance(source, Mapping) and all(hasattr(dataset, "column_names") for dataset in source.values()):
        source = source[chosen_split(list(source), split, "the dataset")]
    if isinstance(source, str | os.PathLike):
        is_far = dataset_url(source) is not None
        return _of_path(dataset_folder(source, whole=True) if is_far else Path(source), split, wanted)
    if hasattr(source, "with_format") and hasattr(source, "column_names"):
        preferences = None if set(IDS) & set(source.column_names) else preference_columns(source.column_names)
        names = _chosen(source.column_names, wanted) if preferences is None else preferences.names
        source = source.select_columns(names).with_format("arrow")[:]
    if isinstance(source, pa.Table):
        return _of_table(source, wanted)
    return _of_rows([source] if isinstance(source, Mapping) else source, wanted, batches)


# ---- files


def _of_path(path: Path, split: str | None, wanted: Collection[str]) -> dict[str, Column]:
    if path.suffix in (".bin", ".idx") or (not path.exists() and bin_path(path).is_file()):
        return _megatron(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder, and no {bin_path(path).name} of Megatron")
    parts = packed_parts(path)
    export = read_export(path) if path.is_dir() and not parts else None
    if export is not None and export["to"] == "megatron":
        return _megatron_split(path, split)
    if export is not None:
        raise not_shown(path, export)
    lines = [] if parts else sorted(filter(_is_json, [path] if path.is_file() else path.iterdir()))
    if lines:
        try:
            return _of_rows(_json_rows(lines), wanted, None)
        except DataError as error:
            raise FormatError(f"{path}: {error}") from None
    files = packed_files(path, split if any(parts) else None)
    names = schema_of(files[0]).names
    preferences = None if set(IDS) & set(names) else preference_columns(names)
    tables = [read_table(file, wanted if preferences is None else preferences.names) for file in files]
    return _of_table(pa.concat_tables(tables, promote_options="permissive"), wanted)


def _of_table(table: pa.Table, wanted: Collection[str]) -> TokenizedColumns:
    preferences = None if set(IDS) & set(table.column_names) else preference_columns(table.column_names)
    columns = TokenizedColumns()
    if preferences is not None:
        columns.has_targets = preferences.has_mask
        batches = [document_rows(batch, preferences) for batch in table.to_batches()]
        table = pa.Table.from_batches(batches) if batches else table
    for name in _chosen(table.column_names, wanted):
        columns[name] = _lists(name, table.column(name))
    return columns


def _is_json(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def _json_rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Read the objects of JSON lines."""
    for path in paths:
        for number, line in numbered_lines(path):
            raw = decode_line(line, "")
            if raw.error is not None:
                raise FormatError(f"{path}, line {number}: {raw.error.message}")
            if not isinstance(raw.value, dict):
                kind = type(raw.value).__name__
                raise FormatError(f"{path}, line {number}: a row is an object with input_ids, not {kind}")
            yield raw.value


def _chosen(names: Sequence[str], wanted: Collection[str]) -> list[str]:
    """Select the columns to read."""
    chosen = [name for name in names if name in wanted]
    if names and not chosen:
        raise DataError(f"no column of token ids: there are {', '.join(names)}")
    return chosen


def _lists(name: str, column: pa.ChunkedArray) -> Column:
    """Flat values and offsets of a column of lists."""
    if not is_list(column.type):
        raise DataError(f"column {name!r} holds {column.type}, not lists of numbers")
    if column.null_count:
        raise DataError(f"column {name!r}: row {int(np.argmax(column.is_null().to_numpy()))} is null")
    types, flat = pa.types, pc.list_flatten(column)
    is_number = types.is_integer(flat.type) or types.is_floating(flat.type) or types.is_boolean(flat.type)
    if flat.null_count or (len(column) and not is_number):
        raise DataError(f"column {name!r} holds {column.type}, or nulls, and not lists of numbers")
    values = flat.cast(pa.uint8()) if types.is_boolean(flat.type) else flat
    return values.to_numpy(), offsets_of(pc.list_value_length(column).to_numpy())


# ---- rows and batches in memory


def _of_rows(source: Any, wanted: Collection[str], batches: int | None) -> dict[str, Column]:
    """Read rows or batches: mappings with lists, arrays or tensors of one or two dimensions."""
    if not isinstance(source, Iterable) and not is_trainer(source):
        raise ConfigError(
            f"cannot audit a {type(source).__name__}: give a path, a dataset, a DataLoader, a Trainer, or rows"
        )
    values: dict[str, list[Any]] = {}
    for number, row in enumerate(first_batches(source, batches)):
        if not isinstance(row, Mapping):
            raise DataError(
                f"item {number} is a {type(row).__name__}; rows and batches are mappings with input_ids. For tuples: "
                'audit(({"input_ids": x, "labels": y} for x, y in loader), model)'
            )
        here = {str(name): value for name, value in row.items() if name in wanted and value is not None}
        ids = next((value for name, value in here.items() if name in IDS and _dimensions(value) == 2), None)
        if ids is not None:
            here = _of_batch(here, int(ids.shape[0]), int(ids.shape[1]))
        if number and set(here) != set(values):
            names = f"{', '.join(sorted(here))}, and the first one {', '.join(sorted(values))}"
            raise DataError(f"item {number} has {names}")
        for name, value in here.items():
            values.setdefault(name, []).extend(_arrays(name, value))
    return {
        name: (
            np.concatenate(rows) if rows else np.empty(0, dtype=np.int64),
            offsets_of(np.array([len(row) for row in rows], dtype=np.int64)),
        )
        for name, rows in values.items()
    }


def _dimensions(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _of_batch(columns: dict[str, Any], rows: int, width: int) -> dict[str, Any]:
    """Split the columns of a batch by row. A mask over pairs of tokens becomes one that numbers documents."""
    mask = columns.get("attention_mask")
    if mask is not None and _dimensions(mask) > 2:
        pairs = _array(mask)
        if pairs.shape[-2:] != (width, width) or pairs.shape[0] not in (1, rows):
            raise DataError(f"attention_mask has the shape {pairs.shape} in a batch of {rows} rows of {width} tokens")
        heads = pairs.reshape(pairs.shape[0], -1, width, width)
        columns["attention_mask"] = _numbered(np.broadcast_to(heads[:, 0], (rows, width, width)))
    axes = columns.get("position_ids")
    if _dimensions(axes) == 3:  # in time, height and width: all of them begin anew with a document
        columns["position_ids"] = _array(axes).sum(axis=0)
    kept = {name: value for name, value in columns.items() if _dimensions(value) <= 2}
    for name in OFFSETS:
        if _dimensions(kept.get(name)) == 1:  # over all rows of the batch
            starts = _array(kept[name])
            kept[name] = [starts[starts // width == row] - row * width for row in range(rows)]
    return kept


def _numbered(mask: NDArray[Any]) -> NDArray[np.int64]:
    """Number the document of each token from 1, by what it sees; 0 for padding, which nobody sees.

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
    """Split a value into rows: one for a list or vector, several for a batch."""
    if isinstance(value, list | tuple) and len(value) and isinstance(value[0], list | tuple | np.ndarray):
        return [np.asarray(row) for row in value]
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


def _megatron_split(folder: Path, split: str | None) -> dict[str, Column]:
    """Read all shards of a split that was exported for Megatron."""
    names = [place.name for place in sorted(folder.iterdir()) if place.is_dir()]
    place = folder / chosen_split(names, split, str(folder))
    shards = [_megatron(file) for file in sorted(place.glob("*_tokens.idx"))]
    columns: dict[str, Column] = {}
    for name in shards[0] if shards else ():
        values = np.concatenate([shard[name][0] for shard in shards])
        lengths = np.concatenate([np.diff(shard[name][1]) for shard in shards])
        columns[name] = (values, offsets_of(lengths))
    return columns


def _megatron(path: Path) -> dict[str, Column]:
    """Read tokens of `PREFIX.bin/.idx` and the mask next to them, whose entry t is for the token at t + 1."""
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
            offsets = offsets_of(mask.lengths)
            labelled = mask.read() > 0
            labelled[offsets[1:] - 1] = False
            columns["loss_mask"] = (np.roll(labelled, 1), offsets)
            break
    return columns
