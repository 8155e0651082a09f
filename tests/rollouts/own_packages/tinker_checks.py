"""The adapter for tinker-cookbook, made by that package itself and held against its own classes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tinker_cookbook import renderers
from tinker_cookbook.renderers import ParseTermination, TrainOnWhat
from tinker_cookbook.tokenizer_utils import register_tokenizer

from chatmill.errors import ConfigError
from chatmill.rollouts.adapters.tinker import TemplateRenderer, register
from tests.rollouts.own_packages.cases import WEATHER, tokenizer_of

TOKENIZER = tokenizer_of("trl/qwen3")
QUESTION = {"role": "user", "content": "How is the weather in Paris?"}
REASONED = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "Let me see."}, {"type": "text", "text": "It is sunny."}],
}
EARLIER = {"role": "assistant", "content": "Hello."}
THREE = [QUESTION, EARLIER, {"role": "user", "content": "And now?"}, REASONED]
CALL = (
    "<think>\nLet me see.\n</think>\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
SPLIT = (TrainOnWhat.LAST_ASSISTANT_MESSAGE, TrainOnWhat.LAST_ASSISTANT_TURN, TrainOnWhat.ALL_ASSISTANT_MESSAGES)


def ours(**options: Any) -> TemplateRenderer:
    register("chatmill/qwen3", **options)
    made = renderers.get_renderer("chatmill/qwen3", TOKENIZER)
    assert isinstance(made, TemplateRenderer)
    return made


def theirs(name: str = "qwen3") -> Any:
    return renderers.get_renderer(name, TOKENIZER)


def trained(example: Any) -> str:
    model_input, weights = example
    ids = model_input.to_ints()
    assert len(ids) == len(weights)
    return str(TOKENIZER.decode([token for token, weight in zip(ids, weights.tolist(), strict=True) if weight]))


def test_prompts_and_stops_are_those_of_the_class_written_by_hand() -> None:
    mine, peer = ours(), theirs()
    for count in (1, 3):
        assert (
            mine.build_generation_prompt(THREE[:count]).to_ints()
            == peer.build_generation_prompt(THREE[:count]).to_ints()
        )
    assert mine.get_stop_sequences() == peer.get_stop_sequences()
    filled = mine.build_generation_prompt(THREE[:1], prefill="<think>").to_ints()
    assert filled == peer.build_generation_prompt(THREE[:1], prefill="<think>").to_ints()


def test_no_thinking_is_an_option_of_the_template() -> None:
    mine, peer = ours(options={"enable_thinking": False}), theirs("qwen3_disable_thinking")
    assert mine.build_generation_prompt(THREE[:3]).to_ints() == peer.build_generation_prompt(THREE[:3]).to_ints()


@pytest.mark.parametrize("what", [what for what in TrainOnWhat if what is not TrainOnWhat.CUSTOMIZED])
@pytest.mark.filterwarnings("ignore")
def test_supervised_examples_are_those_of_the_class_written_by_hand(what: TrainOnWhat) -> None:
    messages = [QUESTION, REASONED]
    own = ours().build_supervised_example(messages, what)
    peer = theirs().build_supervised_example(messages, what)
    assert own[0].to_ints() == peer[0].to_ints()
    assert own[1].tolist() == peer[1].tolist()


def test_chosen_messages_are_trained() -> None:
    messages = [{**QUESTION, "trainable": True}, {**REASONED, "trainable": False}]
    assert (
        trained(ours().build_supervised_example(messages, TrainOnWhat.CUSTOMIZED)) == f"{QUESTION['content']}<|im_end|>"
    )


@pytest.mark.parametrize("what", SPLIT)
def test_what_is_trained_follows_the_prompt_that_is_generated(what: TrainOnWhat) -> None:
    mine = ours()
    assert not mine.has_extension_property
    for model_input, weights in mine.build_supervised_examples(THREE, what):
        ids = model_input.to_ints()
        first = weights.tolist().index(1.0)
        prompts = [mine.build_generation_prompt(THREE[:count]).to_ints() for count in (1, 3)]
        assert ids[:first] in prompts
        assert all(weights[first:])


def test_a_stable_template_has_the_extension_property() -> None:
    register("chatmill/stable")
    tokenizer = tokenizer_of("trl/qwen3_instruct_2507")
    mine = renderers.get_renderer("chatmill/stable", tokenizer)
    assert mine.has_extension_property
    messages = [QUESTION, EARLIER, QUESTION, EARLIER, QUESTION]
    first, second, third = (mine.build_generation_prompt(messages[:count]).to_ints() for count in (1, 3, 5))
    assert second[: len(first)] == first
    assert third[: len(second)] == second


def test_answers_are_parsed_as_by_the_class_written_by_hand() -> None:
    mine, peer = ours(), theirs()
    for text in ("<think>\nLet me see.\n</think>\n\nIt is sunny.", CALL):
        ids = TOKENIZER.encode(text + "<|im_end|>")
        own, peers = mine.parse_response(ids), peer.parse_response(ids)
        assert own[1] is peers[1] is ParseTermination.STOP_SEQUENCE
        assert own[0]["content"] == peers[0]["content"]
        calls = [[call.function for call in one[0].get("tool_calls", [])] for one in (own, peers)]
        assert calls[0] == calls[1]
    message, termination = mine.parse_response(TOKENIZER.encode("<think>\nLet"))
    assert termination is ParseTermination.MALFORMED
    assert message["content"] == "<think>\nLet"


def test_broken_calls_are_unparsed_ones() -> None:
    mine, peer = ours(), theirs()
    ids = TOKENIZER.encode(CALL.replace("}}", "}") + "<|im_end|>")
    (own,) = mine.parse_response(ids)[0]["unparsed_tool_calls"]
    (peers,) = peer.parse_response(ids)[0]["unparsed_tool_calls"]
    assert own.raw_text == peers.raw_text


@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_tools_come_with_a_first_message(system: str) -> None:
    mine, peer = ours(), theirs()
    tools = [WEATHER["function"]]
    own = mine.create_conversation_prefix_with_tools(tools, system)
    peers = peer.create_conversation_prefix_with_tools(tools, system)
    mine_ids = mine.build_generation_prompt([*own, QUESTION]).to_ints()
    peer_ids = peer.build_generation_prompt([*peers, QUESTION]).to_ints()
    if system:
        assert mine_ids == peer_ids
    assert "get_weather" in TOKENIZER.decode(mine_ids)
    results = [{"role": "tool", "content": "Sunny.", "name": "get_weather", "tool_call_id": "call00000"}]
    message, _ = mine.parse_response(TOKENIZER.encode(CALL + "<|im_end|>"))
    assert mine.build_generation_prompt([*own, QUESTION, message, *results]).length > len(mine_ids)


def test_it_is_pickled_by_its_name() -> None:
    mine = ours()
    register_tokenizer(TOKENIZER.name_or_path, lambda *_: TOKENIZER)
    copied = pickle.loads(pickle.dumps(mine))
    assert copied.build_generation_prompt([QUESTION]).to_ints() == mine.build_generation_prompt([QUESTION]).to_ints()


def test_what_a_template_cannot_do_is_said() -> None:
    mine = ours()
    with pytest.raises(ConfigError, match="answer of the assistant"):
        mine.build_generation_prompt([QUESTION], role="user")
    with pytest.raises(ConfigError, match="whole conversations"):
        mine.render_message(QUESTION, None)
