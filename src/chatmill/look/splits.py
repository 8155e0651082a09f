"""One split to look at, however it is stored: a million items, each a document or a row of several."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import spans_of_kinds
from chatmill.core.trees import Branches
from chatmill.errors import ConfigError
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.look.items import Ints, Item, pictures_of
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import KDDocuments
from chatmill.store.kd_shard import COLUMNS
from chatmill.store.split import Documents, Split, even_ranges

RELEASE_TOKENS = 4 << 20
"""Tokens after which a pass over a split unmaps what it has read, so that mapped pages do not pile up."""
SIMILAR_SAMPLE = 20_000
"""Record ids that are compared with one that is not there."""
Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) while a whole split is read."""


class LookLayout(StrEnum):
    """What the items of a dataset are."""

    EPISODES = "episodes"
    """Conversations, one after the other."""
    ROWS = "rows"
    """Packed rows, by the plan of the split."""
    PACKED = "packed"
    """Rows of Arrow or Parquet files, as `datasets` and its trainers read them."""
    PREFERENCES = "preferences"
    """Answers that people compared, in files as trainers of preferences read them."""
    KD = "kd"
    """Documents of a distillation set, each with the spans of its answers."""

    @property
    def item(self) -> str:
        """What one item is called."""
        names = {"episodes": "episode", "rows": "row", "packed": "block", "preferences": "answer", "kd": "document"}
        return names[self.value]

    @property
    def packed(self) -> bool:
        """Whether an item may hold several documents."""
        return self in (LookLayout.ROWS, LookLayout.PACKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(Documents):
    """The documents of some neighbouring items, padding left out."""

    items: Ints
    """The item of each document."""
    spans: NDArray[np.uint8] | None = None


class LookSplit:
    """The documents of a split of the store, each an item; with `rows` the items are rows of several, by its plan.

    Opening it reads no tokens; columns are whole arrays, made when they are first asked for. In a distillation set, a
    token that is shown as analysis or final is one whose own prediction counts in the loss.
    """

    layout: LookLayout
    features: tuple[str, ...]
    """Names of what is stored for each item."""
    source_names: tuple[str, ...] = ()
    has_spans = False
    capacity: int | None = None
    """Positions of a row, padding included; None if rows have no fixed size."""
    episodes: EpisodeDataset | None = None

    def __init__(self, stored: Split, name: str, *, rows: bool = False) -> None:
        self.stored, self.name = stored, name
        self._plan = stored.plan if rows else None
        self.capacity = None if self._plan is None else self._plan.capacity
        self.has_weights = stored.has_masks
        """False: every token is a target."""
        self.has_spans = isinstance(stored, KDDocuments)
        self.has_kinds = stored.has_kinds and not self.has_spans
        self.episodes = stored if isinstance(stored, EpisodeDataset) else None
        self._columns = {} if self.episodes is None else self.episodes.columns
        self.has_record_ids = "record_id" in self._columns
        if isinstance(stored, KDDocuments):
            self.layout, self.features = LookLayout.KD, COLUMNS
            self.source_names = tuple(shard.name for shard in stored.shards)
        else:
            self.layout = LookLayout.ROWS if rows else LookLayout.EPISODES
            mask, pack = ("mask",) if self.has_weights else (), ("pack",) if rows else ()
            self.features = ("tokens", *mask, *self._columns, *pack)
            self.source_names = () if self.episodes is None or rows else self.episodes.source_names

    def __len__(self) -> int:
        return len(self.tokens)

    def check_number(self, number: int) -> int:
        """Resolve an item number, counted from the end if negative; else an error with the nearest number."""
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            nearest = 0 if position < 0 else len(self) - 1
            raise ConfigError(
                f"there is no {self.layout.item} {number:,} in {self.name}: it has {len(self):,}, counted from 0; the "
                f"nearest is {nearest:,}"
            )
        return position

    def batches(self) -> Iterator[TokenBatch]:
        """Read all items in order, about a million tokens at a time, in constant memory."""
        read = 0
        for batch in self._batches():
            read += int(batch.offsets[-1])
            yield batch
            del batch
            if read >= RELEASE_TOKENS:
                read = 0
                self.release()

    @cached_property
    def total_tokens(self) -> int:
        """Tokens of all items, padding not counted."""
        return int(self.tokens.sum())

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of every item."""
        return self.stored.lengths if self._plan is None else self._plan.bin_lengths(self.stored.lengths)

    @cached_property
    def documents(self) -> Ints:
        """Documents of every item."""
        return np.ones(len(self), dtype=np.int64) if self._plan is None else np.diff(self._plan.bin_offsets)

    @cached_property
    def document_lengths(self) -> Ints:
        """Tokens of every document, item by item."""
        return self.stored.lengths if self._plan is None else self.stored.lengths[self._plan.order]

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every document, in a distillation set its shard; None for rows, which may have several."""
        if isinstance(self.stored, KDDocuments):
            return np.repeat(np.arange(len(self.stored.shards), dtype=np.int32), np.diff(self.stored.episode_offsets))
        return self._column("source") if self._plan is None else None

    @cached_property
    def turns(self) -> NDArray[np.integer] | None:
        """Turns of every episode."""
        return self._column("turns") if self._plan is None else None

    @cached_property
    def stored_trained(self) -> Ints | None:
        """Trained tokens of every item by the column of the files, summed for rows; None if tokens have to be read."""
        if not self.has_weights:
            return self.tokens
        trained = self._column("trained")
        if trained is None or self._plan is None:
            return None if trained is None else trained.astype(np.int64)
        return np.add.reduceat(trained[self._plan.order].astype(np.int64), self._plan.bin_offsets[:-1])

    def _column(self, name: str) -> NDArray[np.integer] | None:
        return None if self.episodes is None or name not in self._columns else self.episodes.column(name)

    def pictures(self) -> Iterator[StoredPicture]:
        """Yield all pictures of the split, document by document."""
        if self.episodes is None or not self.episodes.has_pictures:
            return
        for first, last in even_ranges(self.episodes.lengths):
            for line in self.episodes.facts("images", np.arange(first, last)) or ():
                yield from stored_pictures(line)

    def picture_bytes(self, item: Item, picture: StoredPicture) -> bytes | None:
        """Read the bytes of a picture of an item; None where they are not stored."""
        if picture.data is None or self.episodes is None:
            return None
        owner = int(np.searchsorted(item.starts, picture.start, side="right")) - 1
        document = item.number if item.documents is None else int(item.documents[owner])
        return self.episodes.image_bytes(document)[picture.data[0] : sum(picture.data)]

    def teacher(self) -> dict[str, int]:
        """Count what a teacher has answered; empty if no teacher was asked."""
        return {} if self.episodes is None or not self.episodes.teacher.parts else self.episodes.teacher.coverage()

    def item(self, number: int) -> Item:
        """Read an item without its padding."""
        documents = self._numbers(number, number + 1)
        batch = self._batch(number, number + 1)
        pictures = self.stored.facts("images", documents) if self.stored.has_pictures else None
        return Item(
            split=self.name,
            number=number,
            ids=batch.ids,
            weights=batch.weights,
            kinds=batch.kinds,
            spans=batch.spans,
            starts=batch.offsets[:-1] if len(batch.ids) else batch.offsets[:0],
            branches=_branches(self.stored.branches(documents), batch.offsets),
            pictures=pictures_of(pictures, batch.offsets),
            features=self.features,
            **self._facts(number, documents),
        )

    def _facts(self, number: int, documents: Ints) -> dict[str, Any]:
        """Read what is stored about an item besides its tokens, as fields of `Item`."""
        if isinstance(self.stored, KDDocuments):
            ((shard, rows, _),) = self.stored.by_shard(np.array([number]))
            return {"source": f"{self.source_names[shard]} document {int(rows[0]):,}"}
        if self._plan is None:
            facts = {name: self.stored.facts(name, documents) for name in ("record_id", "source", "turns", "side")}
            return {name: values[0] for name, values in facts.items() if values is not None}
        ids, sources = (self.stored.facts(name, documents) for name in ("record_id", "source"))
        return {
            "documents": documents,
            "document_ids": None if ids is None else tuple(ids),
            "capacity": self.capacity,
            "source": None if sources is None else ", ".join(dict.fromkeys(sources)),
        }

    def _numbers(self, first: int, last: int) -> Ints:
        """Number the documents of the items `first` up to `last - 1`."""
        if self._plan is None:
            return np.arange(first, last, dtype=np.int64)
        return self._plan.order[self._plan.bin_offsets[first] : self._plan.bin_offsets[last]]

    def _batches(self) -> Iterator[TokenBatch]:
        """`batches`, while mapped pages pile up."""
        return (self._batch(first, last) for first, last in even_ranges(self.tokens))

    def _batch(self, first: int, last: int) -> TokenBatch:
        documents = self.stored.gather(self._numbers(first, last))
        return TokenBatch(
            items=np.repeat(np.arange(first, last), self.documents[first:last]),
            ids=documents.ids,
            offsets=documents.offsets,
            weights=documents.weights,
            kinds=documents.kinds if self.has_kinds else None,
            spans=spans_of_kinds(documents.kinds) if self.has_spans and documents.kinds is not None else None,
        )

    def release(self) -> None:
        """Unmap the files."""
        self.stored.release()

    @cached_property
    def alone(self) -> LookSplit:
        """The documents as they are stored, one after the other."""
        return self if self._plan is None else LookSplit(self.stored, self.name)

    def record_id(self, number: int) -> str | None:
        """Return the record of a document, or those of a row joined by commas."""
        ids = self.stored.facts("record_id", self._numbers(number, number + 1)) if self.has_record_ids else None
        return None if ids is None else ", ".join(dict.fromkeys(ids))

    def find(self, record_id: str) -> list[int]:
        """Find the items that hold a record."""
        numbers = [number for number, text in self._ids_with(record_id.encode()) if text == record_id]
        if self._plan is None:
            return numbers
        places = np.flatnonzero(np.isin(self._plan.order, numbers))
        return sorted({int(row) for row in np.searchsorted(self._plan.bin_offsets, places, side="right") - 1})

    def similar_ids(self, record_id: str, most: int = 3) -> list[str]:
        """Find ids that contain the text, then the closest among the first ids."""
        if self.episodes is None or not self.has_record_ids:
            return []
        matches: dict[str, None] = {}
        for _, text in self._ids_with(record_id.encode()):
            matches.setdefault(text)
            if len(matches) == most:
                return list(matches)
        sample = self.episodes.facts("record_id", np.arange(min(len(self.episodes), SIMILAR_SAMPLE))) or []
        close = difflib.get_close_matches(record_id, list(dict.fromkeys(sample)), n=most)
        return list(dict.fromkeys([*matches, *close]))[:most]

    def _ids_with(self, wanted: bytes) -> Iterator[tuple[int, str]]:
        """Yield (document, id) for ids that contain these bytes, by one search over the bytes of all ids."""
        if self.episodes is None or not self.has_record_ids or not wanted:
            return
        overlapping = re.compile(b"(?=%s)" % re.escape(wanted))
        for shard, first in zip(self.episodes.shards, self.episodes.episode_offsets.tolist(), strict=False):
            offsets = shard.offsets("record_id")
            last = -1
            for place in (match.start() for match in overlapping.finditer(shard.column("record_id").tobytes())):
                row = int(np.searchsorted(offsets, place, side="right")) - 1
                if row != last and place + len(wanted) <= int(offsets[row + 1]):
                    last = row
                    yield first + row, shard.bytes_of("record_id", row).decode("utf-8", errors="replace")


def _branches(branches: Branches, offsets: Ints) -> tuple[tuple[int, int], ...]:
    """Find where branches begin, counted over trees with these offsets, and the position of their first token."""
    places = branches.flat_starts(np.diff(offsets))
    return tuple(zip(places.tolist(), branches.depths.tolist(), strict=True))
