"""A renderer for PrimeIntellect's `renderers`, and so for verifiers and prime-rl.

[renderer]
name = "custom"
import_path = "chatmill.rollouts.adapters.prime_intellect.ChatmillRenderer"
options = {enable_thinking = true}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, parts_of, roles_of
from chatmill.core.tokens import Tokens
from chatmill.errors import MissingExtraError
from chatmill.rollouts.adapters.messages import plain_message
from chatmill.rollouts.adapters.prompt_memory import PromptMemory
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import ANSWER_PARTS
from chatmill.rollouts.types import Answer, CallStatus, Extension, ExtensionRefused, ParsedCall, Prompt, Proof

try:
    from pydantic import Field
    from renderers.base import (
        ParsedResponse,
        ParsedToolCall,
        RenderedTokens,
        ToolCallParseStatus,
        extract_message_tool_names,
    )
    from renderers.configs import BaseRendererConfig
except ModuleNotFoundError as error:
    if error.name != "renderers":
        raise
    raise MissingExtraError("renderers", "renderers", "chatmill.rollouts.adapters.prime_intellect") from error

STATUSES = {
    CallStatus.OK: ToolCallParseStatus.OK,
    CallStatus.MALFORMED_CALL: ToolCallParseStatus.MALFORMED_STRUCTURE,
    CallStatus.UNKNOWN_TOOL: ToolCallParseStatus.UNKNOWN_TOOL,
    CallStatus.ARGUMENTS_NOT_JSON: ToolCallParseStatus.INVALID_JSON,
    CallStatus.TWO_READINGS: ToolCallParseStatus.OK,
}
STANDS_IN = [{"role": "user", "content": "Question?"}]
"""Messages before an answer whose prompt is not known."""


class ChatmillRendererConfig(BaseRendererConfig):
    """What a `CustomRendererConfig` says next to its import path.

    Attributes:
        model: Model folder, if the tokenizer does not come with a template.
        template: Name or path of a template. Default: the model's own.
        options: Options of the template, such as `enable_thinking`.
        date: Date for templates that ask for one, as YYYY-MM-DD.
        remembered: How many of the last prompts are kept, so that they can be extended.
    """

    name: str = "chatmill"
    model: str | None = None
    template: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    date: str | None = None
    remembered: int = 4096
    _internal_fields = frozenset({"model", "template", "options", "date", "remembered"})


class ChatmillRenderer:
    """Renders, parses and extends by a model's own chat template."""

    config_class = ChatmillRendererConfig

    def __init__(self, tokenizer: Any, config: ChatmillRendererConfig | None = None) -> None:
        """Derive the renderer of a tokenizer's template."""
        self.config = config or ChatmillRendererConfig()
        model = tokenizer if self.config.model is None else self.config.model
        self.renderer = Renderer(model, self.config.template, self.config.options, self.config.date)
        self._prompts: PromptMemory[Prompt] = PromptMemory(self.config.remembered)

    @property
    def is_prefix_stable(self) -> bool:
        """Whether later messages change nothing that the template writes before them."""
        return self.renderer.is_prefix_stable

    def get_stop_token_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return self.renderer.stops

    # ---- rendering

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Render messages, with the message and the three masks of every token."""
        plain = [plain_message(message) for message in messages]
        if add_generation_prompt:
            prompt = self.renderer.prompt(plain, tools)
            self._prompts.keep(prompt.ids, prompt)
            return _rendered(prompt.ids, prompt.kinds, prompt.messages, plain)
        tokens: Tokens = self.renderer.document(plain, tools)
        return _rendered(tokens.ids.tolist(), tokens.kinds, tokens.messages, plain)

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Render messages to ids alone."""
        ids: list[int] = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids
        return ids

    # ---- answers

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Parse sampled ids; calls that are broken have their status."""
        prompt = self._prompts.find(prompt_ids) if prompt_ids else None
        if prompt is None:
            prompt = self.renderer.prompt(STANDS_IN, tools)
        answer = self.renderer.parse(prompt, token_ids, tools)
        message = answer.readings[0] if answer.readings else answer.message
        is_read = answer.proof is not Proof.NOT_WRITTEN or bool(answer.readings)
        return ParsedResponse(
            content=message.get("content") or "",
            reasoning_content=message.get("reasoning_content") or None,
            tool_calls=self._parsed_calls(answer, message),
            reasoning_complete=True if is_read or not self.renderer.grammar.has_reasoning else None,
        )

    def _parsed_calls(self, answer: Answer, message: Mapping[str, Any]) -> list[ParsedToolCall]:
        found = [_parsed_call(call) for call in answer.calls]
        if self.renderer.grammar.has_ids:
            for call, own in zip(found, message.get("tool_calls") or (), strict=False):
                call.id = own["id"]
        return found

    # ---- next prompts

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
    ) -> RenderedTokens | None:
        """Extend a prompt by its answer and new messages, or return None if that cannot be proved."""
        prompt = self._prompts.find(previous_prompt_ids)
        has_assistant = any(message.get("role") == "assistant" for message in new_messages)
        if prompt is None or not new_messages or has_assistant:
            return None
        if self._renders_again(new_messages):
            return None
        plain = [plain_message(message) for message in new_messages]
        try:
            following = self.renderer.extend(prompt, previous_completion_ids, plain)
        except ExtensionRefused:
            return None
        self._prompts.keep(following.ids, following)
        return _extended(following, len(previous_prompt_ids) + len(previous_completion_ids), prompt, plain)

    def _renders_again(self, new_messages: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether the config asks for a full rendering here."""
        retention = self.config.thinking_retention
        if retention == "template":
            return True
        return retention == "tool_cycle" and any(message.get("role") == "user" for message in new_messages)


def _rendered(
    ids: list[int], kinds: np.ndarray, messages: np.ndarray, given: Sequence[Mapping[str, Any]]
) -> RenderedTokens:
    """Return ids with the masks that follow from kinds."""
    parts = parts_of(kinds)
    is_assistant = roles_of(kinds) == RoleCode.ASSISTANT
    is_sampled = is_assistant & np.isin(parts, ANSWER_PARTS) & ((kinds & REPEATED) == 0)
    is_text = (parts == Part.CONTENT) & ((kinds & MARK) == 0) & (messages >= 0)
    owners = np.where(messages >= len(given), -1, messages)
    return RenderedTokens(
        token_ids=ids,
        message_indices=owners.tolist(),
        sampled_mask=is_sampled.tolist(),
        is_content=np.where(is_assistant, is_sampled, is_text).tolist(),
        message_roles=[message.get("role") or "" for message in given],
        message_tool_names=extract_message_tool_names(list(given)),
    )


def _extended(
    following: Extension, sent: int, prompt: Prompt, new_messages: Sequence[Mapping[str, Any]]
) -> RenderedTokens:
    """Return an extension with messages counted from the new ones; nothing of it is sampled."""
    first = len(prompt.conversation.messages) + 1
    owners = np.maximum(following.messages - first, -1)
    owners[:sent] = -1
    kinds = following.kinds | np.uint8(REPEATED)
    return _rendered(following.ids, kinds, owners, new_messages)


def _parsed_call(call: ParsedCall) -> ParsedToolCall:
    return ParsedToolCall(
        raw=call.raw,
        name=call.name or None,
        arguments=_json_value(call.arguments),
        token_span=(call.start, call.end),
        status=STATUSES[call.status],
    )


def _json_value(text: str) -> Any:
    """Return the value of a JSON text, or the text if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
