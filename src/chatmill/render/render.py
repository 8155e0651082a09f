"""Renders conversations: finds the plan of each, and writes all sequences at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chatmill.core import html
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.gc_pause import without_collector
from chatmill.core.native.sequence_layout import Origin
from chatmill.core.texts import Texts
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.render.bound import BoundTemplate
from chatmill.render.fill import applied, fill, numbers_in
from chatmill.render.fragments import Fragment
from chatmill.render.record_plans import RecordPlans, Showings
from chatmill.render.registry import bind, template_mistake
from chatmill.render.sequence_table import SequenceTable
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rendered:
    """Tokens of the conversations that could be rendered, in order, and the ones that could not."""

    tokens: Tokens
    """One entry per sequence; a conversation whose turns cannot share one has several, next to each other."""
    kept: Ints
    """Index of the conversation of each sequence in the input."""
    stripped: Ints
    """Characters of contents and reasoning that no sequence of the conversation shows; 0 but for its first sequence."""
    failed: tuple[tuple[int, RecordError], ...]
    """Input index and error of each conversation that the template refused; empty unless failures are collected."""
    turns: Ints
    """Answers of each sequence's conversation that are trained; 0 but for its first sequence."""
    unstable: Ints
    """Those of them that later messages change."""
    untrained: Ints
    """Answers that are context because their mask cannot be proved."""
    appended: Ints
    """Answers whose stop the template itself does not write."""

    def _facts(self) -> list[tuple[str, int]]:
        """What is worth a look; nothing that is 0."""
        facts = (
            ("conversations", len(np.unique(self.kept))),
            ("refused by the template", len(self.failed)),
            ("sequences", len(self.tokens)),
            ("tokens", len(self.tokens.ids)),
            ("characters that are not shown", int(self.stripped.sum())),
            ("turns that later messages change", int(self.unstable.sum())),
            ("turns without proof", int(self.untrained.sum())),
            ("stops that the template does not write", int(self.appended.sum())),
        )
        return [(words, count) for words, count in facts if count]

    def __repr__(self) -> str:
        facts = ", ".join(f"{count:,} {words}" for words, count in self._facts())
        first = f"; first refused: {self.failed[0][1]}" if self.failed else ""
        return f"Rendered({facts}{first})"

    def _repr_html_(self) -> str:
        refused = "; ".join(str(error) for _, error in self.failed[:SHOWN_FAILURES])
        return html.card("Rendered", html.table(self._facts()), refused)


def render(
    conversations: Sequence[Conversation],
    template: BoundTemplate | str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    collect_failures: bool = False,
    add_generation_prompt: bool = False,
) -> Rendered:
    """Render conversations; all their text is encoded in one call.

    `template` is a bound template, or a name or path that is bound to `tokenizer`. The first conversation that the
    template cannot write raises its `RecordError`; with `collect_failures` it is left out and reported instead.
    """
    bound = template if isinstance(template, BoundTemplate) else bind(template, tokenizer)
    batch = conversations if isinstance(conversations, Conversations) else _columns_of(conversations)
    with bound.plan_cache.lock:
        try:
            if add_generation_prompt:
                return _render_prompts(batch, bound)
            with without_collector():
                numbers, failed = bound.plan_cache.find(batch)
        except Exception as error:
            if (mistake := template_mistake(error)) is not None:
                raise mistake from error
            raise
        return _filled(batch, bound, numbers, failed, collect_failures=collect_failures)


def _columns_of(conversations: Sequence[Conversation]) -> Conversations:
    try:
        return Conversations.of(conversations)
    except UnicodeEncodeError as error:
        place = next(number for number, one in enumerate(conversations) if not _has_utf8_form(one))
        raise RecordError(
            f"conversation {place} holds the lone surrogate U+{ord(error.object[error.start]):04X}: such text has no "
            "UTF-8 form; repair the source",
            code="lone_surrogate",
        ) from None


def _has_utf8_form(conversation: Conversation) -> bool:
    try:
        Conversations.of([conversation])
    except UnicodeEncodeError:
        return False
    return True


def _filled(
    batch: Conversations,
    bound: BoundTemplate,
    numbers: Ints,
    failed: list[tuple[int, RecordError]],
    *,
    collect_failures: bool,
) -> Rendered:
    """The rows of all conversations that have a plan."""
    if failed and not collect_failures:
        raise failed[0][1]
    chosen = np.flatnonzero(numbers >= 0)
    numbers = numbers[chosen]
    cache, plans = bound.plan_cache, bound.plan_cache.plans
    sequences, plan_of = plans.columns.sequences.of(numbers)
    kept = chosen[plan_of]
    filled = fill(cache.sequences, sequences[:, 0], kept, batch, bound.tokenizer, cache.computer(batch))
    is_first = np.diff(plan_of, prepend=-1) > 0
    per_sequence = np.zeros((len(sequences), 5), dtype=np.int64)
    per_sequence[is_first, :4] = plans.columns.counts[numbers]
    per_sequence[is_first, 4] = _stripped(batch, chosen, numbers, plans, filled.changed)
    return Rendered(
        tokens=filled.tokens,
        kept=kept,
        stripped=per_sequence[:, 4],
        failed=tuple(failed),
        turns=per_sequence[:, 0],
        unstable=per_sequence[:, 1],
        untrained=per_sequence[:, 2],
        appended=per_sequence[:, 3],
    )


def _stripped(batch: Conversations, chosen: Ints, numbers: Ints, plans: RecordPlans, changed: Ints) -> Ints:
    """Characters of contents and reasoning that no sequence of a conversation shows; `changed` have texts cut there."""
    stripped, firsts = np.zeros(len(chosen), dtype=np.int64), batch.offsets[chosen]
    is_changed = np.zeros(len(batch), dtype=np.bool_)
    is_changed[changed] = True
    losses, owners = plans.columns.losses.of(numbers)
    lossy = (losses[:, 2] == 0) | is_changed[chosen][owners]  # what is shown is shown whole where nothing was cut
    losses, owners = losses[lossy], owners[lossy]
    for origin, texts in ((Origin.CONTENT, batch.messages.contents), (Origin.REASONING, batch.messages.reasoning)):
        for number in numbers_in(losses[losses[:, 0] == origin, 2]):
            mine = (losses[:, 0] == origin) & (losses[:, 2] == number)
            own = texts.take(firsts[owners[mine]] + losses[mine, 1])
            np.add.at(stripped, owners[mine], _characters_lost(own, plans.showings[number]))
    return stripped


def _characters_lost(texts: Texts, showings: Showings) -> Ints:
    """How many characters of texts are missing in the sequence that has most of them."""
    characters = texts.characters()
    if not showings:
        return characters
    most = np.zeros_like(characters)
    for parts in showings:
        shown = [applied(texts, operations).characters() for operations in parts]
        most = np.maximum(most, np.sum(shown, axis=0))
    lost: Ints = np.maximum(characters - most, 0)
    return lost


def _render_prompts(batch: Conversations, bound: BoundTemplate) -> Rendered:
    """Every conversation up to where an answer begins, one by one."""
    table = SequenceTable(arguments_are_text=True)
    sequences = []
    for index in range(len(batch)):
        fixed = [
            item if hasattr(item, "ids") else item._replace(expression=None)
            for item in bound.write_prompt(batch[index])
        ]
        sequences.append(table.add([Fragment(fixed)]))
    every = np.arange(len(batch), dtype=np.int64)
    tokens = fill(
        table, np.array(sequences, dtype=np.int64), every, batch, bound.tokenizer, bound.plan_cache.computer(batch)
    ).tokens
    nothing = np.zeros(len(batch), dtype=np.int64)
    tokens = replace(  # the message that is still to come has a place, and no weight of its own
        tokens,
        message_offsets=tokens.message_offsets + np.arange(len(batch) + 1),
        message_weights=np.insert(tokens.message_weights, tokens.message_offsets[1:], np.float32(np.nan)),
    )
    return Rendered(
        tokens=tokens,
        kept=every,
        stripped=nothing,
        failed=(),
        turns=nothing,
        unstable=nothing,
        untrained=nothing,
        appended=nothing,
    )
