"""Asking a model in its template: the ids up to where the assistant begins, the ids that end its answer, the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatmill.core.conversation import Conversation, Message, parse_messages
from chatmill.core.kinds import Part, RoleCode, kind, parts_of
from chatmill.render.bound import BoundTemplate
from chatmill.render.render import render
from chatmill.train.generate import Generated, Sampling, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a model said to a conversation."""

    text: str
    stop: str | None
    """The terminator that the model gave, as text; None: it never stopped."""
    generated: Generated
    content: str
    """What the next turn of a conversation repeats: the text behind the last control token of the answer."""


def ask(
    model: Any,
    template: BoundTemplate,
    messages: Sequence[Message | dict[str, Any]],
    *,
    sampling: Sampling | None = None,
) -> Reply:
    """Decode the assistant's next message, up to the template's terminator."""
    made = generate(model, prompt_ids(template, messages), stop_ids=stop_ids(template), sampling=sampling)
    decode = template.tokenizer.decode
    stop = None if made.stop_id is None else decode([made.stop_id])
    controls = set(template.tokenizer.control_ids.values())
    last = max((place + 1 for place, token in enumerate(made.ids) if token in controls), default=0)
    return Reply(text=decode(made.ids), stop=stop, generated=made, content=decode(made.ids[last:]))


def prompt_ids(template: BoundTemplate, messages: Sequence[Message | dict[str, Any]]) -> list[int]:
    """A conversation up to where the assistant begins; what ends a document (an eos) is left out."""
    raw = [message for message in messages if not isinstance(message, Message)]
    parsed = parse_messages(raw) if raw else tuple(message for message in messages if isinstance(message, Message))
    tokens = render([Conversation(tuple(parsed))], template, add_generation_prompt=True).tokens
    is_document = parts_of(tokens.kinds) == Part.DOCUMENT
    begin = int((~is_document).argmax())  # a BOS before it stays
    is_document[:begin] = False
    ids: list[int] = tokens.ids[~is_document].tolist()
    return ids


def stop_ids(template: BoundTemplate) -> set[int]:
    """Ids that end an assistant's last message in this template or the document behind it, and the tokenizer's eos."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokens = render([Conversation(parse_messages(said))], template).tokens
    ends = tokens.ids[tokens.kinds == kind(RoleCode.ASSISTANT, Part.TERMINATOR)].tolist()
    written = np.flatnonzero(parts_of(tokens.kinds) != Part.DOCUMENT)
    behind = tokens.ids[int(written[-1]) + 1 :].tolist()
    eos = template.tokenizer.eos_id
    return {*ends, *behind, *([] if eos is None else [eos])}
