"""Plans hold for every record they are used for: empty texts, and templates that read texts behind the tracing."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import ClassVar

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.jinja.renderer import TraceError
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.render.template import KINDS_OF, Emitter, Template
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from tests.render.reference import jinja
from tools.template_survey import bind_bytes

NAMES = ("chatml", "llama3", "qwen3", "qwen3_training", "qwen2_5", "markers", "token_native")


def turns(*texts: str) -> Conversation:
    roles = itertools.cycle((Role.USER, Role.ASSISTANT))
    return Conversation(tuple(Message(role, text) for role, text in zip(roles, texts, strict=False)))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_empty_texts_is_for_empty_texts(name: str) -> None:
    """Whichever record comes first: an empty text must not hide a later one, nor a full one invent one."""
    source = find_template(name)
    tokenizer = with_control_tokens(load_tokenizer("bytes"), source.control_tokens)
    conversations = [turns(*texts) for texts in itertools.product(("", "a", " \n"), repeat=3)]
    together = render(conversations, bind(source, tokenizer), collect_failures=True)
    refused = {index for index, _ in together.failed}
    assert len(refused) < len(conversations)
    for index, conversation in enumerate(conversations):
        alone = render([conversation], bind(source, tokenizer), collect_failures=True)
        assert bool(alone.failed) == (index in refused)
        rows = np.flatnonzero(together.kept == index)
        assert len(rows) == len(alone.tokens)
        for number, row in enumerate(rows.tolist()):
            mine, theirs = together.tokens.conversation(row), alone.tokens.conversation(number)
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.kinds.tolist() == theirs.kinds.tolist()


class Leaky(Template):
    """Joins texts in C code, where no traced string can notice."""

    name = "leaky"

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        for index, message in enumerate(conversation.messages):
            out.message(index)
            out.text("".join(["> ", message.content]), KINDS_OF[message.role].content)


class LeakyLater(Template):
    """The same, in conversations of more than two messages alone."""

    name = "leaky later"

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        for index, message in enumerate(conversation.messages):
            out.message(index)
            text = "".join(["> ", message.content]) if len(conversation.messages) > 2 else "> " + message.content
            out.text(text, KINDS_OF[message.role].content)


def test_every_plan_of_a_users_template_is_compared() -> None:
    template = bind(LeakyLater, load_tokenizer("bytes"))
    render([turns("a", "b"), turns("c", "d"), turns("a", "b", "c", "d")], template)
    with pytest.raises(TraceError, match="otherwise than"):
        render([turns("e", "f", "g", "h")], template)


class Slow(Template):
    """Notes how many threads are in it at once."""

    name = "slow"
    inside: ClassVar[list[int]] = []
    most: ClassVar[list[int]] = []

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        self.inside.append(1)
        time.sleep(0.005)
        self.most.append(len(self.inside))
        for message in conversation.messages:
            out.text(message.content, KINDS_OF[message.role].content)
        self.inside.pop()


class Renamed(Template):
    """Says of a text that it is another one, as a fault in the tracing would."""

    name = "renamed"

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        for message in conversation.messages:
            out.text(message.content, KINDS_OF[message.role].content)
        out.items = [item._replace(text="other") if hasattr(item, "text") else item for item in out.items]


def test_a_text_that_its_expression_does_not_give_is_never_written() -> None:
    with pytest.raises(TraceError, match="makes 'other' of a text"):
        render([turns("one")], bind(Renamed, load_tokenizer("bytes")))


def test_threads_that_share_a_template_take_turns() -> None:
    """Plans are not for two threads at once."""
    template = bind(Slow, load_tokenizer("bytes"))
    shapes = [turns(*"abcdefgh"[:count]) for count in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda one: render([one], template).tokens.ids.tolist(), shapes))
    assert max(Slow.most) == 1
    assert made == [[ord(letter) for letter in "abcdefgh"[:count]] for count in range(1, 9)]


def test_a_template_that_reads_texts_behind_the_tracing_is_found_out() -> None:
    bound = Leaky(load_tokenizer("bytes"))
    with pytest.raises(TraceError, match="leaky"):
        render([turns("one", "two"), turns("three", "four")], bound)


class Formatted(Template):
    """Uses a format string, which the tracing notices: right, and no plan is shared."""

    name = "formatted"

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        for index, message in enumerate(conversation.messages):
            out.message(index)
            out.text(f"> {message.content}", KINDS_OF[message.role].content)


def test_a_format_string_is_right_for_every_record() -> None:
    tokenizer = load_tokenizer("bytes")
    conversations = [turns("one", "two"), turns("three", "four"), turns("one", "two")]
    tokens = render(conversations, Formatted(tokenizer)).tokens
    texts = [tokenizer.decode(tokens.conversation(index).ids) for index in range(3)]
    assert texts == ["> one> two", "> three> four", "> one> two"]


def with_tools(number: int, text: str) -> Conversation:
    """A conversation with tools of its own, in which a template can ask for many things."""
    properties = {f"p{k}": {"type": "string", "enum": [f"{number}-{k}"]} for k in range(number % 5 + 1)}
    function = {
        "name": f"f{number}",
        "description": f"does {number}",
        "parameters": {"type": "object", "properties": properties},
    }
    return turns("q", text)._replace(tools=({"type": "function", "function": function},))


def test_a_template_that_asks_much_about_tools_keeps_little() -> None:
    """gpt-oss writes tools out as TypeScript: what it asks of tools that no other record has is not kept for all."""
    options = TemplateOptions(today=date(2026, 1, 2))
    conversations = [with_tools(number, text) for number in range(12) for text in ("a", "b")]
    bound = bind_bytes("gptoss", jinja("gptoss"), options)
    together = render(conversations, bound)
    assert bound.plan_cache._keys._tools_by_value
    assert not bound.plan_cache._keys._tool_questions
    assert bound.plan_cache.traced == 5, "tools that give the same answers are written from one plan"
    for index, conversation in enumerate(conversations):
        alone = render([conversation], bind_bytes("gptoss", jinja("gptoss"), options)).tokens
        assert together.tokens.conversation(index).ids.tolist() == alone.ids.tolist()


def test_what_is_forgotten_is_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.render.plan_cache.MAX_QUESTIONS", 20)
    monkeypatch.setattr("chatmill.render.jinja.renderer.MAX_KEPT", 20)
    options = TemplateOptions(today=date(2026, 1, 2))
    conversations = [with_tools(number, "a") for number in range(6)]
    bound = bind_bytes("gptoss", jinja("gptoss"), options)
    for conversation in [*conversations, *conversations]:
        alone = render([conversation], bind_bytes("gptoss", jinja("gptoss"), options)).tokens
        assert render([conversation], bound).tokens.ids.tolist() == alone.ids.tolist()


def test_a_row_of_nothing_behind_others_is_a_row() -> None:
    """A template may write nothing at all: the table of plans grows without new items."""

    class Silent(Template):
        name = "silent"

        def emit(self, conversation: Conversation, out: Emitter) -> None:
            out.text(conversation.messages[0].content or "", KINDS_OF[Role.USER].content)

    template = Silent(load_tokenizer("bytes"))
    assert [len(render([turns(text)], template).tokens.ids) for text in ("ab", "", "c")] == [2, 0, 1]
