"""Writing a split of episodes: constant memory, and the split is there whole or not at all.

It grows in a hidden folder, and gets its name when it is finished and on the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.kinds import KINDS, PLAIN, RULE
from chatmill.core.publish import publish_folder, storing, temporary_folder
from chatmill.core.texts import Texts
from chatmill.core.trees import Branches, joined
from chatmill.errors import ConfigError, DataError
from chatmill.store.episode_layout import SPLIT_MANIFEST, shard_name
from chatmill.store.episode_manifest import COLUMNS, EpisodeManifest, ShardRecord
from chatmill.store.shard_writer import ShardWriter, SourceCodes, as_bytes
from chatmill.structs import SplitName, fits

MAX_ID = 2**32 - 1
HELD = 1 << 16
"""Tokens that are written at a time."""


class EpisodeWriter:
    """Appends episodes to one split of a dataset; use it in a `with` block, or call `close`.

    Which columns a split has (mask, kinds, source, turns, record ids, branches) is decided by the first episode; all
    others bring the same ones. Leaving the `with` block by an exception publishes nothing; a writer that is killed
    leaves a hidden folder next to the split, `.tmp-<pid>-<random>`.
    """

    def __init__(self, dir: str | Path, split: str, shard_tokens: int | None = None) -> None:
        """`shard_tokens`: a shard is closed before it would hold more; None writes the flat layout.

        An episode longer than `shard_tokens` gets a shard of its own.
        """
        if shard_tokens is not None and shard_tokens < 1:
            raise ConfigError(f"shard_tokens is {shard_tokens}; it must be 1 or more, or None for the flat layout")
        if not fits(SplitName, split):
            raise ConfigError(f"{split!r} is no name for a split; use a plain folder name such as 'train'")
        self.directory, self.split, self.shard_tokens = Path(dir), split, shard_tokens
        self.episodes = 0
        """Episodes appended so far."""
        self.tokens = 0
        """Tokens appended so far."""
        self._columns: tuple[str, ...] = ()
        self._sources = SourceCodes()
        self._shards: list[ShardRecord] = []
        self._shard: ShardWriter | None = None
        self._held: list[dict[str, Any]] = []
        """Episodes of the shard that grows which are not written yet, by the names of their columns."""
        self._sizes = [0, 0]
        """Tokens of these, and of the shard with them."""
        self._closed = False
        self._manifest: EpisodeManifest | None = None
        """Set when the split is published."""
        self._folder = self.directory / split
        with storing(self._folder, "create the folder"):
            if self._folder.exists():
                if any(self._folder.iterdir()):
                    raise ConfigError(
                        f"{self._folder}: already holds files; a writer never adds to a published split: "
                        "choose another folder, or delete this one first"
                    )
                self._folder.rmdir()
            self._growing = temporary_folder(self._folder)

    @contextmanager
    def _storing(self, action: str) -> Iterator[None]:
        """Publish nothing after an error."""
        try:
            with storing(self._folder, action):
                yield
        except BaseException:
            self.abort()
            raise

    def append(
        self,
        ids: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        kinds: ArrayLike | None = None,
        source: str | None = None,
        turns: int | None = None,
        record_id: str | None = None,
        branches: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Append one episode; `mask` is token-aligned: the weight of each token as a target.

        `branches` make the episode a tree: where each branch begins, and its position in its row. A branch begins with
        a copy of the last token that it shares, of weight 0. Nothing of an episode with a mistake is written.
        """
        if self._closed:
            raise DataError(f"{self._folder}: this writer is closed")
        place = f"episode {self.episodes}"
        tokens = _tokens(ids, place)
        weights = None if mask is None else _weights(np.asarray(mask), len(tokens), place)
        values = {
            "ids": tokens,
            "mask": weights,
            "kinds": None if kinds is None else _kinds(np.asarray(kinds), len(tokens), place),
            "source": source,
            "turns": None if turns is None else _number(turns, f"{place}: turns"),
            "trained": None if weights is None else int(np.count_nonzero(weights)),
            "record_id": record_id,
            "branches": None if branches is None else _branches(branches, tokens, weights, place),
        }
        episode = {name: value for name, value in values.items() if value is not None}
        names = tuple(episode)
        if self.episodes and names != self._columns:
            had = ", ".join(self._columns[1:]) or "none"
            raise DataError(
                f"{place} brings the columns {', '.join(names[1:]) or 'none'}, but those before it {had}: a column is "
                "there for all episodes of a split or for none"
            )
        self._columns = names
        with self._storing("write"):
            if self.shard_tokens is not None and self._sizes[1] and self._sizes[1] + len(tokens) > self.shard_tokens:
                self._finish_shard()
            self._held.append(episode)
            self._sizes = [size + len(tokens) for size in self._sizes]
            if self._sizes[0] >= HELD:
                self._write()
        self.episodes += 1
        self.tokens += len(tokens)

    def _write(self) -> None:
        """Write the episodes that are held."""
        if self._shard is None:
            specs = [column for column in COLUMNS if column.name in self._columns]
            self._shard = ShardWriter(self._growing / self._shard_name, specs, masks="mask" in self._columns)
        episodes, self._held, self._sizes[0] = self._held, [], 0
        columns: dict[str, Any] = {}
        for name in self._columns:
            values = [episode[name] for episode in episodes]
            if name in ("ids", "mask", "kinds"):
                columns[name] = np.concatenate(values)
            elif name == "record_id":
                columns[name] = Texts.of(list(map(str, values)))
            elif name == "branches":
                columns[name] = joined(values)
            else:
                codes = [self._sources.code(str(episode)) for episode in values] if name == "source" else values
                columns[name] = np.array(codes, dtype=np.uint32)
        lengths = np.array([len(episode["ids"]) for episode in episodes], dtype=np.int64)
        self._shard.append(lengths, columns)

    @property
    def _shard_name(self) -> str:
        """That of the shard which grows; empty in the flat layout."""
        return "" if self.shard_tokens is None else shard_name(len(self._shards))

    def _finish_shard(self) -> None:
        if self._held:
            self._write()
        assert self._shard is not None, "a shard has episodes"
        self._shards.append(self._shard.finish(self._shard_name))
        self._shard, self._sizes = None, [0, 0]

    def close(self) -> EpisodeManifest:
        """Publish the split, and return its manifest.

        A writer without episodes, or one that an error has stopped, publishes nothing and says so.
        """
        if self._manifest is not None:
            return self._manifest
        if self._closed:
            raise DataError(f"{self._folder}: this writer has stopped, and nothing was published")
        if not self.episodes:
            self.abort()
            raise DataError(f"{self._folder}: no episode was appended, and a split cannot be empty")
        with self._storing("publish the split"):
            self._finish_shard()
            columns = {column.name: column for column in COLUMNS if column.name in self._columns}
            manifest = EpisodeManifest(
                split=self.split, columns=columns, sources=self._sources.names, shards=tuple(self._shards)
            )
            (self._growing / SPLIT_MANIFEST).write_bytes(manifest.to_bytes())
            publish_folder(self._growing, self._folder)
        self._closed, self._manifest = True, manifest
        return manifest

    def abort(self) -> None:
        """Stop, and publish nothing."""
        if self._closed:
            return
        self._closed = True
        if self._shard is not None:
            self._shard.discard()
        shutil.rmtree(self._growing, ignore_errors=True)

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _tokens(ids: ArrayLike, place: str) -> NDArray[np.uint32]:
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"{place}: token ids are {tokens.dtype} of shape {tokens.shape}; one row of integers is needed")
    if not tokens.size:
        raise DataError(f"{place}: an episode needs at least one token")
    wrong = np.flatnonzero((tokens < 0) | (tokens > MAX_ID))
    if len(wrong):
        raise DataError(
            f"{place}: token {wrong[0]} has the id {tokens[wrong[0]]}; ids are stored as uint32, 0 to {MAX_ID}"
        )
    return tokens.astype("<u4")  # a copy: the caller may write over its own before these are stored


def _check_shape(values: NDArray[Any], tokens: int, name: str, place: str) -> None:
    if values.shape != (tokens,):
        raise DataError(f"{place}: {name} of shape {values.shape} for {tokens} tokens; one value per token is needed")


def _weights(values: NDArray[Any], tokens: int, place: str) -> NDArray[Any]:
    _check_shape(values, tokens, "weights", place)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{place}: weights are {values.dtype}; numbers are needed")
    if not np.isfinite(values).all() or values.min() < 0:
        raise DataError(f"{place}: a weight is {values.min()}; weights are finite, and 0 or more")
    return as_bytes(values.copy())


def _kinds(values: NDArray[Any], tokens: int, place: str) -> NDArray[np.uint8]:
    _check_shape(values, tokens, "kinds", place)
    is_code = values.dtype.kind in "iu" and values.min() >= 0 and values.max() <= 255
    if not is_code or bool(((values & PLAIN) >= KINDS).any()):
        raise DataError(f"{place}: {RULE} (chatmill.core.kinds)")
    return values.astype(np.uint8)


def _number(value: int, name: str) -> int:
    if np.asarray(value).dtype.kind not in "iu" or not 0 <= value <= MAX_ID:
        raise DataError(f"{name} must be a whole number from 0 to {MAX_ID}")
    return int(value)


def _branches(
    listed: Sequence[tuple[int, int]], ids: NDArray[np.uint32], mask: NDArray[Any] | None, place: str
) -> Branches:
    """Check branches: each begins, at its position, with a copy of a token of the branch before, not trained."""
    pairs = np.asarray(listed)
    if pairs.size and (pairs.shape[1:] != (2,) or pairs.dtype.kind not in "iu"):
        raise DataError(f"{place}: branches are pairs: where a branch begins, and its position")
    starts, depths = pairs.astype(np.int64).reshape(-1, 2).T.copy()
    branches = Branches(offsets=np.array([0, len(starts)]), starts=starts, depths=depths)
    try:
        positions, _ = branches.positions_and_ends(np.array([len(ids)]))
    except DataError:
        raise DataError(
            f"{place}: a branch does not fit its tree: branches begin inside of it, in order, each at the position of "
            "a token of the branch before"
        ) from None
    for start, depth in zip(starts.tolist(), depths.tolist(), strict=True):
        shared = int(np.flatnonzero(positions[:start] == depth)[-1])
        if ids[start] != ids[shared] or (mask is not None and mask[start]):
            raise DataError(
                f"{place}: the branch at {start} must begin with a copy of token {shared}, which is the last that it "
                f"shares (id {ids[shared]}), with the weight 0"
            )
    return branches
