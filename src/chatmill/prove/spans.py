"""Proves the trained spans of a record: the context is what a model would get, the span is the answer and its stop.

For a model's template the proof is made by plain Jinja, without traced strings: P(i) is the rendering of the messages
before i with the generation prompt, A(i) that of the messages up to i.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jinja2

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, part_of, role_of
from chatmill.prove.reference import Derived, DerivedRecord, Reference
from chatmill.prove.report import VerifyReport
from chatmill.render.jinja.options import Expand
from chatmill.render.jinja.turn_sequences import TextSequence
from chatmill.render.model_template import ModelTemplate
from chatmill.render.template import Template

OTHER_CONTEXT = "its context is not the prompt that plain Jinja gives"
OTHER_ANSWER = "its text is not the answer that plain Jinja gives"


class Mismatch(NamedTuple):
    """A token of a record that is not where it must be."""

    sequence: int
    token: int
    """Its place in the whole sequence, before any overflow."""
    message: str


class SpanCheck:
    """Checks the trained messages of derived records, and counts what it could compare."""

    def __init__(self, reference: Reference, book: VerifyReport) -> None:
        """Nothing is counted yet."""
        self._reference, self._book = reference, book

    def mismatches(self, conversation: Conversation, record: DerivedRecord) -> Iterator[Mismatch]:
        """Everything that is wrong with the trained messages of a record."""
        template = self._reference.template
        if isinstance(template, ModelTemplate):
            proof = AnswerProof(template, conversation, record.options)
            for number, sequence in enumerate(record.spans):
                for index in sequence.trained:
                    self._book.counts["trained_messages"] += 1
                    said = proof.failure(sequence, index)
                    if not said:
                        self._book.counts["answers_proved"] += 1
                    elif proof.is_trained_as_changed(sequence, index):
                        self._book.counts["answers_trained_as_changed"] += 1
                    else:
                        yield Mismatch(number, 0, f"message {index}: {said}")
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


class AnswerProof:
    """Renders the prompts and answers of one conversation by plain Jinja."""

    def __init__(self, chat: ModelTemplate, conversation: Conversation, options: Mapping[str, object]) -> None:
        """`options` are those that the template was given for this conversation."""
        self._chat, self._conversation, self._options = chat, conversation, options

    def failure(self, sequence: TextSequence, index: int) -> str:
        """Why an answer of a sequence is not proved; empty where it is."""
        text = "".join(span.text for span in sequence.spans)
        at, begin, end, stops = 0, -1, -1, 0
        for span in sequence.spans:
            if span.message == index and span.breaks:
                begin = at
            at += len(span.text)
            if span.message == index and not span.kind & REPEATED and _is_stop(span.kind):
                end, stops = at, stops + 1
        if begin < 0 or stops != 1:
            return f"it has {stops} stops, and must have one"
        try:
            prompt = self._chat.plain(self._conversation, self._options, index, prompt=True)
            ended = self._chat.plain(self._conversation, self._options, index + 1, prompt=False)
        except jinja2.TemplateError as error:
            return f"plain Jinja refuses it: {error}"
        if text[:begin] != prompt:
            return OTHER_CONTEXT
        stop_begin = end - len(
            next(s.text for s in reversed(sequence.spans) if _is_stop(s.kind) and s.message == index)
        )
        answer, stop = text[begin:stop_begin], text[stop_begin:end]
        if not ended.startswith(prompt + answer):
            return OTHER_ANSWER
        rest = ended[len(prompt) + len(answer) :]
        if rest and not (stop and rest.startswith(stop)):
            return f"its stop is {stop!r}, and plain Jinja goes on with {rest[:20]!r}"
        return ""

    def is_trained_as_changed(self, sequence: TextSequence, index: int) -> bool:
        """Whether the recipe (`expand: none`) asks for the answer as later messages change it.

        The sequence must be the whole conversation as plain Jinja writes it, and must not begin with the answer's own
        rendering.
        """
        if self._chat.given.expand is not Expand.NONE:
            return False
        text, count = "".join(span.text for span in sequence.spans), len(self._conversation.messages)
        whole, ended = (
            self._chat.plain(self._conversation, self._options, upto, prompt=False) for upto in (count, index + 1)
        )
        return text == whole and not whole.startswith(ended)


def _is_stop(code: int) -> bool:
    return role_of(code) is RoleCode.ASSISTANT and part_of(code) is Part.TERMINATOR


def _spans(derived: Derived) -> dict[int, tuple[int, int]]:
    """First token, and one past the last, of every message that has tokens."""
    spans: dict[int, tuple[int, int]] = {}
    for place, message in enumerate(derived.messages):
        if message >= 0:
            spans[message] = (spans.get(message, (place, 0))[0], place + 1)
    return spans
