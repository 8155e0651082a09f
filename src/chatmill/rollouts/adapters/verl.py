"""verl: a builder of continuous tokens and a tool parser for any chat template.

builder = ChatmillTokenBuilder(tokenizer)            # in place of create_continuous_token_builder(tokenizer)
register_tool_parser()                               # rollout.multi_turn.format=chatmill
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.errors import ConfigError, MissingExtraError
from chatmill.rollouts.adapters.prompt_memory import PromptMemory
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.types import Answer, CallStatus, Prompt

try:
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult
except ModuleNotFoundError as error:
    if error.name != "verl":
        raise
    raise MissingExtraError("verl", "verl", "chatmill.rollouts.adapters.verl") from error

REMEMBERED = 4096
"""Prompts and answers that are kept, so that they can be extended."""
STANDS_IN = [{"role": "user", "content": "Question?"}]
"""Messages before an answer, for a parser that is not told of any."""


class ChatmillTokenBuilder(ContinuousTokenBuilder):
    """Builds prompts that begin with what was sent and sampled, by a model's own chat template."""

    def __init__(self, tokenizer: Any, *, template: Any = None, date: str | None = None, **options: Any) -> None:
        """Derive the renderer of a tokenizer's template.

        Args:
            tokenizer: Tokenizer or model folder.
            template: Name or path of a template. Default: the model's own.
            date: Date for templates that ask for one, as YYYY-MM-DD.
            options: `chat_template_kwargs` and `allowed_append_roles`, as in verl.
        """
        super().__init__(tokenizer, **options)
        self.renderer = Renderer(tokenizer, template, self.chat_template_kwargs, date)
        self._prompts: PromptMemory[Prompt] = PromptMemory(REMEMBERED)
        self._answered: PromptMemory[tuple[Prompt, list[int]]] = PromptMemory(REMEMBERED)

    def build_initial_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **media: Any
    ) -> list[int]:
        """Render the first prompt."""
        _refuse_media(media)
        prompt = self.renderer.prompt(messages, tools)
        self._prompts.keep(prompt.ids, prompt)
        return prompt.ids

    def merge_assistant_tokens(self, runtime_token_ids: list[int], assistant_token_ids: list[int]) -> MergeResult:
        """Append what a model sampled."""
        merged = super().merge_assistant_tokens(runtime_token_ids, assistant_token_ids)
        prompt = self._prompts.find(runtime_token_ids)
        if prompt is not None:
            self._answered.keep(merged.token_ids, (prompt, list(assistant_token_ids)))
        return merged

    def merge_context_tokens(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        *,
        tools: Sequence[Any] | None = None,
    ) -> MergeResult:
        """Append what the template writes for new messages, and the next generation prompt.

        Raises:
            ExtensionRefused: It cannot be proved what follows the sampled ids.
            ConfigError: This builder has not seen the prompt or the answer.
        """
        self._assert_append_only(previous_messages, updated_messages)
        found = self._answered.find(runtime_token_ids)
        if found is None:
            raise ConfigError(
                "these tokens are no prompt and answer of this builder, so what follows them is not known: begin with "
                "build_initial_tokens, and hand every answer to merge_assistant_tokens of the same builder"
            )

        prompt, sampled_ids = found
        new_messages = updated_messages[len(previous_messages) :]
        following = self.renderer.extend(prompt, sampled_ids, new_messages)
        self._prompts.keep(following.ids, following)

        inserted = [] if following.inserted_stop is None else [following.inserted_stop]
        appended = len(following.ids) - len(runtime_token_ids) - len(inserted)
        return MergeResult(
            token_ids=following.ids, appended_token_count=appended, kind="context", inserted_token_ids=inserted
        )


class ChatmillToolParser(ToolParser):
    """Finds tool calls by the form in which a model's own chat template writes them."""

    def __init__(self, tokenizer: Any) -> None:
        """Derive the renderer of a tokenizer's template."""
        super().__init__(tokenizer)
        self.renderer = Renderer(tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an answer."""
        return self.renderer.stops

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the content of an answer and its whole calls; all of the text if it cannot be parsed."""
        definitions = [_plain_tool(tool) for tool in tools or ()]
        prompt = self.renderer.prompt(STANDS_IN, definitions)
        answer: Answer = self.renderer.parse(prompt, responses_ids, definitions)
        if not answer.calls:
            return answer.message["content"], []
        message = answer.readings[0] if answer.readings else answer.message
        native = message.get("tool_calls") or [{}] * len(answer.calls)
        found: list[FunctionCall] = []
        for call, own in zip(answer.calls, native, strict=True):
            if call.status in (CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.TWO_READINGS):
                call_id = own.get("id") if self.renderer.grammar.has_ids else None
                found.append(FunctionCall(name=call.name, arguments=call.arguments, tool_call_id=call_id))
        return message["content"], found


def register_tool_parser(name: str = "chatmill") -> None:
    """Register the parser, so that verl finds it by name."""
    ToolParser.register(name)(ChatmillToolParser)


def _plain_tool(tool: Any) -> Any:
    """Return a tool definition as plain data."""
    if hasattr(tool, "model_dump_json"):
        return json.loads(tool.model_dump_json(exclude_unset=True, exclude_none=True))
    return tool


def _refuse_media(media: Mapping[str, Any]) -> None:
    """Refuse images, videos and sound, for which ids alone say too little."""
    for name in ("images", "videos", "audios"):
        if media.get(name):
            raise ConfigError(f"ChatmillTokenBuilder renders text alone, and {name} are given: use verl's own builder")
