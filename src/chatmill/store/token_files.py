"""Flat token files of a split: `X.bin` with its `X_mask.bin`, or the token files of an episode dataset."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import FormatError
from chatmill.store.checksums import CheckedShards, no_hashes
from chatmill.store.episode_layout import (
    INDEX,
    MASK,
    TOKENS,
    is_episode_split,
    refuse_gaps,
    shard_folders,
    split_folder,
)
from chatmill.store.episode_manifest import read_manifest
from chatmill.store.mapped import MappedFile, RecentlyUsed, file_size, open_file_limit, probe

SUFFIX, MASK_SUFFIX = ".bin", "_mask.bin"


class TokenShard:
    """One flat file of uint32 token ids and, where it is there and fits, its mask."""

    def __init__(self, path: Path, mask: Path, mask_dtypes: tuple[str, ...]) -> None:
        """The mask's size decides its type, among `mask_dtypes`."""
        self._tokens = MappedFile(path, "<u4")
        self.tokens = self._tokens.records
        self._mask: MappedFile | None = None
        self.mask_problem = ""
        size = file_size(mask) if mask.exists() else None
        for dtype in map(np.dtype, mask_dtypes):
            if size == self.tokens * dtype.itemsize and self._mask is None:
                self._mask = MappedFile(mask, dtype, self.tokens)
        if size is None:
            self.mask_problem = f"{path.parent}: there is no {mask.name}"
        elif self._mask is None:
            self.mask_problem = (
                f"{mask}: {size:,} bytes for {self.tokens:,} tokens ({' or '.join(mask_dtypes)} per token)"
            )

    @property
    def name(self) -> str:
        """The file's place below the split."""
        path = self._tokens.path
        return f"{path.parent.name}/{path.name}"

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """All token ids."""
        return self._tokens.array

    @property
    def mask(self) -> NDArray[Any]:
        """Token-aligned weights."""
        if self._mask is None:
            raise FormatError(self.mask_problem)
        return self._mask.array

    @property
    def mask_dtype(self) -> np.dtype[Any] | None:
        """The type of the mask; None when there is none that fits."""
        return self._mask.dtype if self._mask else None

    def check_sizes(self) -> None:
        """Raise when a mapped file has changed its size."""
        self._tokens.check()
        if self._mask:
            self._mask.check()

    def release(self) -> None:
        """Unmap; the next use maps again."""
        self._tokens.release()
        if self._mask:
            self._mask.release()


class TokenFiles:
    """The shards of one split, in name order. In a folder of episodes only `tokens.bin` and `mask.bin` are read."""

    def __init__(self, folder: Path, *, check: bool = False) -> None:
        """Find the files and check their sizes; `check=True`: and, in a folder of episodes, their hashes before use."""
        self.folder = split_folder(folder.parent, folder.name)
        self._checked = _checked(folder) if check else None
        self.shards = _episode_shards(folder) if is_episode_split(folder) else _plain_shards(folder)
        self.tokens: NDArray[np.int64] = np.array([shard.tokens for shard in self.shards], dtype=np.int64)
        """Tokens of each shard."""
        self.mask_problem = next((s.mask_problem for s in self.shards if s.mask_problem), "")
        """Why the split has no masks; empty when every shard has one."""
        self._mapped = RecentlyUsed(open_file_limit(files_per_shard=2))
        self._fingerprint = ""

    @property
    def mask_dtype(self) -> np.dtype[Any] | None:
        """The type that holds the masks of all shards; None when one of them has none."""
        if self.mask_problem:
            return None
        return np.result_type(*(shard.mask_dtype for shard in self.shards if shard.mask_dtype is not None))

    def shard(self, number: int) -> TokenShard:
        """A shard ready to be read; old mappings are let go, changed sizes are errors."""
        if self._checked is not None:
            self._checked.check(number)
        old = self._mapped.use(number)
        if old is not None:
            self.shards[old].release()
        self.shards[number].check_sizes()
        return self.shards[number]

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


def _checked(folder: Path) -> CheckedShards:
    """Only the files that are read here are compared."""
    manifest = read_manifest(folder) if is_episode_split(folder) else None
    if manifest is None:
        raise no_hashes(folder)
    return CheckedShards(
        (folder / shard.name, {name: record for name, record in shard.files.items() if name in (TOKENS, MASK)})
        for shard in manifest.shards
    )


def _episode_shards(folder: Path) -> list[TokenShard]:
    folders = [folder] if (folder / INDEX).exists() else shard_folders(folder)
    if folders != [folder]:
        refuse_gaps(folder, folders)
    for shard in folders:
        if not (shard / TOKENS).is_file():
            raise FormatError(f"{shard}: {TOKENS} is missing")
    return [TokenShard(shard / TOKENS, shard / MASK, ("u1", "<f4")) for shard in folders]


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
    return [TokenShard(p, p.with_name(p.stem + MASK_SUFFIX), ("u1",)) for p in shards]
