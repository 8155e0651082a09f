"""The reference renderings: transformers' `apply_chat_template` over the published templates."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from chatmill.core.conversation import Conversation
from tests.data.tokenizer_files import unpacked

TEMPLATES = Path(__file__).parents[1] / "data" / "tokenizers" / "chat_templates"


@cache
def hf_tokenizer(name: str) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(unpacked(name))


@cache
def jinja(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def trl_training_template() -> str:
    """The template TRL trains Qwen3 with, taken from TRL itself."""
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = hf_tokenizer("qwen3")
    published = tokenizer.chat_template
    tokenizer.chat_template = jinja("qwen3")
    try:
        template = get_training_chat_template(tokenizer)
    finally:
        tokenizer.chat_template = published
    assert isinstance(template, str)
    return template


@contextmanager
def on(day: datetime.date) -> Iterator[None]:
    """Templates that ask transformers for the date get this one."""

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Day:
            return cls(day.year, day.month, day.day, tzinfo=tz)

    with mock.patch("transformers.utils.chat_template_utils.datetime", Day):
        yield


def as_dicts(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages in the form that transformers takes."""
    messages: list[dict[str, Any]] = []
    for message in conversation.messages:
        item: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning is not None:
            item["reasoning_content"] = message.reasoning
        if message.tool_calls:
            item["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        messages.append(item)
    return messages


def applied(conversation: Conversation, template: str, tokenizer: Any, **options: Any) -> Any:
    return tokenizer.apply_chat_template(
        as_dicts(conversation),
        tools=list(conversation.tools) or None,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        **options,
    )
