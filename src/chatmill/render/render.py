"""Renders conversations: finds the plan of each, and writes all documents at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.gc_pause import without_collector
from chatmill.core.kinds import REPEATED
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of, ranges, segment_sums
from chatmill.errors import RecordError
from chatmill.images.expand import NO_PICTURES, PictureRuns, look_at
from chatmill.images.files import Shown
from chatmill.render.documents import Counts
from chatmill.render.fill import Entries, fill
from chatmill.render.lost_texts import count_lost
from chatmill.render.model_template import ModelTemplate
from chatmill.render.part_weights import flag_context, split_runs
from chatmill.render.plans import FoundPlans, find_plans, plan_prompt
from chatmill.render.registry import bind
from chatmill.render.sampled import NOTES, has_samples, with_samples
from chatmill.render.sampled_calls import find_calls, lay_calls
from chatmill.render.sampled_context import LastAnswers, check_context
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
PER_DOCUMENT = (
    "kept",
    "stripped",
    "lost",
    "turns",
    "unstable",
    "untrained",
    "appended",
    "as_sampled",
    "mixed",
    "sampled",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Rendered:
    """Tokens of the conversations that could be rendered, in order, and the ones that could not."""

    rows: SharedRows
    """One for each document; a conversation whose turns cannot share one has several, next to each other."""
    kept: Ints
    """Index of the conversation of each document in the input."""
    stripped: Ints
    """Characters of contents and reasoning that no document of the conversation shows; 0 but for its first document."""
    lost: Ints
    """The stripped characters that are more than white space around a text, by the columns of `count_lost`."""
    failed: tuple[tuple[int, RecordError], ...]
    """Input index and error of each conversation that the template refused; empty unless failures are collected."""
    turns: Ints
    """Answers of each document's conversation that are trained; 0 but for its first document."""
    unstable: Ints
    """Those of them that later messages change."""
    untrained: Ints
    """Answers that are context because their mask cannot be proved."""
    appended: Ints
    """Answers whose stop the template itself does not write."""
    as_sampled: Ints
    """Answers that are trained as a model writes them, which the template's history does not have."""
    mixed: Ints
    """Tokens of each document that cover characters of different weights, and have the smallest."""
    sampled: Ints
    """One line per document about sampled tokens, a column for each of `render.sampled.NOTES`."""
    pictures: PictureRuns = NO_PICTURES
    """The runs of the tokens that are pictures."""

    @classmethod
    def of(cls, rows: SharedRows, kept: Ints, **counts: Ints) -> Rendered:
        """Return a rendering; what is not counted is 0."""
        columns: dict[str, Any] = dict.fromkeys(PER_DOCUMENT, np.zeros(len(kept), dtype=np.int64))
        columns |= {"lost": np.zeros((len(kept), 3), np.int64), "sampled": np.zeros((len(kept), len(NOTES)), np.int64)}
        return cls(rows=rows, failed=(), **{**columns, **counts, "kept": kept})

    @property
    def tokens(self) -> Tokens:
        """All tokens of the documents."""
        return self.rows.whole

    def take(self, chosen: Ints) -> Rendered:
        """Return the chosen documents, in that order."""
        counts = {name: getattr(self, name)[chosen] for name in PER_DOCUMENT}
        pictures, runs = self.pictures, self.tokens.document_runs
        if len(pictures.runs):
            pictures = pictures.taken(ranges(runs[chosen], np.diff(runs)[chosen]))
        return replace(self, rows=SharedRows.apart(self.tokens.take(chosen)), pictures=pictures, **counts)

    def without(self, failed: Mapping[int, RecordError], batch: Conversations) -> Rendered:
        """Return the rendering without the conversations that have an error."""
        if not failed:
            return self
        for index, error in failed.items():
            error.record_id = error.record_id or batch.ids[index]
            error.where = error.where or batch.wheres[index]
        stays = ~np.isin(self.kept, list(failed))
        kept = self if stays.all() else self.take(np.flatnonzero(stays))
        return replace(kept, failed=tuple(sorted([*self.failed, *failed.items()], key=itemgetter(0))))

    @classmethod
    def joined(cls, parts: Sequence[Rendered]) -> Rendered:
        """Renderings of different conversations of one batch as one, in the order of the batch."""
        counts: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_DOCUMENT
        }
        firsts = offsets_of(np.array([len(part.tokens.run_kinds) for part in parts], dtype=np.int64))
        runs = [part.pictures.runs + first for part, first in zip(parts, firsts.tolist(), strict=False)]
        pictures = PictureRuns(np.concatenate(runs), [shown for part in parts for shown in part.pictures.pictures])
        failed = sorted((pair for part in parts for pair in part.failed), key=itemgetter(0))
        rows = SharedRows.apart(Tokens.joined([part.tokens for part in parts]))
        whole = cls(rows=rows, failed=tuple(failed), pictures=pictures, **counts)
        return whole.take(np.argsort(whole.kept, kind="stable"))

    def __repr__(self) -> str:
        facts = (
            ("conversations", len(np.unique(self.kept))),
            ("refused by the template", len(self.failed)),
            ("documents", len(self.kept)),
            ("tokens", len(self.tokens.ids)),
            ("characters that are not shown", int(self.stripped.sum())),
            ("turns that later messages change", int(self.unstable.sum())),
            ("turns without proof", int(self.untrained.sum())),
            ("stops that the template does not write", int(self.appended.sum())),
            ("answers as they are sampled", int(self.as_sampled.sum())),
        )
        said = ", ".join(f"{count:,} {words}" for words, count in facts if count)
        first = f"; first refused: {self.failed[0][1]}" if self.failed else ""
        return f"Rendered({said}{first})"


def render(
    conversations: Sequence[Conversation],
    template: ModelTemplate | str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    collect_failures: bool = False,
    add_generation_prompt: bool = False,
) -> Rendered:
    """Render conversations; all their text is encoded in one call.

    `template` is a bound template, or a name or path that is bound to `tokenizer`. The first conversation that the
    template cannot write raises its `RecordError`; with `collect_failures` it is left out and reported instead.
    """
    bound = template if isinstance(template, ModelTemplate) else bind(template, tokenizer)
    batch = conversations if isinstance(conversations, Conversations) else _columns_of(conversations)
    rendered = render_batch(batch, bound, add_generation_prompt=add_generation_prompt)
    if rendered.failed and not collect_failures:
        raise rendered.failed[0][1]
    return rendered


def render_batch(batch: Conversations, bound: ModelTemplate, *, add_generation_prompt: bool = False) -> Rendered:
    """Render conversations, with failures collected."""
    with bound.store.lock:
        bound.store.forget_if_full()
        is_calls = find_calls(batch) if not (add_generation_prompt or bound.given.only_drift) else None
        if add_generation_prompt:
            rendered = _render_prompts(batch, bound)
        elif is_calls is None:
            rendered = _rendered(batch, bound)
        else:
            calls, others = np.flatnonzero(is_calls), np.flatnonzero(~is_calls)
            rendered = _with_others(_of_calls(batch, calls, bound), batch, others, bound)
    rendered = _with_pictures(rendered, batch, bound)
    if rendered.rows.own.part_weights is None:
        return rendered
    return replace(rendered, rows=SharedRows.apart(flag_context(rendered.rows.own)))


def _rendered(batch: Conversations, bound: ModelTemplate) -> Rendered:
    """Return what the template makes of conversations, with the tokens that messages bring along."""
    with without_collector():
        plans = find_plans(batch, bound)
    rendered = _filled(batch, bound, plans)
    return _with_samples(rendered, batch, bound) if has_samples(batch) else rendered


def _with_others(calls: Rendered, batch: Conversations, others: Ints, bound: ModelTemplate) -> Rendered:
    """Return the rows of calls among those of the conversations that a template renders."""
    if not len(others):
        return calls
    rest = _rendered(batch.take(others), bound)
    failed = tuple((int(others[index]), error) for index, error in rest.failed)
    return Rendered.joined([calls, replace(rest, kept=others[rest.kept], failed=failed)])


def _with_samples(rendered: Rendered, batch: Conversations, bound: ModelTemplate) -> Rendered:
    """Return a rendering in which sampled answers are the tokens that were sampled."""
    samples = with_samples(rendered.tokens, rendered.kept, batch, bound)
    if len(samples.doubtful):
        samples = check_context(samples, rendered.kept, batch, lambda some: _last_answers(some, bound))
    rendered = replace(rendered, rows=SharedRows.apart(samples.tokens), sampled=samples.counts)
    return rendered.without(samples.failed, batch)


def _last_answers(batch: Conversations, bound: ModelTemplate) -> LastAnswers:
    """Return what the template writes for conversations that end in an answer, and how its sampled tokens fit there."""
    with without_collector():
        plans = find_plans(batch, bound)
    written = _filled(batch, bound, plans)
    return LastAnswers(with_samples(written.tokens, written.kept, batch, bound), written.kept, dict(written.failed))


def _of_calls(batch: Conversations, places: Ints, bound: ModelTemplate) -> Rendered:
    """Records of whole calls, which need no template."""
    laid = lay_calls(batch, places, bound)
    is_first = np.diff(laid.kept, prepend=-1) > 0
    turns = np.where(is_first, np.diff(batch.offsets)[laid.kept], 0)
    rendered = Rendered.of(SharedRows.apart(laid.tokens), laid.kept, turns=turns, sampled=laid.counts)
    return rendered.without(laid.failed, batch)


def _columns_of(conversations: Sequence[Conversation]) -> Conversations:
    try:
        return Conversations.of(conversations)
    except UnicodeEncodeError as error:
        place = next(number for number, conversation in enumerate(conversations) if not _has_utf8_form(conversation))
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


def _filled(batch: Conversations, bound: ModelTemplate, plans: FoundPlans) -> Rendered:
    """Return the rows of all conversations that have a plan."""
    kept, table = plans.conversations, bound.store.slots.table
    filled = fill(table, plans.entries, kept, batch, bound.tokenizer, bound.form)
    stripped, lost = count_lost(filled.layout, filled.rows.own.document_runs, kept, table.table, batch)
    of_conversations = np.column_stack([plans.counts, stripped, lost])
    is_first = np.diff(kept, prepend=-1) > 0
    counts = np.where(is_first[:, None], of_conversations[kept], 0)
    names = (*Counts._fields, "stripped")
    named = dict(zip(names, counts.T, strict=False))
    rows, failed = filled.rows, plans.failed
    if filled.parts is not None:
        tokens = split_runs(replace(rows.own, part_weights=filled.parts.weights))
        is_mixed = filled.parts.is_mixed & ((tokens.kinds & REPEATED) == 0)
        named["mixed"] = segment_sums(is_mixed, tokens.offsets)
        rows, failed = SharedRows.apart(tokens), dict(filled.parts.failed) | failed
    return Rendered.of(rows, kept, lost=counts[:, len(names) :], **named).without(failed, batch)


def _with_pictures(rendered: Rendered, batch: Conversations, bound: ModelTemplate) -> Rendered:
    """Return a rendering with the tokens of pictures in the places of their placeholders."""
    if bound.expander is None:
        return rendered
    shown: dict[int, list[Shown]] = {}
    if len(batch.messages.pictured):
        wanted = np.zeros(len(batch), dtype=np.bool_)
        wanted[rendered.kept] = True
        shown, bad = look_at(batch, bound.pictures, wanted)
        rendered = rendered.without(bad, batch)
    rendered = rendered.without(bound.expander.misplaced(rendered.tokens, rendered.kept, batch, shown), batch)
    rendered = rendered.without(bound.expander.spelled(rendered.tokens, rendered.kept), batch)
    tokens, pictures = bound.expander.expanded(rendered.tokens, rendered.kept, shown)
    return replace(rendered, rows=SharedRows.apart(tokens), pictures=pictures)


def _render_prompts(batch: Conversations, bound: ModelTemplate) -> Rendered:
    """Every conversation up to where an answer begins, one by one."""
    plans = [plan_prompt(batch[index], bound) for index in range(len(batch))]
    every = np.arange(len(batch), dtype=np.int64)
    columns = np.concatenate([np.empty((0, 2), dtype=np.int64), *(plan.entries for plan in plans)])
    entries = Entries(columns[:, 0], columns[:, 1], np.array([plan.sizes[0] for plan in plans], dtype=np.int64))
    tokens = fill(bound.store.slots.table, entries, every, batch, bound.tokenizer, bound.form).rows.own
    tokens = replace(  # the message that is still to come has a place, and no weight of its own
        tokens,
        message_offsets=tokens.message_offsets + np.arange(len(batch) + 1),
        message_weights=np.insert(tokens.message_weights, tokens.message_offsets[1:], np.float32(np.nan)),
    )
    return Rendered.of(SharedRows.apart(tokens), every)
