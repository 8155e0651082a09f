"""Conversations and vocabularies for the checks with other packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from chatmill.rollouts.renderer import Renderer
from tools.hf_vocabularies import make_tokenizer

DATA = Path(__file__).parents[2] / "data"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "How is the weather in Paris?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CALLING = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00000", "content": "Sunny."}
ANSWER = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "The tool says so."}
MARKS = re.compile(r"</?arg_[a-z]+>")
EPISODE = [QUESTION, CALLING, RESULT, ANSWER]


def tokenizer_of(name: str) -> Any:
    """Make a tokenizer with Qwen3's vocabulary and a published template."""
    text = (DATA / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return make_tokenizer(DATA / "tokenizers" / "qwen3", text, MARKS.findall(text))


def sampled_ids(renderer: Renderer, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
    """Return the ids of the last message as the template writes it, with its stop."""
    prompt = renderer.prompt(messages[:-1], tools)
    tokens = renderer.document(messages, tools, last_answer=True)
    ids: list[int] = tokens.ids[len(prompt.ids) :].tolist()
    ends = [index for index, token in enumerate(ids) if token in renderer.stops]
    return ids[: ends[0] + 1]
