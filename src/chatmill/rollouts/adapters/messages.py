"""Messages of other packages as plain messages in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatmill.errors import RecordError

THINKING = "thinking"
"""The type of a content part that is reasoning, and its key."""


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Move reasoning out of the parts of a content.

    Raises:
        RecordError: Reasoning follows text, for which a message has no field.
    """
    found = dict(message)
    content = found.get("content")
    if not isinstance(content, list):
        return found

    reasoning: list[str] = []
    rest: list[Any] = []
    for index, part in enumerate(content):
        is_thinking = isinstance(part, Mapping) and part.get("type") == THINKING
        if not is_thinking:
            rest.append({"type": "text", "text": part} if isinstance(part, str) else part)
            continue
        if rest:
            raise RecordError(
                "reasoning follows text in one message, and templates write all of it before: split the message",
                code="bad_part",
                path=f"content[{index}]",
            )
        reasoning.append(part[THINKING])

    if not reasoning:
        return found | {"content": rest}
    texts = [part["text"] for part in rest if part.get("type") == "text"]
    is_text = len(texts) == len(rest)
    return found | {"content": "".join(texts) if is_text else rest, "reasoning_content": "".join(reasoning)}
