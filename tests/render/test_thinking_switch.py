"""The switch for thinking is chosen per record, whatever happens to answers without a proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.jinja.options import TemplateOptions, Unproved
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer

TEXT = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is not false %}<think>
{% endif %}{% endif -%}"""


@pytest.mark.parametrize("unproved", list(Unproved))
def test_auto_finds_the_switch_under_which_an_answer_is_proved(unproved: Unproved, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(TEXT)
    tokenizer = byte_tokenizer().with_added(["<|im_start|>", "<|im_end|>"])
    bound = bind(path, tokenizer, TemplateOptions(unproved=unproved))
    conversation = Conversation((Message(Role.USER, "Q"), Message(Role.ASSISTANT, "A")))
    assert bound.write(conversation).options == (("enable_thinking", False),)
    rendered = render([conversation], bound)
    assert rendered.turns.tolist() == [1]
    assert rendered.untrained.tolist() == [0]
