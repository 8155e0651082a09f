"""What Chatmill makes of a chat template that comes without a vocabulary: bound to bytes, run on conversations.

A template file comes without a tokenizer. Here it gets one of 256 byte values and the special tokens that the template
writes. The names of its bos and its stops, which a model's folder would give, are guessed from its text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import jinja2

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.prove.answer_check import AnswerCheck, Row
from chatmill.prove.reference import trained_in
from chatmill.prove.rows import plain_row, token_weights
from chatmill.render.document_items import items_of
from chatmill.render.documents import TextDocument
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.tokenizer.byte_level import byte_tokenizer

TODAY = date(2026, 1, 2)
SPECIAL = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|?>|<[a-z_]{1,20}\|>|<｜[^｜\s{}]{1,40}｜>|〈\|[A-Z]+\|〉|</?s>|\[gMASK\]|<sop>|</assistant>"
    r"|<(?:start|end|begin|beginning)_of_[a-z]+>|<(?:bos|eos|pad|unk)>|<BOS_TOKEN>|\[/?[A-Z_]{3,}\]|<\|\"\|>"
)
"""Special tokens as published templates spell them."""
STOPS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("<|return|>", ("<|return|>", "<|call|>")),
    ("<turn|>", ("<turn|>", "<|tool_response>")),
    ("<end_of_turn>", ("<end_of_turn>",)),
    ("<end_of_utterance>", ("<end_of_utterance>",)),
    ("<|end_of_msg|>", ("<|end_of_msg|>",)),
    ("<|im_end|>", ("<|im_end|>",)),
    ("<|eot_id|>", ("<|eot_id|>", "<|eom_id|>")),
    ("<atem:function_calls>", ("<|eot|>",)),
    ("<|eot|>", ("<|eot|>", "<|eom|>")),
    ("<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",)),
    ("<end_of_sentence>", ("<end_of_sentence>",)),
    ("<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",)),
    ("<｜hy_eos:opensource｜>", ("<｜hy_eos:opensource｜>",)),
    ("<|assistant_end|>", ("<|assistant_end|>",)),
    ("<|eos|>", ("<|eos|>",)),
    ("<|observation|>", ("<|endoftext|>",)),
    ("<|end|>", ("<|end|>", "<|calls|>", "<|flush|>")),
    ("</assistant>", ("</assistant>",)),
    ("<|end_of_text|>", ("<|end_of_text|>",)),
    ("<|endoftext|>", ("<|endoftext|>",)),
)
"""A token that the template writes, and the stops that models with such a template name; the first is the eos."""
BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>", "<bos>", "<|startoftext|>")
POLICY = find_policy("assistant")
DOCUMENTED = frozenset(
    {"template_refused", "no_prompt", "prompt_not_in_history", "no_stop", "not_shown", "origin_lost"}
    | {"content_after_result", "arguments_not_an_object", "goes_on_after_stop", "reasoning_not_closed"}
    | {"no_reasoning", "ambiguous_thinking"}
)
"""Reasons for which a record may be refused."""
NOT_WRITTEN = frozenset({"template_refused", "not_shown", "arguments_not_an_object"})
"""Those that say that the template has no place for the conversation."""


def bind_bytes(name: str, text: str, given: TemplateOptions | None = None) -> ModelTemplate:
    """A template with a vocabulary of bytes and its own special tokens."""
    written = text + _rendered_pair(text)
    special = list(dict.fromkeys(SPECIAL.findall(written)))
    stops = next((stops for mark, stops in STOPS if mark in written), ("</s>",))
    bos = next((one for one in BOS if one in written), "<s>")
    tokens = tuple(dict.fromkeys([*special, *stops, bos]))
    named = {"bos_token": bos, "eos_token": stops[0], "pad_token": "<pad>", "unk_token": "<unk>"}
    source = JinjaSource(name=name, text=text, path=name, named_tokens=named, stop_tokens=stops)
    return ModelTemplate(source, byte_tokenizer(tokens), given or TemplateOptions(today=TODAY))


def _rendered_pair(text: str) -> str:
    """A plain conversation, for templates that make their special tokens of parts."""
    sandbox = PlainSandbox(TODAY)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    values = {"messages": messages * 2, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    try:
        return sandbox.render(sandbox.template(text), values)
    except jinja2.TemplateError:
        return ""


@dataclass(slots=True)
class Survey:
    """What became of conversations under one template."""

    records: int = 0
    proved: int = 0
    answers: int = 0
    rows: int = 0
    changed: int = 0
    """Answers that later messages change."""
    appended: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    options: Counter[tuple[tuple[str, Any], ...]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Whatever must not happen: rows that plain Jinja does not confirm, undocumented reasons."""
    proof: Counter[str] = field(default_factory=Counter)
    """What the proof counted."""

    @property
    def written(self) -> int:
        """Records that the template accepts and shows whole."""
        return self.records - sum(count for reason, count in self.reasons.items() if reason in NOT_WRITTEN)

    @property
    def share(self) -> float:
        """The part of the records that the template can write which is proved."""
        return self.proved / self.written if self.written else 0.0


def _row(template: ModelTemplate, document: TextDocument, conversation: Conversation) -> Row:
    """A document as ids and weights."""
    rules = template.rules
    items, _ = items_of(document.spans, rules, Notes(), rules.first, ends=True)
    plain = plain_row(items, template.tokenizer, {})
    weights = token_weights(POLICY, plain, conversation.messages)
    return Row(plain.ids, weights, trained_in(document))


def survey(template: ModelTemplate, conversations: Iterable[Conversation]) -> Survey:
    """Write every conversation, and prove every trained answer by plain Jinja."""
    found = Survey()
    check = AnswerCheck(template, POLICY, found.proof)
    for conversation in conversations:
        found.records += 1
        try:
            written = template.text_documents(conversation)
        except RecordError as error:
            found.reasons[error.code] += 1
            found.examples.setdefault(error.code, f"{conversation.id}: {error}")
            if error.code not in DOCUMENTED:
                found.failures.append(f"{conversation.id}: {error.code}")
            continue
        rows = [_row(template, document, conversation) for document in written.documents]
        said = [one.message for one in check.mismatches(conversation, dict(written.options), rows)]
        found.failures += [f"{conversation.id}: {one}" for one in said]
        if not said:
            found.proved += 1
        found.answers += sum(len(row.trained) for row in rows)
        found.rows += len(written.documents)
        found.changed += written.counts.unstable
        found.appended += written.counts.appended
        found.options[written.options] += 1
    return found


def texts_of(
    template: ModelTemplate, conversation: Conversation, options: Mapping[str, Any], *, prompt: bool
) -> tuple[str | None, str | None]:
    """A whole conversation by traced strings and by plain Jinja; None where the template refuses it."""
    view = RecordView(conversation, template.form)
    count = len(conversation.messages)
    traced = template._renderer(options).render(view, count, prompt)
    try:
        plain: str | None = template.plain(conversation, options, count, prompt=prompt)
    except jinja2.TemplateError:
        plain = None
    return None if isinstance(traced, Refusal) else traced.text, plain


def probes() -> list[Conversation]:
    """Small conversations, one for each thing that templates treat in their own way."""
    user, again, answer = Message(Role.USER, "Question one?"), Message(Role.USER, " And two? "), "An answer."
    system, said = Message(Role.SYSTEM, "Be kind."), Message(Role.ASSISTANT, answer)
    call = ToolCall("get_weather", '{"city": "Oslo", "days": 2}', "callid001")
    other = ToolCall("get_weather", '{"city": "Bergen", "days": 1}', "callid002")
    calls = Message(Role.ASSISTANT, "", tool_calls=(call,), has_content=False)
    result = Message(Role.TOOL, '{"rain": true}', tool_call_id="callid001", name="get_weather")
    second = Message(Role.TOOL, '{"rain": false}', tool_call_id="callid002", name="get_weather")
    thinks = Message(Role.ASSISTANT, answer, reasoning="Let me think.\n\nDone.")
    last = Message(Role.ASSISTANT, "It rains.\n")
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "Where?"}}}
    tools = ({"type": "function", "function": {"name": "get_weather", "description": "W", "parameters": parameters}},)
    made: dict[str, tuple[list[Message], tuple[Any, ...]]] = {
        "pair": ([user, said], ()),
        "multi_turn": ([user, said, again, last], ()),
        "system": ([system, user, said, again, last], ()),
        "tools": ([user, calls, result, last, again, said], tools),
        "tools_without_definitions": ([user, calls, result, last], ()),
        "parallel": ([system, user, calls._replace(tool_calls=(call, other)), result, second, last], tools),
        "reasoning": ([user, thinks, again, thinks], ()),
        "reasoning_and_calls": ([user, calls._replace(reasoning="Look it up."), result, thinks], tools),
        "content_and_calls": ([user, calls._replace(content="I look.", has_content=True), result, last], tools),
        "ends_with_calls": ([user, calls], tools),
        "two_users": ([user, again, said], ()),
        "two_answers": ([user, said, last], ()),
        "assistant_first": ([said, user, last], ()),
        "ends_with_user": ([user, said, again], ()),
        "empty_answer": ([user, Message(Role.ASSISTANT, "")], ()),
        "think_in_content": ([user, Message(Role.ASSISTANT, "<think>\nHm.\n</think>\n\nYes."), again, said], ()),
    }
    return [Conversation(tuple(messages), id=name, tools=tools) for name, (messages, tools) in made.items()]
