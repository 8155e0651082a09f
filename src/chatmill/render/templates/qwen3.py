"""Qwen3: ChatML with thinking, tool definitions, tool calls and tool results, as the published template writes them."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.messages import MessageColumns
from chatmill.core.texts import Chosen, Texts, joined
from chatmill.core.tools import listed_tools
from chatmill.render.emitter import Emitter
from chatmill.render.events import EventColumns
from chatmill.render.frames import Frame
from chatmill.render.template import KINDS_OF, Ints, numbers_of
from chatmill.render.templates.chatml import IM_END, IM_START, ChatML
from chatmill.render.thinking import THINK, THINK_END, Answers, answers_of, split_reasoning
from chatmill.tokenizer.protocol import Tokenizer

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"

CALL_FORM = ('\n{"name": "', '", "arguments": ', "}\n")
"""What stands before the name of a call, between name and arguments, and after them."""
AFTER_SYSTEM = "\n\n"
"""Between a system message and the tool definitions."""
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
        self._numbers = numbers_of(self._frames)
        self._answer_numbers = np.array(
            [[frame.number for frame in (form.whole, form.before_calls, form.nothing)] for form in self._forms.values()]
        )  # by what stands before the answer, and by what follows it
        self._call_numbers, self._result_numbers = (
            np.array([[table[first, last].number for last in (False, True)] for first in (False, True)])
            for table in (self._calls, self._results)
        )

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

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write the system part, then every message in order."""
        messages = conversation.messages
        last_query = self._last_query(messages)
        first = 0
        if conversation.tools:
            first = int(messages[0].role is Role.SYSTEM)
            out.message(first - 1)
            self._emit_tools(conversation.tools, messages[0].content if first else None, out)
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

    def _emit_tools(self, tools: tuple[Any, ...], system: str | None, out: Emitter) -> None:
        """Write tool definitions, in the system message where there is one."""
        own = "" if system is None else f"{system}{AFTER_SYSTEM}"
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
            text = f"{CALL_FORM[0]}{call.name}{CALL_FORM[1]}{call.arguments}{CALL_FORM[2]}"
            out.framed(self._calls[number == 0, number == last], text)
        source = len(message.content) + len(message.reasoning or "")
        out.stripped += source - len(reasoning) - len(written)

    def _emit_tool(self, message: Message, before: Role | None, after: Role | None, out: Emitter) -> None:
        """A tool result; neighbours share one user turn."""
        out.framed(self._results[before is not Role.TOOL, after is not Role.TOOL], message.content)

    def column_messages(self, batch: Conversations) -> NDArray[np.bool_]:
        """All of them."""
        return np.ones(len(batch.messages), dtype=np.bool_)

    def write_messages(self, batch: Conversations) -> EventColumns:
        """The same from columns."""
        messages = batch.messages
        speaks = messages.roles == RoleCode.ASSISTANT
        who = np.flatnonzero(speaks)
        late, final = self._places_of(batch, who)
        answers = answers_of(messages.take(who), late, final)
        counts = 1 + messages.call_counts
        counts[who] += answers.reasoning.lengths > 0
        with_tools = np.flatnonzero(batch.tools.lengths)
        opening = batch.offsets[with_tools]  # the messages that tool definitions stand in or before
        alone = messages.roles[opening] != RoleCode.SYSTEM
        counts[opening[alone]] += 1
        out = EventColumns(self.table, counts)
        main = out.first[1:] - 1 - messages.call_counts  # the event of the content itself
        others = np.flatnonzero(~speaks)
        out.put(main[others], self._numbers[messages.roles[others]], messages.contents.take(others))
        self._write_results(batch, main, out)
        self._write_answers(messages.call_counts[who] > 0, main[who], answers, out)
        self._write_calls(messages, main, out)
        out.stripped[who] = answers.stripped
        hidden = np.flatnonzero(messages.has_reasoning & ~speaks)
        out.stripped[hidden] = messages.reasoning.take(hidden).characters()
        if len(with_tools):
            self._write_tools(batch.tools.take(with_tools), messages.contents.take(opening), opening, alone, out)
        return out

    def _places_of(self, batch: Conversations, who: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether each of the messages `who` stands behind the last question, and whether it is the last of all."""
        lasts = batch.offsets[1:] - 1
        asks = np.flatnonzero(batch.messages.roles == RoleCode.USER)
        asks = asks[~_wrapped(batch.messages.contents.take(asks))]
        last_query = lasts.copy()
        if len(asks):
            found = asks[np.maximum(np.searchsorted(asks, lasts, side="right") - 1, 0)]
            inside = (found >= batch.offsets[:-1]) & (found <= lasts)
            last_query[inside] = found[inside]
        owner = batch.owners(who)
        return who > last_query[owner], who == lasts[owner]

    def _write_answers(self, calls: NDArray[np.bool_], at: Ints, answers: Answers, out: EventColumns) -> None:
        """Assistant messages, their answers at the events `at`; `calls` tells which of them make calls."""
        thinking = np.flatnonzero(answers.reasoning.lengths > 0)
        newlines = Chosen(["\n"], np.zeros(len(thinking), dtype=np.int64)).columns()
        written = joined(newlines, answers.reasoning.take(thinking), newlines)
        out.put(at[thinking] - 1, self._reasoning.number, written)
        form = np.where(calls, np.where(answers.is_empty, 2, 1), 0)
        before = np.where(answers.reasoning.lengths > 0, 2, answers.shows.astype(np.int64))
        out.put(at, self._answer_numbers[before, form], answers.texts)

    def _write_calls(self, messages: MessageColumns, main: Ints, out: EventColumns) -> None:
        """The calls of assistant messages."""
        counts = messages.call_counts
        count = len(messages.call_names)
        before, between, after = (Chosen([text], np.zeros(count, dtype=np.int64)).columns() for text in CALL_FORM)
        texts = joined(before, messages.call_names, between, messages.call_arguments, after)
        number = np.arange(count) - np.repeat(messages.call_offsets[:-1], counts)  # in its message
        is_last = number == np.repeat(counts, counts) - 1
        frames = self._call_numbers[(number == 0).astype(np.int64), is_last.astype(np.int64)]
        out.put(np.repeat(main, counts) + 1 + number, frames, texts)

    def _write_results(self, batch: Conversations, main: Ints, out: EventColumns) -> None:
        """Tool results; neighbours share one user turn."""
        is_result = batch.messages.roles == RoleCode.TOOL
        places = np.flatnonzero(is_result)
        opens = np.ones(len(is_result) + 1, dtype=np.bool_)
        opens[1:] = ~is_result
        opens[batch.offsets] = True  # the message before, or none, is no result
        closes = np.ones(len(is_result) + 1, dtype=np.bool_)
        closes[:-2] = ~is_result[1:]
        closes[batch.offsets[1:] - 1] = True
        firsts, lasts = opens[places].astype(np.int64), closes[places].astype(np.int64)
        out.put(main[places], self._result_numbers[firsts, lasts], batch.messages.contents.take(places))

    def _write_tools(
        self, tools: Texts, systems: Texts, opening: Ints, alone: NDArray[np.bool_], out: EventColumns
    ) -> None:
        """Tool definitions: in the system message where there is one, else (`alone`) before the first message."""
        before = Chosen([AFTER_SYSTEM + TOOLS_BEFORE, TOOLS_BEFORE], alone.astype(np.int64)).columns()
        after = Chosen([TOOLS_AFTER], np.zeros(len(tools), dtype=np.int64)).columns()
        own = Texts(systems.data, systems.starts, np.where(alone, 0, systems.lengths))
        at = out.first[opening]
        out.put(at, self._system_tools.number, joined(own, before, tools, after))
        out.of_no_message[at[alone]] = True
        out.stripped[opening[~alone]] = 0  # what such a message may have of reasoning is not looked at


def _wrapped(texts: Texts) -> NDArray[np.bool_]:
    """Which texts of a user are wrapped tool results."""
    wrapped = np.zeros(len(texts), dtype=np.bool_)
    for place in np.flatnonzero(texts.leading(ord(RESPONSE[0])) > 0).tolist():
        text = texts[place]
        wrapped[place] = text.startswith(RESPONSE) and text.endswith(RESPONSE_END)
    return wrapped


TEMPLATE = Qwen3
