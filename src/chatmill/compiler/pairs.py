"""Pairs as they were rendered: two documents, each one row, that begin with the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.sides import IS_ANSWER, Side
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.read.preferences import margin_of
from chatmill.render.render import Rendered, without_failing


def whole_pairs(batch: Conversations, rendered: Rendered) -> Rendered:
    """A rendering of pairs and labelled answers without those that fit no trainer, which fail.

    A pair fails as one record, under the number of its chosen conversation.
    """
    assert batch.sides is not None
    records, rows = batch.records, np.searchsorted(rendered.kept, np.arange(len(batch) + 1))
    prompts = _prompts(rendered.tokens)
    failed: dict[int, RecordError] = {}
    for index, error in rendered.failed:
        failed.setdefault(int(records[index]), error)
    for index, side in enumerate(batch.sides.tolist()):
        if side != Side.REJECTED and index not in failed:
            count = 2 if side == Side.CHOSEN else 1
            sizes = np.diff(rows[index : index + count + 1])
            found = problem_of(sizes.tolist(), prompts[rows[index] : rows[index + count]])
            if found is not None:
                found.record_id, found.where = batch.ids[index], batch.wheres[index]
                failed[index] = found
    stays = ~np.isin(records[rendered.kept], list(failed))
    kept = rendered if stays.all() else rendered.take(np.flatnonzero(stays))
    return replace(kept, failed=tuple(sorted(failed.items(), key=itemgetter(0))))


def refuse_pictures(batch: Conversations, rendered: Rendered) -> Rendered:
    """Return a rendering without the conversations that have pictures, which fail: pairs and trees take none yet."""
    rows = np.searchsorted(rendered.tokens.sequence_runs, rendered.pictures.runs, side="right") - 1
    failed = {index: picture_error() for index in np.unique(rendered.kept[rows]).tolist()}
    return without_failing(rendered, failed, batch)


def picture_error() -> RecordError:
    """Return the error of a record with pictures where none are taken."""
    return RecordError(
        "pairs of answers (preferences: pairs) and trees of rows (expand: tree) take no pictures yet: choose "
        "preferences: chosen, or expand: turns",
        code="images_not_taken",
    )


def problem_of(rows: Sequence[int], prompts: Sequence[Sequence[int] | None]) -> RecordError | None:
    """What is wrong with the documents of a record: how many rows each has, and the prompt of each row."""
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
    found = [margin_of(batch.metadata[row]) if batch.sides[row] < Side.LIKED else None for row in rows.tolist()]
    return np.array([np.nan if margin is None else margin for margin in found], dtype=np.float32)


def _prompts(tokens: Tokens) -> list[Sequence[int] | None]:
    """The ids before the answer of each row; None where a row has no answer."""
    runs = np.append(np.flatnonzero(IS_ANSWER[tokens.run_kinds] & (tokens.run_lengths > 0)), len(tokens.run_kinds))
    first = runs[np.searchsorted(runs, tokens.sequence_runs[:-1])]
    ends = tokens.run_offsets[first]
    return [
        tokens.ids[start:end].tolist() if run < last else None
        for start, end, run, last in zip(tokens.offsets[:-1], ends, first, tokens.sequence_runs[1:], strict=True)
    ]
