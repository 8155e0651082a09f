"""Derived response templates: what transformers reads with them is what a renderer reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import parse_response
from trl.chat_template_utils import glm4moe_template, qwen3_template
from typer.testing import CliRunner

from chatmill.cli.app import app
from chatmill.errors import ConfigError, RecordError
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import Proof
from tests.rollouts.helpers import ASKED, TEMPLATES, WEATHER, assistant, call, ids_of, renderer_of, written
from tools.renderer_table import CONVERSATIONS, answer_conversations, bound_file, said

NAMES = (
    "trl/qwen3.jinja",
    "trl/qwen3_6.jinja",
    "trl/glm4moe.jinja",
    "llamacpp/openai-gpt-oss-120b.jinja",
    "vllm/tool_chat_template_mistral.jinja",
    "vllm/tool_chat_template_granite.jinja",
)
PARIS = '{"city": "Paris", "days": 3}'


def seen(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a user can see of a message that transformers read."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    plain = [{"function": {"name": one["name"], "arguments": json.dumps(one["arguments"])}} for one in calls]
    return said({**message, "tool_calls": plain})


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_a_renderer_reads(name: str) -> None:
    renderer = renderer_of(name)
    derived = renderer.response_template()
    count = 0
    for conversation in answer_conversations(CONVERSATIONS, 1):
        try:
            answer = renderer.template.answer(conversation)
        except RecordError:
            continue
        text = "".join(span.text for span in answer.spans) + answer.stop
        prompt = renderer.prompt_of(conversation._replace(messages=conversation.messages[:-1]))
        parsed = renderer.parse(prompt, ids_of(renderer, text))
        if parsed.proof is not Proof.WRITTEN:
            continue
        found = parse_response(text, derived, prefix=prompt.text, tools=list(conversation.tools))
        assert seen(found) == said(parsed.message)
        count += 1
    assert count > 8


@pytest.mark.parametrize(
    ("name", "written_by_hand"), [("trl/qwen3.jinja", qwen3_template), ("trl/glm4moe.jinja", glm4moe_template)]
)
def test_it_reads_what_the_template_written_by_hand_reads(name: str, written_by_hand: dict[str, Any]) -> None:
    renderer = renderer_of(name)
    derived = renderer.response_template()
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    calls = [call("get_weather", PARIS), call("get_weather", PARIS, "call00001")]
    for message in (
        assistant("Sunny.", "I see."),
        assistant("Sunny."),
        assistant(calls=calls[:1]),
        assistant("I look.", "I see.", calls),
    ):
        text = written(renderer, prompt, message).removesuffix("<|observation|>")  # which TRL's takes for content
        given = {"prefix": prompt.text, "tools": [WEATHER]}
        assert parse_response(text, derived, **given) == parse_response(text, written_by_hand, **given)


def test_a_tokenizer_parses_its_own_ids_with_it() -> None:
    renderer = renderer_of("trl/qwen3.jinja")
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    text = written(renderer, prompt, assistant(calls=[call("get_weather", PARIS)]))
    derived = json.loads(json.dumps(renderer.response_template()))
    found = PreTrainedTokenizerFast.parse_response(
        _Decodes(renderer), ids_of(renderer, text), derived, prefix=prompt.ids
    )
    assert found["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": json.loads(PARIS)}


class _Decodes:
    """What `parse_response` asks of a tokenizer."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def decode(self, ids: list[int]) -> str:
        return self._renderer.tokenizer.decode(ids)


PYTHONIC = """{% for t in tools or [] %}{{ t|tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v|tojson }}{{ '' if loop.last else ', ' }}{% endfor %})
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_calls_that_the_format_cannot_say_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pythonic.jinja"
    path.write_text(PYTHONIC)
    renderer = Renderer(RolloutTemplate(bound_file(path, {})))
    assert renderer.grammar.has_calls
    with pytest.raises(ConfigError, match="has no response template: its arguments are no object"):
        renderer.response_template()


def test_the_command_prints_it() -> None:
    path = str(TEMPLATES / "trl" / "qwen3.jinja")
    done = CliRunner().invoke(app, ["template", path, "--response-template"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["fields"].keys() == {"reasoning_content", "tool_calls", "content"}
