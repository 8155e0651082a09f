"""The export while it runs: what a target is given, and where it notes what it could not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import FileRecord
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError
from chatmill.export.row_layout import RowBatch, RowPlan
from chatmill.export.trainer_lines import RowFacts
from chatmill.load.model_needs import HybridModel
from chatmill.load.teacher import whole_teacher
from chatmill.pack.plan import plan
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.named_paths import find_first
from chatmill.store.split import Split, StoredDataset, even_ranges
from chatmill.store.teacher import TeacherColumn

FACTS = {"record_id": "string", "source": "string", "turns": "int32", "side": "string", "margin": "float32"}
"""What episodes know of their records besides tokens, and how Arrow holds it."""
ALONE = "alone"
"""In place of a packing strategy: one document a row, in the order of the build."""
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
    shard_tokens: int
    hybrid: HybridModel | None = None
    """The model that the dataset is for, if it has recurrent layers."""
    said: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """What is not held: sentences, and those with a number in them, which grows."""
    config: list[str] = field(default_factory=list)
    """Lines for the config of the trainer; `{out}` is the folder."""
    hashed: dict[str, FileRecord] = field(default_factory=dict)
    """Files that were hashed while they were written, by their path below the folder."""
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

    def begin_for(self, trainer: str, *, weights: bool = False, held: Collection[str] = ()) -> None:
        """Note what this trainer does not read; where it reads no `weights`, others than 0 and 1 are refused.

        `held`: facts that the target says in a form of its own.
        """
        for split, documents in self.source.splits.items():
            if not weights and has_other_weights(documents):
                raise DataError(
                    f"{split}: some tokens have another weight than 0 and 1, and {trainer} only reads trained or not: "
                    "export to levanter, parquet or hf, which hold weights, or build with weights of 0 and 1"
                )
        unread = [name for name in self.stored if name not in held]
        if unread:
            self.say(f"{', '.join(unread)}: {trainer} reads none of them")
        if self.hybrid is not None and self.hybrid.needs is not None:
            self.say(
                f"{', '.join(self.hybrid.needs.names)}: without it in every batch packed documents see each other in "
                f"{self.hybrid.kind}; whether {trainer} makes it is not known here"
            )

    def teacher_of(self, split: str) -> TeacherColumn:
        """Return the teacher column of a split, which must be whole."""
        documents = self.source.splits[split]
        if not isinstance(documents, EpisodeDataset):
            raise ConfigError(f"{self.source.directory}: {split} has no teacher column: leave out teacher")
        return whole_teacher(documents)

    def targets(self, batch: RowBatch) -> NDArray[np.bool_]:
        """Token-aligned: trained, and not the first token of a document, which no token of it predicts."""
        documents = batch.documents
        trained = documents.trained.copy()
        firsts = documents.offsets[:-1][np.diff(documents.offsets) > 0]
        self.lose(int(np.count_nonzero(trained[firsts])), FIRST_TOKENS)
        trained[firsts] = False
        return trained

    def labels(self, batch: RowBatch) -> NDArray[np.int32]:
        """Return the ids of targets, and -100 elsewhere."""
        return np.where(self.targets(batch), batch.ids, np.int32(IGNORE_INDEX))

    def lose_rows_without(self, batch: RowBatch, trained: NDArray[np.bool_], trainer: str) -> None:
        """For a trainer that drops rows in which nothing is trained."""
        before = np.append(0, np.cumsum(trained))[batch.token_offsets]
        sentence = f"{{:,}} documents have nothing to train: {trainer} drops them when it loads"
        self.lose(int(np.count_nonzero(np.diff(before) == 0)), sentence)

    def rows(self) -> dict[str, RowPlan]:
        """Rows of the pack plans, or one document a row; packed again where a length is given."""
        return {split: self._rows(documents) for split, documents in self.source.splits.items()}

    def _rows(self, documents: Split) -> RowPlan:
        planned, length = documents.plan, self.max_length
        if length is not None:
            _refuse_longer(documents, length)
        if self.packing_strategy == ALONE:
            return RowPlan.of(documents, None, planned.capacity if length is None and planned is not None else length)
        if length is not None:
            planned = plan(documents.lengths.astype(np.int32), length, self.packing_strategy)
        if planned is not None and self.hybrid is not None:
            self.hybrid.refuse_packed()
        return RowPlan.of(documents, planned)

    def padded_rows(self, name: str) -> dict[str, RowPlan]:
        """As `rows`, for a trainer (`name`) that wants all of them padded to one length: without one there are none."""
        plans = self.rows()
        for split, rows in plans.items():
            if rows.capacity is None:
                raise ConfigError(
                    f"all rows of {name} have one length, and {split} has no pack plan: give --max-length (one "
                    "document a row: --pack alone), or build with pack: {length: N}"
                )
            plans[split] = replace(rows, width=rows.capacity)
        return plans

    def documents(self, name: str) -> dict[str, RowPlan]:
        """Return one document a row, for a trainer (`name`) that packs them itself."""
        if any(documents.plan is not None for documents in self.source.splits.values()):
            self.say(f"which episodes share a row is not kept: {name} packs again")
        return {split: RowPlan.of(documents, None) for split, documents in self.source.splits.items()}

    def batches(self, split: str, rows: RowPlan) -> Iterator[RowBatch]:
        """Return the rows of a split, counted as they pass."""
        self.counts[split] = dict.fromkeys(COUNTED, 0)
        return self._counted(split, rows)

    def shards(self, split: str, rows: RowPlan, *, added: int = 0) -> list[Iterator[RowBatch]]:
        """Return the same for a target that writes files of up to `shard_tokens` tokens: the rows of each file.

        `added`: tokens that the target puts after each row.
        """
        self.counts[split] = dict.fromkeys(COUNTED, 0)
        files = even_ranges(rows.row_tokens + added, self.shard_tokens)
        return [self._counted(split, rows.part(first, last)) for first, last in files]

    def _counted(self, split: str, rows: RowPlan) -> Iterator[RowBatch]:
        """About a million tokens at a time."""
        counts = self.counts[split]
        for first, last in even_ranges(rows.row_tokens):
            part = rows.part(first, last)
            documents = self.source.splits[split].gather(part.documents)
            counts["rows"] += last - first
            counts["documents"] += len(documents)
            counts["tokens"] += len(documents.ids)
            counts["trained"] += int(np.count_nonzero(documents.trained))
            yield RowBatch(
                split=split,
                documents=documents,
                numbers=part.documents,
                row_offsets=part.row_offsets,
                packed=rows.packed,
                width=rows.width,
            )

    def holds(self, fact: str) -> bool:
        """Return whether all splits store `record_id`, `source` or `turns`."""
        first = np.zeros(1, dtype=np.int64)
        return all(documents.facts(fact, first) is not None for documents in self.source.splits.values())

    @property
    def stored(self) -> list[str]:
        """Names of all that is stored of documents besides ids and weights."""
        names = [name for name in FACTS if self.holds(name)]
        names += ["kinds"] if self.holds_kinds else []
        names += ["logprobs"] if any(documents.has_logprobs for documents in self.source.splits.values()) else []
        return names

    @property
    def main_split(self) -> str:
        """The split that a trainer trains on: `train`, or the first if there is no such split."""
        return self.facts().main_split

    def facts(self, plans: Mapping[str, RowPlan] | None = None, **known: Any) -> RowFacts:
        """Collect what the lines for a trainer depend on.

        Args:
            plans: Rows of each split; default: one document a row.
            known: Facts that the target knows.
        """
        splits = self.source.splits
        longest = self.longest_document
        rows = [] if plans is None else list(plans.values())
        recipe = self.source.about.get("recipe", {})
        named = recipe.get("tokenizer")
        model = find_first(named, self.source.directory) if isinstance(named, str) and named else RowFacts.model
        return RowFacts(
            splits=tuple(splits),
            is_packed=any(row.packed for row in rows),
            longest=longest,
            row=max((row.longest for row in rows), default=longest),
            has_trees=any(documents.has_trees for documents in splits.values()),
            has_images=any(documents.has_pictures for documents in splits.values()),
            model=model,
            **known,
        )

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document of all splits."""
        return max(int(documents.lengths.max(initial=0)) for documents in self.source.splits.values())

    @property
    def eos_id(self) -> int | None:
        """The end token of the tokenizer that the dataset was built with; None where none is known."""
        eos_id = self.source.about.get("tokenizer", {}).get("eos_id")
        return None if eos_id is None else int(eos_id)

    @property
    def eod_advice(self) -> str:
        """Name a token that can end documents: that of padding, if it is another one than the end token."""
        pad_id = self.source.about.get("tokenizer", {}).get("pad_id")
        if pad_id is None or pad_id == self.eos_id:
            return ""
        return f", such as --eod-id {pad_id}, with which this tokenizer pads"

    @property
    def pad_id(self) -> int:
        """That of the build; 0 where it is not known (padding is known by lengths, never by its id)."""
        return int(self.source.about.get("tokenizer", {}).get("pad_id", 0))

    @property
    def holds_kinds(self) -> bool:
        """Whether all splits store kinds."""
        return all(documents.has_kinds for documents in self.source.splits.values())


def _refuse_longer(documents: Split, length: int) -> None:
    too_long = np.flatnonzero(documents.lengths > length)
    if len(too_long):
        shown = too_long[:3]
        names = documents.facts("record_id", shown) or [f"document {number}" for number in shown.tolist()]
        listed = ", ".join(f"{name} ({documents.lengths[i]:,})" for name, i in zip(names, shown.tolist(), strict=True))
        more = ", ..." if len(too_long) > len(shown) else ""
        raise DataError(
            f"{len(too_long):,} of {len(documents):,} documents are longer than a row of {length:,} tokens: "
            f"{listed}{more}. Choose a longer row (the longest has {int(documents.lengths.max()):,} tokens), or "
            "build again with `--max-length` and an overflow policy, which counts what is lost"
        )


def has_other_weights(documents: Split) -> bool:
    """Return whether a token has a weight that is neither 0 nor 1."""
    for weights in (documents.shard_columns(shard).weights for shard in range(len(documents.shards))):
        for first in range(0, 0 if weights is None else len(weights), SCAN):
            piece = np.asarray(weights)[first : first + SCAN]
            if bool(((piece != 0) & (piece != 1)).any()):
                return True
    return False
