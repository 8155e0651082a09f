"""Asking a model in its template: the ids up to where the assistant begins, the ids that end its answer, the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatmill.core.conversation import Conversation, Message, parse_messages
from chatmill.core.kinds import Part, RoleCode, kind, parts_of
from chatmill.render.bound import BoundTemplate
from chatmill.render.render import render
from chatmill.train.generate import Generated, Sampling, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said to a conversation."""

    text: str
    stop: str | None
    """The terminator that the model gave, as text; None: it never stopped."""
    generated: Generated


def ask(
    model: Any,
    template: BoundTemplate,
    messages: Sequence[Message | dict[str, Any]],
    *,
    sampling: Sampling | None = None,
) -> Answer:
    """Decode the assistant's next message, up to the template's terminator."""
    made = generate(model, prompt_ids(template, messages), stop_ids=stop_ids(template), sampling=sampling)
    decode = template.tokenizer.decode
    stop = None if made.stop_id is None else decode([made.stop_id])
    return Answer(text=decode(made.ids), stop=stop, generated=made)


def prompt_ids(template: BoundTemplate, messages: Sequence[Message | dict[str, Any]]) -> list[int]:
    """A conversation up to where the assistant begins; what ends a document (an eos) is left out."""
    raw = [message for message in messages if not isinstance(message, Message)]
    parsed = parse_messages(raw) if raw else tuple(message for message in messages if isinstance(message, Message))
    tokens = render([Conversation(tuple(parsed))], template, add_generation_prompt=True).tokens
    is_document = parts_of(tokens.kinds) == Part.DOCUMENT
    begin = int((~is_document).argmax())  # a BOS stands before it and stays
    is_document[:begin] = False
    ids: list[int] = tokens.ids[~is_document].tolist()
    return ids


def stop_ids(template: BoundTemplate) -> set[int]:
    """Ids that end an assistant's last message in this template, and the tokenizer's eos."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokens = render([Conversation(parse_messages(said))], template).tokens
    ends = tokens.ids[tokens.kinds == kind(RoleCode.ASSISTANT, Part.TERMINATOR)].tolist()
    eos = template.tokenizer.eos_id
    return {*ends, *([] if eos is None else [eos])}
