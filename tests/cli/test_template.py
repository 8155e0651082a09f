"""`chatmill template`: what people see at 80 columns, what scripts read, what is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.errors import TokenizerError, UnknownNameError
from chatmill.look.template_look import look_at_template
from chatmill.render.registry import bundled_names
from tests.cli.run import here

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
OPENS = CHATML.replace(
    "{{ message.content }}", "{% if message.role == 'assistant' %}<think>\n{% endif %}{{ message.content }}"
).replace("assistant\n{% endif -%}", "assistant\n<think>\n{% endif -%}")
NOT_FALSE = "{% if enable_thinking is not false %}<think>\n"
OWN = {
    "own": CHATML,
    "dated": "{{ '<|day|>' + strftime_now('%d.%m.%Y') + '<|im_end|>\\n' }}" + CHATML,
    "shouts": "{% if shout %}<|loud|>{% endif %}" + CHATML,
    "user_begins": "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML,
    "switched_prompt": CHATML.replace("assistant\n{% endif", f"assistant\n{NOT_FALSE}{{% endif %}}{{% endif"),
    "opens_reasoning": OPENS,
    "opens_unless_off": OPENS.replace("<think>\n", NOT_FALSE + "{% else %}<think></think>{% endif %}"),
    "unknown_token": CHATML.replace("<|im_start|>", "<|open|>"),
}
"""Templates by what is odd about them; `golden` has what is found."""


def test_one_of_several_templates_in_a_folder(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "<|tools|>" + CHATML}]
    config = {"chat_template": named, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    default, tools = (look_at_template(f"{tmp_path}{name}") for name in ("", "#tool_use"))
    assert tools.facts["name"] == f"{tmp_path.name}#tool_use"
    assert default.facts["sha256"] != tools.facts["sha256"]
    assert tools.probes[0].rows[0].as_json()["documents"][0]["text"].startswith("<|tools|>")
    with pytest.raises(UnknownNameError, match="Did you mean 'tool_use'"):
        look_at_template(f"{tmp_path}#tool_us")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError):  # a broken vocabulary is not a missing one
        look_at_template(tmp_path)


def test_every_bundled_template_is_listed() -> None:
    done = here("template", "--json")
    assert done.returncode == 0, done.stderr
    found = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert list(found) == list(bundled_names())
    for entry in found.values():
        assert entry["origin"]
        assert entry["licence"]
        assert entry["stop_tokens"], entry["name"]
    assert found["qwen3_training"]["default_policy"] == "trl"
    assert found["gpt_oss"]["stop_tokens"] == ["<|return|>", "<|call|>"]


@pytest.mark.parametrize("name", bundled_names())
def test_every_bundled_template_can_be_looked_at(name: str) -> None:
    look = look_at_template(name)
    assert look.probes[0].rows, "a question and an answer are written by every template"
    assert not look.probes[0].refused
    json.dumps(look.as_json())
