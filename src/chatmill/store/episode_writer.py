"""Writing a split of episodes: constant memory, and a shard is there whole or not at all.

Files grow under a hidden name; when a shard is complete they are synced to disk and the folder is renamed. The
manifest comes last.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import ArrayLike

from chatmill.core.machine_limits import disk_way_out
from chatmill.core.publish import TEMPORARY, lock, remove_path, sync_folder, sync_tree, write_whole
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.store.episode_columns import EpisodeColumns, SourceCodes, checked_columns
from chatmill.store.episode_layout import MANIFEST, shard_name, writing_mark
from chatmill.store.episode_manifest import COLUMNS, ColumnSpec, EpisodeManifest, ShardRecord
from chatmill.store.names import is_split_name
from chatmill.store.shard_writer import ShardWriter

PARTIAL = re.compile(rf"\.shard_\d+\.partial|{TEMPORARY.pattern}")
"""Names under which the parts of a split grow."""


class EpisodeWriter:
    """Appends episodes to one split of a dataset; use it in a `with` block, or call `close`.

    Which columns a split has (mask, kinds, source, turns, record ids) is decided by the first episode; all others
    bring the same ones. Leaving the `with` block by an exception publishes nothing more.
    """

    def __init__(self, dir: str | Path, split: str, shard_tokens: int | None = None) -> None:
        """`shard_tokens`: a shard is closed before it would hold more; None writes the flat layout.

        An episode longer than `shard_tokens` gets a shard of its own.
        """
        if shard_tokens is not None and shard_tokens < 1:
            raise ConfigError(f"shard_tokens is {shard_tokens}; it must be 1 or more, or None for the flat layout")
        if not is_split_name(split):
            raise ConfigError(f"{split!r} is no name for a split; use a plain folder name such as 'train'")
        self.directory, self.split, self.shard_tokens = Path(dir), split, shard_tokens
        self.episodes = 0
        """Episodes appended so far."""
        self.tokens = 0
        """Tokens appended so far."""
        self._names: tuple[str, ...] | None = None
        self._sources = SourceCodes()
        self._published: list[ShardRecord] = []
        self._shard: ShardWriter | None = None
        self._closed = False
        self._folder = self.directory / split
        try:
            self._lock = self._begin()
        except OSError as error:
            raise ConfigError(
                f"{self.directory}: cannot write a dataset here: {error.strerror or error}; "
                + disk_way_out(error, "choose a folder you may write to")
            ) from error

    def _begin(self) -> IO[bytes]:
        """Claim the split: refuse an existing one, remove what a killed writer left, and leave a mark."""
        self.directory.mkdir(parents=True, exist_ok=True)
        mark = writing_mark(self.directory, self.split)
        left_by_another = mark.exists()
        held: IO[bytes] = mark.open("ab")
        try:
            lock(held.fileno(), f"{mark}: another process is writing this split now")
        except ConfigError:
            held.close()
            raise
        try:
            rests = [self._flat_folder]
            if self._folder.exists():
                there = list(self._folder.iterdir())
                rests += [path for path in there if PARTIAL.fullmatch(path.name)]
                if len(there) > len(rests) - 1:
                    raise ConfigError(
                        f"{self._folder}: already holds files; a writer never adds to a published split: "
                        "choose another folder, or delete this one first"
                    )
            for rest in rests:
                remove_path(rest)
            if self.shard_tokens is not None:
                self._folder.mkdir(exist_ok=True)
        except BaseException:
            if left_by_another:
                held.close()  # the split stays marked as unfinished
            else:
                self._release(held)
            raise
        return held

    @property
    def _flat_folder(self) -> Path:
        """Where the flat layout grows before it is renamed to the split."""
        return self.directory / f".{self.split}.partial"

    def append(
        self,
        ids: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        kinds: ArrayLike | None = None,
        source: str | None = None,
        turns: int | None = None,
        trained: int | None = None,
        record_id: str | None = None,
    ) -> None:
        """Append one episode; `mask` is token-aligned: the weight of each token as a target.

        `trained` is counted from the mask when it is not given.
        """
        tokens = np.asarray(ids)
        self.append_batch(
            tokens,
            np.array([0, tokens.size]),
            mask,
            kinds,
            source=source,
            turns=None if turns is None else [turns],
            trained=None if trained is None else [trained],
            record_ids=None if record_id is None else [record_id],
        )

    def append_batch(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        weights: ArrayLike | None = None,
        kinds: ArrayLike | None = None,
        *,
        source: str | Sequence[str] | None = None,
        turns: ArrayLike | None = None,
        trained: ArrayLike | None = None,
        record_ids: Sequence[str] | None = None,
    ) -> None:
        """Append many episodes at once: flat columns, cut by `offsets` (one more than episodes, the first is 0).

        Gives the same bytes as one `append` per episode. Nothing of a batch with a mistake in it is written.
        """
        if self._closed:
            raise DataError(f"{self._folder}: this writer is closed")
        columns = checked_columns(
            ids,
            offsets,
            weights,
            kinds,
            source=source,
            turns=turns,
            trained=trained,
            record_ids=record_ids,
            first=self.episodes,
            sources=self._sources,
        )
        if not len(columns):
            return
        self._same_columns(columns.names)
        try:
            self._write(columns)
        except OSError as error:
            self.abort()
            raise ConfigError(
                f"{self._folder}: writing failed: {error.strerror or error}; the shard that was being written is not "
                f"published ({len(self._published)} whole shards are); {disk_way_out(error, 'check the disk')}"
            ) from error

    def _same_columns(self, names: tuple[str, ...]) -> None:
        if self._names is None:
            self._names = names
        elif names != self._names:
            raise DataError(
                f"episode {self.episodes} brings the columns {', '.join(names) or 'none'}, but those before it "
                f"{', '.join(self._names) or 'none'}: a column is there for all episodes of a split or for none"
            )

    def _write(self, columns: EpisodeColumns) -> None:
        ends = offsets_of(columns.lengths)[1:]
        done = 0
        while done < len(columns):
            if self._shard is None:
                masks = "mask" in (self._names or ())
                self._shard = ShardWriter(self._shard_folder(), self.columns, masks=masks)
            room = np.iinfo(np.int64).max if self.shard_tokens is None else self.shard_tokens - self._shard.tokens
            before = int(ends[done - 1]) if done else 0
            upto = int(np.searchsorted(ends, min(room, int(ends[-1])) + before, side="right"))
            if upto <= done and self._shard.episodes:
                self._publish_shard()
                continue
            upto = max(upto, done + 1)
            self._shard.append(columns.part(done, upto))
            done = upto
        self.episodes += len(columns)
        self.tokens += int(ends[-1])

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The extra columns of this split; known after the first episode."""
        return tuple(column for column in COLUMNS if column.name in (self._names or ()))

    def _shard_folder(self) -> Path:
        if self.shard_tokens is None:
            return self._flat_folder
        return self._folder / f".{shard_name(len(self._published))}.partial"

    def _publish_shard(self) -> None:
        assert self._shard is not None
        name = shard_name(len(self._published))
        self._published.append(self._shard.finish(name))
        sync_tree(self._shard.folder)
        self._shard.folder.rename(self._folder / name)
        sync_folder(self._folder)
        self._shard = None

    def manifest(self) -> EpisodeManifest:
        """What has been published so far."""
        return EpisodeManifest(
            split=self.split,
            columns=self.columns,
            sources=self._sources.names,
            shards=tuple(self._published),
        )

    def close(self) -> EpisodeManifest:
        """Publish what is left and the manifest, and return it; a writer without episodes publishes nothing."""
        if self._closed:
            return self.manifest()
        if not self.episodes:
            self.abort()
            raise DataError(f"{self._folder}: no episode was appended, and a split cannot be empty")
        try:
            self._finish()
        except OSError as error:
            self.abort()
            raise ConfigError(
                f"{self._folder}: publishing failed: {error.strerror or error}; {disk_way_out(error, 'check the disk')}"
            ) from error
        self._closed = True
        self._release(self._lock)
        return self.manifest()

    def _finish(self) -> None:
        if self.shard_tokens is not None:
            if self._shard is not None:
                self._publish_shard()
            write_whole(self._folder / MANIFEST, self.manifest().to_bytes())
        else:
            assert self._shard is not None
            self._published.append(self._shard.finish(""))
            self._shard = None
            (self._flat_folder / MANIFEST).write_bytes(self.manifest().to_bytes())
            sync_tree(self._flat_folder)
            self._flat_folder.rename(self._folder)
        sync_folder(self.directory)

    def abort(self) -> None:
        """Stop without publishing anything more; what is published stays, marked as unfinished."""
        if self._closed:
            return
        self._closed = True
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # only when nothing was published
        if self._folder.exists():
            self._lock.close()
        else:
            self._release(self._lock)

    @staticmethod
    def _release(lock: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            os.unlink(lock.name)
        lock.close()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
