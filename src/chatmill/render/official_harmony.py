"""The official Harmony renderer (openai-harmony), loaded offline: for Harmony's own contents, and as the reference."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from chatmill.errors import MissingExtraError, RecordError, need
from chatmill.tokenizer.assets import O200K_FILE, bundled_o200k, find_o200k

MESSAGE = 200008
"""`<|message|>`, which ends a header."""
_LOADED: list[Any] = []


def encoding(vocabulary: Path | None = None) -> Any:
    """Return the `HARMONY_GPT_OSS` encoding of openai-harmony, from a checked o200k file; never from the network.

    It is loaded once: whichever file is named first, all that pass the check hold the same bytes.
    """
    if not _LOADED:
        _LOADED.append(_load(vocabulary))
    return _LOADED[0]


def _load(named: Path | None) -> Any:
    try:
        import openai_harmony
    except ImportError:
        raise MissingExtraError("openai-harmony", "harmony", "the template 'harmony'") from None
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    vocabulary = find_o200k(named)
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


@lru_cache(maxsize=4096)
def content_text(role: str, content: str, has_tools: bool) -> str:
    """Return the text of a Harmony system or developer content, given as JSON."""
    message = {"role": role, "content": [json.loads(content)]}
    ids = render_message(message, has_function_tools=has_tools)
    text: str = encoding().decode_utf8(ids[ids.index(MESSAGE) + 1 : -1])
    return text


def tools_text(tools: Sequence[Any]) -> str:
    """Tool definitions as a developer message has them."""
    described = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("a tool definition needs a 'name'", code="bad_tool", path=f"tools[{number}]")
        fields = {"description": function.get("description") or "", "parameters": function.get("parameters")}
        described.append({"name": function["name"], **fields})
    listed = {"functions": {"name": "functions", "description": None, "tools": described}}
    return content_text("developer", json.dumps({"type": "developer_content", "tools": listed}), False)


def has_function_tools(structured: Mapping[str, Any] | None) -> bool:
    """Return whether a Harmony content defines functions."""
    tools = (structured or {}).get("tools") or {}
    return bool((tools.get("functions") or {}).get("tools"))


def render_training(messages: Sequence[Any], vocabulary: Path | None = None) -> list[int]:
    """The official training render of a whole conversation of Harmony message dicts: the slow, exact reference."""
    need("openai_harmony", "the official render of Harmony")
    import openai_harmony

    refusals = (ValueError, RuntimeError, TypeError, KeyError, AttributeError, openai_harmony.HarmonyError)
    config = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)
    try:
        # What `Conversation.from_json` does with the text, which is decoded already.
        listed = [openai_harmony.Message.from_dict(message) for message in messages]
        conversation = openai_harmony.Conversation(messages=listed)
        return list(encoding(vocabulary).render_conversation_for_training(conversation, config))
    except refusals as error:
        raise RecordError(f"the Harmony renderer refuses the row: {error}", code="harmony_refused") from None
