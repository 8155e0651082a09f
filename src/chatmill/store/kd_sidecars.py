"""Further sidecars of a distillation shard: any dtype, label-aligned, written by any program, at any time.

A teacher's log-probability of every token is the typical one. `PREFIX_NAME.{bin,idx}` is beside `PREFIX_tokens`; the
record ids that a build can store say which conversation each document is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.core.shift import shift_left
from chatmill.errors import DataError, FormatError, member
from chatmill.store.kd_shard import COLUMNS, RECORD_IDS, TOKENS, KDShard, check_sidecar_name, sidecar_prefix
from chatmill.store.megatron import MegatronWriter, bin_path

_CACHE = re.compile(rf"[^/]+/[^/]+_{TOKENS}/cache/.+")
_FILE = re.compile(r"([^/]+/shard_\d{2,})_([a-z][a-z0-9_]*)\.(?:bin|idx)")


class Aligned(StrEnum):
    """Which token a value is about."""

    LABELS = "labels"
    """Position `t` has the value of token `t + 1`, the last one is 0: as on disk, and as a model's losses come."""
    TOKENS = "tokens"
    """Position `t` has the value of token `t`; that of the first token is dropped, since nothing predicts it."""


def write_sidecar(
    prefix: str | os.PathLike[str],
    name: str,
    documents: Iterable[NDArray[Any]],
    dtype: DTypeLike = np.float32,
    *,
    aligned: str = Aligned.LABELS,
) -> Path:
    """Write the values of every document of a shard, in its order, as `PREFIX_NAME`; gives the `.bin`.

    `prefix` is that of the token files. A number of documents or of values that is not that of the tokens, or a last
    value other than 0 in label-aligned ones, is a `DataError`, and nothing is left behind.
    """
    check_sidecar_name(name)
    alignment = member(Aligned, "alignment", aligned)
    shard = KDShard.open(prefix)
    target = sidecar_prefix(shard.prefix, name)
    count = 0
    with MegatronWriter(target, dtype) as writer:
        for count, values in enumerate(documents, start=1):
            if count > len(shard):
                raise DataError(f"{target}: more documents than the {len(shard):,} of the shard")
            length = int(shard.tokens.lengths[count - 1])
            if values.shape != (length,):
                raise DataError(
                    f"{target}: document {count - 1} has values of the shape {values.shape}, but {length:,} tokens"
                )
            own = shift_left(values) if alignment is Aligned.TOKENS else values
            if own[-1] != 0:
                raise DataError(
                    f"{target}: the last value of document {count - 1} is {own[-1]}; label-aligned values end in 0, "
                    "because no token follows: are they token-aligned?"
                )
            writer.append(own.astype(writer.dtype) if writer.dtype.kind == "f" else own, np.array([length]))
        if count != len(shard):
            raise DataError(f"{target}: {count:,} documents, but the shard has {len(shard):,}")
    return bin_path(target)


def is_index_cache(name: str) -> bool:
    """Whether a file in a root, by its path there, is one that Megatron wrote as its index cache."""
    return _CACHE.fullmatch(name) is not None


def check_added(folder: Path, names: Iterable[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Files of a root that its receipt does not name: those that are wrong and why, sidecars, and the index cache.

    Sidecars that were added later must fit to their tokens.
    """
    wrong: dict[str, str] = {}
    sidecars, cache = set(), []
    for name in names:
        found = _FILE.fullmatch(name)
        if is_index_cache(name):
            cache.append(name)
        elif found is None or found[2] in (*COLUMNS, RECORD_IDS):
            wrong[name] = ""
        else:
            sidecars.add((found[1], found[2]))
    for stem, sidecar in sorted(sidecars):
        try:
            KDShard.open(folder / f"{stem}_{TOKENS}", [sidecar])
        except FormatError as error:
            wrong[f"{stem}_{sidecar}"] = str(error)
    return wrong, [f"{stem}_{sidecar}" for stem, sidecar in sorted(sidecars)], cache
