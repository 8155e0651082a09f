"""Small conversations that show how a template behaves, what it makes of them, and a vocabulary where it has none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.label.policy import Policy
from chatmill.look.decoder import Decoder
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.items import item_of_tokens
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.rules import Answer
from chatmill.render.jinja.turns import Turns
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer

EXAMPLE_DAY = date(2026, 1, 1)
"""What a template that asks for the date is given while it is looked at, unless the user names a day."""
SPECIAL_LOOK = re.compile(
    r"<\|[\w./:+ -]{1,60}\|?>|<[\w./:+-]{1,60}\|>|<｜[^<>｜\s]{1,60}｜>|\[\|[\w/]{1,40}\|\]|</?s>|<(?:bos|eos|sop|eop)>"
    r"|<(?:start|end)_of_[a-z_]{1,30}>|<reserved_\d+>|\[gMASK\]"
)
"""What a special token looks like in the text of a template. No list of known names: families add their own."""
BRACKETS = re.compile(r"\[/?[A-Z][A-Z_]{2,30}\]")
"""Special tokens of Mistral's vocabularies (`[INST]`); the same spelling is plain text in Llama 2's."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A conversation with a purpose."""

    name: str
    conversation: Conversation
    shown: bool = False
    """Whether its rendering is printed; findings use all of them."""


def _probe(name: str, *messages: Message, tools: bool = False, shown: bool = False) -> Probe:
    definitions = (WEATHER,) if tools else ()
    return Probe(name=name, conversation=Conversation(messages, tools=definitions), shown=shown)


def _calls(*cities: str) -> tuple[ToolCall, ...]:
    # Nine letters and digits: Mistral's templates refuse other ids.
    return tuple(
        ToolCall("get_weather", f'{{"city": "{city}"}}', f"callid{n:03}") for n, city in enumerate(cities, start=1)
    )


def _result(text: str, number: int = 1) -> Message:
    return Message(Role.TOOL, text, tool_call_id=f"callid{number:03}", name="get_weather")


SYSTEM = Message(Role.SYSTEM, "S-zero.")
ASKS, ASKS_AGAIN = Message(Role.USER, "Q-one?"), Message(Role.USER, "Q-two?")
SAYS, SAYS_AGAIN = Message(Role.ASSISTANT, "A-one."), Message(Role.ASSISTANT, "A-two.")
THINKS = Message(Role.ASSISTANT, "A-one.", reasoning="R-one.")
THINKS_AGAIN = Message(Role.ASSISTANT, "A-two.", reasoning="R-two.")
CALLS = Message(Role.ASSISTANT, "", tool_calls=_calls("Oslo"))

PAIR = _probe("question and answer", ASKS, SAYS)
TWO_TURNS = _probe("two turns", SYSTEM, ASKS, SAYS, ASKS_AGAIN, SAYS_AGAIN)
REASONING = _probe("two turns with reasoning", ASKS, THINKS, ASKS_AGAIN, THINKS_AGAIN, shown=True)
CALL = _probe("tool call and result", ASKS, CALLS, _result("R-one"), SAYS, tools=True, shown=True)
WITH_SYSTEM = _probe("system message", SYSTEM, ASKS, SAYS, shown=True)
PROBES = (
    PAIR,
    WITH_SYSTEM,
    TWO_TURNS,
    REASONING,
    CALL,
    _probe("tool call without definitions", ASKS, CALLS, _result("R-one"), SAYS),
    _probe(
        "tool call, then another question",
        *(ASKS, CALLS, _result("R-one"), SAYS, ASKS_AGAIN, SAYS_AGAIN),
        tools=True,
    ),
    _probe(
        "reasoning before a tool call",
        *(ASKS, CALLS._replace(reasoning="R-one."), _result("R-one"), SAYS._replace(reasoning="R-two.")),
        tools=True,
    ),
    _probe(
        "text next to a tool call",
        *(ASKS, Message(Role.ASSISTANT, "A-one.", tool_calls=_calls("Oslo")), _result("R-one"), SAYS_AGAIN),
        tools=True,
    ),
    _probe(
        "two calls at once",
        ASKS,
        Message(Role.ASSISTANT, "", tool_calls=_calls("Oslo", "Rome")),
        *(_result("R-one"), _result("R-two", 2), SAYS),
        tools=True,
    ),
    _probe("empty answer", ASKS, Message(Role.ASSISTANT, "")),
    _probe("answer before any question", SAYS, ASKS, SAYS_AGAIN),
    _probe("two answers in a row", ASKS, SAYS, SAYS_AGAIN),
)
"""Texts are words that no template writes, so that they are found again in a rendering."""


def spelled_tokens(text: str) -> list[str]:
    """Find everything in the text of a template that looks like a special token."""
    return [match.group() for look in (SPECIAL_LOOK, BRACKETS) for match in look.finditer(text)]


def byte_vocabulary(text: str, *more: str) -> Tokenizer:
    """Make a vocabulary of bytes and everything in a template that looks like a special token."""
    return byte_tokenizer().with_added([name for name in dict.fromkeys([*more, *spelled_tokens(text)]) if name])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLook:
    """What a template makes of a probe."""

    probe: Probe
    refused: str
    """The error of a record like this in a build; empty where it is written."""
    code: str
    options: Mapping[str, Any]
    """Template options that were chosen for it."""
    turns: Turns
    """Its renderings under these options."""
    answers: tuple[Answer[int], ...]
    rows: tuple[ItemView, ...]
    """Answers without a proof are context here."""
    stripped: int
    """Characters that no row shows."""

    @property
    def is_opened(self) -> bool:
        """Whether the prompt of an answer opens reasoning that history does not have."""
        return any(answer.reason == "no_reasoning" or self.is_as_sampled(answer) for answer in self.answers)

    def is_as_sampled(self, answer: Answer[int]) -> bool:
        """Return whether an answer is trained as a model writes it, and not as history has it."""
        return not answer.reason and self.turns.is_as_sampled(answer)

    def is_stable(self, answer: Answer[int]) -> bool:
        """Return whether later messages leave an answer as it is."""
        return bool(answer.reason) or self.turns.is_stable(answer)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for scripts."""
        return {
            "name": self.probe.name,
            "refused": self.refused or None,
            "code": self.code or None,
            "options": dict(self.options),
            "stripped": self.stripped,
            "turns": [
                {
                    **{name: getattr(answer, name) for name in ("message", "reason", "detail", "stop")},
                    "stable": self.is_stable(answer),
                    "as_sampled": self.is_as_sampled(answer),
                    "proved": not answer.reason,
                }
                for answer in self.answers
            ],
            "rows": [[row.run_json(run) for run in row.runs] for row in self.rows],
        }


def look_at_probe(probe: Probe, bound: ModelTemplate, lenient: ModelTemplate, policy: Policy) -> ProbeLook:
    """Render a probe; `lenient` writes answers without a proof too."""
    refused, code = "", ""
    rendered = render([probe.conversation], bound, collect_failures=True)
    if rendered.failed:
        refused, code = str(rendered.failed[0][1]), rendered.failed[0][1].code
        rendered = render([probe.conversation], lenient, collect_failures=True)
    weights = policy.document_weights(rendered.tokens, rendered.kept)
    decoder = Decoder(bound.tokenizer)
    items = (item_of_tokens(rendered.tokens, row, weights) for row in range(len(rendered.tokens)))
    rows = [view_item(item, decoder, "conversation") for item in items]
    options = chosen_options(bound, probe.conversation)
    turns = bound.turns(probe.conversation, options)
    return ProbeLook(
        probe=probe,
        refused=refused,
        code=code,
        options=options,
        turns=turns,
        answers=tuple(answers_of(turns)),
        rows=tuple(rows),
        stripped=int(rendered.stripped.sum()),
    )


def chosen_options(chat: ModelTemplate, conversation: Conversation) -> dict[str, Any]:
    """Choose the options under which a conversation is written; if it is not, those that come closest."""
    try:
        return dict(chat.text_documents(conversation).options)
    except RecordError:
        choices = list(chat.choices(conversation.options))
    return next((choice for choice in choices if not _is_apart(chat, conversation, choice)), choices[0])


def _is_apart(chat: ModelTemplate, conversation: Conversation, options: Mapping[str, Any]) -> bool:
    """Tell whether prompt and answer disagree."""
    unfit = ("prompt_not_in_history", "reasoning_not_closed")
    return any(answer.reason in unfit for answer in answers_of(chat.turns(conversation, options)))


def answers_of(turns: Turns) -> list[Answer[int]]:
    """List the answers of a conversation; none if the template refuses the whole of it."""
    try:
        turns.whole  # noqa: B018 (rendered here, so that a refusal of the whole conversation is noticed)
        return turns.answers()
    except RecordError:
        return []


def generation_prompt(chat: ModelTemplate) -> str:
    """Find what the template writes after a question to prompt an answer."""
    turns = chat.turns(PAIR.conversation)
    prompt, ended = turns.prompt(1), turns.until(0)
    if not isinstance(prompt, Rendering) or not isinstance(ended, Rendering):
        return ""
    if prompt.text.startswith(ended.text):
        return prompt.text[len(ended.text) :]
    return prompt.text[max((piece.stop for piece in prompt.pieces if piece.owner == 0), default=0) :]
