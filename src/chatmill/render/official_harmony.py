"""The official Harmony renderer (openai-harmony), loaded offline and asked for headers and whole messages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from chatmill.errors import MissingExtraError, RecordError, need
from chatmill.tokenizer.assets import O200K_FILE, bundled_o200k, find_o200k


@cache
def encoding() -> Any:
    """The `HARMONY_GPT_OSS` encoding of openai-harmony, read from the checked o200k vocabulary file."""
    try:
        import openai_harmony
    except ImportError:
        raise MissingExtraError("openai-harmony", "harmony", "the template 'harmony'") from None
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    vocabulary = find_o200k()
    if vocabulary.name != O200K_FILE:  # the library knows that name alone; the bytes are the same
        vocabulary = bundled_o200k()
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(vocabulary.parent)  # the library's only offline way in
    try:
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        if before is None:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]
        else:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


def render_message(message: Mapping[str, Any], *, has_function_tools: bool = False) -> list[int]:
    """Ids of one Harmony message dict, its closing token included (`<|end|>`, or `<|call|>` for a call)."""
    need("openai_harmony", "rendering Harmony messages")
    import openai_harmony

    try:
        official = openai_harmony.Message.from_dict(dict(message))
        options = openai_harmony.RenderOptions(conversation_has_function_tools=has_function_tools)
        return list(encoding().render(official, options))
    except (ValueError, RuntimeError, TypeError, KeyError, openai_harmony.HarmonyError) as error:
        raise RecordError(f"the Harmony renderer refuses the message: {error}", code="harmony_refused") from None


def render_training(messages: list[Mapping[str, Any]]) -> list[int]:
    """The official training render of a whole conversation of Harmony message dicts: the slow, exact reference."""
    need("openai_harmony", "rendering Harmony messages")
    import openai_harmony

    conversation = openai_harmony.Conversation.from_json(json.dumps({"messages": messages}))
    config = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)
    return list(encoding().render_conversation_for_training(conversation, config))
