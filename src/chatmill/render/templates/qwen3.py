"""Qwen3: ChatML with thinking, tool definitions, tool calls and tool results, as the published template writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.emitter import Emitter
from chatmill.render.frames import Frame
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


class Before(Enum):
    """What stands before an answer in its turn."""

    HEADER = "the header alone"
    NO_REASONING = "the header and an empty thinking block"
    REASONING = "reasoning that is written already"


class _AnswerForm(NamedTuple):
    """The frames of an answer in one of these places."""

    whole: Frame
    """An answer that ends its message."""
    before_calls: Frame
    """An answer that calls follow."""
    nothing: Frame
    """No answer, and calls follow."""


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
        self._call, self._call_end = self.literal(CALL), self.literal(CALL_END)
        self._tools_tail = self.literal(CALL, CALL_END, TOOLS_FORM[0], CALL, TOOLS_FORM[1], CALL_END)
        self._system_tools = self.frame(
            _SYSTEM.content,
            before=[(self._start, _SYSTEM.header)],
            head=("system\n", _SYSTEM.header),
            after=[(self._tools_tail, _SYSTEM.content), *self._closing[Role.SYSTEM]],
        )
        think, think_end = self.literal(THINK), self.literal(THINK_END)
        header = (self._assistant, _ASSISTANT.header)
        self._reasoning = self.frame(
            _ASSISTANT.reasoning,
            before=[header, (think, _ASSISTANT.reasoning)],
            after=[(think_end, _ASSISTANT.reasoning)],
        )
        no_reasoning = (self.literal(THINK, "\n\n", THINK_END), _ASSISTANT.reasoning)
        self._forms = {
            Before.HEADER: self._answer_form([header], ""),
            Before.NO_REASONING: self._answer_form([header, no_reasoning], "\n\n"),
            Before.REASONING: self._answer_form([], "\n\n"),
        }
        self._calls = {
            (first, last): self._call_frame(first, last) for first in (False, True) for last in (False, True)
        }
        response, response_end = self.literal(RESPONSE), self.literal(RESPONSE_END)
        user_newline = self.literal(IM_START, "user\n")
        self._results = {
            (first, last): self.frame(
                _TOOL.content,
                before=[(user_newline if first else self._newline, _TOOL.header), (response, _TOOL.header)],
                head=("\n", _TOOL.header),
                tail=("\n", _TOOL.header),
                after=[(response_end, _TOOL.header), *(self._closing[Role.TOOL] if last else [])],
            )
            for first in (False, True)
            for last in (False, True)
        }

    def _answer_form(self, before: list[tuple[int, int]], head: str) -> _AnswerForm:
        """The frames of an answer that these literals and this text stand before."""
        kind, blank = _ASSISTANT.content, (head, _ASSISTANT.reasoning)
        blanks = [(self.literal(head), _ASSISTANT.reasoning)] if head else []
        return _AnswerForm(
            whole=self.frame(kind, before=before, head=blank, after=self._closing[Role.ASSISTANT]),
            before_calls=self.frame(kind, before=before, head=blank, tail=("\n", _ASSISTANT.tool_call)),
            nothing=self.fixed([*before, *blanks]),
        )

    def _call_frame(self, first: bool, last: bool) -> Frame:
        """One call; neighbours are parted by a newline, the last one ends the message."""
        parting = [] if first else [(self._newline, _ASSISTANT.tool_call)]
        return self.frame(
            _ASSISTANT.tool_call,
            before=[*parting, (self._call, _ASSISTANT.tool_call)],
            after=[(self._call_end, _ASSISTANT.tool_call), *(self._closing[Role.ASSISTANT] if last else [])],
        )

    @property
    def plain_frames(self) -> Mapping[Role, Frame] | None:
        """None: what stands before an answer depends on the messages after it."""
        return None

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write the system part, then every message in order."""
        messages = conversation.messages
        last_query = self._last_query(messages)
        first = 0
        if conversation.tools:
            first = int(messages[0].role is Role.SYSTEM)
            out.message(first - 1)
            self.emit_tools(conversation.tools, messages[0].content if first else None, out)
        for index in range(first, len(messages)):
            message = messages[index]
            out.message(index)
            if message.role is Role.ASSISTANT:
                self._emit_assistant(message, index, len(messages), last_query, out)
            elif message.role is Role.TOOL:
                before = messages[index - 1].role if index else None
                after = messages[index + 1].role if index + 1 < len(messages) else None
                self._emit_tool(message, before, after, out)
            else:
                out.framed(self._frames[message.role], message.content)
            if message.reasoning and message.role is not Role.ASSISTANT:
                out.stripped += len(message.reasoning)

    def emit_tools(self, tools: tuple[Any, ...], system: str | None, out: Emitter) -> None:
        """Write tool definitions, in the system message where there is one."""
        own = "" if system is None else f"{system}\n\n"
        out.framed(self._system_tools, f"{own}{TOOLS_BEFORE}{listed_tools(tools)}{TOOLS_AFTER}")

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
        reasoning, written = split_reasoning(message)
        calls, content = message.tool_calls, written
        if not self._shows_reasoning(index, count, last_query, reasoning):
            reasoning, form = "", self._forms[Before.HEADER]
        else:
            reasoning, written = reasoning.strip("\n"), content.lstrip("\n")
            form = self._forms[Before.REASONING if reasoning else Before.NO_REASONING]
            if reasoning:
                out.framed(self._reasoning, f"\n{reasoning}\n")
        if not calls:
            out.framed(form.whole, written)
        elif content:
            out.framed(form.before_calls, written)
        else:
            out.fixed(form.nothing)
        last = len(calls) - 1
        for number, call in enumerate(calls):
            text = f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
            out.framed(self._calls[number == 0, number == last], text)
        source = len(message.content) + len(message.reasoning or "")
        out.stripped += source - len(reasoning) - len(written)

    def _emit_tool(self, message: Message, before: Role | None, after: Role | None, out: Emitter) -> None:
        """A tool result; neighbours share one user turn."""
        out.framed(self._results[before is not Role.TOOL, after is not Role.TOOL], message.content)


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


_LISTED: dict[int, tuple[tuple[Any, ...], str]] = {}
_LISTED_KEPT = 256


def listed_tools(tools: tuple[Any, ...]) -> str:
    """Tool definitions, a line each, as the chat templates of transformers write them.

    Records of one source share the same tuple, so the texts of the last ones are kept; each with its tuple, which must
    live on for its identity to mean something.
    """
    known = _LISTED.get(id(tools))
    if known is not None:
        return known[1]
    if len(_LISTED) >= _LISTED_KEPT:
        _LISTED.clear()
    text = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    _LISTED[id(tools)] = tools, text
    return text


TEMPLATE = Qwen3
