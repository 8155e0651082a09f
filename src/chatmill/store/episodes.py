"""Reading a split of episodes: memory-mapped, with random access to every column."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from chatmill.core.sides import SIDE_NAMES
from chatmill.core.tokens import offsets_of
from chatmill.core.trees import Branches, joined
from chatmill.errors import ChatmillError, ConfigError, FormatError
from chatmill.pack.plan import Plan
from chatmill.pack.plan import plan as pack_rows
from chatmill.store.episode_layout import (
    INDEX,
    MASK,
    SPLIT_MANIFEST,
    TOKENS,
    dataset_folder,
    episode_folders,
    split_folder,
    was_compared,
)
from chatmill.store.episode_manifest import ColumnSpec, EpisodeManifest, read_split_manifest
from chatmill.store.episode_shard import MAX_CODE, EpisodeShard
from chatmill.store.mapped import SAMPLE, SAMPLES, MappedFiles, probe
from chatmill.store.split import Ints, Split, TokenColumns
from chatmill.store.teacher import FOLDER, TeacherColumn

EPISODE_FACTS = ("source", "turns", "trained", "record_id", "images", "side", "margin")
"""The columns that are fields of an `Episode`, one value each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One conversation. The arrays are read-only views of the files, one value per token."""

    index: int
    ids: NDArray[np.uint32]
    weights: NDArray[np.uint8] | NDArray[np.float32] | None
    """Token-aligned: how much each token counts as a target; None when the split has no masks."""
    kinds: NDArray[np.uint8] | None
    """What each token is (`chatmill.core.kinds`); None when not stored."""
    source: str | None = None
    turns: int | None = None
    trained: int | None = None
    """Tokens with a weight above 0."""
    record_id: str | None = None
    logprobs: NDArray[np.float32] | None
    """Log-probabilities of sampled tokens, NaN for the others; None when not stored."""
    branches: Branches
    """Its branches where it is a tree (`chatmill.core.trees`); a row has none."""
    images: str | None = None
    """Its pictures as JSON (`chatmill.images.column`); None when not stored."""
    side: str | None = None
    """`chosen`, `rejected`, `liked`, `disliked` or `pair` (a tree of both), in a dataset of answers that people
    compared (`preferences: pairs`); else None."""
    margin: float | None = None
    """By how much the chosen answer of its pair is better; None where nothing says it."""

    def __len__(self) -> int:
        return len(self.ids)


class EpisodeDataset(Split):
    """The episodes of one split, flat or sharded, in the order of their shards' names.

    Opening looks at the sizes of tokens, index and masks; files are mapped and checked when they are first used.
    """

    def __init__(self, dir: str | Path, split: str = "train", *, strict: bool = True) -> None:
        """Open `dir/split`.

        A mask that is missing in some shards or has the wrong length is an error; with `strict=False` the split is
        then read without masks, and `mask_problem` says why.
        """
        self.directory, self.split = dataset_folder(dir), split
        self.folder = split_folder(self.directory, split)
        self.manifest: EpisodeManifest | None = read_split_manifest(self.folder)
        folders = episode_folders(self.folder)
        _match_manifest(self.manifest, folders, self.folder)
        self.columns: dict[str, ColumnSpec] = self.manifest.columns if self.manifest else {}
        files, codes = MappedFiles(), _source_codes(self.manifest, len(folders))
        self.shards: list[EpisodeShard] = [
            EpisodeShard(path, self.columns, its_codes, files) for path, its_codes in zip(folders, codes, strict=True)
        ]
        self.episode_offsets = offsets_of(np.array([s.episodes for s in self.shards]))
        self.tokens: int = sum(shard.tokens for shard in self.shards)
        """Tokens in all `tokens.bin` files."""
        some_masks = any(shard.mask_dtype is not None or shard.mask_problem for shard in self.shards)
        self.mask_problem: str = next((shard.no_mask for shard in self.shards if some_masks and shard.no_mask), "")
        """Why a split with some masks is read without them; empty when nothing is wrong."""
        if strict and self.mask_problem:
            raise FormatError(self.mask_problem)
        self.has_masks = some_masks and not self.mask_problem
        self.has_kinds = "kinds" in self.columns
        self.has_trees = "branches" in self.columns
        self.has_logprobs = "logprobs" in self.columns
        self.has_sides = "side" in self.columns
        if len(self) == 0:
            raise FormatError(f"{self.folder}: an empty split: its index has no episodes")

    def __getstate__(self) -> dict[str, Any]:
        """Without arrays that are as long as the split: another process makes them anew where it needs them."""
        return {name: value for name, value in self.__dict__.items() if name not in ("lengths", "plan", "teacher")}

    def __len__(self) -> int:
        return int(self.episode_offsets[-1])

    def __repr__(self) -> str:
        return f"EpisodeDataset({str(self.folder)!r}: {len(self):,} episodes, {self.tokens:,} tokens)"

    def __getitem__(self, index: int) -> Episode:
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"episode {index} of {len(self):,} in {self.folder}")
        number = int(np.searchsorted(self.episode_offsets, position, side="right")) - 1
        shard, row = self.shards[number], position - int(self.episode_offsets[number])
        start, length = shard.index[row].tolist()
        ids, *others = self.shard_columns(number)
        weights, kinds, logprobs = (None if column is None else column[start : start + length] for column in others)
        return Episode(
            index=position,
            ids=ids[start : start + length],
            weights=weights,
            kinds=kinds,
            logprobs=logprobs,
            branches=shard.branches(np.array([row])),
            **{name: self._facts(shard, name, [row])[0] for name in EPISODE_FACTS if name in self.columns},
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self[i] for i in range(len(self)))

    def _facts(self, shard: EpisodeShard, name: str, rows: list[int]) -> list[Any]:
        """Return what a per-episode column says of some episodes of a shard."""
        if self.columns[name].dtype == "utf8":
            return [shard.bytes_of(name, row).decode("utf-8", errors="replace") for row in rows]
        values: list[Any] = shard.column(name, rows).tolist()
        if name == "margin":
            return [None if np.isnan(value) else value for value in values]
        if name == "side":
            return [SIDE_NAMES[value] for value in values]
        if name != "source":
            return values
        names = self.source_names
        for row, code in zip(rows, values, strict=True):
            if code >= len(names):
                raise FormatError(
                    f"{shard.folder}: episode {row} has source code {code}; the manifest has {len(names)} names"
                )
        return [names[code] for code in values]

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of every episode (read-only)."""
        out = np.concatenate([shard.index[:, 1].astype(np.int64) for shard in self.shards])
        out.flags.writeable = False
        return out

    @cached_property
    def plan(self) -> Plan | None:
        """Which episodes share a row, planned again by what the manifest states; None where the split is not packed."""
        stated = self.manifest.rows if self.manifest else None
        if stated is None:
            return None
        where = self.folder / SPLIT_MANIFEST
        try:
            planned = pack_rows(self.lengths, stated.length, stated.strategy)
        except ChatmillError as error:
            raise FormatError(f"{where}: rows of {stated.length:,} tokens cannot be planned again: {error}") from None
        if planned.bins != stated.count:
            raise FormatError(
                f"{where} states {stated.count:,} packed rows of {stated.length:,} tokens by {stated.strategy}, and "
                f"the planner makes {planned.bins:,} of its episodes: it was edited, or built by another version; "
                "build it again"
            )
        return planned

    @cached_property
    def teacher(self) -> TeacherColumn:
        """What a teacher says of the targets (`chatmill teacher add`); opened when first asked for."""
        return TeacherColumn(self, self.directory / FOLDER / self.split)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the source codes, in code order."""
        return self.manifest.sources if self.manifest else ()

    def column(self, name: str) -> NDArray[Any]:
        """Return a whole per-episode column of numbers (a new array when there are several shards)."""
        spec = self.columns.get(name)
        if spec is None or spec.per != "episode" or spec.offsets_file:
            numeric = [c.name for c in self.columns.values() if c.per == "episode" and not c.offsets_file]
            raise ConfigError(
                f"{self.folder}: no column of numbers per episode named {name!r}; there is: {numeric or 'none'}"
            )
        if len(self.shards) == 1:
            return self.shards[0].column(name)
        return np.concatenate([shard.column(name).copy() for shard in self.shards])  # a view would hold its file

    def shard_columns(self, shard: int) -> TokenColumns:
        """Return the columns of a whole shard that have a value per token (views of its files)."""
        files = self.shards[shard]
        return TokenColumns(
            files.token_ids,
            files.mask if self.has_masks else None,
            files.column("kinds") if self.has_kinds else None,
            files.column("logprobs") if self.has_logprobs else None,
        )

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Record ids (`record_id`), source names (`source`) or assistant turns (`turns`) of some episodes.

        None where the dataset does not store them.
        """
        if name not in self.columns:
            return None
        values: list[Any] = [None] * len(numbers)
        for shard, rows, places in self.by_shard(numbers):
            facts = self._facts(self.shards[shard], name, rows.tolist())
            for place, value in zip(places.tolist(), facts, strict=True):
                values[place] = value
        return values

    @cached_property
    def has_pictures(self) -> bool:
        """Whether an episode has pictures."""
        if "images" not in self.columns:
            return False
        return any(len(shard.column("images")) for shard in self.shards)

    def image_bytes(self, number: int) -> bytes:
        """Return the bytes of the pictures of an episode, one after another."""
        ((shard, rows, _),) = self.by_shard(np.array([number]))
        return self.shards[shard].bytes_of("image_bytes", int(rows[0]))

    def branches(self, numbers: Ints) -> Branches:
        """Return the branches of some episodes, in the order asked for."""
        if not self.has_trees:
            return Branches.none(len(numbers))
        parts = [(self.shards[shard].branches(rows), places) for shard, rows, places in self.by_shard(numbers)]
        back = np.argsort(np.concatenate([np.empty(0, dtype=np.int64), *(places for _, places in parts)]))
        return joined([branches for branches, _ in parts]).take(back)

    def _compare_small_files(self, manifest: EpisodeManifest) -> None:
        """Compare indexes, and small files of tokens and masks, with the digests in the manifest.

        Files of a remote dataset were compared when they were fetched.
        """
        shards = zip(self.shards, manifest.shards, strict=True) if manifest.shards else ()
        for shard, stated in shards:
            for name in (INDEX, TOKENS, MASK):
                record = stated.files.get(name)
                path = shard.folder / name
                if record is None or was_compared(path) or (name != INDEX and record.bytes > SAMPLE * SAMPLES):
                    continue
                with suppress(ImportError):  # a machine that only trains may have no hashes
                    if not record.record.is_of(path):
                        raise FormatError(
                            f"{path} is not the file that {SPLIT_MANIFEST} names: it was changed after the build "
                            "(chatmill verify shows what else differs)"
                        )

    def contents(self) -> list[str]:
        """Return a text for each shard that is the same where all its files are.

        Empty for a shard whose files may have changed since the manifest was written: one that is no remote one.
        """
        if self.manifest is None or not self.manifest.shards:
            return [""] * len(self.shards)
        texts: list[str] = []
        for shard, stated in zip(self.shards, self.manifest.shards, strict=True):
            files = (f"{name} {file.bytes} {file.xxh128}" for name, file in sorted(stated.files.items()))
            texts.append("\n".join(files) if was_compared(shard.folder / TOKENS) else "")
        return texts

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the shards: their names, and the digests of their files as the manifest of the split has them.

        Without a manifest: sizes, the whole index, and samples of tokens and masks, files up to 256 KiB whole. It
        tells datasets apart when a run is resumed, in milliseconds; `chatmill verify` is what proves every byte.
        """
        if self.manifest is not None:
            self._compare_small_files(self.manifest)
            return _manifest_fingerprint(self.manifest)
        digest = hashlib.sha256(b"chatmill-episodes-1")
        for shard in self.shards:
            name = shard.folder.name if len(self.shards) > 1 else ""
            digest.update(f"{name}\0{shard.episodes}\0{shard.tokens}\0{shard.mask_dtype}\0".encode())
            digest.update(shard.index.data)
            probe(digest, shard.token_ids, shards=len(self.shards))
            if self.has_masks:
                probe(digest, shard.mask, shards=len(self.shards))
            if self.has_logprobs:
                probe(digest, shard.column("logprobs"), shards=len(self.shards))
            if self.has_sides:
                digest.update(shard.column("side").tobytes())
            if self.has_trees:
                digest.update(shard.column("branches").data)
        return digest.hexdigest()


def _manifest_fingerprint(manifest: EpisodeManifest) -> str:
    """Hash what a manifest says of the shards; nothing else is read, so a dataset in a bucket is not fetched for it."""
    digest = hashlib.sha256(b"chatmill-episodes-2")
    for shard in manifest.shards:
        name = shard.name if len(manifest.shards) > 1 else ""
        digest.update(f"{name}\0{shard.episodes}\0{shard.tokens}\0".encode())
        for file, record in sorted(shard.files.items()):
            digest.update(f"{file}\0{record.bytes}\0{record.xxh128}\0".encode())
    return digest.hexdigest()


def _source_codes(manifest: EpisodeManifest | None, shards: int) -> list[NDArray[np.uint32] | None]:
    """For each shard with a source table of its own, the codes of the split for those names."""
    if manifest is None:
        return [None] * shards
    codes = {name: code for code, name in enumerate(manifest.sources)}
    return [
        np.array([codes.get(name, MAX_CODE) for name in shard.sources], "<u4") if shard.sources is not UNSET else None
        for shard in manifest.shards
    ]


def _match_manifest(manifest: EpisodeManifest | None, folders: list[Path], split: Path) -> None:
    """Check that the shards on disk are the ones the manifest names."""
    present = [] if folders == [split] else [folder.name for folder in folders]
    named = present if manifest is None else [shard.name for shard in manifest.shards if shard.name]
    if present != named:
        different = ", ".join(sorted(set(named) ^ set(present))[:5])
        raise FormatError(
            f"{split}: the manifest names {len(named)} shards, {len(present)} are there; different: {different}"
        )
