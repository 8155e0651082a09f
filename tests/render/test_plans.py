"""Plans hold for every record they are used for: empty texts, and templates that read texts after the tracing."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import REPEATED
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
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
    template = bind(source, tokenizer)
    together = render(conversations, template, collect_failures=True)
    refused = {index for index, _ in together.failed}
    assert len(refused) < len(conversations)
    for index, conversation in enumerate(conversations):
        template.store.forget()
        alone = render([conversation], template, collect_failures=True)
        assert bool(alone.failed) == (index in refused)
        rows = np.flatnonzero(together.kept == index)
        assert len(rows) == len(alone.tokens)
        for number, row in enumerate(rows.tolist()):
            mine, theirs = together.tokens.conversation(row), alone.tokens.conversation(number)
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.kinds.tolist() == theirs.kinds.tolist()


TRIMMED = (
    "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content | trim }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.mark.parametrize("place", [0, 1], ids=["learned", "replayed"])
def test_a_text_that_plain_jinja_does_not_write_costs_one_record(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the tracing is found by the comparison with plain Jinja; other records are written as ever."""
    monkeypatch.setattr("chatmill.render.jinja.renderer.COMPARED", 1)
    bound = bind_bytes("trimmed", TRIMMED)
    plain = bound._sandboxes.plain
    trim = plain.filters["trim"]
    plain.filters["trim"] = lambda text: "other" if text == "wrong" else trim(text)
    batch = [turns("one", "two", "three", "four"), turns("a", "b")]
    batch.insert(place, turns("wrong", "two"))
    rendered = render(batch, bound, collect_failures=True)
    assert [(index, error.code) for index, error in rendered.failed] == [(place, "not_followed")]
    texts = [bound.tokenizer.decode(rendered.tokens.conversation(row).ids) for row in range(2)]
    assert texts == ["<|u|>one<|eos|><|a|>two<|eos|><|u|>three<|eos|><|a|>four<|eos|>", "<|u|>a<|eos|><|a|>b<|eos|>"]


def test_threads_that_share_a_template_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are not for two threads at once."""
    inside: list[int] = []
    most: list[int] = []
    write = ModelTemplate.write

    def slow(*arguments: Any, **options: Any) -> Any:
        inside.append(1)
        time.sleep(0.005)
        most.append(len(inside))
        written = write(*arguments, **options)
        inside.pop()
        return written

    monkeypatch.setattr(ModelTemplate, "write", slow)
    template = bind("chatml", with_control_tokens(load_tokenizer("bytes"), find_template("chatml").control_tokens))
    shapes = [turns(*"abcdefgh"[:count]) for count in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda one: render([one], template).tokens.ids.tolist(), shapes))
    assert max(most) == 1
    assert made == [render([one], template).tokens.ids.tolist() for one in shapes]


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
    assert bound.store.keys._tools_by_value
    assert not bound.store.keys._tool_questions
    # five kinds of tools, with a prompt and without; the rest by replay
    assert bound._renderer({}).runs == 10
    for index, conversation in enumerate(conversations):
        alone = render([conversation], bind_bytes("gptoss", jinja("gptoss"), options)).tokens
        assert together.tokens.conversation(index).ids.tolist() == alone.ids.tolist()


@pytest.mark.parametrize("weights", list(itertools.product((None, 0.0, 1.0), repeat=2)))
def test_an_answer_of_weight_0_is_marked_wherever_it_is(weights: tuple[float | None, float | None]) -> None:
    """Also if it is the first message of all."""
    said = [Message(Role.ASSISTANT, "a", weight=weights[0]), Message(Role.USER, "q", weight=0.0)]
    said.append(Message(Role.ASSISTANT, "b", weight=weights[1]))
    source = find_template("chatml")
    bound = bind(source, with_control_tokens(load_tokenizer("bytes"), source.control_tokens))
    rendered = render([Conversation(tuple(said))], bound)
    tokens = rendered.tokens
    assert rendered.turns.tolist() == [sum(weight != 0 for weight in weights)]
    owners = [said[number] if number >= 0 else None for number in tokens.run_messages.tolist()]
    unwanted = [one is not None and one.role is Role.ASSISTANT and one.weight == 0 for one in owners]
    assert ((tokens.run_kinds & REPEATED) > 0).tolist() == unwanted
