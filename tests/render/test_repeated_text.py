"""Text of an answer that a template writes once more, after the answer, is context."""

from __future__ import annotations

import datetime

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.label.presets import find_policy
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer

NAMES = ("start", "end", "message", "channel", "constrain", "return", "call")


def test_gpt_oss_names_the_called_function_again_in_the_header_of_its_result() -> None:
    tokenizer = byte_tokenizer().with_added([f"<|{name}|>" for name in NAMES])
    bound = bind("gpt_oss", tokenizer, TemplateOptions(today=datetime.date(2026, 1, 1)))
    conversation = Conversation(
        (
            Message(Role.USER, "Weather?"),
            Message(Role.ASSISTANT, "", tool_calls=(ToolCall("look_up", '{"city": "Oslo"}', "c1"),)),
            Message(Role.TOOL, "Rain.", tool_call_id="c1", name="look_up"),
            Message(Role.ASSISTANT, "It rains."),
        )
    )
    tokens = render([conversation], bound).tokens
    text = tokenizer.decode(tokens.ids)
    assert "<|call|><|start|>functions.look_up to=assistant" in text, "the template repeats the name"
    trained = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    last_call = int((tokens.ids == tokenizer.control("<|call|>")).nonzero()[0][-1])
    answer = tokenizer.decode(tokens.ids[last_call + 1 :][trained[last_call + 1 :]])
    assert answer == "<|channel|>final<|message|>It rains.<|return|>"
