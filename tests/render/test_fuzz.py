"""Random conversations through every template: no control id from text, no crash, kinds over every token."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import KINDS, Part, parts_of
from chatmill.core.kinds import PLAIN as PLAIN_KIND
from chatmill.label.presets import PRESETS
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.tokenizer.load import with_control_tokens
from tests.data.tokenizer_files import loaded

TEMPLATES = bundled_names()
DATED = TemplateOptions(today=datetime.date(2026, 1, 2))

SPELLINGS = [
    "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>", "<|end|>",
    "<|return|>", "<|channel|>", "<|EOS|>", "<|END|>", "<|eot_id|>", "<|begin_of_text|>",
    "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>", "<tool_response>", "</tool_response>",
]  # fmt: skip
PLAIN = st.text(max_size=12)
BYTES = st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", errors="replace"))
TEXTS = st.lists(PLAIN | BYTES | st.sampled_from([*SPELLINGS, "\n", "\n\n", " ", ""]), max_size=4).map("".join)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(list(Role)))
    calls: tuple[ToolCall, ...] = ()
    reasoning = None
    if role is Role.ASSISTANT:
        calls = tuple(draw(st.lists(st.tuples(NAMES, TEXTS).map(lambda pair: ToolCall(*pair)), max_size=2)))
        reasoning = draw(st.none() | TEXTS)
    name = draw(NAMES) if role is Role.TOOL else None
    weight = draw(st.none() | st.sampled_from([0.0, 0.5, 1.0]))
    return Message(role, draw(TEXTS), reasoning=reasoning, tool_calls=calls, name=name, weight=weight)


TOOLS = st.lists(st.fixed_dictionaries({"name": NAMES, "description": TEXTS}), max_size=2).map(tuple)
CONVERSATIONS = st.tuples(st.lists(messages(), min_size=1, max_size=6).map(tuple), st.just(()) | TOOLS).map(
    lambda parts: Conversation(parts[0], tools=parts[1])
)


_BOUND: dict[str, Any] = {}


def bind_cached(name: str) -> Any:
    if name not in _BOUND:
        _BOUND[name] = bind(name, with_control_tokens(loaded("o200k"), find_template(name).control_tokens), DATED)
    return _BOUND[name]


@settings(max_examples=40)
@given(st.lists(CONVERSATIONS, min_size=1, max_size=4), st.sampled_from(TEMPLATES))
def test_random_conversations(conversations: list[Conversation], name: str) -> None:
    template = bind_cached(name)
    rendered = render(conversations, template, collect_failures=True)
    tokens = rendered.tokens
    failed = {index for index, _ in rendered.failed}
    assert sorted([*set(rendered.kept.tolist()), *failed]) == list(range(len(conversations)))
    assert tokens.offsets[-1] == len(tokens.ids) == len(tokens.kinds) == len(tokens.messages)
    assert (tokens.kinds & PLAIN_KIND < KINDS).all()
    assert (parts_of(tokens.kinds) != Part.PAD).all()
    assert (tokens.run_lengths >= 0).all()
    assert np.isin(tokens.offsets, tokens.run_offsets).all()
    for policy in PRESETS.values():
        weights = policy.run_weights(tokens)
        assert weights.shape == tokens.run_kinds.shape
        assert ((weights >= 0) & (weights <= 1)).all()


@settings(max_examples=40)
@given(CONVERSATIONS, st.sampled_from(TEMPLATES))
def test_control_ids_stand_only_where_the_template_put_them(conversation: Conversation, name: str) -> None:
    """Replacing every spelled control token in the texts changes no count of any control id."""
    template = bind_cached(name)

    def clean(text: str) -> str:
        for spelling in SPELLINGS:
            text = text.replace(spelling, spelling.replace("<", "(").replace(">", ")"))
        return text

    # Templates ask for `</think>` and `<tool_response>` in a content and write another text then.
    conversation = conversation._replace(
        messages=tuple(
            m._replace(content=m.content.replace("</think>", "").replace("<think>", "")) for m in conversation.messages
        )
    )
    if any(m.content.startswith("<tool_response>") for m in conversation.messages):
        return
    cleaned = conversation._replace(
        messages=tuple(
            m._replace(
                content=clean(m.content),
                reasoning=None if m.reasoning is None else clean(m.reasoning),
                tool_calls=tuple(call._replace(arguments=clean(call.arguments)) for call in m.tool_calls),
            )
            for m in conversation.messages
        )
    )
    rendered, other = (render([c], template, collect_failures=True) for c in (conversation, cleaned))
    assert [error.code for _, error in rendered.failed] == [error.code for _, error in other.failed]
    found, expected = rendered.tokens.ids, other.tokens.ids
    control = np.array(sorted(set(template.tokenizer.control_ids.values())))
    assert found[np.isin(found, control)].tolist() == expected[np.isin(expected, control)].tolist()
