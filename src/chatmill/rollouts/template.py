"""A chat template as rollouts need it: prompts, histories and labelled answers.

This is the only file of the package that asks `chatmill.render`.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import numpy as np

from chatmill.core.conversation import Conversation
from chatmill.core.kinds import Part, RoleCode, part_of, role_of
from chatmill.core.tokens import Tokens
from chatmill.errors import ChatmillError
from chatmill.render.jinja.options import Expand, TemplateOptions, Thinking, Unproved
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.render.registry import bind, own_template
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer

ANSWER_PARTS = (Part.CONTENT, Part.REASONING, Part.TOOL_CALL, Part.TERMINATOR)


class AnswerSpan(NamedTuple):
    """Characters of an answer with one origin."""

    text: str
    expression: tuple[Any, ...] | None
    """How the text follows from the message, or None for text of the template."""


class WrittenText(NamedTuple):
    """Text of the template, with the special tokens that are tokens."""

    text: str
    specials: list[tuple[int, int]]
    """Start and end of each special token in the text."""


class LabelledAnswer(NamedTuple):
    """The last answer of a conversation, cut by origin."""

    spans: list[AnswerSpan]
    """Without the stop token."""
    stop: str


class RolloutTemplate:
    """A template under fixed options, bound to a tokenizer."""

    def __init__(self, bound: ModelTemplate) -> None:
        """Take a template that writes the last answer of a conversation as it is given."""
        self.bound = bound
        self.tokenizer = bound.tokenizer
        self.options: dict[str, Any] = dict(bound.given.options)
        controls = bound.tokenizer.control_ids
        named = [controls[name] for name in bound.stops.names if name in controls]
        self.stops: list[int] = list(dict.fromkeys([*named, *bound.source.stop_ids]))
        names = [name for name in bound.tokenizer.special_tokens if name]
        self.special_ids = np.array(sorted({controls[name] for name in names}), dtype=np.int64)
        ordered = sorted(names, key=len, reverse=True)
        self.specials = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    @classmethod
    def load(
        cls,
        model: Any,
        template: str | os.PathLike[str] | JinjaSource | None,
        options: Mapping[str, Any] | None,
        date: datetime.date | None,
    ) -> RolloutTemplate:
        """Load a model's tokenizer and template."""
        tokenizer = load_tokenizer(model)
        source: Any = template
        if source is None:
            is_path = isinstance(model, str | os.PathLike)
            source = (own_template(model) or model) if is_path else model
        given = TemplateOptions(options=dict(options or {}), today=date, expand=Expand.LAST, thinking=Thinking.AS_GIVEN)
        return cls(bind(source, tokenizer, given))

    @property
    def name(self) -> str:
        """The template's name."""
        return self.bound.name

    def token_name(self, token_id: int) -> str:
        """Spell the token of an id."""
        return self.tokenizer.decode([token_id])

    def prompt_tokens(self, conversation: Conversation) -> Tokens:
        """Render a conversation and the generation prompt after it."""
        return render([conversation], self.bound, add_generation_prompt=True).tokens

    @cached_property
    def _of_documents(self) -> ModelTemplate:
        """The same template, which writes whole conversations with all of their answers."""
        given = replace(self.bound.given, expand=Expand.NONE, unproved=Unproved.UNTRAINED, whole_document=True)
        return bind(self.bound.source, self.tokenizer, given)

    def document(self, conversation: Conversation) -> Tokens:
        """Render a whole conversation; answers without a proof have the flag of repeated ones."""
        return render([conversation], self._of_documents).tokens

    def last_answer(self, conversation: Conversation) -> Tokens:
        """Render the document that trains the last answer.

        Raises:
            RecordError: The template cannot write it, or its extent cannot be proved.
        """
        tokens = render([conversation], self.bound).tokens
        return tokens.conversation(len(tokens) - 1)

    def plain(self, conversation: Conversation, *, prompt: bool) -> str | None:
        """Return the text that plain Jinja writes, or None if the template refuses."""
        options = {**self.options, **conversation.options}
        try:
            with self.bound.store.lock:
                return self.bound.plain(conversation, options, len(conversation.messages), prompt=prompt)
        except (jinja2.TemplateError, ChatmillError):
            return None

    def labelled(self, conversation: Conversation) -> WrittenText | None:
        """Return the document that trains the last answer, with its special tokens."""
        try:
            spans = self.bound.text_documents(conversation).documents[-1].spans
        except ChatmillError:
            return None
        return self._with_specials([AnswerSpan(span.text, span.expression) for span in spans])

    def answer(self, conversation: Conversation) -> LabelledAnswer:
        """Return the last answer by origin.

        Raises:
            RecordError: The template cannot write it, or its extent cannot be proved.
        """
        spans = list(self.bound.text_documents(conversation).documents[-1].spans)
        last = len(conversation.messages) - 1
        inside = [
            index
            for index, span in enumerate(spans)
            if span.message == last and part_of(span.kind) in ANSWER_PARTS and role_of(span.kind) is RoleCode.ASSISTANT
        ]
        if not inside:
            return LabelledAnswer([], "")
        body = spans[inside[0] : inside[-1] + 1]
        stop = ""
        while body and part_of(body[-1].kind) is Part.TERMINATOR:
            stop = body.pop().text + stop
        return LabelledAnswer([AnswerSpan(span.text, span.expression) for span in body], stop)

    def _with_specials(self, spans: list[AnswerSpan]) -> WrittenText:
        found: list[tuple[int, int]] = []
        size = 0
        for span in spans:
            if span.expression is None:
                found += [(size + match.start(), size + match.end()) for match in self.specials.finditer(span.text)]
            size += len(span.text)
        return WrittenText("".join(span.text for span in spans), found)

    def tail_offset(self, tokens: Tokens, message: int) -> int | None:
        """Return the offset of the first token after the stop of an answer in a longer prompt."""
        end: int | None = None
        is_stop = False
        kinds: list[int] = tokens.run_kinds.tolist()
        offsets: list[int] = tokens.run_offsets.tolist()
        for run in np.flatnonzero(tokens.run_messages == message).tolist():
            kind = kinds[run]
            if (
                role_of(kind) is RoleCode.ASSISTANT
                and part_of(kind) in ANSWER_PARTS
                and offsets[run + 1] > offsets[run]
            ):
                end, is_stop = offsets[run + 1], part_of(kind) is Part.TERMINATOR
        if end is None:
            return None
        if not is_stop and end < len(tokens.ids) and int(tokens.ids[end]) in self.stops:
            end += 1
        return end
