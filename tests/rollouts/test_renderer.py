"""Prompts, parsed answers and next prompts: what the template writes comes back, and nothing else has a proof."""

from __future__ import annotations

from typing import Any

import pytest

import chatmill
from chatmill.core.conversation import Role
from chatmill.errors import RecordError
from chatmill.render.render import render
from chatmill.rollouts.types import CallStatus, Proof, Reason
from tests.rollouts.helpers import ASKED, TEMPLATES, WEATHER, assistant, call, ids_of, renderer_of, written
from tools.renderer_table import CONVERSATIONS, answer_conversations, round_trips

FORMS = {
    "trl/qwen3.jinja": "JSON in marks",
    "trl/glm4moe.jinja": "keys and values in marks, and a stop of the next message",
    "trl/gptoss_training.jinja": "channels",
    "vllm/tool_chat_template_mistral.jinja": "a list of JSON with ids",
}
PARIS = '{"city": "Paris", "days": 3}'


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_the_template_writes_comes_back_with_proof_and_its_tokens(name: str) -> None:
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    message = assistant(calls=[call("get_weather", PARIS)])
    ids = ids_of(renderer, written(renderer, prompt, message))
    answer = renderer.parse(prompt, ids)
    assert (answer.proof, answer.reason, answer.finished) == (Proof.WRITTEN, None, True)
    assert answer.message["tool_calls"][0]["function"]["name"] == "get_weather"
    (found,) = answer.calls
    assert (found.arguments, found.status) == (PARIS, CallStatus.OK)
    assert renderer.tokenizer.decode(ids[found.start : found.end]).strip() == found.raw
    assert "Paris" in found.raw


@pytest.mark.parametrize("name", FORMS)
def test_the_next_prompt_begins_with_what_was_sent_and_sampled_over_twenty_turns(name: str) -> None:
    renderer = renderer_of(name)
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    for turn in range(20):
        message = assistant(f"Answer {turn}.")
        if turn % 2:
            message = assistant(calls=[call("get_weather", PARIS, f"call{turn // 2:05d}")])
        text = written(renderer, prompt, message)
        ids = ids_of(renderer, text)
        answer = renderer.parse(prompt, ids)
        assert answer.proof is Proof.WRITTEN
        new: list[dict[str, Any]] = [{"role": "user", "content": f"Question {turn}?"}]
        if answer.calls:
            call_id = answer.message["tool_calls"][0]["id"]
            new = [{"role": "tool", "content": "Sunny.", "name": "get_weather", "tool_call_id": call_id}]
        following = renderer.extend(prompt, ids, new, answer=answer)
        assert following.ids[: len(prompt.ids) + len(ids)] == [*prompt.ids, *ids]
        assert len(following.ids) == len(following.kinds) == len(following.messages)
        template = renderer.extend(prompt, ids, new, history="template", answer=answer)
        assert template.ids == renderer.prompt_of(following.conversation).ids
        if following.agrees_with_template:
            assert renderer.tokenizer.decode(template.ids[-20:]) == renderer.tokenizer.decode(following.ids[-20:])
        prompt = following


def test_a_prompt_has_the_ids_that_a_build_puts_before_the_answer() -> None:
    renderer = renderer_of("trl/qwen3.jinja")
    for conversation in answer_conversations(CONVERSATIONS, 1):
        try:
            tokens = render([conversation], renderer.bound).tokens
        except RecordError:
            continue
        document = tokens.conversation(len(tokens) - 1)
        prompt = renderer.prompt_of(conversation._replace(messages=conversation.messages[:-1]))
        assert document.ids[: len(prompt.ids)].tolist() == prompt.ids
        assert conversation.messages[-1].role is Role.ASSISTANT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl/qwen3.jinja", "trl/glm4moe.jinja"])
def test_what_templates_write_for_bundled_conversations_is_parsed(name: str) -> None:
    counts = round_trips(TEMPLATES / name, list(answer_conversations(CONVERSATIONS, 1)))
    assert counts.accepted > 10
    outcomes = {outcome for one in counts.outcomes.values() for outcome in one}
    assert outcomes <= {"same", "ambiguous"}


# ---- what has no proof


def reasons(name: str, text: str, **more: Any) -> tuple[Proof, Reason | None]:
    renderer = renderer_of(name)
    answer = renderer.parse(renderer.prompt(ASKED, tools=[WEATHER]), ids_of(renderer, text), **more)
    if answer.proof is Proof.NOT_WRITTEN:
        stop = "<|end|>" if name == "trl/phi3.jinja" else "<|im_end|>"
        assert answer.message == {"role": "assistant", "content": text.removesuffix(stop)}
    return answer.proof, answer.reason


EMPTY = "<think>\n\n</think>\n\n"


def test_answers_without_proof_say_why() -> None:
    qwen = "trl/qwen3.jinja"
    assert reasons(qwen, f"{EMPTY}Yes.<|im_end|>") == (Proof.WRITTEN, None)
    assert reasons(qwen, f"{EMPTY}Yes.") == (Proof.NOT_WRITTEN, Reason.NO_STOP)
    assert reasons(qwen, f"{EMPTY}Yes.", finish_reason="length") == (Proof.NOT_WRITTEN, Reason.CUT_BY_LENGTH)
    assert reasons(qwen, f"{EMPTY} Yes. \n<|im_end|>") == (Proof.WRITTEN, None)
    assert reasons(qwen, f"{EMPTY}\nYes.<|im_end|>") == (Proof.NOT_WRITTEN, Reason.STRIPPED_TEXT)
    assert reasons(qwen, "Yes.<|im_end|>") == (Proof.NOT_WRITTEN, Reason.STRIPPED_TEXT)
    assert reasons(qwen, f"{EMPTY}Yes.<|im_start|>user<|im_end|>") == (Proof.NOT_WRITTEN, Reason.SPECIAL_IN_TEXT)
    broken = f'{EMPTY}<tool_call>\n{{"name": "get_weather", "arguments": {{"city": \n</tool_call><|im_end|>'
    assert reasons(qwen, broken) == (Proof.NOT_WRITTEN, Reason.ARGUMENTS_NOT_JSON)
    other = f'{EMPTY}<tool_call>\n{{"call": "get_weather"}}\n</tool_call><|im_end|>'
    assert reasons(qwen, other) == (Proof.NOT_WRITTEN, Reason.MALFORMED_CALL)
    assert reasons("trl/phi3.jinja", "<tool_call>x</tool_call><|end|>") == (Proof.NOT_WRITTEN, Reason.FORM_NOT_DERIVED)


def test_bytes_that_are_no_text_have_no_proof() -> None:
    renderer = renderer_of("trl/qwen3.jinja")
    prompt = renderer.prompt(ASKED)
    answer = renderer.parse(prompt, [*ids_of(renderer, EMPTY), 0xE2, 0x82, *renderer.stops[-1:]])
    assert (answer.proof, answer.reason) == (Proof.NOT_WRITTEN, Reason.INVALID_UTF8)
    answer = renderer.parse(prompt, [*ids_of(renderer, EMPTY), 10**6, *renderer.stops[-1:]])
    assert (answer.proof, answer.reason) == (Proof.NOT_WRITTEN, Reason.INVALID_UTF8)


def test_an_unknown_tool_is_said_of_its_call() -> None:
    renderer = renderer_of("trl/qwen3.jinja")
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    ids = ids_of(renderer, written(renderer, prompt, assistant(calls=[call("get_time", "{}")])))
    assert renderer.parse(prompt, ids).calls[0].status is CallStatus.UNKNOWN_TOOL


def test_two_readings_are_both_given_unless_the_tools_decide() -> None:
    renderer = renderer_of("trl/glm4moe.jinja")
    text = (
        "\n<think></think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n</tool_call><|observation|>"
    )
    prompt = renderer.prompt(ASKED)
    answer = renderer.parse(prompt, ids_of(renderer, text))
    found = {reading["tool_calls"][0]["function"]["arguments"] for reading in answer.readings}
    assert (answer.proof, answer.reason, found) == (Proof.AMBIGUOUS, Reason.TWO_READINGS, {'{"x": 7}', '{"x": "7"}'})
    for kind, arguments in (("string", '{"x": "7"}'), ("integer", '{"x": 7}')):
        tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": kind}}}}}
        answer = renderer.parse(prompt, ids_of(renderer, text), tools=[tool])
        assert (answer.proof, answer.calls[0].arguments) == (Proof.WRITTEN, arguments)


def test_a_stop_that_is_missing_is_inserted_and_said() -> None:
    renderer = renderer_of("trl/qwen3.jinja")
    prompt = renderer.prompt(ASKED)
    ids = ids_of(renderer, f"{EMPTY}Yes, and")
    following = renderer.extend(prompt, ids, [{"role": "user", "content": "Go on."}], finish_reason="length")
    stop = renderer.tokenizer.control("<|im_end|>")
    assert following.inserted_stop == stop
    assert following.ids[: len(prompt.ids) + len(ids) + 1] == [*prompt.ids, *ids, stop]


def test_an_extension_that_depends_on_a_broken_answer_is_refused() -> None:
    renderer = renderer_of("trl/gptoss_training.jinja")
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    ids = ids_of(renderer, "<|channel|>commentary to=functions.get_weather<|message|>{<|call|>")
    with pytest.raises(chatmill.ExtensionRefused) as refused:
        renderer.extend(prompt, ids, [{"role": "tool", "content": "Sunny.", "tool_call_id": "call00000"}])
    assert refused.value.reason


def test_rollouts_become_rows_that_carry_what_was_sampled() -> None:
    tokenizer = chatmill.load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    renderer = chatmill.Renderer(tokenizer, "chatml")
    prompt = renderer.prompt([{"role": "user", "content": "1+1?"}])
    stop = tokenizer.control("<|im_end|>")
    sampled = [*tokenizer.encode("2"), stop]
    following = renderer.extend(prompt, sampled, [{"role": "user", "content": "2+2?"}])
    second = [*tokenizer.encode("4"), stop]
    rollout = chatmill.Rollout(
        prompts=[prompt.ids, following.ids], samples=[sampled, second], logprobs=[[-0.5, -0.1], [-0.2, 0.0]]
    )
    record = renderer.row(rollout, id="e1")
    dataset = chatmill.compile([record], "bytes", template="chatml", add_control_tokens=True)
    assert dataset[0].ids.tolist() == [*following.ids, *second]
    trained = [index for index, weight in enumerate(dataset[0].weights.tolist()) if weight]
    assert [dataset[0].ids.tolist()[index] for index in trained] == [*sampled, *second]
