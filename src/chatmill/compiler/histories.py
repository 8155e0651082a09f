"""What a model is given as history when it is served: a rule that changes the prompt of every answer before rendering.

Every trained answer is rendered after the history that the rule gives it. Answers whose histories go on from each other
share a conversation; the others get one of their own, in which earlier answers are context. What comes back is a
rendering of the records as they were read: rows, and messages counted as the record has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.ledger import HISTORY_CHANGED, HISTORY_ROWS
from chatmill.core.messages import MessageColumns
from chatmill.core.shared_rows import SharedRows
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError, RecordError
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render_batch
from chatmill.render.sampled_calls import find_calls

Ints = NDArray[np.int64]
LINES = "{lines}"
IN_MESSAGE = re.compile(r"messages\[(\d+)\]")
OBSERVERS = {"tool": RoleCode.TOOL, "user": RoleCode.USER}


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a conversation is in the prompt of an answer. What comes before the first answer always is."""

    observations: Annotated[int, Meta(ge=1)] | None = None
    """Keep the texts of the last observations, so many; earlier ones become `elided`."""
    roles: Annotated[tuple[Literal["tool", "user"], ...], Meta(min_length=1)] = ("tool",)
    """Whose messages are observations, from the first answer on."""
    elided: str = f"Old environment output: ({LINES} lines omitted)"
    """What takes the place of an earlier observation's text; `{lines}` is how many lines that has."""
    exchanges: Annotated[int, Meta(ge=1)] | None = None
    """Keep the last answers, so many, each with what follows it; leave earlier ones out."""

    def __post_init__(self) -> None:
        """A rule says something."""
        if self.observations is None and self.exchanges is None:
            raise ConfigError("history keeps everything: give observations, exchanges or both")

    def before(self, roles: Sequence[int], answer: int) -> list[int]:
        """Return the messages in the prompt of an answer; `~k` for message k if its text is elided."""
        answers = [k for k in range(answer) if roles[k] == RoleCode.ASSISTANT]
        if not answers:
            return list(range(answer))
        start = answers[0]
        if self.exchanges is not None and len(answers) > self.exchanges:
            start = answers[-self.exchanges]
        observers = {OBSERVERS[role] for role in self.roles}
        seen = [k for k in range(answers[0], answer) if roles[k] in observers]
        old = set() if self.observations is None else set(seen[: -self.observations])
        return [*range(answers[0]), *(~k if k in old else k for k in range(start, answer))]


def render_after(
    batch: Conversations, template: ModelTemplate, history: History | None
) -> tuple[Rendered, dict[int, Counter[str]]]:
    """Render conversations, each answer after the history it will see; collect failures.

    Also return the ledger notes of the conversations that the rule changes.
    """
    if history is None:
        return render_batch(batch, template), {}
    expanded = _Expanded(batch, history, template)
    rendered = expanded.folded(render_batch(expanded.conversations, template, expanded.is_new))
    failed = {index for index, _ in rendered.failed}
    return rendered, {place: notes for place, notes in expanded.notes.items() if place not in failed}


class _Variant(NamedTuple):
    """A conversation with the answers whose histories it holds."""

    messages: list[int]
    """As `History.before` gives them."""
    trained: set[int]


def _variants(history: History, roles: Sequence[int], trained: Sequence[int]) -> list[_Variant]:
    """Return as few conversations as have every trained answer after its own history."""
    variants: list[_Variant] = []
    for answer in trained:
        messages, answers = [*history.before(roles, answer), answer], {answer}
        if variants and messages[: len(variants[-1].messages)] == variants[-1].messages:
            answers |= variants.pop().trained
        variants.append(_Variant(messages, answers))
    if not variants:
        return [_Variant(list(range(len(roles))), set())]
    variants[-1].messages.extend(range(trained[-1] + 1, len(roles)))
    return variants


class _Expanded:
    """Records as the conversations that their answers are trained in."""

    def __init__(self, batch: Conversations, history: History, template: ModelTemplate) -> None:
        calls = None if template.given.only_drift else find_calls(batch)
        self._batch = batch
        self.notes: dict[int, Counter[str]] = {}
        owners, counts, places, elided, context = (list[int]() for _ in range(5))
        for index, (first, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
            roles = batch.messages.roles[first:end].tolist()
            answers = [k for k, role in enumerate(roles) if role == RoleCode.ASSISTANT]
            trained = [k for k in answers if batch.messages.weights[first + k] != 0]
            if template.given.last_turn_only:
                user = max((k for k, role in enumerate(roles) if role == RoleCode.USER), default=-1)
                trained = [k for k in trained if k > user]
            variants = _variants(history, roles, trained)
            if calls is not None and calls[index]:  # the prompts that were sent are known
                variants = [_Variant(list(range(len(roles))), set(answers))]
            changed: set[int] = set()
            for messages, variant_answers in variants:
                owners.append(index)
                counts.append(len(messages))
                elided += [len(places) + at for at, k in enumerate(messages) if k < 0]
                spoken = (at for at, k in enumerate(messages) if k >= 0 and roles[k] == RoleCode.ASSISTANT)
                context += [len(places) + at for at in spoken if messages[at] not in variant_answers]
                places += [first + (k if k >= 0 else ~k) for k in messages]
                changed |= set(range(messages[-1])) - set(messages) if messages else set()
            if changed:
                self.notes[index] = Counter({HISTORY_CHANGED: len(changed), HISTORY_ROWS: len(variants) - 1})
        self._owners, self._places = np.array(owners, dtype=np.int64), np.array(places, dtype=np.int64)
        whole = np.delete(np.arange(len(places)), elided)
        self.is_new = np.zeros(len(places), dtype=np.bool_)
        """Whether a message is in none of the conversations before: what is not shown of it counts here."""
        self.is_new[whole[np.unique(self._places[whole], return_index=True)[1]]] = True
        self.conversations = replace(
            batch.take(self._owners),
            messages=_changed(batch.messages.take(self._places), history, elided, context),
            offsets=offsets_of(np.array(counts, dtype=np.int64)),
        )

    def folded(self, rendered: Rendered) -> Rendered:
        """Return the rows as those of the records; a record with an error in any of its conversations has none."""
        failed: dict[int, RecordError] = {}
        for index, error in sorted(rendered.failed, key=itemgetter(0)):
            first, record = int(self.conversations.offsets[index]), int(self._owners[index])
            if named := IN_MESSAGE.match(error.path):
                message = self._places[first + int(named[1])] - self._batch.offsets[record]
                error.path = f"messages[{message}]{error.path[named.end() :]}"
            failed.setdefault(record, error)
        if failed:
            rendered = rendered.take(np.flatnonzero(~np.isin(self._owners[rendered.kept], list(failed))))
        records, tokens = self._owners[rendered.kept], rendered.tokens
        begins, starts = self._batch.offsets[records], self.conversations.offsets
        documents = np.repeat(np.arange(len(tokens)), np.diff(tokens.document_runs))
        of_message = np.flatnonzero(tokens.run_messages >= 0)
        at = starts[rendered.kept[documents[of_message]]] + tokens.run_messages[of_message]
        run_messages = tokens.run_messages.copy()
        run_messages[of_message] = self._places[at] - begins[documents[of_message]]
        counts, here = np.diff(self._batch.offsets)[records], np.diff(starts)[rendered.kept]
        offsets = offsets_of(counts)
        weights = self._batch.messages.weights[ranges(begins, counts)].astype(np.float32)
        shown = ranges(starts[rendered.kept], here)
        at = np.repeat(offsets[:-1] - begins, here) + self._places[shown]
        weights[at] = self.conversations.messages.weights[shown]
        tokens = replace(tokens, run_messages=run_messages, message_offsets=offsets, message_weights=weights)
        return replace(rendered, rows=SharedRows.apart(tokens), kept=records, failed=tuple(failed.items()))


def _changed(messages: MessageColumns, history: History, elided: list[int], context: list[int]) -> MessageColumns:
    """Messages of which some have another text, and some answers are context: these are what their text gives."""
    old, others = np.array(elided, dtype=np.int64), np.array(context, dtype=np.int64)
    sizes = [len(text.splitlines()) for text in messages.contents.take(old)]
    texts = Texts.of([history.elided.replace(LINES, str(size)) for size in sizes])
    weights, has_content = messages.weights.copy(), messages.has_content.copy()
    weights[others], has_content[old] = 0.0, True
    parts = messages.parts
    if len(messages.pictured):
        parts = parts.copy()
        for place in elided:
            parts[place] = ()
    spans = messages.spans
    if len(messages.with_spans):
        spans = spans.copy()
        for place in elided:
            spans[place] = ()
    return replace(
        messages,
        spans=spans,
        contents=messages.contents.replaced(old, texts),
        has_content=has_content,
        weights=weights,
        parts=parts,
        token_ids=messages.token_ids.without(others),
        prompt_token_ids=messages.prompt_token_ids.without(others),
        logprobs=messages.logprobs.without(others),
    )
