"""The two documents of a pair in the slow path: what makes them one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from chatmill.compiler.pairs import picture_error, problem_of
from chatmill.core.sides import IS_ANSWER
from chatmill.prove.reference import Derived, DerivedRecord
from chatmill.render.jinja.turn_sequences import Counts


def refuse_unfit(sides: Sequence[DerivedRecord], *, compared: bool, is_tree: bool) -> None:
    """Raise the error of a record whose answers people compared and no trainer could; drop its rows together."""
    has_pictures = any(sequence.images for side in sides for sequence in side.sequences)
    if has_pictures and (compared or is_tree):
        raise picture_error()
    if not compared:
        return
    prompts = [_prompt(sequence) for side in sides for sequence in side.sequences]
    problem = problem_of([len(side.sequences) for side in sides], prompts)
    if problem is not None:
        raise problem
    rows = [sequence for side in sides for sequence in side.sequences]
    if not all(row.episodes for row in rows):
        for row in rows:
            row.spans, row.episodes = [], []


def _prompt(derived: Derived) -> list[int] | None:
    """The ids before the first token of an answer that is not context."""
    answers = (place for place, code in enumerate(derived.kinds) if IS_ANSWER[code])
    first = next(answers, None)
    return None if first is None else derived.ids[:first]


def joined(sides: Sequence[DerivedRecord]) -> DerivedRecord:
    """The rows of a record, and the sums of what is noted of its sides."""
    if len(sides) == 1:
        return sides[0]
    return replace(
        sides[0],
        sides=len(sides),
        sequences=[sequence for side in sides for sequence in side.sequences],
        lost=sum((Counter(side.lost) for side in sides), Counter[str]()),
        notes=sum((Counter(side.notes) for side in sides), Counter[str]()),
        counts=Counts(*(sum(values) for values in zip(*(side.counts for side in sides), strict=True))),
    )
