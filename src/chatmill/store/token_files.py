"""Flat token files of a split: `X.bin` with its `X_mask.bin`, or the token files of an episode dataset."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import FormatError
from chatmill.store.episode_layout import (
    INDEX,
    MASK,
    TOKENS,
    is_episode_split,
    refuse_gaps,
    shard_folders,
    split_folder,
)
from chatmill.store.episode_manifest import BRANCHES
from chatmill.store.mapped import file_size, probe
from chatmill.store.token_shard import MASK_TYPES, ShardsInUse, TokenShard

SUFFIX, MASK_SUFFIX = ".bin", "_mask.bin"


class TokenFiles:
    """The shards of one split, in name order. In a folder of episodes only `tokens.bin` and `mask.bin` are read."""

    def __init__(self, folder: Path) -> None:
        """Find the files and check their sizes."""
        self.folder = split_folder(folder.parent, folder.name)
        self.shards = _episode_shards(folder) if is_episode_split(folder) else _plain_shards(folder)
        self.tokens: NDArray[np.int64] = np.array([shard.tokens for shard in self.shards], dtype=np.int64)
        """Tokens of each shard."""
        self.mask_problem = next((shard.no_mask for shard in self.shards if shard.no_mask), "")
        """Why the split has no masks; empty when every shard has one."""
        self._in_use = ShardsInUse(self.shards, files_per_shard=2)
        self._fingerprint = ""

    @property
    def mask_dtype(self) -> np.dtype[Any] | None:
        """The type that holds the masks of all shards; None when one of them has none."""
        if self.mask_problem:
            return None
        return np.result_type(*(shard.mask_dtype for shard in self.shards if shard.mask_dtype is not None))

    def shard(self, number: int) -> TokenShard:
        """A shard ready to be read; old mappings are let go, changed sizes are errors."""
        return self._in_use.use(number)

    @property
    def fingerprint(self) -> str:
        """sha256 over names, sizes and samples of the tokens (small files whole)."""
        if not self._fingerprint:
            digest = hashlib.sha256(b"chatmill-token-files-1")
            for number in range(len(self.shards)):
                shard = self.shard(number)
                digest.update(f"{shard.name}\0".encode())
                probe(digest, shard.token_ids, shards=len(self.shards))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def _episode_shards(folder: Path) -> list[TokenShard]:
    folders = [folder] if (folder / INDEX).exists() else shard_folders(folder)
    if folders != [folder]:
        refuse_gaps(folder, folders)
    for shard in folders:
        if not (shard / TOKENS).is_file():
            raise FormatError(f"{shard}: {TOKENS} is missing")
        if (shard / BRANCHES.file).exists():
            raise FormatError(
                f"{shard}: its episodes are trees, whose branches a stream of tokens would read as one text: read them "
                "as episodes (sft_episode with pack), or build with expand: turns"
            )
    return [TokenShard(shard, _sizes(shard, (TOKENS, MASK))) for shard in folders]


def _plain_shards(folder: Path) -> list[TokenShard]:
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
    return [TokenShard(folder, _sizes(folder, pair), pair, MASK_TYPES[:1]) for pair in pairs]


def _sizes(folder: Path, names: tuple[str, str]) -> dict[str, int]:
    """Bytes of those files that are there."""
    return {name: file_size(folder / name) for name in names if (folder / name).exists()}
