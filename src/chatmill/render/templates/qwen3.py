"""Qwen3: ChatML with thinking, tool definitions, tool calls and tool results, as the published template writes them."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import msgspec

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.emitter import Emitter
from chatmill.render.template import KINDS_OF
from chatmill.render.templates.chatml import IM_END, IM_START, ChatML
from chatmill.tokenizer.protocol import Tokenizer

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
TOOLS_FORM = (" XML tags:\n", '\n{"name": <function-name>, "arguments": <args-json-object>}\n')

_SYSTEM, _ASSISTANT, _TOOL = (KINDS_OF[role] for role in (Role.SYSTEM, Role.ASSISTANT, Role.TOOL))


class Qwen3(ChatML):
    """Equal to the published template: reasoning is shown after the last user question only.

    So it is not prefix-stable: an earlier turn looks different once a later question follows it.
    """

    name = "qwen3"
    control_tokens: ClassVar[tuple[str, ...]] = (
        IM_START,
        IM_END,
        THINK,
        THINK_END,
        CALL,
        CALL_END,
        RESPONSE,
        RESPONSE_END,
    )
    roles: ClassVar[frozenset[Role]] = frozenset(Role) - {Role.DEVELOPER}
    writes_tool_calls = True
    prefix_stable = False
    default_policy = "assistant"
    declares = (
        "Reasoning of turns before the last user question is not shown; newlines around reasoning and before the "
        "answer that follows it are trimmed; reasoning written as <think>...</think> inside a content without "
        "reasoning of its own is taken out of it."
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode what is fixed."""
        super().__init__(tokenizer)
        self._newlines = self.literal("\n\n")
        self._call, self._call_end = self.literal(CALL), self.literal(CALL_END)
        self._tools_tail = self.literal(CALL, CALL_END, TOOLS_FORM[0], CALL, TOOLS_FORM[1], CALL_END)
        think, think_end = self.literal(THINK), self.literal(THINK_END)
        opening = (self._assistant, _ASSISTANT.header)
        closing = self._closing[Role.ASSISTANT]
        self._reasoning = self.frame(
            _ASSISTANT.reasoning,
            before=[opening, (think, _ASSISTANT.reasoning)],
            after=[(think_end, _ASSISTANT.reasoning)],
        )
        self._no_reasoning = self.literal(THINK, "\n\n", THINK_END)
        self._answer = self.frame(_ASSISTANT.content, head=("\n\n", _ASSISTANT.reasoning), after=closing)
        self._unreasoned = self.frame(
            _ASSISTANT.content,
            before=[opening, (self._no_reasoning, _ASSISTANT.reasoning)],
            head=("\n\n", _ASSISTANT.reasoning),
            after=closing,
        )
        self._system_tools = self.frame(
            _SYSTEM.content,
            before=[(self._start, _SYSTEM.header)],
            head=("system\n", _SYSTEM.header),
            after=[(self._tools_tail, _SYSTEM.content), *self._closing[Role.SYSTEM]],
        )
        self._response, self._response_end = self.literal(RESPONSE), self.literal(RESPONSE_END)
        self._user_newline = self.literal(IM_START, "user\n")

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write the system part, then every message in order."""
        messages = conversation.messages
        last_query = self._last_query(messages)
        first = 0
        if conversation.tools:
            first = int(messages[0].role is Role.SYSTEM)
            out.message(first - 1)
            own = f"{messages[0].content}\n\n" if first else ""
            listed = "".join(f"\n{tool_json(tool)}" for tool in conversation.tools)
            out.framed(self._system_tools, f"{own}{TOOLS_BEFORE}{listed}{TOOLS_AFTER}")
        for index in range(first, len(messages)):
            message = messages[index]
            out.message(index)
            if message.role is Role.ASSISTANT:
                self._emit_assistant(message, index, len(messages), last_query, out)
            elif message.role is Role.TOOL:
                self._emit_tool(messages, index, out)
            else:
                out.framed(self._frames[message.role], message.content)
            if message.reasoning and message.role is not Role.ASSISTANT:
                out.stripped += len(message.reasoning)

    def _last_query(self, messages: tuple[Message, ...]) -> int:
        """Index of the last user message that is not a wrapped tool result; the last message when there is none."""
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if message.role is Role.USER and not (
                message.content.startswith(RESPONSE) and message.content.endswith(RESPONSE_END)
            ):
                return index
        return len(messages) - 1

    def _shows_reasoning(self, index: int, count: int, last_query: int, reasoning: str) -> bool:
        return index > last_query and (index == count - 1 or bool(reasoning))

    def _emit_assistant(self, message: Message, index: int, count: int, last_query: int, out: Emitter) -> None:
        reasoning, content = split_reasoning(message)
        written, calls = content, message.tool_calls
        if self._shows_reasoning(index, count, last_query, reasoning):
            reasoning, written = reasoning.strip("\n"), content.lstrip("\n")
            if not reasoning and not calls:
                out.framed(self._unreasoned, written)
                out.stripped += len(message.content) + len(message.reasoning or "") - len(written)
                return
            if reasoning:
                out.framed(self._reasoning, f"\n{reasoning}\n")
            else:
                out.put(self._assistant, _ASSISTANT.header)
                out.put(self._no_reasoning, _ASSISTANT.reasoning)
            if not calls:
                out.framed(self._answer, written)
            else:
                self._answer_before_calls([("\n\n", _ASSISTANT.reasoning)], written, bool(content), out)
        else:
            reasoning = ""
            if not calls:
                out.framed(self._frames[Role.ASSISTANT], written)
            else:
                out.put(self._assistant, _ASSISTANT.header)
                self._answer_before_calls([], written, bool(content), out)
        if calls:
            self._emit_calls(message, out)
        source = len(message.content) + len(message.reasoning or "")
        out.stripped += source - len(reasoning) - len(written)

    def _answer_before_calls(self, parts: list[tuple[str, int]], written: str, has_content: bool, out: Emitter) -> None:
        """What stands before the first call, as one piece: a blank line, the answer, and a newline after an answer."""
        if written:
            parts.append((written, _ASSISTANT.content))
        if has_content:
            parts.append(("\n", _ASSISTANT.tool_call))
        if parts:
            out.joined(parts)

    def _emit_calls(self, message: Message, out: Emitter) -> None:
        for number, call in enumerate(message.tool_calls):
            if number:
                out.put(self._newline, _ASSISTANT.tool_call)
            out.put(self._call, _ASSISTANT.tool_call)
            out.text(f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n', _ASSISTANT.tool_call)
            out.put(self._call_end, _ASSISTANT.tool_call)
        for literal, kind in self._closing[Role.ASSISTANT]:
            out.put(literal, kind)

    def _emit_tool(self, messages: tuple[Message, ...], index: int, out: Emitter) -> None:
        """A tool result; neighbours share one user turn."""
        first = index == 0 or messages[index - 1].role is not Role.TOOL
        last = index == len(messages) - 1 or messages[index + 1].role is not Role.TOOL
        out.put(self._user_newline if first else self._newline, _TOOL.header)
        out.put(self._response, _TOOL.header)
        out.joined([("\n", _TOOL.header), (messages[index].content, _TOOL.content), ("\n", _TOOL.header)])
        out.put(self._response_end, _TOOL.header)
        if last:
            for literal, kind in self._closing[Role.TOOL]:
                out.put(literal, kind)


def split_reasoning(message: Message) -> tuple[str, str]:
    """Reasoning and content as the published template sees them.

    Without reasoning of its own, a content that holds `</think>` is split: what stands between the last `<think>`
    before the first `</think>` and that mark is the reasoning, what stands after the last `</think>` is the content.
    """
    content = message.content
    if message.reasoning is not None:
        return message.reasoning, content
    if THINK_END not in content:
        return "", content
    pieces = content.split(THINK_END)
    return pieces[0].rstrip("\n").split(THINK)[-1].lstrip("\n"), pieces[-1].lstrip("\n")


_TOOL_TEXTS: dict[bytes, str] = {}
_TOOL_TEXTS_KEPT = 4096


def tool_json(tool: Any) -> str:
    """A tool definition as the chat templates of transformers write it; records repeat them, so texts are kept."""
    key = msgspec.json.encode(tool)  # much faster than writing the text
    text = _TOOL_TEXTS.get(key)
    if text is None:
        if len(_TOOL_TEXTS) >= _TOOL_TEXTS_KEPT:
            _TOOL_TEXTS.clear()
        text = _TOOL_TEXTS[key] = json.dumps(tool, ensure_ascii=False)
    return text


TEMPLATE = Qwen3
