"""`chatmill template` and `chatmill templates`: what people see at 80 columns, what scripts read, what is found."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from chatmill.errors import TokenizerError, UnknownNameError
from chatmill.look.template_look import TemplateLook, look_at_template
from chatmill.render.registry import bundled_names
from tests.cli.run import here

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
DATED = "{{ '<|day|>' + strftime_now('%d.%m.%Y') + '<|im_end|>\\n' }}" + CHATML
SHOUTS = "{% if shout %}<|loud|>{% endif %}" + CHATML
USER_BEGINS = "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML


def codes(look: TemplateLook) -> set[str]:
    return {finding.code for finding in look.findings}


def text_of(look: TemplateLook, code: str) -> str:
    return " ".join(finding.text for finding in look.findings if finding.code == code)


OPENS = CHATML.replace(
    "{{ message.content }}", "{% if message.role == 'assistant' %}<think>\n{% endif %}{{ message.content }}"
).replace("assistant\n{% endif -%}", "assistant\n<think>\n{% endif -%}")
"""Opens reasoning that nothing closes."""
CONTENT = "{{ message.content }}<|im_end|>"
TAGGED = "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>"
OWN = {
    "switched prompt": CHATML.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
    ),
    "opens reasoning": OPENS,
    "opens reasoning unless switched off": OPENS.replace(
        "<think>\n", "{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
    ),
    "tags without the stop": CHATML.replace(
        CONTENT, f"{{% if message.role == 'assistant' %}}{TAGGED}{{% else %}}{CONTENT}{{% endif %}}"
    ),
    "unknown token": CHATML.replace("<|im_start|>", "<|open|>"),
}
"""Templates by what is odd about them."""


@cache
def look(name: str, tokenizer: str | None = None) -> TemplateLook:
    """Of a bundled template, a folder of the tests, one of TRL's, or one of the odd ones."""
    if name in OWN:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "own.jinja").write_text(OWN[name])
            return look_at_template(Path(folder) / "own.jinja", tokenizer)
    if name.startswith("trl/"):
        spec = find_spec("trl")
        assert spec is not None
        return look_at_template(Path(str(spec.origin)).parent / "chat_templates" / f"{name.removeprefix('trl/')}.jinja")
    folder = TOKENIZERS / name
    return look_at_template(folder if folder.is_dir() else name)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("qwen3", "history_rewritten", "R-one."),
        ("chatml", "history_stable", ""),
        ("chatml", "prompt_agrees", ""),
        ("mistral_nemo", "history_rewritten", "The answer itself changes the context of message 2, in 'system"),
        ("mistral_nemo", "reasoning_dropped", ""),
        ("mistral_nemo", "template_refuses", "must alternate"),
        ("switched prompt", "prompt_not_in_history", "With enable_thinking=false they agree"),
        ("opens reasoning", "reasoning_not_closed", "opens reasoning that answers never close"),
        ("opens reasoning", "reasoning_not_closed", "No thinking switch fixes"),
        ("opens reasoning unless switched off", "reasoning_not_closed", "With enable_thinking=false they agree"),
        ("deepseek_v3", "not_shown", "tools"),
        ("deepseek_v3", "results_inside_answers", ""),
        ("qwen3_base", "stop_not_in_config", "the model's generation config would not stop there"),
        ("qwen3_base", "stop_not_in_config", "its eos is <|endoftext|>"),
        ("llama3", "white_space_trimmed", "around user contents"),
        ("trl/gptoss_training", "tags_train_prompt", "<|start|>assistant"),
        ("trl/qwen3_5_think_training", "tags_train_prompt", "<think>"),
        ("trl/qwen3_8_training", "tags_train_prompt", "<think>"),
        ("trl/qwen2_5_training", "tags_train_prompt", '"\\n"'),
        ("trl/qwen3_training", "tags_train_behind_stop", '"\\n"'),
        ("trl/cohere2_training", "tags_agree", "exactly what is proved"),
        ("tags without the stop", "tags_miss_stop", "<|im_end|>"),
    ],
)
def test_what_is_found(name: str, code: str, words: str) -> None:
    found = look(name)
    assert code in codes(found)
    assert words in text_of(found, code)
    if code.startswith("tags_"):
        assert found.facts["generation_tags"]
        assert ("tags_train_prompt" in codes(found)) == (code == "tags_train_prompt")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("mistral_nemo", "prompt_not_in_history"),
        ("qwen3", "reasoning_dropped"),
        ("opens reasoning unless switched off", "prompt_agrees"),
        ("chatml", "white_space_trimmed"),
        ("unknown token", "tokens_not_in_vocabulary"),  # there is no vocabulary to lack it
    ],
)
def test_what_is_not_found(name: str, code: str) -> None:
    assert code not in codes(look(name))


def test_facts() -> None:
    qwen3 = look("qwen3")
    wanted = {
        "made_up_vocabulary": False,
        "vocab_size": 151669,
        "options": ["enable_thinking"],  # names that the template sets itself are no options
        "roles": ["system", "user", "assistant", "tool"],
        "tool_definitions": True,
        "tool_calls": True,
        "prompt": "<|im_start|>assistant\n",
        "stops": [{"token": "<|im_end|>", "sources": ["the tokenizer's eos"]}],
        "asks_for_date": False,
    }
    assert {name: qwen3.facts[name] for name in wanted} == wanted
    thinking = next(probe for probe in qwen3.probes if probe.probe.name == "two turns with reasoning")
    assert [thinking.is_stable(answer) for answer in thinking.answers] == [False, True]
    assert len(thinking.rows) == 2
    assert look("mistral_nemo").facts["arguments"] == "object"
    deepseek = look("deepseek_v3").facts
    assert (deepseek["tool_definitions"], deepseek["tool_calls"]) == (False, True)
    base = look("qwen3_base").facts
    assert base["made_up_vocabulary"]
    assert [stop["token"] for stop in base["stops"]] == ["<|endoftext|>", "<|im_end|>"]
    assert base["stops"][1]["sources"][0].startswith("habit")
    assert look("switched prompt").probes[0].options == {"enable_thinking": False}
    lacks = look("unknown token", str(TOKENIZERS / "qwen3"))
    assert "<|open|>" in text_of(lacks, "tokens_not_in_vocabulary")


def test_a_generation_config_is_a_source_of_stops(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (TOKENIZERS / "qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151643]}))
    look = look_at_template(folder)
    assert look.facts["stops"][0] == {"token": "<|endoftext|>", "sources": ["generation config"]}


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
    done = here("templates", "--json")
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
