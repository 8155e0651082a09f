"""The order of keys in a record, as templates see it: that of transformers, or the record is refused."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from chatmill.read.conversations import ConversationFile
from chatmill.render.render import render
from tests.render.jinja.at_hand import of_text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nINSIDE{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "a": 2}}}


def orders(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(pairs) for pairs in permutations(value.items())]


def chats() -> list[list[dict[str, Any]]]:
    """Messages whose keys, and those of their calls, are in all orders."""
    asking = {"role": "user", "content": "q", "name": "Ann"}
    thinking = [{"role": "assistant", "content": "a", name: "r"} for name in ("reasoning_content", "thinking")]
    found = [[user, assistant] for user in orders(asking) for one in thinking for assistant in orders(one)]
    for function in orders(CALL["function"]):
        for call in orders({**CALL, "function": function}):
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            found.append([{"role": "user", "content": "q"}, calling, {"role": "tool", "content": "r"}])
    return found


def compared(inside: str, folder: Path) -> list[str]:
    """Compare the text of every record that is built with transformers'; return the codes of the others."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text, records = CHATML.replace("INSIDE", inside), chats()
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    template = of_text(text)
    rendered = render(list(ConversationFile(path)), template, collect_failures=True)
    for place, index in enumerate(rendered.kept.tolist()):
        (wanted,), _ = render_jinja_template(conversations=[records[index]], chat_template=text)
        assert template.tokenizer.decode(rendered.tokens.conversation(place).ids) == wanted, records[index]
    assert len(rendered.kept) + len(rendered.failed) == len(records) == 84
    return [error.code for _, error in rendered.failed]


EACH_CALL = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
BY_NAME = [
    "{{ m.thinking or '' }}" + EACH_CALL.replace("CALL", "{{ c|tojson }}"),
    "{% if m.tool_calls %}{{ m.tool_calls|tojson(indent=1) }}{% endif %}{{ 'id' in m.keys() }}{{ m.get('name') or 0 }}",
    "{{ m is mapping }}" + EACH_CALL.replace("CALL", "{{ c.items()|map('first')|join }}{{ c|tojson }}"),
    "{{ 1 if m }}" + EACH_CALL.replace("CALL", "{% for k in c.function %}{{ k }}{% endfor %}{{ c|tojson }}"),
]


@pytest.mark.parametrize("inside", BY_NAME)
def test_what_is_read_by_name_and_what_a_call_lists_is_what_transformers_gives(inside: str, tmp_path: Path) -> None:
    assert compared(inside, tmp_path) == []


ALL_FIELDS = [
    *("m|tojson", "m|tojson(sort_keys=true)", "[m]|tojson", "messages|tojson", "dict(m)|tojson", "dict(**m)|tojson"),
    *("m.items()|list|length", "m.values()|list|length", "m.keys()|join", "m|join", "m|list", "m|length", "m|dictsort"),
    *("m|items|list|length", "m.copy()|tojson", "m", "m|string", "m|first", "m|map('upper')|join", "m|reverse|join"),
    *("namespace(**m).role", "messages|map('list')|list|length", "m|batch(2)|list|length", "m|unique|list", "m|pprint"),
    *("messages|groupby('role')|tojson", "messages|map('tojson')|join", "m.items()|length", "'%(role)s'|format(**m)"),
]
BLOCKS = ["{% for k in m %}{{ k }}{% endfor %}", "{% for k, v in m.items() %}{{ k }}{% endfor %}"]
BLOCKS += ["{% macro w() %}{{ kwargs|tojson }}{% endmacro %}{{ w(**m) }}"]


@pytest.mark.parametrize("inside", [*(f"{{{{ {expression} }}}}" for expression in ALL_FIELDS), *BLOCKS])
def test_a_template_that_goes_over_all_fields_of_a_message_refuses_the_record(inside: str, tmp_path: Path) -> None:
    """Their order is not kept, nor what means nothing here; also where the conversation is rendered as a whole."""
    assert set(compared(inside, tmp_path)) == {"origin_lost"}
    assert set(compared(inside + "{{ loop.changed(m.role) }}", tmp_path)) == {"origin_lost"}
