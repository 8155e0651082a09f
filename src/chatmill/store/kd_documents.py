"""A distillation dataset read as any other: documents with ids, token-aligned weights and kinds.

On disk mask and span are label-aligned: position `t` is that of token `t + 1`, and the last one of a document is 0.
So the values of all documents, moved by one, are those of the tokens; only the first token of a document has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from chatmill.core.canonical import canonical_json
from chatmill.core.harmony_ids import EOD, kinds_of_spans
from chatmill.core.tokens import offsets_of
from chatmill.store.kd import find_kd_root
from chatmill.store.kd_shard import LOSSMASK, RECORD_IDS, SPAN, TOKENS, KDShard, sidecar_prefix
from chatmill.store.megatron import idx_path
from chatmill.store.receipts import SEAL
from chatmill.store.split import Ints, Split, StoredDataset, TokenColumns, chosen_splits

O200K_FINGERPRINT = "121b20d1a306b5380b3a56876fa683ecc17e49547161f4a2f3b439b4b2b7ddb3"
"""That of the one tokenizer of these datasets, whose vocabulary file is fixed."""


class _TokenAligned:
    """Label-aligned values of a shard, as those of its tokens; made for each slice."""

    def __init__(self, values: NDArray[np.uint8], made: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
        self._values, self._made = values, made

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: slice) -> NDArray[np.uint8]:
        start, stop, _ = place.indices(len(self))
        if start or stop <= start:
            return self._made(self._values[start - 1 : stop - 1] if stop > start else self._values[:0])
        return self._made(np.concatenate([np.zeros(1, dtype=np.uint8), self._values[: stop - 1]]))


class KDDocuments(Split):
    """The documents of one split, shard after shard."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Open the shards; what does not fit together is a `FormatError`."""
        self.shards = [KDShard.open(prefix) for prefix in prefixes]
        self.firsts = offsets_of(np.array([len(shard) for shard in self.shards]))
        """The first document of each shard, and the number of all documents."""
        self.has_masks = self.has_kinds = True
        self._record_ids: dict[int, list[str]] = {}

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of every document."""
        return np.concatenate([shard.tokens.lengths for shard in self.shards]).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash over those of the shards."""
        return hashlib.sha256("".join(shard.fingerprint() for shard in self.shards).encode()).hexdigest()

    @property
    def shard_count(self) -> int:
        """Shards of the split."""
        return len(self.shards)

    @property
    def plan(self) -> None:
        """Megatron packs for itself."""

    def shard_columns(self, shard: int) -> TokenColumns:
        """Ids, weights and kinds of a whole shard; the latter two are made for the slices that are read."""
        values = self.shards[shard].values
        ids = values(TOKENS)
        return TokenColumns(
            ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint32),
            cast(Any, _TokenAligned(values(LOSSMASK), lambda own: own)),
            cast(Any, _TokenAligned(values(SPAN), kinds_of_spans)),
        )

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Record ids where the build stored them; the shard as `source`."""
        shards = (np.searchsorted(self.firsts, numbers, side="right") - 1).tolist()
        if name == "source":
            return [self.shards[shard].name for shard in shards]
        if name != "record_id" or not all(_has_ids(shard) for shard in self.shards):
            return None
        rows = (numbers - self.firsts[shards]).tolist() if shards else []
        return [self._ids_of(shard)[row] for shard, row in zip(shards, rows, strict=True)]

    def _ids_of(self, shard: int) -> list[str]:
        if shard not in self._record_ids:
            self._record_ids = {shard: self.shards[shard].record_ids()}
        return self._record_ids[shard]

    def locate(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Shard number, start and length (in tokens) of some documents."""
        shards = np.searchsorted(self.firsts, numbers, side="right") - 1
        starts = np.empty(len(numbers), dtype=np.int64)
        for shard in np.unique(shards).tolist():
            own = shards == shard
            starts[own] = self.shards[shard].tokens.starts(numbers[own] - self.firsts[shard])
        return shards, starts, self.lengths[numbers]

    def release(self) -> None:
        """Unmap the files; they are mapped again when they are needed."""
        for shard in self.shards:
            shard.files.release()


def _has_ids(shard: KDShard) -> bool:
    return idx_path(sidecar_prefix(shard.prefix, RECORD_IDS)).exists()


def open_kd_dataset(directory: Path, splits: Sequence[str] | None) -> StoredDataset:
    """Open the root of a finished distillation dataset."""
    root = find_kd_root(directory)
    chosen = chosen_splits(root.splits, splits, "A split without documents has no shards.")
    manifest = root.manifest if SEAL in root.manifest else None
    return StoredDataset(
        directory=directory,
        about={} if manifest is None else _about(manifest),
        of_build=None if manifest is None else manifest["fingerprint"],
        splits={name: KDDocuments(root.splits[name]) for name in chosen},
    )


def _about(manifest: Any) -> dict[str, Any]:
    """What a build would say of the same: how these datasets are made is fixed but for `config`."""
    renderer = hashlib.sha256(canonical_json(manifest["renderer"])).hexdigest()
    split = hashlib.sha256(canonical_json(manifest["split"])).hexdigest()
    return {
        **{name: manifest[name] for name in ("package_version", "git_sha", "fingerprint")},
        "tokenizer": {
            "name": "o200k",
            "given_as": "o200k",
            "fingerprint": O200K_FINGERPRINT,
            "vocab_size": manifest["tokenizer"]["vocab_size"],
            "eos_id": EOD,
            "pad_id": EOD,
        },
        "template": {"name": "harmony", "fingerprint": renderer},
        "policy": {"name": "synth_kd", "fingerprint": split},
        "inputs": [],
        "recipe": {
            "tokenizer": "o200k",
            "template": "harmony",
            "policy": "synth_kd",
            "add_control_tokens": False,
            "config": manifest["config"],
            "input": manifest["input"],
        },
    }
