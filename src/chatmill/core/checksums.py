"""Sizes and hashes of files: how a manifest states them, and how files are compared with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

TREE_BLOCK = 1 << 20
"""Bytes of a file that have one digest in its `tree-xxh128`."""


class RunningDigest(Protocol):
    """A running digest, as those of `hashlib`."""

    def update(self, data: Any, /) -> None:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, as text."""


class Hash(StrEnum):
    """The hashes that files have; the name is the key in JSON."""

    XXH128 = "xxh128"
    """XXH3 with 128 bits, for the files of datasets: as fast as memory; made against damage, not against forgery."""
    SHA256 = "sha256"
    """For files that come from others or go to them: distillation inputs, exports."""
    TREE_XXH128 = "tree-xxh128"
    """For the inputs of builds: XXH128 of the XXH128 of every MiB, so that several processes can hash one file."""

    def begin(self) -> RunningDigest:
        """Return a digest of no bytes yet. Reading needs no hashes, so their package is imported here."""
        if self is Hash.SHA256:
            return hashlib.sha256()
        if self is Hash.TREE_XXH128:
            return TreeDigest()
        from xxhash import xxh3_128

        return xxh3_128()

    def of_file(self, path: Path) -> str:
        """Return the digest of a file's bytes, as hexadecimal digits."""
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, self.begin).hexdigest()  # type: ignore[arg-type]


INPUT_HASH = Hash.TREE_XXH128.value
"""The key of an input's hash in a manifest."""


class TreeDigest:
    """A running digest of digests: each block of `TREE_BLOCK` bytes is hashed by itself, then these hashes together."""

    def __init__(self) -> None:
        """Begin with no bytes."""
        self._whole = bytearray()
        self._begin_block()

    def _begin_block(self) -> None:
        self._block = Hash.XXH128.begin()
        self._room = TREE_BLOCK

    def update(self, data: Any, /) -> None:
        """Take in the next bytes."""
        left = memoryview(data)
        while len(left):
            taken = left[: self._room]
            self._block.update(taken)
            self._room -= len(taken)
            left = left[len(taken) :]
            if not self._room:
                self._whole += bytes.fromhex(self._block.hexdigest())
                self._begin_block()

    @property
    def blocks(self) -> bytes:
        """The digests of all blocks so far, one after the other; the last block may be shorter."""
        if self._room == TREE_BLOCK:
            return bytes(self._whole)
        return bytes(self._whole) + bytes.fromhex(self._block.hexdigest())

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, as text."""
        return tree_digest(self.blocks)


def tree_digest(blocks: bytes) -> str:
    """Return the hash of a file from the digests of its blocks, which may come from several `TreeDigest`s."""
    digest = Hash.XXH128.begin()
    digest.update(blocks)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and hash of one file."""

    bytes: int
    digest: str
    hash: Hash = Hash.XXH128

    def to_json(self) -> dict[str, Any]:
        """Return a plain object, such as `{"bytes": 32, "xxh128": "..."}`."""
        return {"bytes": self.bytes, self.hash.value: self.digest}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` made; a `KeyError` if there is no hash."""
        kind = Hash.SHA256 if Hash.SHA256 in value else Hash.XXH128
        return cls(bytes=int(value["bytes"]), digest=str(value[kind]), hash=kind)

    @classmethod
    def of_file(cls, path: Path, hash: Hash = Hash.XXH128) -> Self:
        """Return the record of a file that is there."""
        return cls(bytes=path.stat().st_size, digest=hash.of_file(path), hash=hash)

    def is_of(self, path: Path) -> bool:
        """Return whether a file is there with this size and these bytes."""
        return path.is_file() and path.stat().st_size == self.bytes and self.hash.of_file(path) == self.digest
