"""Long conversations, and templates that go over all messages for each of them: built, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.native import library
from chatmill.core.native.replayer import Renderings, Replayer, TooLongError
from chatmill.render import documents
from chatmill.render.jinja import renderer as renderer_module
from chatmill.render.jinja.options import Expand
from chatmill.render.jinja.replay import Replay
from chatmill.render.render import render
from tests.chats import chat
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nINSIDE{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAME_OF_CALL = (
    "{% if m.role == 'tool' %}{% for n in messages %}{% for c in n.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}{% endif %}"
)
IS_FIRST = "{% if m.role == 'user' %}{{ m.content == messages[0].content }}{% endif %}"


def talked(count: int) -> Conversation:
    return chat(*((("user", "assistant")[number % 2], f"m{number}") for number in range(count)), id=str(count))


def agent(calls: int) -> Conversation:
    """Questions, calls with ids of their own, results and answers."""
    messages: list[Message] = []
    for number in range(calls):
        call = ToolCall(f"f{number % 3}", "{}", f"c{number}")
        messages.append(Message(Role.USER, f"q{number}"))
        messages.append(Message(Role.ASSISTANT, "", tool_calls=(call,)))
        messages.append(Message(Role.TOOL, "r", tool_call_id=call.id))
        messages.append(Message(Role.ASSISTANT, f"a{number}"))
    return Conversation(tuple(messages), id=str(calls))


def test_twenty_thousand_messages_are_built_and_take_as_much_memory_as_they_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each prompt and answer only what the whole conversation does not have is written down."""
    sizes: list[int] = []
    replay = Replayer.replay

    def sized(self: Replayer, *about: Any) -> Renderings:
        made = replay(self, *about)
        sizes.append(made.outputs_of_all.nbytes)
        return made

    monkeypatch.setattr(Replayer, "replay", sized)
    template = of_text(CHATML.replace("INSIDE", ""))
    assert not render([talked(20_000)], template).failed
    assert max(sizes) < 100 * 20_000
    rendered = rendered_like_plain_jinja(template, [talked(3_000), talked(20_000)])
    assert not rendered.failed
    assert max(sizes) < 100 * 20_000


def test_a_conversation_that_is_too_long_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts and answers are compared with it, of which there is no end."""
    monkeypatch.setattr(renderer_module, "MAX_RENDERED", 10_000)
    template = of_text(CHATML.replace("INSIDE", ""))
    rendered = render([talked(2), talked(200), talked(4)], template, collect_failures=True)
    assert rendered.kept.tolist() == [0, 2]
    ((index, error),) = rendered.failed
    assert (index, error.code) == (1, "conversation_too_long")
    assert "the prompts and answers of its 200 messages have more than 10,000 messages together" in str(error)


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.TREE])
def test_documents_that_are_too_long_together_cost_their_conversation_alone(
    expand: Expand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where later messages change every answer, each is in a document with all before it."""
    monkeypatch.setattr(documents, "MAX_WRITTEN", 1_000)
    template = of_text(CHATML.replace("INSIDE", "{{ loop.last }}"), expand=expand)
    rendered = render([talked(10), talked(100), talked(4)], template, collect_failures=True)
    assert rendered.kept.tolist() == [0] * 5 + [2] * 2
    ((index, error),) = rendered.failed
    assert (index, error.code) == (1, "conversation_too_long")
    assert "split the conversation, or use `expand: last`" in str(error)


def test_memory_of_compiled_code_is_copied_in_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ctypes.string_at` takes a C int."""
    template = of_text(CHATML.replace("INSIDE", NAME_OF_CALL))
    expected = render([agent(3), talked(6)], template).tokens.ids.tolist()
    monkeypatch.setattr(library, "MOST_AT_ONCE", 0)
    assert render([agent(3), talked(6)], template).tokens.ids.tolist() == expected


def test_a_loop_over_messages_inside_of_one_asks_each_pair_of_messages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each prompt and answer: twice the messages are four times the questions, not eight times."""
    asked = [0]
    ask = Replay._asked

    def counted(self: Replay, *about: int) -> int:
        asked[0] += 1
        return ask(self, *about)

    monkeypatch.setattr(Replay, "_asked", counted)
    counts: list[int] = []
    for calls in (10, 20):
        template, record = of_text(CHATML.replace("INSIDE", NAME_OF_CALL)), agent(calls)
        assert not rendered_like_plain_jinja(template, [record, record]).failed
        asked[0] = 0
        assert not rendered_like_plain_jinja(template, [agent(calls)._replace(id="again")]).failed
        counts.append(asked[0])
    assert counts[1] < 6 * counts[0], counts


def test_replies_of_one_conversation_are_not_those_of_the_next() -> None:
    """Pairs of messages with equal classes and other texts."""
    template = of_text(CHATML.replace("INSIDE", NAME_OF_CALL + IS_FIRST))
    mixed: list[Conversation] = []
    for calls in (3, 4, 3, 2, 4):
        one = agent(calls)
        late = (message._replace(tool_call_id="c0") if message.tool_call_id else message for message in one.messages)
        mixed += [one, Conversation(tuple(late), id=f"late{calls}"), one._replace(messages=one.messages[4:])]
    assert not rendered_like_plain_jinja(template, [*mixed, *mixed]).failed


def test_a_record_that_takes_too_many_steps_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every rendering is made by running the template: each has a limit of its own, but there are many."""
    monkeypatch.setattr(renderer_module, "MAX_STEPS_OF_RECORD", 3_000)
    template = of_text(CHATML.replace("INSIDE", "{{ loop.changed(m.role) }}"))
    rendered = render([agent(1), agent(60), agent(1)], template, collect_failures=True)
    assert rendered.kept.tolist() == [0, 2]
    assert [(index, error.code) for index, error in rendered.failed] == [(1, "conversation_too_long")]
    assert "take more than 3,000 steps of the template together: split the conversation" in str(rendered.failed[0][1])


def test_a_refused_conversation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned of it is right for the records after it."""
    template = of_text(CHATML.replace("INSIDE", NAME_OF_CALL))
    replay = Replayer.replay
    calls = iter([False, True])

    def stopped(self: Replayer, *about: Any) -> Renderings:
        if next(calls, False):
            raise TooLongError
        return replay(self, *about)

    monkeypatch.setattr(Replayer, "replay", stopped)
    rendered = render([agent(9)], template, collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["conversation_too_long"]
    monkeypatch.undo()
    assert not rendered_like_plain_jinja(template, [agent(5), agent(9), talked(8), agent(20)]).failed
