"""Pairs as they were rendered: two documents, each one row, that begin with the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.native.gather import gathered
from chatmill.core.sides import IS_ANSWER, Side
from chatmill.core.tokens import Tokens, offsets_of, segment_sums
from chatmill.errors import RecordError
from chatmill.pack.overflow import Overflow
from chatmill.render.jinja.options import Expand
from chatmill.render.render import Rendered

if TYPE_CHECKING:
    from chatmill.compiler.recipe import Recipe

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOfPair:
    """What a build keeps of the documents of a pair."""

    tokens: int | None = None
    """The first so many of each, where longer ones are cut; None: all."""
    is_tree: bool = False
    """Whether the two become one tree."""

    @classmethod
    def by(cls, recipe: Recipe) -> KeptOfPair:
        """Return what a recipe says of it."""
        is_cut = recipe.packing.overflow is Overflow.CUT
        return cls(tokens=recipe.packing.max_length if is_cut else None, is_tree=recipe.expand is Expand.TREE)


def whole_pairs(batch: Conversations, rendered: Rendered, kept: KeptOfPair) -> Rendered:
    """Fail pairs and labelled answers that no trainer can use, and take them out of the rendering.

    A pair fails as one record, under the number of its chosen conversation.
    """
    assert batch.sides is not None
    records, rows = batch.records, np.searchsorted(rendered.kept, np.arange(len(batch) + 1))
    failed: dict[int, RecordError] = {}
    for index, error in rendered.failed:
        failed.setdefault(int(records[index]), error)
    documents = _Documents(rendered.tokens)
    for index in np.unique(records[_doubtful(batch.sides, rows, documents, kept)]).tolist():
        if index not in failed:
            count = 2 if batch.sides[index] == Side.CHOSEN else 1
            sizes = np.diff(rows[index : index + count + 1])
            sides = [documents.side(row) for row in range(rows[index], rows[index + count])]
            problem = problem_of(sizes.tolist(), sides, kept)
            if problem is not None:
                problem.record_id, problem.where = batch.ids[index], batch.wheres[index]
                failed[index] = problem
    stays = ~np.isin(records[rendered.kept], list(failed))
    whole = rendered if stays.all() else rendered.take(np.flatnonzero(stays))
    return replace(whole, failed=tuple(sorted(failed.items(), key=itemgetter(0))))


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


class AnswerRow(NamedTuple):
    """A row of one side."""

    ids: Sequence[int]
    answer: int | None
    """Where its answer begins; None where it has none."""


def problem_of(rows: Sequence[int], sides: Sequence[AnswerRow], kept: KeptOfPair) -> RecordError | None:
    """Return what is wrong with the documents of a record: how many rows each side has, and every row."""
    if max(rows) > 1:
        return RecordError(
            f"under this template the answer needs {max(rows)} rows, since later messages change earlier ones, and "
            "a trainer of pairs reads one row for each answer: choose expand: none, or end the record earlier",
            code="several_rows",
        )
    if any(side.answer is None for side in sides):
        return RecordError("nothing is left of an answer to compare", code="no_answer")
    if len(sides) == 1:
        return None
    (chosen, begins), (rejected, other) = sides
    if chosen[:begins] != rejected[:other]:
        return RecordError(
            "the template writes another prompt for 'rejected' than for 'chosen': reasoning in one of the two alone "
            "switches thinking on in its prompt (thinking: as_given leaves the switch as template_options has it)",
            code="prompts_differ",
            path="rejected",
        )
    return _same_problem(chosen[: kept.tokens], rejected[: kept.tokens], begins or 0, kept)


def _same_problem(chosen: Sequence[int], rejected: Sequence[int], begins: int, kept: KeptOfPair) -> RecordError | None:
    """Return what is wrong with the tokens that are kept of the two sides, whose answers begin at one place."""
    if min(len(chosen), len(rejected)) <= begins:
        return RecordError(
            f"the prompt alone has {begins:,} tokens: nothing is left of an answer to compare in {kept.tokens:,}",
            code="no_answer",
        )
    shorter = min(len(chosen), len(rejected))
    if chosen[:shorter] != rejected[:shorter] or (len(chosen) != len(rejected) and not kept.is_tree):
        return None
    what = "the tokens of 'chosen' and 'rejected' are the same"
    if kept.tokens == shorter:
        what += f" in the {kept.tokens:,} that are kept: choose a larger packing.max_length, or overflow: drop"
    elif len(chosen) != len(rejected):
        what = "one answer begins with all the tokens of the other, so a tree has no branch for both: expand: turns"
    return RecordError(what, code="answers_same", path="rejected")


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
    if batch.margins is None:
        return np.full(len(rows), np.nan, dtype=np.float32)
    return batch.margins[rows]


class _Documents:
    """Rows of sides, and what is before the answer of each."""

    def __init__(self, tokens: Tokens) -> None:
        runs = np.append(np.flatnonzero(IS_ANSWER[tokens.run_kinds] & (tokens.run_lengths > 0)), len(tokens.run_kinds))
        first = runs[np.searchsorted(runs, tokens.document_runs[:-1])]
        self.ids, self.starts, self.stops = tokens.ids, tokens.offsets[:-1], tokens.offsets[1:]
        self.answers: Ints = tokens.run_offsets[first]
        self.has_answer: NDArray[np.bool_] = first < tokens.document_runs[1:]

    def side(self, row: int) -> AnswerRow:
        """Return a row as lists."""
        start = self.starts[row]
        answer = int(self.answers[row] - start) if self.has_answer[row] else None
        return AnswerRow(self.ids[start : self.stops[row]].tolist(), answer)

    def differ(self, mine: Ints, others: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return which pairs of rows differ in their first so many tokens."""
        nowhere = np.zeros(len(mine), dtype=np.uint8)
        first, second = (gathered([self.ids], nowhere, self.starts[side], lengths) for side in (mine, others))
        differs: NDArray[np.bool_] = segment_sums(first != second, offsets_of(lengths)) > 0
        return differs


def _doubtful(sides: NDArray[np.uint8], rows: Ints, documents: _Documents, kept: KeptOfPair) -> Ints:
    """Conversations with several rows, without an answer, or of a pair with other prompts or the same tokens."""
    several = np.flatnonzero(np.diff(rows) > 1)
    mute = np.searchsorted(rows, np.flatnonzero(~documents.has_answer), side="right") - 1
    pairs = np.flatnonzero((sides == Side.CHOSEN) & (np.diff(rows) == 1))
    pairs = pairs[rows[pairs + 2] - rows[pairs + 1] == 1]
    mine, others = rows[pairs], rows[pairs + 1]
    prompts, other_prompts = ((documents.answers - documents.starts)[side] for side in (mine, others))
    is_other = prompts != other_prompts
    is_other |= documents.differ(mine, others, np.where(is_other, 0, prompts))
    room = np.iinfo(np.int64).max if kept.tokens is None else kept.tokens
    length, other_length = (np.minimum(documents.stops - documents.starts, room)[side] for side in (mine, others))
    may_be_same = (length == other_length) | kept.is_tree
    is_same = may_be_same & ~documents.differ(mine, others, np.where(may_be_same, np.minimum(length, other_length), 0))
    return np.concatenate([several, mute, pairs[is_other | is_same | (length <= prompts) | (other_length <= prompts)]])
