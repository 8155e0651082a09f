"""Shards of a distillation set: token files with the two sidecars beside them, opened together or refused.

A shard is `PREFIX_tokens`, `PREFIX_lossmask` and `PREFIX_span`, each a `.bin` with an `.idx`. On disk the two sidecars
are *label-aligned*: the value at position `t` is that of token `t + 1`, and the last value of a document is 0. A mask
of 1 means "train on that token"; a span is 1 (analysis), 2 (final) or 0 (neither, or not trained).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import first_difference
from chatmill.errors import ConfigError, FormatError, UnknownNameError
from chatmill.store.kd_rules import ShardRules
from chatmill.store.mapped import MappedFile, file_size, probe
from chatmill.store.megatron import MegatronIndex, idx_path
from chatmill.store.receipts import MANIFEST, read_export, read_kd_manifest

TOKENS, LOSSMASK, SPAN = "tokens", "lossmask", "span"
COLUMNS = (TOKENS, LOSSMASK, SPAN)
"""What the three datasets of a shard are called: `PREFIX_tokens` and so on."""
RECORD_IDS = "ids"
"""The dataset beside them, where it was asked for: the UTF-8 bytes of each document's record id."""
SPAN_NAMES = ("context", "analysis", "final")
"""What the span ids 0, 1 and 2 mean."""
SAMPLED = 64
"""Documents of a shard whose values are compared when it is opened, beside the first."""
_SIDECAR_NAME = re.compile(r"[a-z][a-z0-9_]*")


def token_prefix(prefix: str | os.PathLike[str]) -> str:
    """The prefix of a shard's token files, checked for its name, which is where the sidecars are found."""
    text = os.fspath(prefix)
    if not text.endswith(f"_{TOKENS}"):
        hint = f"; did you mean {text}_{TOKENS}?" if idx_path(f"{text}_{TOKENS}").exists() else ""
        raise ConfigError(
            f"{text}: the prefix of a distillation shard ends in _{TOKENS}, so that _{LOSSMASK} and _{SPAN} are found "
            f"beside it{hint}"
        )
    return text


def sidecar_prefix(prefix: str | os.PathLike[str], column: str) -> str:
    """The prefix of a sidecar, from that of the token files."""
    return f"{token_prefix(prefix).removesuffix(TOKENS)}{column}"


def check_sidecar_name(name: str) -> None:
    """A sidecar of a user's own has a plain name that is not one of ours."""
    if not _SIDECAR_NAME.fullmatch(name) or name in (*COLUMNS, RECORD_IDS):
        raise ConfigError(
            f"{name!r} is no name for a sidecar: lower-case letters, digits and _, and none of "
            f"{', '.join((*COLUMNS, RECORD_IDS))}"
        )


@dataclass(frozen=True, kw_only=True)
class KDShard:
    """One shard, opened and found aligned: counts, lengths, document borders, and the values of some documents."""

    prefix: str
    """That of the token files, with `_tokens`."""
    tokens: MegatronIndex
    sidecars: Mapping[str, MegatronIndex]
    """`lossmask`, `span`, and the sidecars of a user's own that were asked for."""

    @classmethod
    def open(cls, prefix: str | os.PathLike[str], sidecars: Sequence[str] = ()) -> KDShard:
        """Open all six files, and those of further sidecars; what does not fit together is a `FormatError`."""
        name = token_prefix(prefix)
        for sidecar in sidecars:
            check_sidecar_name(sidecar)
        beside = (LOSSMASK, SPAN, *sidecars)
        shard = cls(
            prefix=name,
            tokens=MegatronIndex.open(name),
            sidecars={column: MegatronIndex.open(sidecar_prefix(name, column)) for column in beside},
        )
        shard._check_tokens()
        for column, index in shard.sidecars.items():
            if column in COLUMNS and index.dtype != np.uint8:
                raise FormatError(f"{index.bin}: holds {index.dtype.name} values; a sidecar holds uint8")
            _check_beside(shard.tokens, index)
        shard._check_ends()
        shard._check_sampled()
        return shard

    @property
    def name(self) -> str:
        """`shard_00`."""
        return Path(self.prefix).name.removesuffix(f"_{TOKENS}")

    def __len__(self) -> int:
        """Documents."""
        return self.tokens.documents

    @cached_property
    def files(self) -> dict[str, MappedFile]:
        """The values of all datasets, mapped when first used."""
        indices = {TOKENS: self.tokens, **self.sidecars}
        return {column: MappedFile(index.bin, index.dtype, index.values) for column, index in indices.items()}

    def place(self, number: int) -> slice:
        """Where a document lies in the flat values."""
        first = int(self.tokens.pointers[number]) // self.tokens.dtype.itemsize
        return slice(first, first + int(self.tokens.lengths[number]))

    def document(self, number: int) -> tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.uint8]]:
        """Ids, mask and span of a document as they are on disk: mask and span are label-aligned. Views."""
        place = self.place(number)
        return self.files[TOKENS].array[place], self.files[LOSSMASK].array[place], self.files[SPAN].array[place]

    def fingerprint(self) -> str:
        """A hash over all lengths and samples of all values, with their sizes: another build gives another one."""
        digest = hashlib.sha256(self.tokens.dtype.name.encode())
        digest.update(np.ascontiguousarray(self.tokens.lengths).data)
        for file in self.files.values():
            probe(digest, file.array)
        return digest.hexdigest()

    def record_ids(self) -> list[str]:
        """The record id of every document, where the build stored them."""
        prefix = sidecar_prefix(self.prefix, RECORD_IDS)
        if not idx_path(prefix).exists():
            raise FormatError(f"{idx_path(prefix)}: no such file; --record-ids stores the record id of every document")
        index = MegatronIndex.open(prefix)
        if index.documents != len(self) or index.dtype != np.uint8:
            raise FormatError(f"{index.idx}: {index.documents:,} ids of {index.dtype.name} for {len(self):,} documents")
        data, ends = index.read().tobytes(), np.cumsum(index.lengths, dtype=np.int64).tolist()
        return [data[first:last].decode() for first, last in zip([0, *ends[:-1]], ends, strict=True)]

    def _sampled(self) -> Iterator[int]:
        """The first document and a sample of the others, evenly spaced."""
        last = len(self) - 1
        yield from sorted({0, *np.linspace(0, last, min(SAMPLED, last + 1)).astype(np.int64).tolist()})

    def _check_sampled(self) -> None:
        """On a sample of documents: the rules that `verify` holds every position to."""
        rules = ShardRules.of_root(Path(self.prefix).parent.parent)
        for number in self._sampled():
            ids, mask, span = self.document(number)
            for message, wrong in rules.broken(ids, mask, span, np.array([len(ids) - 1])).items():
                if wrong.any():
                    at = int(np.flatnonzero(wrong)[0])
                    raise FormatError(
                        f"{self.tokens.bin}: {message}: document {number} has the mask {mask[at]} and the span "
                        f"{span[at]} at position {at} ({wrong.sum():,} of its {len(ids):,} positions are wrong), where "
                        f"the token is {ids[at]}; tokens or sidecars are shifted, swapped, or belong to another build"
                    )

    def _check_ends(self) -> None:
        """On a sample of documents: what is label-aligned ends in 0."""
        for number in self._sampled():
            for name, index in self.sidecars.items():
                end = self.files[name].array[self.place(number).stop - 1]
                if end != 0:
                    raise FormatError(
                        f"{index.bin}: the last value of document {number} is {end}; label-aligned values end in 0, "
                        "because no token follows: was it written token-aligned?"
                    )

    def _check_tokens(self) -> None:
        """There are documents, of one sequence each, in an integer dtype."""
        index = self.tokens
        if not len(index.lengths):
            raise FormatError(f"{index.idx}: holds no document; leave this shard out")
        if index.dtype.kind not in "iu":
            raise FormatError(f"{index.bin}: holds {index.dtype.name} values; token ids are integers")
        if index.documents != len(index.lengths):
            raise FormatError(
                f"{index.idx}: {index.documents:,} documents of {len(index.lengths):,} sequences; in a distillation "
                "shard every document is one sequence"
            )
        if not int(index.lengths.min()):
            empty = int(np.flatnonzero(index.lengths == 0)[0])
            raise FormatError(f"{index.idx}: document {empty} is empty")


def _check_beside(tokens: MegatronIndex, sidecar: MegatronIndex) -> None:
    """A sidecar has the sequences, lengths and document borders of the tokens."""
    for what, theirs, ours in (
        ("sequences", len(sidecar.lengths), len(tokens.lengths)),
        ("documents", sidecar.documents, tokens.documents),
    ):
        if theirs != ours:
            raise FormatError(f"{sidecar.idx}: {theirs:,} {what}, but {tokens.idx.name} beside it has {ours:,}")
    columns: tuple[tuple[str, NDArray[Any], NDArray[Any]], ...] = (
        ("length", sidecar.lengths, tokens.lengths),
        ("border", sidecar.document_indices, tokens.document_indices),
    )
    for what, values, expected in columns:
        at = first_difference(values, expected)
        if at is not None:
            raise FormatError(
                f"{sidecar.idx}: document {at} has the {what} {int(values[at]):,}, but in {tokens.idx.name} beside it "
                f"{int(expected[at]):,}: the sidecar belongs to another build or shard"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KDRoot:
    """A folder of splits with shards: what `chatmill synth-kd` wrote, or an export to megatron."""

    directory: Path
    manifest: Mapping[str, Any]
    """Its manifest.json (or export.json)."""
    splits: dict[str, tuple[str, ...]]
    """The token prefixes of each split, in order; splits without a document are left out."""


def find_kd_root(directory: str | os.PathLike[str]) -> KDRoot:
    """Look into a finished folder, without opening its shards; refuses one whose manifest is not there yet."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder")
    splits = {
        split.name: prefixes
        for split in sorted(folder.iterdir(), key=_split_order)
        if split.is_dir() and not split.name.startswith(".") and (prefixes := shard_prefixes(split))
    }
    if not splits:
        raise FormatError(f"{folder}: holds no SPLIT/shard_NN_{TOKENS}.idx; give the folder that synth-kd wrote")
    manifest = read_kd_manifest(folder) if (folder / MANIFEST).is_file() else read_export(folder)
    if manifest is None:
        raise FormatError(
            f"{folder}: has shards but no {MANIFEST}, which is written last: the build is not finished; continue with "
            "chatmill synth-kd --resume"
        )
    _check_listed(folder, manifest)
    return KDRoot(directory=folder, manifest=manifest, splits=splits)


def _check_listed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """The files that a manifest lists (by shard, or flat in an export) are there, with the sizes that it says."""
    files = manifest.get("files")
    if files is None:
        shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
        files = {file["path"]: file for shard in shards for file in shard["files"]}
    for name, record in files.items():
        path, stated = folder / name, record["bytes"]
        size = file_size(path)
        if size != stated:
            raise FormatError(
                f"{path}: {size:,} bytes, but the manifest says {stated:,}: the file was cut or "
                "replaced after the build"
            )


class KDBlend(NamedTuple):
    """A blend as Megatron's configs take it: `(prefixes, weights)`."""

    prefixes: list[str]
    """The token prefixes of a split, one a shard."""
    weights: list[float]
    """Their tokens, so that every document is as likely as in one large shard."""


def synth_kd_blend(root: str | os.PathLike[str], split: str = "train") -> KDBlend:
    """The shards of a split for `blend_per_split` of a `GPTDatasetConfig`, weighted by their tokens.

    Weights need a number of samples; for exactly one epoch, or without a number, give `(blend.prefixes, None)`.
    Shards are not opened here beyond their sizes: the dataset checks them when it is built.
    """
    found = find_kd_root(root)
    if split not in found.splits:
        raise UnknownNameError("split", split, list(found.splits), "A split without documents has no shards.")
    prefixes = list(found.splits[split])
    return KDBlend(prefixes, [float(MegatronIndex.open(prefix).values) for prefix in prefixes])


def synth_kd_blends(root: str | os.PathLike[str]) -> list[KDBlend | None]:
    """`blend_per_split` of a `GPTDatasetConfig`: train, valid and test; None for a split without documents."""
    found = find_kd_root(root).splits
    names = ("train", "val" if "val" in found and "valid" not in found else "valid", "test")
    return [synth_kd_blend(root, split) if split in found else None for split in names]


def shard_prefixes(folder: Path) -> tuple[str, ...]:
    """The token prefixes in the folder of a split, by the number in their names."""
    found = [str(path.with_suffix("")) for path in folder.glob(f"*_{TOKENS}.idx")]
    return tuple(sorted(found, key=lambda prefix: (len(prefix), prefix)))


def _split_order(path: Path) -> tuple[int, str]:
    """Train before valid before whatever else."""
    return ("train", "valid").index(path.name) if path.name in ("train", "valid") else 2, path.name
