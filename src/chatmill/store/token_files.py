"""Flat token files of a split: `X.bin` with its `X_mask.bin`, or the token files of an episode dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.words import counted
from chatmill.errors import FormatError
from chatmill.store.episode_layout import MASK, TOKENS, episode_folders, has_file, is_episode_split, split_folder
from chatmill.store.episode_manifest import BRANCHES
from chatmill.store.mapped import MappedFiles, file_size, probe, whole_records

SUFFIX, MASK_SUFFIX = ".bin", "_mask.bin"
MASK_TYPES = (np.dtype("u1"), np.dtype("<f4"))


class TokenShard:
    """A file of uint32 token ids and, if it is there and fits, its mask; both are mapped when they are used."""

    def __init__(
        self,
        folder: Path,
        files: MappedFiles,
        names: tuple[str, str] = (TOKENS, MASK),
        mask_types: Sequence[np.dtype[Any]] = MASK_TYPES,
    ) -> None:
        """Take the type of a mask from its size; a mask of another size is kept as `mask_problem`."""
        self.folder, self.files = folder, files
        self.token_file, self._mask_file = names
        self.tokens = whole_records(folder / names[0], file_size(folder / names[0]), 4)
        mask = folder / names[1]
        size = file_size(mask) if has_file(mask) else None
        self.mask_dtype = next((dtype for dtype in mask_types if size == self.tokens * dtype.itemsize), None)
        self.mask_problem = ""
        if size is not None and self.mask_dtype is None:
            sizes = " or ".join(f"{counted(dtype.itemsize, 'byte')} ({dtype.name})" for dtype in mask_types)
            self.mask_problem = f"{mask}: {size:,} bytes for {self.tokens:,} tokens; a mask has {sizes} per token"

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """All token ids of the shard."""
        return self._map(self.token_file, "<u4", self.tokens)

    @property
    def mask(self) -> NDArray[Any]:
        """Token-aligned weights, uint8 or float32."""
        if self.mask_dtype is None:
            raise FormatError(self.no_mask)
        return self._map(self._mask_file, self.mask_dtype, self.tokens)

    @property
    def no_mask(self) -> str:
        """Why there is no mask; empty if there is one."""
        missing = f"{self.folder}: {self._mask_file} is missing"
        return self.mask_problem or ("" if self.mask_dtype is not None else missing)

    def _map(self, name: str, dtype: str | np.dtype[Any], records: int | None) -> NDArray[Any]:
        """Return a file that must hold `records` records; None: any number."""
        return self.files.get(f"{self.folder}/{name}", dtype, records)


class TokenFiles:
    """The shards of one split, in name order. In a folder of episodes only `tokens.bin` and `mask.bin` are read."""

    def __init__(self, folder: Path) -> None:
        """Find the files and check their sizes."""
        self.folder = split_folder(folder.parent, folder.name)
        read_shards = _episode_shards if is_episode_split(folder) else _plain_shards
        self.shards = read_shards(folder, MappedFiles())
        self.tokens: NDArray[np.int64] = np.array([shard.tokens for shard in self.shards], dtype=np.int64)
        """Tokens of each shard."""
        self.mask_problem = next((shard.no_mask for shard in self.shards if shard.no_mask), "")
        """Why the split has no masks; empty when every shard has one."""

    @property
    def mask_dtype(self) -> np.dtype[Any] | None:
        """The type that holds the masks of all shards; None when one of them has none."""
        if self.mask_problem:
            return None
        return np.result_type(*(shard.mask_dtype for shard in self.shards if shard.mask_dtype is not None))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over names, sizes and samples of the tokens (small files whole)."""
        digest = hashlib.sha256(b"chatmill-token-files-1")
        for shard in self.shards:
            digest.update(f"{shard.folder.name}/{shard.token_file}\0".encode())
            probe(digest, shard.token_ids, shards=len(self.shards))
        return digest.hexdigest()


def _episode_shards(folder: Path, files: MappedFiles) -> list[TokenShard]:
    folders = episode_folders(folder)
    for shard in folders:
        if has_file(shard / BRANCHES.file):
            raise FormatError(
                f"{shard}: its episodes are trees, whose branches a stream of tokens would read as one text: read them "
                "as episodes (sft_episode with pack), or build with expand: turns"
            )
    return [TokenShard(shard, files) for shard in folders]


def _plain_shards(folder: Path, mapped: MappedFiles) -> list[TokenShard]:
    files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX) and path.is_file())
    names = {path.name for path in files}
    masks = {name for name in names if name.endswith(MASK_SUFFIX)}
    for mask in sorted(masks):
        owner = mask.removesuffix(MASK_SUFFIX) + SUFFIX
        if owner not in names:
            raise FormatError(
                f"{folder / mask}: looks like the mask of {owner}, which is not there: rename or remove it"
            )
    shards = [path for path in files if path.name not in masks]
    if not shards:
        raise FormatError(f"{folder}: an empty split: no *{SUFFIX} file of tokens is there")
    pairs = [(path.name, path.stem + MASK_SUFFIX) for path in shards]
    return [TokenShard(folder, mapped, pair, MASK_TYPES[:1]) for pair in pairs]
