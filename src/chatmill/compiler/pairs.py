"""Pairs as they were rendered: two documents, each one row, that begin with the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.native.gather import gathered
from chatmill.core.sides import IS_ANSWER, Side
from chatmill.core.tokens import Tokens, offsets_of, segment_sums
from chatmill.errors import RecordError
from chatmill.read.preferences import margin_of
from chatmill.render.render import Rendered


def whole_pairs(batch: Conversations, rendered: Rendered) -> Rendered:
    """Fail pairs and labelled answers that no trainer can use, and take them out of the rendering.

    A pair fails as one record, under the number of its chosen conversation.
    """
    assert batch.sides is not None
    records, rows = batch.records, np.searchsorted(rendered.kept, np.arange(len(batch) + 1))
    failed: dict[int, RecordError] = {}
    for index, error in rendered.failed:
        failed.setdefault(int(records[index]), error)
    prompts = _Prompts(rendered.tokens)
    for index in np.unique(records[_doubtful(batch.sides, rows, prompts)]).tolist():
        if index not in failed:
            count = 2 if batch.sides[index] == Side.CHOSEN else 1
            sizes = np.diff(rows[index : index + count + 1])
            ids = [prompts.ids_of(row) for row in range(rows[index], rows[index + count])]
            problem = problem_of(sizes.tolist(), ids)
            if problem is not None:
                problem.record_id, problem.where = batch.ids[index], batch.wheres[index]
                failed[index] = problem
    stays = ~np.isin(records[rendered.kept], list(failed))
    kept = rendered if stays.all() else rendered.take(np.flatnonzero(stays))
    return replace(kept, failed=tuple(sorted(failed.items(), key=itemgetter(0))))


def refuse_pictures(batch: Conversations, rendered: Rendered) -> Rendered:
    """Return a rendering without the conversations that have pictures, which fail: pairs and trees take none yet."""
    runs = rendered.rows.own.document_runs  # rows with pictures share nothing
    rows = np.searchsorted(runs, rendered.pictures.runs, side="right") - 1
    failed = {index: picture_error() for index in np.unique(rendered.kept[rows]).tolist()}
    return rendered.without(failed, batch)


def picture_error() -> RecordError:
    """Return the error of a record with pictures where none are taken."""
    return RecordError(
        "pairs of answers (preferences: pairs) and trees of rows (expand: tree) take no pictures yet: choose "
        "preferences: chosen, or expand: turns",
        code="images_not_taken",
    )


def problem_of(rows: Sequence[int], prompts: Sequence[Sequence[int] | None]) -> RecordError | None:
    """Return what is wrong with the documents of a record: how many rows each has, and the prompt of each row."""
    if max(rows) > 1:
        return RecordError(
            f"under this template the answer needs {max(rows)} rows, since later messages change earlier ones, and "
            "a trainer of pairs reads one row for each answer: choose expand: none, or end the record earlier",
            code="several_rows",
        )
    if any(prompt is None for prompt in prompts):
        return RecordError("nothing is left of an answer to compare", code="no_answer")
    if any(prompt != prompts[0] for prompt in prompts):
        return RecordError(
            "the template writes another prompt for 'rejected' than for 'chosen': reasoning in one of the two alone "
            "switches thinking on in its prompt (thinking: as_given leaves the switch as template_options has it)",
            code="prompts_differ",
            path="rejected",
        )
    return None


def sides_of(batch: Conversations, rows: NDArray[np.int64], *, is_tree: bool) -> NDArray[np.uint8] | None:
    """Return the side of each row, given by its conversation; trees hold both sides of a pair."""
    if batch.sides is None:
        return None
    sides = batch.sides[rows]
    return np.where(sides == Side.CHOSEN, np.uint8(Side.PAIR), sides) if is_tree else sides


def margins_of(batch: Conversations, rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return the margin of the pair of each row, given by its conversation; NaN where its record says nothing."""
    if batch.sides is None:
        return None
    margins = np.full(len(rows), np.nan, dtype=np.float32)
    has_some = np.fromiter(map(bool, batch.metadata[rows].tolist()), dtype=np.bool_, count=len(rows))
    for place in np.flatnonzero(has_some & (batch.sides[rows] < Side.LIKED)).tolist():
        margin = margin_of(batch.metadata[rows[place]])
        margins[place] = np.nan if margin is None else margin
    return margins


class _Prompts:
    """What is before the answer of each row."""

    def __init__(self, tokens: Tokens) -> None:
        runs = np.append(np.flatnonzero(IS_ANSWER[tokens.run_kinds] & (tokens.run_lengths > 0)), len(tokens.run_kinds))
        first = runs[np.searchsorted(runs, tokens.document_runs[:-1])]
        self.ids, self.starts, self.ends = tokens.ids, tokens.offsets[:-1], tokens.run_offsets[first]
        self.has_answer: NDArray[np.bool_] = first < tokens.document_runs[1:]

    def ids_of(self, row: int) -> Sequence[int] | None:
        """Return the ids before the answer of a row; None where it has no answer."""
        return self.ids[self.starts[row] : self.ends[row]].tolist() if self.has_answer[row] else None


def _doubtful(sides: NDArray[np.uint8], rows: NDArray[np.int64], prompts: _Prompts) -> NDArray[np.int64]:
    """Conversations with several rows, without an answer, or with another prompt than the other side of their pair."""
    several = np.flatnonzero(np.diff(rows) > 1)
    mute = np.searchsorted(rows, np.flatnonzero(~prompts.has_answer), side="right") - 1
    pairs = np.flatnonzero((sides == Side.CHOSEN) & (np.diff(rows) == 1))
    pairs = pairs[rows[pairs + 2] - rows[pairs + 1] == 1]
    mine, others = rows[pairs], rows[pairs + 1]
    lengths = (prompts.ends - prompts.starts)[mine]
    is_other = lengths != (prompts.ends - prompts.starts)[others]
    lengths[is_other] = 0
    nowhere = np.zeros(len(pairs), dtype=np.uint8)
    first, second = (gathered([prompts.ids], nowhere, prompts.starts[side], lengths) for side in (mine, others))
    is_other |= segment_sums(first != second, offsets_of(lengths)) > 0
    return np.concatenate([several, mute, pairs[is_other]])
