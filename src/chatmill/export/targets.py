"""The export while it runs: what a target is given, and where it notes what it could not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError, DataError
from chatmill.export.row_layout import ALONE, RowBatch, RowPlan, as_stored, one_each, packed_anew
from chatmill.load.model_needs import HybridModel
from chatmill.load.teacher import whole_teacher
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Split, StoredDataset, even_ranges
from chatmill.store.teacher import TeacherColumn

FACTS = {"record_id": "string", "source": "string", "turns": "int32", "side": "string", "margin": "float32"}
"""What episodes know of their records besides tokens, and how Arrow holds it."""
COUNTED = ("rows", "documents", "tokens", "trained")
SCAN = 1 << 22
FIRST_TOKENS = (
    "{:,} trained tokens are the first of a document and have no label: no token of their own document comes before "
    "them"
)


@dataclass(kw_only=True, slots=True)
class Export:
    """One export while it runs."""

    source: StoredDataset
    folder: Path
    """Where the target writes: not yet published."""
    alone: bool
    """Whether one split was asked for by name."""
    max_length: int | None
    packing_strategy: str
    pad_id: int
    shard_tokens: int
    kinds: bool
    """Whether kinds are wanted."""
    eod_id: int | None = None
    """Put after every document that does not end in it, untrained."""
    record_ids: bool = False
    """Whether the record id of every document is stored; `megatron` alone takes it."""
    teacher: bool = False
    """Whether what a teacher says is wanted."""
    hybrid: HybridModel | None = None
    """The model that the dataset is for, if it has recurrent layers."""
    said: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """What is not held: sentences, and those with a number in them, which grows."""
    config: list[str] = field(default_factory=list)
    """Lines for the config of the trainer; `{out}` is the folder."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per split: rows, documents, tokens and trained tokens."""

    def say(self, sentence: str) -> None:
        """Note once what is not held."""
        if sentence not in self.said:
            self.said.append(sentence)

    def lose(self, count: int, sentence: str) -> None:
        """Count what is not held; the sentence has a `{:,}` for the sum."""
        self.lost[sentence] += count

    @property
    def not_held(self) -> list[str]:
        """Sentences about what the target cannot hold, or was asked to leave out."""
        return [*self.said, *(sentence.format(count) for sentence, count in self.lost.items() if count)]

    def begin_for(self, trainer: str, *, weights: bool = False) -> None:
        """Note what this trainer does not read; where it reads no `weights`, others than 0 and 1 are refused."""
        for split, documents in self.source.splits.items():
            if not weights and has_other_weights(documents):
                raise DataError(
                    f"{split}: some tokens have another weight than 0 and 1, and {trainer} only reads trained or not: "
                    "export to levanter, parquet or hf, which hold weights, or build with weights of 0 and 1"
                )
        stored = [name for name in FACTS if self.holds(name)]
        stored += ["kinds"] if all(documents.has_kinds for documents in self.source.splits.values()) else []
        if stored:
            self.say(f"{', '.join(stored)}: {trainer} reads none of them")
        if self.hybrid is not None and self.hybrid.needs is not None:
            self.say(
                f"{', '.join(self.hybrid.needs.names)}: without it in every batch packed documents see each other in "
                f"{self.hybrid.kind}; whether {trainer} makes it is not known here"
            )

    def teacher_of(self, split: str) -> TeacherColumn:
        """The teacher column of a split, which must be whole."""
        documents = self.source.splits[split]
        if not isinstance(documents, EpisodeDataset):
            raise ConfigError(f"{self.source.directory}: {split} has no teacher column: leave out teacher")
        return whole_teacher(documents)

    def targets(self, batch: RowBatch) -> NDArray[np.bool_]:
        """Token-aligned: trained, and not the first token of a document, which no token of it predicts."""
        some = batch.documents
        trained = some.trained.copy()
        firsts = some.offsets[:-1][np.diff(some.offsets) > 0]
        self.lose(int(np.count_nonzero(trained[firsts])), FIRST_TOKENS)
        trained[firsts] = False
        return trained

    def lose_rows_without(self, batch: RowBatch, trained: NDArray[np.bool_], trainer: str) -> None:
        """For a trainer that drops rows in which nothing is trained."""
        before = np.append(0, np.cumsum(trained))[batch.token_offsets]
        sentence = f"{{:,}} documents have nothing to train: {trainer} drops them when it loads"
        self.lose(int(np.count_nonzero(np.diff(before) == 0)), sentence)

    def rows(self, split: str) -> RowPlan:
        """Rows of the pack plan, or one document a row; packed again where a length is given."""
        documents = self.source.splits[split]
        if self.max_length is None and self.packing_strategy == ALONE:
            return one_each(documents, documents.plan.capacity if documents.plan is not None else None)
        if self.max_length is None:
            made = as_stored(documents)
        else:
            made = packed_anew(documents, self.max_length, self.packing_strategy)
        if made.packed and self.hybrid is not None:
            self.hybrid.refuse_packed()
        return made

    def rows_of_one_length(self, split: str, name: str) -> RowPlan:
        """As `rows`, for a trainer (`name`) that wants them padded: without a length there are none."""
        if self.max_length is None and self.source.splits[split].plan is None:
            raise ConfigError(
                f"all rows of {name} have one length, and {split} has no pack plan: give --max-length (one document a "
                "row: --pack alone), or build with pack: {length: N}"
            )
        return self.rows(split)

    def documents(self, split: str, name: str) -> RowPlan:
        """One document a row, for a trainer (`name`) that packs them itself."""
        documents = self.source.splits[split]
        if documents.plan is not None:
            self.say(f"which episodes share a row is not kept: {name} packs again")
        return one_each(documents)

    def batches(self, split: str, rows: RowPlan, *, width: int = 0) -> Iterator[RowBatch]:
        """The rows of a split, counted as they pass; `width` is their length where the target pads them."""
        self.counts[split] = dict.fromkeys(COUNTED, 0)
        return self._counted(split, rows, width)

    def shards(self, split: str, rows: RowPlan, *, width: int = 0, added: int = 0) -> list[Iterator[RowBatch]]:
        """The same for a target that writes files of up to `shard_tokens` tokens: the rows of each file.

        `added`: tokens that the target puts after each row.
        """
        self.counts[split] = dict.fromkeys(COUNTED, 0)
        tokens = np.maximum(rows.row_tokens, width) + added
        files = even_ranges(tokens, self.shard_tokens)
        return [self._counted(split, rows.part(first, last), width) for first, last in files]

    def _counted(self, split: str, rows: RowPlan, width: int) -> Iterator[RowBatch]:
        """About a million tokens at a time; a row counts as `width` tokens where it has fewer."""
        counts = self.counts[split]
        for first, last in even_ranges(np.maximum(rows.row_tokens, width)):
            some = rows.part(first, last)
            documents = self.source.splits[split].gather(some.documents, some.lengths)
            counts["rows"] += last - first
            counts["documents"] += len(documents)
            counts["tokens"] += len(documents.ids)
            counts["trained"] += int(np.count_nonzero(documents.trained))
            yield RowBatch(split=split, documents=documents, numbers=some.documents, row_offsets=some.row_offsets)

    def holds(self, fact: str) -> bool:
        """Whether all splits store `record_id`, `source` or `turns`."""
        first = np.zeros(1, dtype=np.int64)
        return all(documents.facts(fact, first) is not None for documents in self.source.splits.values())

    @property
    def main_split(self) -> str:
        """The split that a trainer trains on: `train`, or the first if there is no such split."""
        return "train" if "train" in self.source.splits else next(iter(self.source.splits))

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document of all splits."""
        return max(int(documents.lengths.max(initial=0)) for documents in self.source.splits.values())

    @property
    def eos_id(self) -> int | None:
        """The end token of the tokenizer that the dataset was built with; None where none is known."""
        found = self.source.about.get("tokenizer", {}).get("eos_id")
        return None if found is None else int(found)

    @property
    def holds_kinds(self) -> bool:
        """Whether kinds are wanted and all splits store them."""
        stored = all(documents.has_kinds for documents in self.source.splits.values())
        if stored and not self.kinds:
            self.say("kinds are left out, as asked")
        return stored and self.kinds


def has_other_weights(documents: Split) -> bool:
    """Whether a token has a weight that is neither 0 nor 1."""
    for shard in range(documents.shard_count):
        weights = documents.shard_columns(shard)[1]
        for first in range(0, 0 if weights is None else len(weights), SCAN):
            assert weights is not None
            piece = weights[first : first + SCAN]
            if bool(((piece != 0) & (piece != 1)).any()):
                return True
    return False
