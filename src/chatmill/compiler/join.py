"""Joins the parts of all chunks, in order, into the shards of the final dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_job import REJECTED
from chatmill.compiler.faults import fault_point
from chatmill.compiler.journal import Journal, JournalLine
from chatmill.compiler.ledger import Ledger
from chatmill.compiler.publish import remove_at_once
from chatmill.compiler.recipe import Recipe
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.store.durable import GrowingFile, remove_path
from chatmill.store.episode_columns import EpisodeColumns
from chatmill.store.episode_layout import writing_mark
from chatmill.store.episode_writer import EpisodeWriter, WriterProgress
from chatmill.store.episodes import EpisodeDataset

SLICE_TOKENS = 4 << 20
"""Tokens that are copied at a time; bounds the memory of a join."""
JOURNAL = "journal.jsonl"


class Join:
    """The growing dataset: parts are handed over as they are made, in any order, and joined in the order of chunks.

    Episodes are copied as soon as all parts before them are there, while other chunks are still at work; a part goes
    when the journal has it.
    """

    def __init__(self, recipe: Recipe, out: Path) -> None:
        """Join into the folder `out`, going on with what a join that was stopped left there."""
        self._recipe, self._out = recipe, out
        self.ledger = Ledger()
        """The sum of the ledgers of all parts that are joined."""
        self.joined = 0
        """Parts that are joined: those of the chunks before this one."""
        self._waiting: dict[int, tuple[Path, dict[str, Any]]] = {}
        self._writers: dict[str, EpisodeWriter] = {}
        self._rejected: GrowingFile | None = None
        out.mkdir(exist_ok=True)
        self._journal = Journal(out / JOURNAL)
        try:
            self._go_on(self._journal)
        except BaseException:
            self.close()
            raise

    def _go_on(self, journal: Journal) -> None:
        """Go back to the last line of the journal that the files bear out; where there is none, begin anew."""
        while len(journal) and not self._opened(journal.last()):
            journal.drop_last()
        known = {JOURNAL, *self._writers, *(writing_mark(self._out, split).name for split in self._writers)}
        for path in list(self._out.iterdir()):
            if path.name not in known and not (path.name == REJECTED and self._rejected):
                remove_path(path)
        for receipt in self.receipts():
            self.ledger.add(Ledger.from_json(receipt["ledger"]))
        self.joined = len(journal)

    def _opened(self, line: JournalLine) -> bool:
        """Open the files as they were at a line; False when they are not what it says."""
        try:
            for split, progress in line.splits.items():
                self._writers[split] = self._new_writer(split, progress)
            if line.rejected is not None:
                self._rejected = GrowingFile(self._out / REJECTED, begun=line.rejected)
        except FormatError:
            self._leave()
            return False
        return True

    def receipts(self) -> Iterator[dict[str, Any]]:
        """Those of the parts that the journal has, in order."""
        return self._journal.receipts()

    def _new_writer(self, split: str, begun: WriterProgress | None = None) -> EpisodeWriter:
        return EpisodeWriter(self._out, split, shard_tokens=self._recipe.shard_tokens, begun=begun)

    def add(self, number: int, part: Path, receipt: dict[str, Any]) -> None:
        """Take the part of chunk `number`, which has this receipt."""
        self._waiting[number] = part, receipt
        while self.joined in self._waiting:
            self._join(*self._waiting.pop(self.joined))

    def _join(self, part: Path, receipt: dict[str, Any]) -> None:
        """Put the next part behind those that are joined."""
        if (part / REJECTED).exists():
            self._rejected = self._rejected or GrowingFile(self._out / REJECTED)
            self._rejected.write((part / REJECTED).read_bytes())
        for split in receipt["splits"]:
            if split not in self._writers:
                self._writers[split] = self._new_writer(split)
            append_part(self._writers[split], part, split)
        self.ledger.add(Ledger.from_json(receipt["ledger"]))
        self.joined += 1
        fault_point("before_journal")
        self._journal.append(self._line(receipt))
        fault_point("after_journal")
        remove_at_once(part)
        fault_point("after_part_removal")

    def _line(self, receipt: dict[str, Any]) -> JournalLine:
        return JournalLine(
            receipt=receipt,
            rejected=None if self._rejected is None else self._rejected.progress(),
            splits={split: writer.progress() for split, writer in self._writers.items()},
        )

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write what is left and close; what each split holds, for the manifest."""
        assert not self._waiting, f"chunk {self.joined} was never handed over"
        if self._rejected is not None:
            self._rejected.finish()
        for writer in self._writers.values():
            writer.close()
        return {
            split: {"episodes": writer.episodes, "tokens": writer.tokens}
            for split, writer in sorted(self._writers.items())
        }

    def _leave(self) -> None:
        """Close all files that grow; a join that goes on finds them as they are."""
        for writer in self._writers.values():
            writer.abort()  # does nothing to one that is closed
        if self._rejected is not None:
            self._rejected.discard()
        self._writers, self._rejected = {}, None

    def __enter__(self) -> Join:
        return self

    def close(self) -> None:
        """Close all files; what is not finished can be gone on with."""
        self._leave()
        self._journal.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def append_part(writer: EpisodeWriter, part: Path, split: str) -> None:
    """Copy all episodes of a part behind those that a writer has."""
    dataset = EpisodeDataset(part, split)
    shard = dataset.shard(0)
    for first, last in slices_of(dataset):
        ids, offsets, weights, kinds = columns_of(dataset, first, last)
        columns = EpisodeColumns(
            ids=ids,
            lengths=np.diff(offsets),
            mask=weights,
            kinds=kinds,
            source=shard.column("source")[first:last],
            turns=shard.column("turns")[first:last],
            trained=shard.column("trained")[first:last],
            record_id=shard.texts("record_id", first, last),
        )
        writer.append_columns(columns, dataset.source_names)
        del ids, weights, kinds, columns
        shard.release()  # pages of mapped files count as memory of this process
        fault_point("during_join")


def slices_of(dataset: EpisodeDataset) -> Iterator[tuple[int, int]]:
    """Ranges of episodes of a part that hold about `SLICE_TOKENS` tokens each."""
    ends = np.cumsum(dataset.lengths)
    first = 0
    while first < len(dataset):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + SLICE_TOKENS, side="right")))
        yield first, last
        first = last


def columns_of(
    dataset: EpisodeDataset, first: int, last: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[Any], NDArray[np.uint8] | None]:
    """Flat ids, offsets, weights and kinds of consecutive episodes of a part (views of its files)."""
    shard = dataset.shard(0)
    lengths = shard.index[first:last, 1].astype(np.int64)
    start = int(shard.index[first, 0])
    tokens = slice(start, start + int(lengths.sum()))
    kinds = shard.column("kinds")[tokens] if "kinds" in dataset.columns else None
    return shard.token_ids[tokens], offsets_of(lengths), shard.mask[tokens], kinds
