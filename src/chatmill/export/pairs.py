"""Targets for answers that people compared: TRL's DPO, KTO and reward trainers, and those of LLaMA-Factory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.sides import IS_ANSWER, SIDE_NAMES, Side
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError, DataError
from chatmill.export.arrow_files import Columns, save_splits
from chatmill.export.row_layout import RowBatch, RowPlan, arrow_lists
from chatmill.export.trainer_lines import dpo_lines, kto_lines, llamafactory_pair_lines, reward_lines
from chatmill.store.split import Split

if TYPE_CHECKING:
    from chatmill.export.targets import Export

Ints = NDArray[np.int64]
MEDIA = ("images", "videos", "audios")
"""Columns that LLaMA-Factory's collators read whatever is in them."""
LEFT_OUT = "{:,} untrained tokens after the last answer, such as a newline, are left out: TRL trains all of an answer"
GOOD = [SIDE_NAMES[Side.CHOSEN], SIDE_NAMES[Side.LIKED]]


def to_trl_dpo(export: Export) -> None:
    """`prompt_ids`, `chosen_ids` and `rejected_ids`: what the collator of TRL's `DPOTrainer` reads."""

    def columns(batch: RowBatch) -> Columns:
        parts = _Parts(batch)
        ends = parts.answers_of_trl(export)
        prompts, chosen, rejected = parts.starts[::2], parts.answers[::2], parts.answers[1::2]
        return {
            "prompt_ids": parts.taken(prompts, chosen),
            "chosen_ids": parts.taken(chosen, ends[::2]),
            "rejected_ids": parts.taken(rejected, ends[1::2]),
        }

    _save(export, columns, _pairs)
    export.config += dpo_lines(export.facts())


def to_trl_kto(export: Export) -> None:
    """`prompt_ids`, `completion_ids` and `label`: what the collator of TRL's `KTOTrainer` reads."""

    def columns(batch: RowBatch) -> Columns:
        parts = _Parts(batch)
        ends = parts.answers_of_trl(export)
        return {
            "prompt_ids": parts.taken(parts.starts, parts.answers),
            "completion_ids": parts.taken(parts.answers, ends),
            "label": _labels(export, batch),
        }

    _save(export, columns)
    export.config += kto_lines(export.facts())
    export.say("KL_completion_ids, which the loss `kto` reads, depend on the batch size: add them with `rows.map`")


def to_trl_reward(export: Export) -> None:
    """`chosen_ids` and `rejected_ids`, each a whole document, and `margin`: what TRL's `RewardTrainer` reads."""
    import pyarrow as pa

    margins = {split: _facts(documents, "margin") for split, documents in export.source.splits.items()}
    has_margins = any(margin is not None for values in margins.values() for margin in values)

    def columns(batch: RowBatch) -> Columns:
        parts = _Parts(batch)
        table = {
            name: parts.taken(parts.starts[side::2], parts.ends[side::2])
            for side, name in enumerate(("chosen_ids", "rejected_ids"))
        }
        if has_margins:
            said = [margins[batch.split][number] for number in batch.numbers[::2].tolist()]
            export.lose(said.count(None), "{:,} pairs have no margin, and get 0")
            table["margin"] = pa.array([margin or 0.0 for margin in said], type=pa.float32())
        return table

    _save(export, columns, _pairs, held=("side", "margin"))
    export.config += reward_lines(export.facts())


def pairs_to_llamafactory(export: Export) -> None:
    """`chosen_input_ids`, `chosen_labels`, ... for the stages dpo and rm; with labels alone, those of the stage kto."""
    import pyarrow as pa

    has_pairs = any("chosen" in _facts(documents, "side") for documents in export.source.splits.values())

    def columns(batch: RowBatch) -> Columns:
        parts = _Parts(batch)
        nothing = pa.array([[]] * len(batch), type=pa.list_(pa.string()))
        media = dict.fromkeys(MEDIA, nothing)
        if has_pairs:
            return {
                **parts.documents("chosen_", slice(0, None, 2)),
                **parts.documents("rejected_", slice(1, None, 2)),
                **media,
            }
        return {
            **parts.documents("", slice(None)),
            **parts.mismatched("kl_"),
            "kto_tags": _labels(export, batch),
            **media,
        }

    _save(export, columns, _pairs if has_pairs else None, {"val": "validation"})
    export.config += llamafactory_pair_lines(export.facts(has_pairs=has_pairs))


class _Parts:
    """Where the prompt and the answer of each document of a batch are, in its flat ids."""

    def __init__(self, batch: RowBatch) -> None:
        documents = batch.documents
        self.ids, self.trained = batch.ids, documents.trained
        self.starts, self.ends = documents.offsets[:-1], documents.offsets[1:]
        is_answer = documents.trained if documents.kinds is None else IS_ANSWER[documents.kinds]
        places = np.append(np.flatnonzero(is_answer), len(self.ids))
        self.answers: Ints = np.minimum(places[np.searchsorted(places, self.starts)], self.ends)
        """Where the answer of each begins."""

    def taken(self, starts: Ints, ends: Ints) -> Any:
        """Return a column of the ids from each start up to its end."""
        return arrow_lists(self.ids[ranges(starts, ends - starts)], offsets_of(ends - starts))

    def answers_of_trl(self, export: Export) -> Ints:
        """Return where each answer ends, for a trainer that trains every token of it."""
        before = np.append(0, np.cumsum(self.trained))
        places = np.append(-1, np.flatnonzero(self.trained))
        ends: Ints = np.maximum(places[before[self.ends]] + 1, self.answers)
        inside = (ends - self.answers) - (before[ends] - before[self.answers])
        if inside.any():
            raise DataError(
                f"{np.count_nonzero(inside):,} answers have {int(inside.sum()):,} untrained tokens in them (results of "
                "tools, later questions, parts that the policy leaves out), and TRL trains everything after the "
                "prompt: export to llamafactory, hf or parquet, which hold masks"
            )
        export.lose(int((self.ends - ends).sum()), LEFT_OUT)
        return ends

    def documents(self, name: str, chosen: slice) -> Columns:
        """Return some whole documents as LLaMA-Factory reads them, in columns whose names begin with `name`."""
        answers = self.answers[chosen]
        return self._laid(name, self.starts[chosen], answers, answers, self.ends[chosen])

    def mismatched(self, name: str) -> Columns:
        """Every prompt with the answer of the document before it (the first with the last one), as KTO compares."""
        other = np.roll(np.arange(len(self.starts)), 1)
        return self._laid(name, self.starts, self.answers, self.answers[other], self.ends[other])

    def _laid(self, name: str, starts: Ints, ends: Ints, more: Ints, more_ends: Ints) -> Columns:
        """Return two pieces of each row, one after the other."""
        begins = np.stack([starts, more], axis=1).ravel()
        counts = np.stack([ends - starts, more_ends - more], axis=1).ravel()
        at, offsets = ranges(begins, counts), offsets_of(counts)[::2]
        labels = np.where(self.trained[at], self.ids[at], np.int32(IGNORE_INDEX))
        values = {"input_ids": self.ids[at], "attention_mask": np.ones(len(at), dtype=np.int8), "labels": labels}
        return {f"{name}{column}": arrow_lists(column_values, offsets) for column, column_values in values.items()}


def _facts(documents: Split, name: str) -> list[Any]:
    return documents.facts(name, np.arange(len(documents), dtype=np.int64)) or []


def _labels(export: Export, batch: RowBatch) -> Any:
    import pyarrow as pa

    sides = export.source.splits[batch.split].facts("side", batch.numbers) or []
    return pa.array([side in GOOD for side in sides], type=pa.bool_())


def _pairs(documents: Split) -> RowPlan:
    """Return a row for each pair: the chosen document and the rejected one."""
    sides = _facts(documents, "side")
    if sides != ["chosen", "rejected"] * (len(sides) // 2):
        raise ConfigError("some answers have a label and no partner: export them to trl-kto, hf or parquet")
    return replace(RowPlan.of(documents, None), row_offsets=np.arange(0, len(documents) + 1, 2, dtype=np.int64))


def _save(
    export: Export,
    columns: Callable[[RowBatch], Columns],
    plan: Callable[[Split], RowPlan] | None = None,
    names: dict[str, str] | None = None,
    held: Collection[str] = ("side",),
) -> None:
    """Write all splits for `datasets.load_from_disk`; without a `plan`, one document a row.

    `held`: facts that are in the columns, or that say in which column an answer is.
    """
    splits = export.source.splits
    if not all(documents.has_sides for documents in splits.values()):
        raise ConfigError("the dataset holds no answers that people compared: build it with preferences: pairs")
    export.begin_for("the trainer", held=held)
    if any(documents.plan is not None for documents in splits.values()):
        export.say("which episodes share a row is not kept: trainers of preferences read rows of one document")
    plans = {split: plan(of_split) if plan else RowPlan.of(of_split, None) for split, of_split in splits.items()}
    save_splits(export, plans, columns, names=names)
