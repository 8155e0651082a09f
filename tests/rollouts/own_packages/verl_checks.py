"""The adapter for verl: its builder of continuous tokens and its tool parser, with verl's own base classes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from chatmill.errors import ConfigError
from chatmill.rollouts.adapters.verl import ChatmillTokenBuilder, register_tool_parser
from chatmill.rollouts.types import ExtensionRefused
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

TOOLS = [WEATHER]
NAMES = ("trl/qwen3", "trl/qwen3_6", "trl/glm4moe")
TOKENIZERS = {name: tokenizer_of(name) for name in NAMES}


def loop(builder: ChatmillTokenBuilder, second: list[int] | None = None) -> tuple[list[int], list[int], list[float]]:
    """Run an episode as verl's agent loop does; return tokens, response mask and log-probabilities."""
    tokens = builder.build_initial_tokens([QUESTION], tools=TOOLS)
    mask: list[int] = []
    logprobs: list[float] = []
    messages = [QUESTION]
    answers = (sampled_ids(builder.renderer, [QUESTION, CALLING], TOOLS), sampled_ids(builder.renderer, EPISODE, TOOLS))
    for number, (sampled, message) in enumerate(zip(answers, (CALLING, ANSWER), strict=True)):
        if number and second is not None:
            sampled = second
        merged = builder.merge_assistant_tokens(tokens, sampled)
        mask, logprobs = builder.align_response_metadata(
            merged, mask, logprobs, assistant_logprobs=[-0.5] * len(sampled)
        )
        tokens = merged.token_ids
        messages = [*messages, message]
        if not number:
            merged = builder.merge_context_tokens(messages, [*messages, RESULT], tokens, tools=TOOLS)
            assert merged.token_ids[: len(tokens)] == tokens
            mask, logprobs = builder.align_response_metadata(merged, mask, logprobs)
            tokens, messages = merged.token_ids, [*messages, RESULT]
    return tokens, mask, logprobs


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_keeps_what_was_sampled_and_its_mask(name: str) -> None:
    builder = ChatmillTokenBuilder(TOKENIZERS[name])
    tokens, mask, logprobs = loop(builder)
    response = tokens[-len(mask) :]
    sampled = [token for token, one in zip(response, mask, strict=True) if one]
    assert sampled == [
        *sampled_ids(builder.renderer, [QUESTION, CALLING], TOOLS),
        *sampled_ids(builder.renderer, EPISODE, TOOLS),
    ]
    assert [value != 0 for value in logprobs] == [bool(one) for one in mask]
    assert tokens[: -len(mask)] == builder.build_initial_tokens([QUESTION], tools=TOOLS)


@pytest.mark.parametrize(("name", "family"), [("trl/qwen3", "qwen3"), ("trl/glm4moe", "glm47")])
def test_tokens_are_those_of_the_builder_written_by_hand(name: str, family: str) -> None:
    mine = ChatmillTokenBuilder(TOKENIZERS[name])
    peer = create_continuous_token_builder(TOKENIZERS[name], model_family=family)
    tokens = mine.build_initial_tokens([QUESTION], tools=TOOLS)
    assert tokens == peer.build_initial_tokens([QUESTION], tools=TOOLS)
    sampled = sampled_ids(mine.renderer, [QUESTION, CALLING], TOOLS)
    runtime = mine.merge_assistant_tokens(tokens, sampled).token_ids
    messages = [QUESTION, CALLING]
    own = mine.merge_context_tokens(messages, [*messages, RESULT], runtime, tools=TOOLS)
    other = peer.merge_context_tokens(messages, [*messages, RESULT], runtime, tools=TOOLS)
    assert own.token_ids == other.token_ids
    # GLM's stop is also what the next message begins with: verl's builder takes it out of what is trained.
    kept, _ = mine.align_response_metadata(own, [1] * len(sampled))
    theirs, _ = mine.align_response_metadata(other, [1] * len(sampled))
    assert sum(kept) == len(sampled)
    assert sum(theirs) == len(sampled) - (name == "trl/glm4moe")


def test_a_stop_that_is_missing_is_inserted_and_not_trained() -> None:
    builder = ChatmillTokenBuilder(TOKENIZERS["trl/qwen3"])
    tokens = builder.build_initial_tokens([QUESTION], tools=TOOLS)
    sampled = sampled_ids(builder.renderer, [QUESTION, ANSWER], TOOLS)[:-1]
    runtime = builder.merge_assistant_tokens(tokens, sampled).token_ids
    merged = builder.merge_context_tokens([QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION], runtime, tools=TOOLS)
    assert merged.inserted_token_ids == builder.renderer.stops
    assert merged.token_ids[: len(runtime)] == runtime
    mask, _ = builder.align_response_metadata(merged, [1] * len(sampled))
    assert mask == [1] * len(sampled) + [0] * (len(merged.token_ids) - len(runtime))


def test_unknown_tokens_and_media_are_refused() -> None:
    builder = ChatmillTokenBuilder(TOKENIZERS["trl/qwen3"])
    with pytest.raises(ConfigError, match="no prompt and answer of this builder"):
        builder.merge_context_tokens([QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION], [1, 2, 3])
    with pytest.raises(ConfigError, match="images are given"):
        builder.build_initial_tokens([QUESTION], images=[object()])
    assert issubclass(ExtensionRefused, Exception)


@pytest.mark.parametrize("name", NAMES)
def test_the_tool_parser_is_found_by_its_name(name: str) -> None:
    register_tool_parser()
    parser: Any = ToolParser.get_tool_parser("chatmill", TOKENIZERS[name])
    ids = sampled_ids(parser.renderer, [QUESTION, CALLING], TOOLS)
    schemas = [OpenAIFunctionToolSchema.model_validate(tool | {"type": "function"}) for tool in TOOLS]
    content, calls = asyncio.run(parser.extract_tool_calls(ids, schemas))
    assert content == ""
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", '{"city": "Paris"}')]
    assert parser.stop_token_ids
    content, calls = asyncio.run(parser.extract_tool_calls(ids[: len(ids) // 2]))
    assert calls == []
    assert content
