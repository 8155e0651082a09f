"""Token ids and masks of the shards of a split: mapped when they are first used, and let go when they are too many."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.core.words import counted
from chatmill.errors import FormatError
from chatmill.store.episode_layout import MASK, TOKENS
from chatmill.store.mapped import MappedFile, open_file_limit, whole_records

MASK_TYPES = (np.dtype("u1"), np.dtype("<f4"))


class TokenShard:
    """A file of uint32 token ids and, where it is there and fits, its mask; more files for those who know of them."""

    def __init__(
        self,
        folder: Path,
        sizes: Mapping[str, int],
        names: tuple[str, str] = (TOKENS, MASK),
        mask_types: Sequence[np.dtype[Any]] = MASK_TYPES,
    ) -> None:
        """`sizes` has the bytes of the two files of these names; the size of a mask decides its type.

        A mask of another size is kept as `mask_problem`.
        """
        self.folder = folder
        self._token_file, self._mask_file = names
        self._mapped: dict[str, MappedFile] = {}
        """The files that were used so far. Loaders read in two threads: `list` takes a copy in one step."""
        self.tokens = whole_records(f"{folder}/{self._token_file}", sizes[self._token_file], 4)
        size = sizes.get(self._mask_file)
        self.mask_dtype = next((dtype for dtype in mask_types if size == self.tokens * dtype.itemsize), None)
        self.mask_problem = ""
        if size is not None and self.mask_dtype is None:
            known = " or ".join(f"{counted(dtype.itemsize, 'byte')} ({dtype.name})" for dtype in mask_types)
            self.mask_problem = (
                f"{folder / self._mask_file}: {size:,} bytes for {self.tokens:,} tokens; a mask has {known} per token"
            )

    @property
    def name(self) -> str:
        """The place of the token file below the split."""
        return f"{self.folder.name}/{self._token_file}"

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """All token ids of the shard."""
        return self._map(self._token_file, "<u4", self.tokens).array

    @property
    def mask(self) -> NDArray[Any]:
        """Token-aligned weights, uint8 or float32."""
        if self.mask_dtype is None:
            raise FormatError(self.no_mask)
        return self._map(self._mask_file, self.mask_dtype, self.tokens).array

    @property
    def no_mask(self) -> str:
        """Why there is no mask; empty where there is one."""
        missing = f"{self.folder}: there is no {self._mask_file}"
        return self.mask_problem or ("" if self.mask_dtype is not None else missing)

    def _map(self, name: str, dtype: DTypeLike, records: int | None) -> MappedFile:
        """A file that must hold `records` records; None: any number."""
        mapped = self._mapped.get(name)
        if mapped is None:  # another thread may be here as well: one of the two stays
            mapped = self._mapped.setdefault(name, MappedFile(self.folder / name, dtype, records))
        return mapped

    @property
    def mapped_files(self) -> int:
        """Files that are mapped now; each takes a file descriptor."""
        return sum(mapped.is_mapped for mapped in list(self._mapped.values()))

    def check_sizes(self) -> None:
        """Raise when a mapped file has changed its size since it was opened."""
        for mapped in list(self._mapped.values()):
            mapped.check()

    def release(self) -> None:
        """Unmap all files; they are mapped again when they are needed."""
        for mapped in list(self._mapped.values()):
            mapped.release()


ShardT = TypeVar("ShardT", bound=TokenShard)


class ShardsInUse(Generic[ShardT]):
    """The shards of a split; no more of them are mapped at a time than file descriptors allow."""

    def __init__(self, shards: Sequence[ShardT], files_per_shard: int) -> None:
        """`files_per_shard`: that readers need at first."""
        self._shards = shards
        self._files_per_shard = files_per_shard
        """That readers have needed so far, at most."""
        self._limit = open_file_limit(files_per_shard)
        self._mapped: OrderedDict[int, None] = OrderedDict()
        """The shards that are mapped, the one used longest ago first."""
        self._last = -1
        """The shard that was used last; none yet."""

    def use(self, number: int) -> ShardT:
        """A shard ready to be read: its files are checked for a changed size, and old mappings are let go."""
        shard = self._shards[number]
        if number != self._last:
            self._let_go_for(number)
        shard.check_sizes()
        return shard

    def _let_go_for(self, number: int) -> None:
        """Note that another shard is used, and unmap those that are too many now.

        Safe without a lock: every operation on the dictionary is atomic, and a shard that another thread lets go is
        mapped again.
        """
        used, self._last = self._shards[self._last].mapped_files, number
        if used > self._files_per_shard:
            self._files_per_shard, self._limit = used, open_file_limit(used)
        self._mapped[number] = None
        with contextlib.suppress(KeyError):
            self._mapped.move_to_end(number)
        while len(self._mapped) > self._limit:
            self._shards[self._mapped.popitem(last=False)[0]].release()
