"""Proves the trained messages of a record: the context is what a model would get, what is trained is its answer."""

from __future__ import annotations

from collections.abc import Iterator

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import Part, part_of
from chatmill.prove.answer_check import AnswerCheck, Mismatch
from chatmill.prove.reference import Derived, DerivedRecord, Reference
from chatmill.prove.report import VerifyReport
from chatmill.render.model_template import ModelTemplate
from chatmill.render.template import Template


class SpanCheck:
    """Checks the trained messages of derived records, and counts what it could compare."""

    def __init__(self, reference: Reference, book: VerifyReport) -> None:
        """Nothing is counted yet."""
        self._reference, self._book = reference, book
        chat = reference.template
        self._answers = AnswerCheck(chat, reference.policy, book.counts) if isinstance(chat, ModelTemplate) else None

    def mismatches(self, conversation: Conversation, record: DerivedRecord) -> Iterator[Mismatch]:
        """Everything that is wrong with the trained messages of a record."""
        template = self._reference.template
        if self._answers is not None:
            yield from self._answers.mismatches(conversation, record.options, record.rows)
        elif isinstance(template, Template):
            for number, derived in enumerate(record.sequences):
                yield from self._contexts(conversation, derived, number, template.prefix_stable)

    def _contexts(
        self, conversation: Conversation, derived: Derived, sequence: int, prefix_stable: bool
    ) -> Iterator[Mismatch]:
        """For a template in Python: what comes before an answer is its generation prompt."""
        for index, (first, last) in sorted(_spans(derived).items()):
            if not any(weight > 0 for weight in derived.weights[first:last]):
                continue
            self._book.counts["trained_messages"] += 1
            if conversation.messages[index].role is not Role.ASSISTANT:
                continue
            answer = first
            while answer < last and part_of(derived.kinds[answer]) is Part.HEADER:
                answer += 1
            if answer == first:
                self._book.counts["answers_that_go_on"] += 1  # the model itself opens this message
            elif not derived.is_whole:
                self._book.counts["contexts_cut"] += 1
            elif not index or derived.ids[:answer] == self._reference.prompt(conversation, index):
                self._book.counts["contexts_equal"] += 1
            elif prefix_stable:
                yield Mismatch(sequence, first, f"the context of message {index} is not its generation prompt")
            else:
                self._book.counts["contexts_that_change"] += 1


def _spans(derived: Derived) -> dict[int, tuple[int, int]]:
    """First token, and one past the last, of every message that has tokens."""
    spans: dict[int, tuple[int, int]] = {}
    for place, message in enumerate(derived.messages):
        if message >= 0:
            spans[message] = (spans.get(message, (place, 0))[0], place + 1)
    return spans
