"""`chatmill.Renderer`: prompts, stops, parsed answers and next prompts of any chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from chatmill.core.conversation import Conversation, Message
from chatmill.core.tokens import Tokens
from chatmill.errors import ConfigError, member, short_errors
from chatmill.render.model_template import ModelTemplate
from chatmill.rollouts.grammar import Grammar, derive_grammar
from chatmill.rollouts.messages import conversation as parse_conversation
from chatmill.rollouts.messages import openai_message
from chatmill.rollouts.proof import Prover, candidates, tool_names, tool_types
from chatmill.rollouts.reader import NAME, Reader, Reading
from chatmill.rollouts.report import report
from chatmill.rollouts.response_template import response_template
from chatmill.rollouts.sampled_text import SampledText
from chatmill.rollouts.stability import unstable_probes
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import (
    Answer,
    CallStatus,
    Extension,
    HistoryKind,
    ParsedCall,
    Prompt,
    Proof,
    Reason,
    Rollout,
)

REASONS = {reason.value: reason for reason in Reason}
UNSEEN_MARKS = (
    *("<tool_call>", "<tool_calls>", "<function_call>", "<function=", "[TOOL_CALLS]", "<|tool_call", "<|python_tag|>"),
    *(
        "<|action_start|>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<|tool_calls_section_begin|>",
        "<|START_ACTION|>",
    ),
    *("<\uff5cDSML\uff5c", "<invoke ", "<arg_key>"),
)
"""Marks of calls in the field, which text is not where a template shows no form of calls."""


class Renderer:
    """Derives prompts, stops, parsed answers and next prompts from a chat template.

    Every parsed message is proved: the template writes the prompt and exactly this answer from it.

        renderer = chatmill.Renderer("./MyModel")
        prompt = renderer.prompt(messages, tools=tools)
        answer = renderer.parse(prompt, sampled_ids)
        following = renderer.extend(prompt, sampled_ids, [{"role": "user", "content": "Go on."}])
    """

    @short_errors
    def __init__(
        self,
        model: Any,
        template: Any = None,
        options: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        """Load a model's tokenizer and template, and derive the grammar of its answers.

        Args:
            model: Model folder, tokenizer, or loaded tokenizer of transformers.
            template: Name or path of a template. Default: the model's own.
            options: Options of the template, such as `enable_thinking`.
            date: Date for templates that ask for one, as YYYY-MM-DD.
        """
        day = None if date is None else datetime.date.fromisoformat(date)
        self._template = (
            model if isinstance(model, RolloutTemplate) else RolloutTemplate.load(model, template, options, day)
        )
        self.grammar: Grammar = derive_grammar(self._template)
        self._loose = self.grammar.loosened()

    @property
    def name(self) -> str:
        """Name of the template."""
        return self._template.name

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the template is bound to."""
        return self._template.tokenizer

    @property
    def template(self) -> RolloutTemplate:
        """The template under its options."""
        return self._template

    @property
    def bound(self) -> ModelTemplate:
        """The template, bound to the tokenizer."""
        return self._template.bound

    @property
    def stops(self) -> list[int]:
        """Ids of all tokens that can end an answer."""
        return list(self._template.stops)

    @cached_property
    def is_prefix_stable(self) -> bool:
        """Whether later messages change nothing that the template writes before them."""
        return not unstable_probes(self._template)

    def report(self) -> str:
        """Describe the stops, the form of calls, and what is not derived, in plain words."""
        return report(self._template, self.grammar)

    @short_errors
    def response_template(self) -> dict[str, Any]:
        """Export the grammar for `parse_response` of transformers, as far as its format can say it.

        Raises:
            ConfigError: It cannot, with the reason.
        """
        return response_template(self._template, self.grammar)

    # ---- prompts

    @short_errors
    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> Prompt:
        """Render messages and the generation prompt after them.

        Raises:
            RecordError: The template refuses the messages.
        """
        return self.prompt_of(parse_conversation(messages, tools))

    def prompt_of(self, conversation: Conversation) -> Prompt:
        """Render a conversation and the generation prompt after it."""
        tokens = self._template.prompt_tokens(conversation)
        text = self._template.plain(conversation, prompt=True)
        return Prompt(
            ids=tokens.ids.tolist(),
            kinds=tokens.kinds,
            messages=tokens.messages,
            conversation=conversation,
            text=text or "",
        )

    @short_errors
    def document(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, last_answer: bool = False
    ) -> Tokens:
        """Render a whole conversation, without a generation prompt.

        Args:
            messages: The messages.
            tools: Tool definitions.
            last_answer: Write the last answer after its own prompt, and nothing after it.

        Raises:
            RecordError: The template refuses the messages.
        """
        conversation = parse_conversation(messages, tools)
        return self._template.last_answer(conversation) if last_answer else self._template.document(conversation)

    # ---- answers

    @short_errors
    def parse(
        self,
        prompt: Prompt,
        sampled_ids: Sequence[int],
        tools: Sequence[Any] | None = None,
        finish_reason: str | None = None,
    ) -> Answer:
        """Parse what a model sampled after a prompt.

        Args:
            prompt: What the model was given.
            sampled_ids: The ids that it sampled, with the stop token at their end.
            tools: Tool definitions. Default: those of the prompt.
            finish_reason: What the server said. `stop` accepts ids without the stop token; `length` names the cut.

        Returns:
            The answer. It has no proof if the ids are cut off, malformed, or not written like this by the template.
        """
        return self._parse(prompt, SampledText(sampled_ids, self._template), tools, finish_reason)

    def _parse(
        self, prompt: Prompt, sampled: SampledText, tools: Sequence[Any] | None, finish_reason: str | None
    ) -> Answer:
        given = prompt.conversation.tools if tools is None else tools
        needs_stop = not (sampled.stop is None and finish_reason == "stop")
        first_id = sum(len(message.tool_calls) for message in prompt.conversation.messages)
        types = tool_types(given)
        prover = Prover(self._template, self.grammar, prompt.text, prompt.conversation)
        has_stop = sampled.stop is not None or not needs_stop
        broken: Reading | None = None
        for reading in Reader(sampled.text, self.grammar).readings() if sampled.is_valid else ():
            if self._is_suspicious(reading):
                broken = broken or reading
                continue
            proved = []
            for candidate in candidates(reading, types, first_id):
                if prover.is_written(candidate.message, sampled, needs_stop=needs_stop and has_stop):
                    proved.append(candidate.message)
                    if candidate.is_decided:
                        break
            if proved:
                return self._proved(_different(proved), reading, sampled, given, has_stop, finish_reason)
        return self._unproved(broken, sampled, types, given, first_id, finish_reason)

    def _is_suspicious(self, reading: Reading) -> bool:
        """Tell whether a reading has a broken call, or the mark of one in its content."""
        if reading.is_broken or not reading.is_whole:
            return True
        if not self.grammar.has_calls:
            return any(mark in reading.content for mark in UNSEEN_MARKS)
        keys = [key for call in reading.calls for key in call.values]
        if self.grammar.unmarked_calls and not all(map(NAME.fullmatch, keys)):
            return True  # a part of a value that was taken for the next key
        return self.grammar.spells_call(reading.content)

    def _proved(
        self,
        messages: list[Message],
        reading: Reading,
        sampled: SampledText,
        tools: Sequence[Any],
        has_stop: bool,
        finish_reason: str | None,
    ) -> Answer:
        """Return the answer of a reading that the template writes."""
        readings = tuple(openai_message(message) for message in messages)
        is_ambiguous = len(messages) > 1
        status = CallStatus.TWO_READINGS if is_ambiguous else CallStatus.OK
        calls = self._calls(reading, messages[0], sampled, tools, status)
        proof, reason = Proof.WRITTEN, None
        if is_ambiguous:
            proof, reason = Proof.AMBIGUOUS, Reason.TWO_READINGS
        if not has_stop:
            proof, reason = Proof.NOT_WRITTEN, _cut(finish_reason)
        message = readings[0]
        if not has_stop:
            message = {"role": "assistant", "content": sampled.text}
        return Answer(
            message=message,
            proof=proof,
            reason=reason,
            calls=calls,
            finished=has_stop,
            readings=() if proof is Proof.WRITTEN else readings,
        )

    def _calls(
        self, reading: Reading, message: Message | None, sampled: SampledText, tools: Sequence[Any], status: CallStatus
    ) -> tuple[ParsedCall, ...]:
        """Return the calls of a reading, with their tokens."""
        names = tool_names(tools)
        found: list[ParsedCall] = []
        for index, call in enumerate(reading.calls):
            own = call.status if call.status is not CallStatus.OK else status
            if own is CallStatus.OK and names and call.name not in names:
                own = CallStatus.UNKNOWN_TOOL
            start, end = sampled.tokens(call.start, call.end)
            arguments = call.arguments or ""
            if message is not None:
                arguments = message.tool_calls[index].arguments
            elif call.arguments is None and call.status is CallStatus.OK:
                arguments = json.dumps({key: value.text for key, value in call.values.items()}, ensure_ascii=False)
            raw = sampled.text[call.start : call.end]
            found.append(ParsedCall(name=call.name, arguments=arguments, raw=raw, start=start, end=end, status=own))
        return tuple(found)

    def _unproved(
        self,
        broken: Reading | None,
        sampled: SampledText,
        types: Mapping[tuple[str, str], frozenset[str]],
        tools: Sequence[Any],
        first_id: int,
        finish_reason: str | None,
    ) -> Answer:
        """Return an answer without proof: its content is all of the text."""
        loose = next(iter(Reader(sampled.text, self._loose, is_loose=True).readings()), None)
        guess = loose if loose is not None and not self._is_suspicious(loose) else None
        reading = guess or broken or Reading()
        readings: tuple[dict[str, Any], ...] = ()
        message: Message | None = None
        if guess is not None:
            message = next(candidates(guess, types, first_id)).message
            readings = (openai_message(message),)
        return Answer(
            message={"role": "assistant", "content": sampled.text},
            proof=Proof.NOT_WRITTEN,
            reason=self._reason(broken, sampled, finish_reason),
            calls=self._calls(reading, message, sampled, tools, CallStatus.OK),
            finished=sampled.stop is not None,
            readings=readings,
        )

    def _reason(self, broken: Reading | None, sampled: SampledText, finish_reason: str | None) -> Reason:
        """Return the first reason against a proof."""
        if not sampled.is_valid:
            return Reason.INVALID_UTF8
        if sampled.stop is None and finish_reason != "stop":
            return _cut(finish_reason)
        bad = next((call for call in broken.calls if call.status is not CallStatus.OK), None) if broken else None
        if bad is not None:
            return REASONS[bad.status.value]
        if not self.grammar.has_calls and any(mark in sampled.text for mark in UNSEEN_MARKS):
            return Reason.FORM_NOT_DERIVED
        if broken is not None and self.grammar.spells_call(broken.content):
            return Reason.MALFORMED_CALL
        literals = "".join(edge.literal for edges in self.grammar.edges.values() for edge in edges)
        if any(sampled.text[start:end] not in literals for start, end in sampled.specials):
            return Reason.SPECIAL_IN_TEXT
        return Reason.STRIPPED_TEXT

    # ---- next prompts

    @short_errors
    def extend(
        self,
        prompt: Prompt,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        history: str = HistoryKind.SAMPLED,
        answer: Answer | None = None,
        finish_reason: str | None = None,
    ) -> Extension:
        """Return the prompt of the next call.

        Args:
            prompt: What the model was given.
            sampled_ids: The ids that it sampled.
            new_messages: Messages after the answer: results of tools, or a user's.
            history: `sampled` keeps the ids that were sent and sampled; `template` renders the whole history again.
            answer: The parsed answer, if it is known.
            finish_reason: What the server said.

        Raises:
            ExtensionRefused: It cannot be proved what follows the sampled ids.
        """
        kind = member(HistoryKind, "history", history)
        sampled = SampledText(sampled_ids, self._template)
        if answer is None:
            answer = self._parse(prompt, sampled, None, finish_reason)
        from chatmill.rollouts.extend import Extender

        return Extender(self._template, prompt, list(map(int, sampled_ids)), sampled, answer).extension(
            parse_conversation(new_messages, None).messages if new_messages else (), kind
        )

    # ---- rows

    def row(self, rollout: Rollout, **fields: Any) -> dict[str, Any]:
        """Return a rollout as a record that carries tokens, for `chatmill.compile` and `chatmill build`.

        Calls whose prompts extend one another become one row. Others become rows of their own, or with `expand: tree`
        branches of a tree. `fields` are added to the record.
        """
        return rollout_record(rollout, **fields)


def rollout_record(rollout: Rollout, **fields: Any) -> dict[str, Any]:
    """Return the calls of a rollout as one record."""
    if len(rollout.prompts) != len(rollout.samples):
        raise ConfigError(
            f"a rollout needs one sample for each prompt: it has {len(rollout.prompts)} prompts and "
            f"{len(rollout.samples)} samples"
        )
    calls: list[dict[str, Any]] = []
    for index, (prompt, sample) in enumerate(zip(rollout.prompts, rollout.samples, strict=True)):
        call: dict[str, Any] = {"prompt_token_ids": list(map(int, prompt)), "token_ids": list(map(int, sample))}
        if rollout.logprobs is not None:
            call["logprobs"] = [min(float(value), 0.0) for value in rollout.logprobs[index]]
        calls.append(call)
    return {**fields, "calls": calls}


def _cut(finish_reason: str | None) -> Reason:
    return Reason.CUT_BY_LENGTH if finish_reason == "length" else Reason.NO_STOP


def _different(messages: list[Message]) -> list[Message]:
    """Return messages that a user can tell apart."""
    found: dict[Any, Message] = {}
    for message in messages:
        calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
        found.setdefault(repr((message.content, message.reasoning or "", calls)), message)
    return list(found.values())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
