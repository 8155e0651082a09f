"""`chatmill template` and `chatmill templates`: what people see at 80 columns, what scripts read, what is found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import TokenizerError, UnknownNameError
from chatmill.look.template_look import TemplateLook, look_at_template
from chatmill.look.template_probes import PROBES
from chatmill.render.registry import bundled_names, given_options
from tests.cli.run import here
from tests.look.sets import tokenizer_once

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def codes(look: TemplateLook) -> set[str]:
    return {finding.code for finding in look.findings}


def text_of(look: TemplateLook, code: str) -> str:
    return " ".join(finding.text for finding in look.findings if finding.code == code)


def trl_template(name: str) -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"


@pytest.fixture(scope="module", autouse=True)
def _vocabularies_are_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatmill.look.template_look.load_tokenizer", tokenizer_once)
        yield


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_template(text: str, name: str = "own.jinja") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_template


@pytest.fixture(scope="module")
def qwen3() -> TemplateLook:
    return look_at_template(TOKENIZERS / "qwen3")


def test_json_has_everything(write: Any) -> None:
    done = here("template", write(CHATML), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        *("name", "origin", "licence", "sha256", "tokenizer", "vocab_size", "made_up_vocabulary", "options"),
        *("roles", "tool_definitions", "tool_calls", "asks_for_date", "date", "arguments", "content"),
        *("default_policy", "prompt", "stops", "generation_tags", "findings", "probes", "data"),
    }
    assert found["made_up_vocabulary"] is True
    assert found["data"] is None
    assert [probe["name"] for probe in found["probes"]] == [probe.name for probe in PROBES]
    pair = found["probes"][0]
    assert pair["turns"][0] | {"proved": True, "stop": "<|im_end|>", "stable": True} == pair["turns"][0]
    assert "".join(run["text"] for run in pair["rows"][0] if run["weight"]) == "A-one.<|im_end|>"
    assert {"code", "text"} == set(found["findings"][0])


def test_facts_of_a_model_folder(qwen3: TemplateLook) -> None:
    assert not qwen3.facts["made_up_vocabulary"]
    assert qwen3.facts["vocab_size"] == 151669
    assert qwen3.facts["options"] == ["enable_thinking"], "names that the template sets itself are no options"
    assert qwen3.facts["roles"] == ["system", "user", "assistant", "tool"]
    assert qwen3.facts["tool_definitions"]
    assert qwen3.facts["tool_calls"]
    assert qwen3.facts["prompt"] == "<|im_start|>assistant\n"
    assert qwen3.facts["stops"] == [{"token": "<|im_end|>", "sources": ["the tokenizer's eos"]}]
    assert not qwen3.facts["asks_for_date"]


def test_history_that_is_rewritten(qwen3: TemplateLook) -> None:
    assert "history_rewritten" in codes(qwen3)
    assert "R-one." in text_of(qwen3, "history_rewritten")
    thinking = next(probe for probe in qwen3.probes if probe.probe.name == "two turns with reasoning")
    assert [thinking.is_stable(answer) for answer in thinking.answers] == [False, True]
    assert len(thinking.rows) == 2
    assert "history_stable" in codes(look_at_template("chatml"))


def test_the_served_prompt_and_the_history(qwen3: TemplateLook) -> None:
    assert "prompt_agrees" in codes(look_at_template("chatml"))
    nemo = look_at_template(TOKENIZERS / "mistral_nemo")
    assert "prompt_not_in_history" not in codes(nemo)
    rewritten = text_of(nemo, "history_rewritten")
    assert "The answer itself changes the context of message 2, in 'system message'" in rewritten
    assert nemo.facts["arguments"] == "object"
    assert "reasoning_dropped" in codes(nemo)
    assert "reasoning_dropped" not in codes(qwen3)
    assert "must alternate" in text_of(nemo, "template_refuses")


def test_the_switch_under_which_prompt_and_history_agree(write: Any) -> None:
    text = CHATML.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
    )
    look = look_at_template(write(text))
    found = text_of(look, "prompt_not_in_history")
    assert "With enable_thinking=false they agree" in found
    assert "No switch" not in found
    assert look.probes[0].options == {"enable_thinking": False}


def test_a_prompt_that_opens_reasoning_which_nothing_closes(write: Any) -> None:
    opens = "{% if message.role == 'assistant' %}<think>\n{% endif %}{{ message.content }}"
    text = CHATML.replace("{{ message.content }}", opens).replace(
        "assistant\n{% endif -%}", "assistant\n<think>\n{% endif -%}"
    )
    found = text_of(look_at_template(write(text)), "reasoning_not_closed")
    assert "opens reasoning that answers never close" in found
    assert "No thinking switch fixes" in found
    off = "{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
    look = look_at_template(write(text.replace("<think>\n", off)))
    assert "With enable_thinking=false they agree" in text_of(look, "reasoning_not_closed")
    assert "prompt_agrees" not in codes(look)


def test_dropped_texts_and_tool_results_inside_answers() -> None:
    look = look_at_template(TOKENIZERS / "deepseek_v3")
    assert "tools" in text_of(look, "not_shown")
    assert "results_inside_answers" in codes(look)
    assert not look.facts["tool_definitions"]
    assert look.facts["tool_calls"]


def test_stops_that_the_model_would_not_stop_at() -> None:
    look = look_at_template(TOKENIZERS / "qwen3_base")
    assert look.facts["made_up_vocabulary"]
    assert [stop["token"] for stop in look.facts["stops"]] == ["<|endoftext|>", "<|im_end|>"]
    assert look.facts["stops"][1]["sources"][0].startswith("habit")
    found = text_of(look, "stop_not_in_config")
    assert "the model's generation config would not stop there" in found
    assert "its eos is <|endoftext|>" in found


def test_a_generation_config_is_a_source_of_stops(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (TOKENIZERS / "qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151643]}))
    look = look_at_template(folder)
    assert look.facts["stops"][0] == {"token": "<|endoftext|>", "sources": ["generation config"]}


def test_white_space_that_is_trimmed() -> None:
    assert "around user contents" in text_of(look_at_template("llama3"), "white_space_trimmed")
    assert "white_space_trimmed" not in codes(look_at_template("chatml"))


def test_special_tokens_that_the_vocabulary_lacks(write: Any) -> None:
    own = write(CHATML.replace("<|im_start|>", "<|open|>"))
    look = look_at_template(own, str(TOKENIZERS / "qwen3"))
    assert "<|open|>" in text_of(look, "tokens_not_in_vocabulary")
    assert "tokens_not_in_vocabulary" not in codes(look_at_template(own)), "there is no vocabulary to lack it"


@pytest.mark.parametrize(
    ("name", "code", "example"),
    [
        ("gptoss_training", "tags_train_prompt", "<|start|>assistant"),
        ("qwen3_5_think_training", "tags_train_prompt", "<think>"),
        ("qwen3_8_training", "tags_train_prompt", "<think>"),
        ("qwen2_5_training", "tags_train_prompt", '"\\n"'),
        ("qwen3_training", "tags_train_behind_stop", '"\\n"'),
        ("cohere2_training", "tags_agree", "exactly what is proved"),
    ],
)
def test_generation_tags_are_compared_with_the_proof(name: str, code: str, example: str) -> None:
    look = look_at_template(trl_template(name))
    assert look.facts["generation_tags"]
    assert example in text_of(look, code)
    tagged = {found for found in codes(look) if found.startswith("tags_")}
    assert ("tags_train_prompt" in tagged) == (code == "tags_train_prompt")


def test_tags_that_train_too_little(write: Any) -> None:
    content = "{{ message.content }}<|im_end|>"
    tagged = "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>"
    both = f"{{% if message.role == 'assistant' %}}{tagged}{{% else %}}{content}{{% endif %}}"
    look = look_at_template(write(CHATML.replace(content, both)))
    assert "<|im_end|>" in text_of(look, "tags_miss_stop")
    assert "tags_train_prompt" not in codes(look)


def test_a_template_that_asks_for_the_date(write: Any) -> None:
    own = write("{{ '<|day|>' + strftime_now('%d.%m.%Y') + '<|im_end|>\\n' }}" + CHATML)
    look = look_at_template(own)
    assert look.facts["asks_for_date"]
    assert "asks_for_date" in codes(look)
    assert "01.01.2026" in look.probes[0].rows[0].as_json()["documents"][0]["text"]
    given = look_at_template(own, options=given_options(today="2025-03-04"))
    assert "04.03.2025" in given.probes[0].rows[0].as_json()["documents"][0]["text"]
    done = here("template", own)
    assert "asked for; the probes below have 2026-01-01, because none was given" in " ".join(done.stdout.split())


def test_options_reach_the_template(write: Any) -> None:
    own = write("{% if shout %}<|loud|>{% endif %}" + CHATML)
    done = here("template", own, "--set", "template_options.shout=true", "--json")
    found = json.loads(done.stdout)
    assert found["options"] == ["shout"]
    assert found["probes"][0]["options"] == {"shout": True}
    assert found["probes"][0]["rows"][0][0]["text"].startswith("<|loud|>")


def _several(folder: Path) -> None:
    folder.mkdir()
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "<|tools|>" + CHATML}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "<|im_end|>"}))


def test_one_of_several_templates_in_a_folder(tmp_path: Path) -> None:
    _several(tmp_path / "several")
    default, tools = (look_at_template(f"{tmp_path}/several{name}") for name in ("", "#tool_use"))
    assert tools.facts["name"] == "several#tool_use"
    assert default.facts["sha256"] != tools.facts["sha256"]
    assert tools.probes[0].rows[0].as_json()["documents"][0]["text"].startswith("<|tools|>")
    with pytest.raises(UnknownNameError, match="Did you mean 'tool_use'"):
        look_at_template(f"{tmp_path}/several#tool_us")


def test_a_folder_whose_vocabulary_is_broken_is_no_folder_without_one(tmp_path: Path) -> None:
    _several(tmp_path / "several")
    (tmp_path / "several" / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError):
        look_at_template(tmp_path / "several")


def test_the_share_of_a_file_that_is_proved(write: Any, tmp_path: Path) -> None:
    own = write("{% if messages[0].role == 'assistant' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML)
    question, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    records = [[question, answer], [question, answer] * 2, [answer, question], [question, answer, question, call]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": r}) + "\n" for r in records) + "{broken\n")
    found = json.loads(here("template", own, "--data", path, "--json").stdout)["data"]
    assert found["records"] == 5
    assert found["proved"] == 2
    assert found["refused"] == {"invalid_json": 1, "not_shown": 1, "template_refused": 1}
    assert (found["turns"], found["turns_proved"]) == (6, 4)
    assert found["turns_unproved"] == {"template_refused": 1, "not_shown": 1}
    done = here("template", own, "--data", path)
    assert re.search(r"^records +2 of 5 \(40\.0%\)$", done.stdout, re.M)
    assert re.search(r"^turns +4 of 6 \(66\.7%\)$", done.stdout, re.M)


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
