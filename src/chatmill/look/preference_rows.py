"""Rows with two answers, or an answer and its label, as trainers of preferences read them, taken apart into documents.

    prompt_ids | chosen_ids | rejected_ids   ->   prompt + chosen, prompt + rejected

What comes out has the columns of other rows (`input_ids`, `loss_mask` or `labels`), and `side`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.sides import SIDE_NAMES, Side
from chatmill.core.tokens import offsets_of


@dataclass(frozen=True, kw_only=True)
class AnswerColumns:
    """The columns that hold one answer of a row."""

    prompt: str = ""
    """Ids before the answer; empty where the answer holds its prompt."""
    answer: str
    labels: str = ""
    """Labels of the answer; empty where all of it is trained."""
    side: Side | None = None
    """None where the column `label` says whether people liked it."""


@dataclass(frozen=True, kw_only=True)
class PreferenceColumns:
    """One way to write answers that people compared into columns."""

    answers: tuple[AnswerColumns, ...]
    has_mask: bool = True
    """Whether the columns say what is trained."""
    label: str = ""

    @property
    def names(self) -> list[str]:
        """All columns that are read."""
        names: list[str] = []
        for one in self.answers:
            names += [one.prompt, one.answer, one.labels]
        return [name for name in dict.fromkeys([*names, self.label]) if name]


PREFERENCES = (
    PreferenceColumns(
        answers=(
            AnswerColumns(prompt="prompt_ids", answer="chosen_ids", side=Side.CHOSEN),
            AnswerColumns(prompt="prompt_ids", answer="rejected_ids", side=Side.REJECTED),
        )
    ),
    PreferenceColumns(answers=(AnswerColumns(prompt="prompt_ids", answer="completion_ids"),), label="label"),
    PreferenceColumns(
        answers=(
            AnswerColumns(answer="chosen_input_ids", labels="chosen_labels", side=Side.CHOSEN),
            AnswerColumns(answer="rejected_input_ids", labels="rejected_labels", side=Side.REJECTED),
        )
    ),
    PreferenceColumns(
        answers=(
            AnswerColumns(answer="chosen_ids", side=Side.CHOSEN),
            AnswerColumns(answer="rejected_ids", side=Side.REJECTED),
        ),
        has_mask=False,
    ),
)
"""Those of TRL's DPO and KTO trainers, of LLaMA-Factory, and of TRL's reward trainer, in the order they are tried."""


def preference_columns(names: Collection[str]) -> PreferenceColumns | None:
    """Find the columns of answers that people compared; None where there are none."""
    for columns in PREFERENCES:
        if all(name in names for name in columns.names):
            return columns
    return None


def document_schema(columns: PreferenceColumns) -> Any:
    """Make the schema of what `document_rows` returns."""
    import pyarrow as pa

    fields = [("input_ids", pa.list_(pa.int64()))]
    if columns.has_mask:
        fields.append(("loss_mask", pa.list_(pa.uint8())))
    return pa.schema([*fields, ("side", pa.string())])


def document_rows(batch: Any, columns: PreferenceColumns) -> Any:
    """Take the rows of an Arrow batch apart: a row for each answer, those of one row next to each other."""
    import pyarrow as pa

    prompts = [_lists(batch, one.prompt) for one in columns.answers]
    answers = [_lists(batch, one.answer) for one in columns.answers]
    labels = [_lists(batch, one.labels) if one.labels else None for one in columns.answers]
    ids: list[Any] = []
    targets: list[Any] = []
    sides: list[str] = []
    for row in range(batch.num_rows):
        for number, one in enumerate(columns.answers):
            prompt = prompts[number](row)
            answer = answers[number](row)
            ids.append(np.concatenate([prompt, answer]))
            own_labels = labels[number]
            if own_labels is None:
                targets.append(np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(len(answer), np.uint8)]))
            else:
                targets.append((own_labels(row) != IGNORE_INDEX).astype(np.uint8))
            side = one.side
            if side is None:
                side = Side.LIKED if batch.column(columns.label)[row].as_py() else Side.DISLIKED
            sides.append(SIDE_NAMES[side])

    made = {"input_ids": _joined(ids, pa.int64())}
    if columns.has_mask:
        made["loss_mask"] = _joined(targets, pa.uint8())
    made["side"] = pa.array(sides, pa.string())
    return pa.RecordBatch.from_pydict(made, schema=document_schema(columns))


def _lists(batch: Any, name: str) -> Any:
    """Return a function from rows to the numbers in a column of lists; to none without a column."""
    import pyarrow.compute as pc

    if not name:
        return lambda row: np.empty(0, dtype=np.int64)
    column = batch.column(name)
    offsets = offsets_of(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
    values = pc.list_flatten(column).to_numpy(zero_copy_only=False)
    return lambda row: values[offsets[row] : offsets[row + 1]]


def _joined(rows: list[Any], kind: Any) -> Any:
    """Make a column of lists."""
    import pyarrow as pa

    offsets = offsets_of(np.array([len(row) for row in rows], dtype=np.int64))
    flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat, kind))
