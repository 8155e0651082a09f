"""Renderers of template files for tests: bytes and the special tokens that a template spells."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.rollouts.messages import conversation as parsed
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import Prompt
from tools.renderer_table import bound_file

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ASKED = [{"role": "user", "content": "How is the weather?"}]


@functools.cache
def renderer_of(name: str) -> Renderer:
    """Load a template of the test data."""
    return Renderer(RolloutTemplate(bound_file(TEMPLATES / name, {})))


def ids_of(renderer: Renderer, text: str) -> list[int]:
    """Encode an answer; special tokens that it spells are tokens."""
    ids: list[int] = renderer.tokenizer.encode_documents([text])[0].tolist()
    return ids


def written(renderer: Renderer, prompt: Prompt, message: Mapping[str, Any]) -> str:
    """Return the answer that the template writes for a message, with its stop."""
    conversation: Conversation = parsed([message], None)
    whole = prompt.conversation._replace(messages=(*prompt.conversation.messages, *conversation.messages))
    answer = renderer.template.answer(whole)
    return "".join(span.text for span in answer.spans) + answer.stop


def call(name: str, arguments: str, call_id: str = "call00000") -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str = "", reasoning: str | None = None, calls: Sequence[Any] = ()) -> dict[str, Any]:
    """Return an assistant's message in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message
