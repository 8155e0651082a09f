"""The adapter for `renderers`, made by that package itself and held against its own classes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from renderers import CustomRendererConfig, create_renderer
from renderers.base import Renderer as RendererProtocol
from renderers.base import ToolCallParseStatus, build_training_sample
from renderers.configs import _CONFIG_BY_NAME

from chatmill.rollouts.adapters.prime_intellect import ChatmillRenderer
from tests.rollouts.own_packages.cases import (
    ANSWER,
    CALLING,
    EPISODE,
    QUESTION,
    RESULT,
    WEATHER,
    sampled_ids,
    tokenizer_of,
)
from tools.renderer_peers import Compared, compare_one
from tools.renderer_table import CONVERSATIONS, answer_places

IMPORT_PATH = "chatmill.rollouts.adapters.prime_intellect.ChatmillRenderer"
FAMILIES = {"qwen3": "trl/qwen3", "qwen3.6": "trl/qwen3_6", "glm-4.5": "trl/glm4moe"}
TOOLS = [WEATHER]


def custom(name: str, **fields: Any) -> ChatmillRenderer:
    """Make the renderer as the package does from a config."""
    made = create_renderer(tokenizer_of(name), CustomRendererConfig(import_path=IMPORT_PATH, **fields))
    assert isinstance(made, ChatmillRenderer)
    return made


def their_class(family: str) -> Any:
    return create_renderer(tokenizer_of(FAMILIES[family]), _CONFIG_BY_NAME[family]())


def test_the_package_makes_the_renderer_from_its_import_path() -> None:
    renderer = custom("trl/qwen3", options={"enable_thinking": False})
    assert isinstance(renderer, RendererProtocol)
    assert renderer.renderer.tokenizer.decode(renderer.render_ids([QUESTION], add_generation_prompt=True)).endswith(
        "<think>\n\n</think>\n\n"
    )
    config = CustomRendererConfig(import_path=IMPORT_PATH, date="2026-11-19")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="unknown"):
        CustomRendererConfig(import_path=IMPORT_PATH, unknown=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_answers_and_next_prompts_are_those_of_the_class_written_by_hand(family: str) -> None:
    ours, theirs = custom(FAMILIES[family]), their_class(family)
    found = Compared()
    for whole, index in answer_places(CONVERSATIONS, 1):
        if len(whole.messages) < 30:
            compare_one(found, theirs, ours, whole, index)
    assert set(found.counts["prompt"]) == {"same"}
    assert set(found.counts["parse"]) == {"same"}
    # Theirs gives none after a question, where the template takes reasoning out of history.
    assert set(found.counts["next prompt"]) <= {"same", "here alone"}
    assert found.counts["next prompt"]["same"] > 1
    assert sum(found.counts["prompt"].values()) > 10


UNLIKE = {
    "qwen3": (set(), set()),
    # Its class trains the mark that the prompt ends with.
    "qwen3.6": (set(), {"<think>", "\n"}),
    # Its class takes the line break after the prompt for a part of it.
    "glm-4.5": ({"\n"}, set()),
}
"""Tokens that are sampled here alone, and in the class written by hand alone."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_masks_of_a_conversation_are_those_of_the_class_written_by_hand(family: str) -> None:
    ours, theirs = custom(FAMILIES[family]), their_class(family)
    messages = [{"role": "system", "content": "Be brief."}, *EPISODE]
    own, other = ours.render(messages, tools=TOOLS), theirs.render(messages, tools=TOOLS)
    # GLM's last stop is the header of a message that is not there yet.
    size = min(len(own.token_ids), len(other.token_ids))
    assert len(own.token_ids) - size <= 1
    assert own.token_ids[:size] == other.token_ids[:size]
    assert own.message_tool_names == other.message_tool_names
    assert own.message_roles == other.message_roles
    decode = ours.renderer.tokenizer.decode
    for name in ("sampled_mask", "is_content"):
        pairs = list(zip(getattr(own, name)[:size], getattr(other, name)[:size], strict=True))
        here = {decode([own.token_ids[place]]) for place, pair in enumerate(pairs) if pair == (True, False)}
        there = {decode([own.token_ids[place]]) for place, pair in enumerate(pairs) if pair == (False, True)}
        assert (here, there) == UNLIKE[family], name
    assert own.tokens_by_role(sampled_only=True)["user"] == 0


def test_training_samples_are_built_from_its_masks() -> None:
    renderer = custom("trl/qwen3")
    sample = build_training_sample(renderer, EPISODE, tools=TOOLS)
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    text = renderer.renderer.tokenizer.decode(trained)
    assert text.endswith("It is sunny.<|im_end|>")
    assert "get_weather" in text
    assert "How is" not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_begins_with_what_was_sent_and_sampled(family: str) -> None:
    renderer = custom(FAMILIES[family])
    prompt = renderer.render_ids([QUESTION], tools=TOOLS, add_generation_prompt=True)
    ids = sampled_ids(renderer.renderer, [QUESTION, CALLING], TOOLS)
    bridged = renderer.bridge_to_next_turn(prompt, ids, [RESULT], tools=TOOLS)
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + len(ids)] == [*prompt, *ids]
    assert set(bridged.message_indices) == {-1, 0}
    assert not any(bridged.sampled_mask)
    shown = [token for token, mask in zip(bridged.token_ids, bridged.is_content, strict=True) if mask]
    assert renderer.renderer.tokenizer.decode(shown).strip() == "Sunny."
    assert bridged.tokens_per_message()[0] >= len(shown)

    again = sampled_ids(renderer.renderer, EPISODE, TOOLS)
    parsed = renderer.parse_response(again, tools=TOOLS, prompt_ids=bridged.token_ids)
    assert (parsed.content, parsed.reasoning_content) == (ANSWER["content"], ANSWER["reasoning_content"])
    assert renderer.bridge_to_next_turn(bridged.token_ids, again, [QUESTION]) is not None


def test_what_cannot_be_bridged_is_none() -> None:
    renderer = custom("trl/qwen3")
    prompt = renderer.render_ids([QUESTION], add_generation_prompt=True)
    ids = sampled_ids(renderer.renderer, [QUESTION, ANSWER], [])
    assert renderer.bridge_to_next_turn(prompt, ids, []) is None
    assert renderer.bridge_to_next_turn(prompt, ids, [ANSWER]) is None
    assert renderer.bridge_to_next_turn([*prompt, 1], ids, [QUESTION]) is None
    kept = custom("trl/qwen3", thinking_retention="tool_cycle")
    prompt = kept.render_ids([QUESTION], add_generation_prompt=True)
    assert kept.bridge_to_next_turn(prompt, ids, [QUESTION]) is None
    assert kept.bridge_to_next_turn(prompt, ids, [RESULT]) is not None


def test_only_the_last_prompts_are_kept() -> None:
    renderer = custom("trl/qwen3", remembered=1)
    first = renderer.render_ids([QUESTION], add_generation_prompt=True)
    ids = sampled_ids(renderer.renderer, [QUESTION, ANSWER], [])
    renderer.render_ids([{"role": "user", "content": "Another one."}], add_generation_prompt=True)
    assert renderer.bridge_to_next_turn(first, ids, [QUESTION]) is None


def test_a_broken_call_has_its_status() -> None:
    renderer = custom("trl/qwen3")
    text = '<think>\n\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call><|im_end|>'
    ids = renderer.renderer.tokenizer.encode_documents([text])[0].tolist()
    (call,) = renderer.parse_response(ids, tools=TOOLS).tool_calls
    assert call.status is ToolCallParseStatus.INVALID_JSON
    assert renderer.renderer.tokenizer.decode(ids[call.token_span[0] : call.token_span[1]]).strip() == call.raw


def test_reasoning_may_be_a_part_of_the_content() -> None:
    renderer = custom("trl/qwen3")
    parts = [{"type": "thinking", "thinking": "The tool says so."}, {"type": "text", "text": "It is sunny."}]
    as_parts = renderer.render_ids([QUESTION, {"role": "assistant", "content": parts}])
    assert as_parts == renderer.render_ids([QUESTION, ANSWER])
