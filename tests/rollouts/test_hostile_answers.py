"""Hostile answers: no exception, no proof that is not one, and no more work for a longer answer than its length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from chatmill.rollouts.reader import Reader
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import CallStatus, Prompt, Proof, Reason
from tests.rollouts.helpers import ASKED, TEMPLATES, WEATHER, assistant, call, ids_of, renderer_of, written
from tools.renderer_fuzz import fuzz
from tools.renderer_table import bound_file

NAMES = (
    "trl/qwen3.jinja",
    "trl/glm4moe.jinja",
    "trl/gptoss_training.jinja",
    "vllm/tool_chat_template_mistral.jinja",
    "llamacpp/Qwen3.5-4B.jinja",
    "vllm/tool_chat_template_granite.jinja",
)
ARGUMENTS = '{"city": "Saint-\\u00c9tienne \\"x\\" {[", "days": 3}'


def calling(renderer: Renderer) -> tuple[Prompt, list[int]]:
    """Return a prompt and the ids of an answer with a call."""
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    message = assistant(calls=[call("get_weather", ARGUMENTS)])
    return prompt, ids_of(renderer, written(renderer, prompt, message))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_cut_anywhere_has_no_proof_and_says_so(name: str) -> None:
    renderer = renderer_of(name)
    prompt, ids = calling(renderer)
    assert renderer.parse(prompt, ids).proof is Proof.WRITTEN
    for end in range(len(ids)):
        answer = renderer.parse(prompt, ids[:end], finish_reason="length")
        assert (answer.proof, answer.finished) == (Proof.NOT_WRITTEN, False)
        assert answer.reason is not None
        text = renderer.tokenizer.decode(ids[:end])
        assert answer.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", NAMES)
def test_marks_of_calls_inside_of_strings_are_text_or_have_no_proof(name: str) -> None:
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    marks = sorted(renderer.grammar.call_marks)
    assert marks
    for mark in marks:
        text = mark.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        message = assistant(calls=[call("get_weather", f'{{"city": "a {text} b"}}')])
        answer = renderer.parse(prompt, ids_of(renderer, written(renderer, prompt, message)))
        if answer.proof is Proof.NOT_WRITTEN:
            continue
        (found,) = answer.message["tool_calls"]
        assert found["function"]["arguments"] == f'{{"city": "a {text} b"}}'


@pytest.mark.parametrize("name", NAMES)
def test_a_special_token_in_the_middle_of_a_text_has_no_proof(name: str) -> None:
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    before = ids_of(renderer, written(renderer, prompt, assistant("One two three.")))
    middle = len(before) - 5
    special = next(token for token in renderer.template.special_ids.tolist() if token not in renderer.stops)
    answer = renderer.parse(prompt, [*before[:middle], special, *before[middle:]])
    assert answer.proof is Proof.NOT_WRITTEN
    # The same text, spelled by ordinary tokens, is text.
    spelled = renderer.tokenizer.encode(renderer.template.token_name(special))
    answer = renderer.parse(prompt, [*before[:middle], *spelled, *before[middle:]])
    if answer.proof is Proof.WRITTEN:
        assert renderer.template.token_name(special) in answer.message["content"]


BRACKETS = """{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() -%}
{{ k }}={{ v }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_call_that_only_brackets_begin_is_never_proved_as_a_text(tmp_path: Path) -> None:
    path = tmp_path / "brackets.jinja"
    path.write_text(BRACKETS)
    renderer = Renderer(RolloutTemplate(bound_file(path, {})))
    assert renderer.grammar.has_calls
    assert not renderer.grammar.call_marks
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    answer = renderer.parse(prompt, ids_of(renderer, "[get_weather(city=Paris)]<|im_end|>"))
    assert (answer.proof, answer.calls[0].arguments) == (Proof.WRITTEN, '{"city": "Paris"}')
    # A comma in a value could begin the next argument.
    answer = renderer.parse(prompt, ids_of(renderer, "[get_weather(city=['Paris', 'Rome'])]<|im_end|>"))
    assert (answer.proof, answer.reason) == (Proof.NOT_WRITTEN, Reason.MALFORMED_CALL)
    answer = renderer.parse(prompt, ids_of(renderer, "[get_weather(city=[{'a': 1}, {'b=': 2}], days=3)]<|im_end|>"))
    assert answer.proof is Proof.NOT_WRITTEN
    for text in ("[a] b", "[1, 2]", "See [the page](x)."):
        answer = renderer.parse(prompt, ids_of(renderer, f"{text}<|im_end|>"))
        assert (answer.proof, answer.message["content"]) == (Proof.WRITTEN, text)


BROKEN = ("{", '{"name": "get_weather", "arguments": {"city": [', "}", "[", "]", '"', "\\", "<", "\x00", "\ud7ff")


@pytest.mark.parametrize("name", NAMES)
def test_unbalanced_calls_have_no_proof(name: str) -> None:
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    stop = renderer.stops[-1:]
    for mark in sorted(renderer.grammar.call_marks):
        for text in BROKEN:
            answer = renderer.parse(prompt, [*ids_of(renderer, mark + text), *stop])
            assert answer.proof is Proof.NOT_WRITTEN, (mark, text)
            assert answer.reason is not None
            assert all(found.status is not CallStatus.OK or found.raw for found in answer.calls)


def repeated(renderer: Renderer) -> Iterator[str]:
    """Yield what an answer may repeat: characters, marks of the template, and special tokens."""
    yield from ("a", "{", '"', "\\", "\n", "\u4e16", '{"a":[')
    yield from sorted(renderer.grammar.call_marks)
    yield from (edge.literal for edges in renderer.grammar.edges.values() for edge in edges if edge.literal)
    yield from map(renderer.template.token_name, renderer.template.special_ids.tolist()[:3])


@pytest.mark.parametrize("name", NAMES)
def test_long_answers_of_one_token_are_read_a_few_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is readings and renderings: both must not grow with the answer."""
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    counts = {"readings": 0, "renderings": 0}
    read, plain = Reader.readings, type(renderer.template).plain

    def counting(reader: Any) -> Iterator[Any]:
        for reading in read(reader):
            counts["readings"] += 1
            yield reading

    def rendering(*given: Any, **more: Any) -> Any:
        counts["renderings"] += 1
        return plain(*given, **more)

    monkeypatch.setattr(Reader, "readings", counting)
    monkeypatch.setattr(type(renderer.template), "plain", rendering)
    for unit in dict.fromkeys(repeated(renderer)):
        found = []
        for size in (2_000, 20_000):
            counts.update(readings=0, renderings=0)
            ids = ids_of(renderer, unit * (size // len(unit)))
            answer = renderer.parse(prompt, [*ids, *renderer.stops[-1:]])
            assert answer.proof in Proof
            found.append(dict(counts))
        assert found[0] == found[1], unit
        assert max(found[1].values()) < 50, unit


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_megabyte_of_one_token_is_parsed(name: str) -> None:
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    for unit in dict.fromkeys(repeated(renderer)):
        ids = ids_of(renderer, unit * (1_000_000 // len(unit)))
        assert renderer.parse(prompt, [*ids, *renderer.stops[-1:]]).proof in Proof


def run_rollout(index: int) -> Proof:
    """Run one call and make the prompt after it, with texts that no other rollout has."""
    renderer = renderer_of("trl/qwen3.jinja")
    prompt = renderer.prompt([{"role": "user", "content": f"Question {index}?"}], tools=[WEATHER])
    arguments = f'{{"city": "City {index}.", "days": {index}}}'
    ids = ids_of(renderer, written(renderer, prompt, assistant(calls=[call("get_weather", arguments)])))
    answer = renderer.parse(prompt, ids)
    assert answer.calls[0].arguments == arguments
    result = {"role": "tool", "content": f"{index}", "name": "get_weather", "tool_call_id": "call00000"}
    following = renderer.extend(prompt, ids, [result], answer=answer)
    assert following.ids[: len(prompt.ids) + len(ids)] == [*prompt.ids, *ids]
    assert renderer.tokenizer.decode(following.ids).count(f"City {index}.") == 1
    return answer.proof


@pytest.mark.parametrize("count", [50, pytest.param(1_000, marks=pytest.mark.slow)])
def test_rollouts_in_threads_keep_their_proofs(count: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(run_rollout, range(count))) == {Proof.WRITTEN}


@pytest.mark.slow
def test_rollouts_in_processes_keep_their_proofs() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert set(pool.map(run_rollout, range(1_000), chunksize=100)) == {Proof.WRITTEN}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.jinja")), ids=lambda path: path.name)
def test_no_proof_of_a_fuzzed_answer_is_contradicted_by_plain_jinja(path: Path) -> None:
    name, counts, faults = fuzz(path, 300, seed=random.Random(path.name).randrange(1000))
    assert not faults, name
    assert not counts or counts.total() == 300


@pytest.mark.parametrize("name", NAMES)
def test_no_proof_of_a_few_fuzzed_answers_is_contradicted_by_plain_jinja(name: str) -> None:
    _, counts, faults = fuzz(TEMPLATES / name, 60, seed=1)
    assert not faults
    assert counts.total() == 60
    assert counts[Proof.WRITTEN] > 5
