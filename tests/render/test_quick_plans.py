"""Records that compiled code writes are what `DocumentWriter` writes of them, whatever came before."""

from __future__ import annotations

import random
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.quick_plans import QuickPlans
from chatmill.render.registry import bind, find_template
from chatmill.render.render import PER_DOCUMENT, Rendered, render
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens

NAMES = ("chatml", "qwen3", "qwen3_training", "glm4_5", "granite", "gpt_oss")
OWN = {
    "recap": "{% set asked = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < asked.last %}{{ m.content }};{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "ended": "{% for m in messages %}{% if loop.previtem is defined %}<|eos|>{% endif %}{{ m.role }}: "
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if loop.last %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "trimmed": "{% for m in messages %}{{ m.role }}: {{ m.content | trim if "
    "m.role == 'assistant' and not loop.last else m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
"""Templates that write a changed answer again after texts of others, that end it in the next message's turn, and in
which texts alone say whether an answer is changed."""
WRITTEN = {name for name in (*NAMES, *OWN) if name != "granite"}
"""Templates whose records are known to be written quickly."""
QUESTIONS = [Message(Role.USER, text) for text in ("why?", "", " x \n", "<|im_end|>", "a</think>b")]
ANSWERS = [
    *(Message(Role.ASSISTANT, text) for text in ("so", "", "\n so ", "<think>a</think>b")),
    *(Message(Role.ASSISTANT, text, reasoning=why) for text, why in (("so", "as"), ("x ", ""), ("", " why\n"))),
    Message(Role.ASSISTANT, "no", weight=0.0),
]
CALLS = [
    Message(Role.ASSISTANT, "", tool_calls=(ToolCall("find", arguments),), reasoning=why)
    for arguments, why in (('{"a": 1}', None), ('{"a": "x"}', "so"), ('{"a": "", "b": {}}', "so"), ("{}", None))
]
RESULT = Message(Role.TOOL, "found", name="find")
TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}


def conversations(count: int, rng: random.Random, *, calls: bool) -> list[Conversation]:
    """Chats of which hardly two are alike."""
    made = []
    for _ in range(count):
        messages = [Message(Role.SYSTEM, "be kind")] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 6)):
            messages.append(rng.choice(QUESTIONS))
            for _ in range(rng.randint(0, 3) if calls else 0):
                messages += (rng.choice(CALLS), RESULT)
            messages.append(rng.choice(ANSWERS))
        made.append(Conversation(tuple(messages), tools=(TOOL,) if calls and rng.random() < 0.5 else ()))
    return made


def facts(rendered: Rendered) -> list[list[object]]:
    tokens = rendered.tokens
    columns = (tokens.ids, tokens.offsets, tokens.run_offsets, tokens.run_kinds, tokens.run_messages, rendered.kept)
    counted = [getattr(rendered, name) for name in PER_DOCUMENT]
    return [*(np.asarray(one).tolist() for one in (*columns, *counted)), [index for index, _ in rendered.failed]]


@pytest.mark.parametrize("name", [*NAMES, *OWN])
@pytest.mark.parametrize("expand", [Expand.NONE, Expand.TURNS])
def test_quick_plans_are_those_of_the_slow_way(
    name: str, expand: Expand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.jinja").write_text(OWN.get(name, ""))
    source = find_template(tmp_path / "own.jinja" if name in OWN else name)
    tokenizer = with_control_tokens(load_tokenizer("bytes"), source.control_tokens or ("<|eos|>",))
    chats = conversations(40, random.Random(f"{name} {expand}"), calls=name not in ("chatml", *OWN))
    unproved = Unproved.UNTRAINED if name == "gpt_oss" else Unproved.REFUSE
    given = TemplateOptions(expand=expand, today=date(2026, 1, 2), unproved=unproved)
    made: list[list[list[object]]] = []
    written = 0
    plan = QuickPlans.plan
    for is_quick in (True, False):
        monkeypatch.setattr(QuickPlans, "plan", plan if is_quick else lambda self, view: None)
        bound = bind(source, tokenizer, given)
        parts = [render(chats[first : first + 10], bound, collect_failures=True) for first in range(0, 40, 10)]
        made.append([facts(one) for one in parts])
        assert bound.store.quick is not None
        written += bound.store.quick._written
    assert made[0] == made[1]
    assert written or name not in WRITTEN


def test_what_a_program_may_not_touch_is_left_alone(tmp_path: Path) -> None:
    """A template whose segments have texts of many messages is written slowly, and right."""
    path = tmp_path / "many.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {% for o in messages[:4] %}{{ o.content }},{% endfor %}{{ m.content }}"
        "<|eos|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = with_control_tokens(load_tokenizer("bytes"), ("<|eos|>",))
    chats = conversations(30, random.Random(3), calls=False)
    bound = bind(path, tokenizer)
    together = render(chats, bound, collect_failures=True)
    alone = [render([one], bind(path, tokenizer), collect_failures=True) for one in chats]
    ids = np.concatenate([one.tokens.ids for one in alone])
    assert together.tokens.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("name", ["glm4_5", "gpt_oss"])
def test_arguments_that_are_no_object_are_refused_whatever_is_known(name: str) -> None:
    source = find_template(name)
    tokenizer = with_control_tokens(load_tokenizer("bytes"), source.control_tokens or ())
    bound = bind(source, tokenizer, TemplateOptions(today=date(2026, 1, 2)))

    def chat(arguments: str) -> Conversation:
        call = Message(Role.ASSISTANT, "", tool_calls=(ToolCall("find", arguments),))
        return Conversation((QUESTIONS[0], call, RESULT, ANSWERS[0]))

    for _ in range(2):
        chats = [chat(text) for text in ('{"a": 1}', '{"a": 2}', "[1]", '{"a": 3}', "no")]
        refused = [(index, error.code) for index, error in render(chats, bound, collect_failures=True).failed]
        assert refused == [(2, "arguments_not_an_object"), (4, "arguments_not_an_object")]
