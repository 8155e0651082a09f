"""Proves the rows of a record under a model's template: contexts are prompts, and what is trained is the answers.

What a row must hold comes from plain Jinja (`answers.py`), and is compared with its ids and weights. Of the fast path
only a claim is used, and tested: which messages a row trains. Every answer must be trained once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import RoleCode
from chatmill.label.policy import ANSWER, Policy
from chatmill.prove.answers import PlainAnswer, PlainIds, encoded, plain_answer
from chatmill.prove.plain import PlainRecord, PlainTemplate
from chatmill.prove.plain_weights import part_weights
from chatmill.render.jinja.options import Expand, Unproved
from chatmill.render.model_template import ModelTemplate


class Row(NamedTuple):
    """One document of a record, and what is said about it."""

    ids: Sequence[int]
    weights: Sequence[float]
    trained: Mapping[int, int]
    """The messages whose answers are trained here, and the characters where they are said to begin."""


class Mismatch(NamedTuple):
    """A token of a record that is not where it must be."""

    document: int
    token: int
    """Its place in the whole document, before any overflow."""
    message: str
    ids: Sequence[int] | None = None
    """What plain Jinja gives for the document, where it is known and is not what the document has."""


_Wrong = tuple[int, str, Sequence[int] | None]
"""As in `Mismatch`."""


class AnswerCheck:
    """Compares the rows of records with what they must hold, and counts."""

    def __init__(self, chat: ModelTemplate, policy: Policy, counts: Counter[str]) -> None:
        """`counts` are added to."""
        self._chat, self._policy, self.counts = chat, policy, counts
        self._plain = PlainTemplate(chat)
        weights = {policy.weights.get((RoleCode.ASSISTANT, part), 0.0) for part in ANSWER}
        self._weight = weights.pop() if len(weights) == 1 else None
        """Of every token of an answer; None where its parts have weights of their own."""

    def mismatches(
        self, conversation: Conversation, options: Mapping[str, object], rows: Sequence[Row]
    ) -> Iterator[Mismatch]:
        """Everything that is wrong with the rows of a record."""
        record = PlainRecord(self._plain, conversation, options)
        for number, row in enumerate(rows):
            self.counts["trained_messages"] += len(row.trained)
            derived = {
                i: plain_answer(record, conversation.messages, i, self._chat.stops, self._chat.given)
                for i in row.trained
            }
            wrong = [f"message {i}: {answer}" for i, answer in derived.items() if isinstance(answer, str)]
            yield from (Mismatch(number, 0, answer) for answer in wrong)
            answers = {i: answer for i, answer in derived.items() if isinstance(answer, PlainAnswer)}
            if any(answer is None for answer in derived.values()):
                self.counts["answers_not_checked"] += len(derived) - len(wrong)
            elif not wrong:
                said = self._wrong_row(conversation, record, row, answers)
                yield from (Mismatch(number, *difference) for difference in said)
        for text in self._wrong_claims(conversation, rows):
            yield Mismatch(0, 0, text)

    def _wrong_row(
        self, conversation: Conversation, record: PlainRecord, row: Row, answers: Mapping[int, PlainAnswer]
    ) -> Iterator[_Wrong]:
        """Yield what is wrong with a row whose answers are known, each with its token and the ids it should have."""
        whole, count = record.rendering(len(conversation.messages), prompt=False), len(conversation.messages)
        if isinstance(whole, str):
            yield 0, f"plain Jinja refuses the conversation: {whole}", None
            return
        if count - 1 in answers:
            whole = answers[count - 1].text if answers[count - 1].is_appended else whole
        texts, trains_in_place = [whole], self._chat.given.expand is Expand.NONE
        if answers and not trains_in_place:
            texts.append(answers[max(answers)].text)
        if any(text.unknown for text in texts):
            self.counts["answers_not_checked"] += len(answers)
            return
        said = f"messages {sorted(answers)}: not all of them have their prompts before them"
        difference: _Wrong = (0, said, encoded(self._chat, whole, ()).ids)
        for text in texts:
            stable = {i: answer for i, answer in answers.items() if text.text.startswith(answer.text.text)}
            if len(stable) == len(answers) or trains_in_place:
                breaks = [place for i in answers for place in (stable[i].begins if i in stable else [row.trained[i]])]
                ids = encoded(self._chat, text, breaks)
                if ids.ids == list(row.ids):
                    wrong = self._wrong_weights(record, row, stable, ids)
                    yield from ((token, text, None) for token, text in wrong)
                    return
                difference = (*_first_difference(row, stable, ids), ids.ids)
        yield difference

    def _wrong_weights(
        self, record: PlainRecord, row: Row, stable: Mapping[int, PlainAnswer], ids: PlainIds
    ) -> Iterator[tuple[int, str]]:
        """Answers that are not trained as they must be, and trained tokens that are in none."""
        in_answer = np.zeros(len(row.ids), dtype=np.bool_)
        weights = np.array(row.weights, dtype=np.float32)
        for index, answer in stable.items():
            own_tokens = np.zeros(len(row.ids), dtype=np.bool_)
            for start, stop in answer.extents:
                own_tokens[ids.tokens_at[start] : ids.tokens_at[stop]] = True
            in_answer |= own_tokens
            message = record.messages[index]
            stated: Any = message.weight
            stated = (0.0 if self._policy.only_weighted_messages else 1.0) if stated is None else stated
            if self._weight is None:
                self.counts["answers_proved_but_for_parts"] += 1
                continue
            if message.spans and message.weight != 0:
                stated = part_weights(self._chat, record, index, answer, ids)
                if stated is None:
                    self.counts["answers_proved_but_for_parts"] += 1
                    continue
            expected = np.float32(self._weight) * np.asarray(stated, dtype=np.float32)
            wrong = np.flatnonzero(own_tokens & (weights != expected) & ~np.isnan(expected))
            if len(wrong):
                place = int(wrong[0])
                yield place, f"message {index}: a token of its answer has the weight {weights[place]:g}"
            else:
                self.counts["answers_proved"] += 1
        changed = [row.trained[i] for i in row.trained if i not in stable]
        self.counts["answers_trained_as_changed"] += len(changed)
        if self._policy.trains_answers_only:
            outside = np.flatnonzero((weights > 0) & ~in_answer)
            first = min((ids.tokens_at[place] for place in changed), default=len(weights))
            if len(outside) and outside[0] < first:
                yield int(outside[0]), "a token that is in no answer is trained"

    def _wrong_claims(self, conversation: Conversation, rows: Sequence[Row]) -> Iterator[str]:
        """Answers that are trained twice, or not at all, or must not be trained."""
        messages, options = conversation.messages, self._chat.given
        wanted = [k for k, message in enumerate(messages) if message.role is Role.ASSISTANT and message.weight != 0]
        if options.last_turn_only:
            last = max((k for k, message in enumerate(messages) if message.role is Role.USER), default=-1)
            wanted = [k for k in wanted if k > last]
        if options.expand is Expand.LAST:
            wanted = wanted[-1:]
        claimed = Counter(index for row in rows for index in row.trained)
        for index in sorted({*wanted, *claimed}):
            if index not in wanted:
                yield f"message {index}: it must not be trained"
            elif claimed[index] > 1:
                yield f"message {index}: its answer is trained {claimed[index]} times"
            elif not claimed[index] and options.unproved is Unproved.UNTRAINED:
                self.counts["answers_left_untrained"] += 1
            elif not claimed[index]:
                yield f"message {index}: its answer is trained in no row"


def _first_difference(row: Row, answers: Mapping[int, PlainAnswer], ids: PlainIds) -> tuple[int, str]:
    """Return where a row is not what it must be."""
    pairs = enumerate(zip(row.ids, ids.ids, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(row.ids), len(ids.ids)))
    for index in sorted(answers):
        begin, end = ids.tokens_at[answers[index].begin], ids.tokens_at[len(answers[index].text.text)]
        if place < begin:
            return place, f"message {index}: its context is not the prompt that plain Jinja gives"
        if place < end:
            return place, f"message {index}: its text is not the answer that plain Jinja gives"
    return place, "the row is not the conversation that plain Jinja gives"
