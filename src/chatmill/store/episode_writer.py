"""Writing a split of episodes: constant memory, and the split is there whole or not at all.

It grows in a hidden folder, and gets its name when it is finished and on the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike

from chatmill.core.machine_limits import disk_way_out
from chatmill.core.publish import publish_folder, temporary_folder
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.store.episode_columns import EpisodeColumns, SourceCodes, checked_columns
from chatmill.store.episode_layout import MANIFEST, shard_name
from chatmill.store.episode_manifest import COLUMNS, ColumnSpec, EpisodeManifest, ShardRecord
from chatmill.store.shard_writer import ShardWriter
from chatmill.structs import SplitName, fits


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
        self._names: tuple[str, ...] | None = None
        self._sources = SourceCodes()
        self._shards: list[ShardRecord] = []
        self._shard: ShardWriter | None = None
        self._closed = False
        self._folder = self._growing = self.directory / split
        with self._storing(f"{self.directory}: cannot write a dataset here", "choose a folder you may write to"):
            if self._folder.exists():
                if any(self._folder.iterdir()):
                    raise ConfigError(
                        f"{self._folder}: already holds files; a writer never adds to a published split: "
                        "choose another folder, or delete this one first"
                    )
                self._folder.rmdir()
            self._growing = temporary_folder(self._folder)

    @contextmanager
    def _storing(self, what: str, way_out: str = "check the disk") -> Iterator[None]:
        """Publish nothing after an error; one of the disk says what failed, and the way out."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise ConfigError(f"{what}: {error.strerror or error}; {disk_way_out(error, way_out)}") from error
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
        trained: int | None = None,
        record_id: str | None = None,
        branches: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Append one episode; `mask` is token-aligned: the weight of each token as a target.

        `trained` is counted from the mask when it is not given. `branches` make the episode a tree: where each branch
        begins, and its position in its row. A branch begins with a copy of the last token that it shares, of weight 0.
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
            branches=None if branches is None else [branches],
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
        branches: Sequence[Sequence[tuple[int, int]]] | None = None,
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
            branches=branches,
            first=self.episodes,
            sources=self._sources,
        )
        if not len(columns):
            return
        self._same_columns(columns.names)
        with self._storing(f"{self._folder}: writing failed, nothing is published"):
            self._write(columns)

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
                self._shard = ShardWriter(self._growing / self._shard_name, self.columns, masks=masks)
            room = np.iinfo(np.int64).max if self.shard_tokens is None else self.shard_tokens - self._shard.tokens
            before = int(ends[done - 1]) if done else 0
            upto = int(np.searchsorted(ends, min(room, int(ends[-1])) + before, side="right"))
            if upto <= done and self._shard.episodes:
                self._finish_shard()
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

    @property
    def _shard_name(self) -> str:
        """That of the shard which grows; empty in the flat layout."""
        return "" if self.shard_tokens is None else shard_name(len(self._shards))

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shards.append(self._shard.finish(self._shard_name))
            self._shard = None

    def manifest(self) -> EpisodeManifest:
        """What has been written so far, in whole shards."""
        columns = {column.name: column for column in self.columns}
        return EpisodeManifest(
            split=self.split, columns=columns, sources=self._sources.names, shards=tuple(self._shards)
        )

    def close(self) -> EpisodeManifest:
        """Publish the split, and return its manifest; a writer without episodes publishes nothing."""
        if self._closed:
            return self.manifest()
        if not self.episodes:
            self.abort()
            raise DataError(f"{self._folder}: no episode was appended, and a split cannot be empty")
        with self._storing(f"{self._folder}: publishing failed"):
            self._finish_shard()
            (self._growing / MANIFEST).write_bytes(self.manifest().to_bytes())
            publish_folder(self._growing, self._folder)
        self._closed = True
        return self.manifest()

    def abort(self) -> None:
        """Stop, and publish nothing."""
        if self._closed:
            return
        self._closed = True
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        if self._growing != self._folder:
            shutil.rmtree(self._growing, ignore_errors=True)

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
