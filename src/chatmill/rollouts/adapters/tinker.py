"""tinker-cookbook: a renderer for any chat template, registered by name.

register("chatmill/MyModel", template="./MyModel")
renderer = tinker_cookbook.renderers.get_renderer("chatmill/MyModel", tokenizer)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.kinds import REPEATED, Part, RoleCode, parts_of, roles_of
from chatmill.core.tokens import Tokens
from chatmill.errors import ConfigError, MissingExtraError
from chatmill.rollouts.adapters.messages import plain_message
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import ANSWER_PARTS
from chatmill.rollouts.types import Answer, CallStatus, ParsedCall, Proof, Reason

try:
    import tinker
    from tinker_cookbook import renderers
    from tinker_cookbook.renderers import ParseTermination, ToolCall, TrainOnWhat, UnparsedToolCall
except ModuleNotFoundError as error:
    if error.name not in ("tinker", "tinker_cookbook"):
        raise
    raise MissingExtraError("tinker-cookbook", "tinker", "chatmill.rollouts.adapters.tinker") from error

if TYPE_CHECKING:
    import torch

TOOLS = "tools"
"""Key of a first message that carries tool definitions, as the cookbook has no argument for them."""
STANDS_IN = [{"role": "user", "content": "Question?"}]
"""Messages before an answer, as the cookbook parses answers without their prompt."""
USABLE = (CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.TWO_READINGS)


class TemplateRenderer(renderers.Renderer):
    """Renders, trains and parses by a model's own chat template."""

    def __init__(self, tokenizer: Any, renderer: Renderer) -> None:
        """`renderer` belongs to the tokenizer."""
        super().__init__(tokenizer)
        self.renderer = renderer
        self._tools: dict[str, Any] = {}
        """Tool definitions that prompts had, by name: the types of arguments when answers are parsed."""

    @property
    def has_extension_property(self) -> bool:
        """Whether every next prompt begins with the one before and its answer."""
        return self.renderer.is_prefix_stable

    def get_stop_sequences(self) -> list[int]:
        """Return the ids that end an answer."""
        return self.renderer.stops

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[Mapping[str, Any]], system_prompt: str = ""
    ) -> list[Any]:
        """Return a first message that carries tools; without a system prompt it writes the tools alone."""
        wrapped = [tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]
        return [{"role": "system", "content": system_prompt, TOOLS: wrapped}]

    # ---- prompts and training

    def build_generation_prompt(
        self, messages: Sequence[Any], role: str = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """Render messages and the generation prompt after them."""
        if role != "assistant":
            raise ConfigError(f"a chat template prompts for an answer of the assistant, and role is {role!r}")
        plain, tools = self._plain(messages)
        ids = list(self.renderer.prompt(plain, tools).ids)
        if prefill:
            ids += self.renderer.tokenizer.encode(prefill)
        return tinker.ModelInput.from_ints(ids)

    def build_supervised_example(
        self, messages: Sequence[Any], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """Render a conversation as one sequence, with a weight for each token.

        The last answer is trained after its own prompt; earlier ones as the whole conversation shows them.
        """
        plain, tools = self._plain(messages)
        import torch

        is_last = train_on_what is TrainOnWhat.LAST_ASSISTANT_MESSAGE
        tokens = self.renderer.document(plain, tools, last_answer=is_last)
        kept = messages[len(messages) - len(plain) :]
        weights = _weights(tokens, kept, train_on_what)
        end = int(np.flatnonzero(parts_of(tokens.kinds) != Part.SEPARATOR)[-1]) + 1
        ids = tokens.ids[:end].tolist()
        return tinker.ModelInput.from_ints(ids), torch.tensor(weights[:end], dtype=torch.float32)

    def render_message(self, message: Any, ctx: Any) -> Any:
        """Refuse: a chat template writes whole conversations."""
        raise ConfigError(
            "a chat template writes whole conversations, no message alone: use build_generation_prompt or "
            "build_supervised_example"
        )

    # ---- answers

    def parse_response(self, response: Sequence[int]) -> tuple[Any, ParseTermination]:
        """Parse sampled ids; calls that are broken are unparsed ones."""
        tools = list(self._tools.values())
        prompt = self.renderer.prompt(STANDS_IN, tools)
        answer = self.renderer.parse(prompt, response, tools)
        said = answer.readings[0] if answer.readings else answer.message
        message: dict[str, Any] = {"role": "assistant", "content": said["content"]}
        if said.get("reasoning_content"):
            thinking = {"type": "thinking", "thinking": said["reasoning_content"]}
            message["content"] = [thinking, {"type": "text", "text": said["content"]}]
        self._add_calls(message, answer, said)
        return message, _termination(answer)

    def _add_calls(self, message: dict[str, Any], answer: Answer, said: Mapping[str, Any]) -> None:
        own = said.get("tool_calls") or [{}] * len(answer.calls)
        usable = [
            _tool_call(call, one.get("id"))
            for call, one in zip(answer.calls, own, strict=True)
            if call.status in USABLE
        ]
        broken = [
            UnparsedToolCall(raw_text=call.raw, error=call.status.sentence)
            for call in answer.calls
            if call.status not in USABLE
        ]
        if usable:
            message["tool_calls"] = usable
        if broken:
            message["unparsed_tool_calls"] = broken

    def to_openai_message(self, message: Any) -> dict[str, Any]:
        """Return a message with its reasoning in a field of its own."""
        plain = plain_message(message)
        found = super().to_openai_message({**message, "content": plain.get("content") or ""})
        if plain.get("reasoning_content"):
            found["reasoning_content"] = plain["reasoning_content"]
        return found

    def _plain(self, messages: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return messages in OpenAI's form, and the tools that the first one carries."""
        tools: list[Any] = []
        plain: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            carried = message.get(TOOLS) or []
            tools += carried
            if carried and not index and not message["content"]:
                continue
            plain.append(self.to_openai_message(message))
        self._tools |= {tool["function"]["name"]: tool for tool in tools}
        return plain, tools


def register(
    name: str, template: Any = None, options: Mapping[str, Any] | None = None, date: str | None = None
) -> None:
    """Register a renderer with tinker-cookbook.

    Args:
        name: Name for `get_renderer`, such as `chatmill/MyModel`.
        template: Name or path of a template. Default: the tokenizer's own.
        options: Options of the template, such as `enable_thinking`.
        date: Date for templates that ask for one, as YYYY-MM-DD.
    """

    def make(tokenizer: Any, image_processor: Any = None) -> TemplateRenderer:
        return TemplateRenderer(tokenizer, Renderer(tokenizer, template, options, date))

    renderers.register_renderer(name, make)


def _tool_call(call: ParsedCall, call_id: str | None) -> ToolCall:
    return ToolCall(id=call_id, function=ToolCall.FunctionBody(name=call.name, arguments=call.arguments))


def _termination(answer: Answer) -> ParseTermination:
    """Return how an answer ended: what is cut off or broken is malformed."""
    if not answer.finished or answer.reason is Reason.INVALID_UTF8:
        return ParseTermination.MALFORMED
    if answer.proof is Proof.NOT_WRITTEN and not answer.readings and answer.calls:
        return ParseTermination.MALFORMED
    return ParseTermination.STOP_SEQUENCE


def _weights(tokens: Tokens, messages: Sequence[Any], what: TrainOnWhat) -> np.ndarray:
    """Return whether each token is trained."""
    owners = tokens.messages
    parts = parts_of(tokens.kinds)
    is_body = (owners >= 0) & ~np.isin(parts, (Part.HEADER, Part.SEPARATOR, Part.DOCUMENT))
    is_answer = (roles_of(tokens.kinds) == RoleCode.ASSISTANT) & np.isin(parts, ANSWER_PARTS)
    is_answer &= (tokens.kinds & REPEATED) == 0
    roles = [message["role"] for message in messages]
    if what is TrainOnWhat.LAST_ASSISTANT_MESSAGE:
        return is_answer & (owners == len(messages) - 1)
    if what is TrainOnWhat.LAST_ASSISTANT_TURN:
        users = [index for index, role in enumerate(roles) if role == "user"]
        return is_answer & (owners > (users[-1] if users else -1))
    if what is TrainOnWhat.ALL_ASSISTANT_MESSAGES:
        return is_answer
    if what is TrainOnWhat.ALL_TOKENS:
        return np.ones(len(owners), dtype=bool)
    if what is TrainOnWhat.ALL_MESSAGES:
        return is_body & (is_answer | (roles_of(tokens.kinds) != RoleCode.ASSISTANT))
    chosen = [role in ("user", "system") for role in roles]
    if what is TrainOnWhat.CUSTOMIZED:
        chosen = [bool(message.get("trainable")) for message in messages]
    is_chosen = np.isin(owners, np.flatnonzero(chosen))
    return is_body & is_chosen & (is_answer | (roles_of(tokens.kinds) != RoleCode.ASSISTANT))
