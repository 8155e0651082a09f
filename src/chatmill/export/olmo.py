"""The export to OLMo-core: headerless arrays of tokens and label masks, and the bounds of documents."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError, DataError
from chatmill.export.row_layout import RowBatch, with_ends

if TYPE_CHECKING:
    from chatmill.export.targets import Export

DTYPES = (np.uint8, np.uint16, np.uint32)
"""OLMo-core takes the smallest that holds the vocabulary."""


def to_olmo_core(export: Export, *, eod_id: int | None = None) -> None:
    """`SPLIT/token_ids_part_00000.npy`, `labels_mask_part_00000.npy` and the bounds, `token_ids_part_00000.csv.gz`.

    The mask is token-aligned. OLMo-core finds the documents by their end token (and, asked for it, by the bounds), so
    each must end in it and have it nowhere else.
    """
    export.begin_for("OLMo-core")
    eos = export.eos_id if eod_id is None else eod_id
    if eos is None:
        raise ConfigError(
            "OLMo-core finds documents by their end token, and this dataset's tokenizer names none: give one with "
            f"--eod-id, which ends every document{export.eod_advice}"
        )
    size = _vocabulary(export, eod_id)
    if eos >= size:
        raise ConfigError(f"eod_id is {eos:,}; the vocabulary has {size:,} tokens")
    dtype = next(dtype for dtype in DTYPES if size - 1 <= np.iinfo(dtype).max)
    for split, rows in export.documents("OLMo-core").items():
        for number, shard in enumerate(export.shards(split, rows, added=int(eod_id is not None))):
            documents = (_ended(export, batch, size, eos, adds=eod_id is not None) for batch in shard)
            _write_part(export.folder / split, number, documents, dtype)
    longest = export.longest_document + int(eod_id is not None)
    export.config += [
        "NumpyPackedFSLDatasetConfig(",
        f"    tokenizer=TokenizerConfig(vocab_size={size}, eos_token_id={eos}, pad_token_id={export.pad_id}),",
        f'    paths=["{{out}}/{export.main_split}/token_ids_part_*.npy"], dtype="{np.dtype(dtype).name}",',
        f'    label_mask_paths=["{{out}}/{export.main_split}/labels_mask_part_*.npy"], expand_glob=True,',
        "    generate_doc_lengths=True,  # keeps the documents of a row apart",
        f"    sequence_length=...,  # a power of 2, {longest:,} or more: OLMo-core cuts longer documents",
        ")",
    ]


def _vocabulary(export: Export, eod_id: int | None) -> int:
    """Tokens of the vocabulary; where the dataset does not say so, one more than the largest id."""
    size = export.source.about.get("tokenizer", {}).get("vocab_size")
    if size is not None:
        return int(size)
    largest = [-1 if eod_id is None else eod_id]
    for documents in export.source.splits.values():
        largest += [int(documents.shard_columns(shard)[0].max(initial=0)) for shard in range(len(documents.shards))]
    return max(largest) + 1


def _ended(
    export: Export, batch: RowBatch, size: int, eos: int, *, adds: bool
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]:
    """Ids, offsets and mask of documents that each end in `eos`, which is added untrained where it was asked for."""
    ids, offsets, trained = batch.documents.ids, batch.documents.offsets, export.targets(batch)
    largest = int(ids.max(initial=0))
    if largest >= size:
        raise DataError(f"{batch.split}: a token has the id {largest:,}; the vocabulary has {size:,}")
    problem = batch.problem_with_ends(eos)
    if problem and "inside" in problem:
        raise DataError(
            f"{problem}, and OLMo-core cuts them there: choose another token that ends them, one that the template "
            f"does not write (and eos_token_id in OLMo-core){export.eod_advice or ': --eod-id N'}"
        )
    if problem and not adds:
        raise DataError(f"{problem}, by which OLMo-core finds their ends: --eod-id {eos} adds it after them, untrained")
    if problem:
        ids, offsets, trained = with_ends(ids, offsets, eos, trained)
    return ids, offsets, trained


def _write_part(
    folder: Path,
    number: int,
    documents: Iterable[tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]],
    dtype: type[np.unsignedinteger[Any]],
) -> None:
    """Write the three files of one part."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, lines = 0, []
    with (
        (folder / f"token_ids_part_{number:05d}.npy").open("wb") as ids_file,
        (folder / f"labels_mask_part_{number:05d}.npy").open("wb") as mask_file,
    ):
        for ids, offsets, mask in documents:
            ids_file.write(ids.astype(dtype).tobytes())
            mask_file.write(mask.tobytes())
            borders = (offsets + tokens).tolist()
            lines += [f"{start},{end}\n" for start, end in pairwise(borders)]
            tokens = borders[-1]
    bounds = gzip.compress("".join(lines).encode(), mtime=0)
    (folder / f"token_ids_part_{number:05d}.csv.gz").write_bytes(bounds)
