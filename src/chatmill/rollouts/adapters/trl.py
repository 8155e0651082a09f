"""TRL: a `rollout_func` for `GRPOTrainer`, which trains the ids that were sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chatmill.rollouts.episodes import AgentEpisode, RunTool, Sample, run_episodes
from chatmill.rollouts.renderer import Renderer

SampleWithTrainer = Callable[[list[list[int]], Any], Sequence[Sample]]
"""Samples an answer for each list of prompt ids, with the trainer's model."""


def rollout_func(
    renderer: Renderer,
    sample: SampleWithTrainer,
    *,
    tools: Sequence[Any] = (),
    run_tool: RunTool | None = None,
    max_calls: int = 8,
) -> Callable[[Sequence[Any], Any], dict[str, Any]]:
    """Make the `rollout_func` of a `GRPOTrainer`.

    Args:
        renderer: Renderer of the model.
        sample: Samples answers for lists of prompt ids; the trainer is its second argument.
        tools: Tool definitions.
        run_tool: Runs a tool, given its name and its arguments as JSON text.
        max_calls: Calls of the model in one episode.

    Returns:
        A function of prompts and trainer. Its `env_mask` is 1 on sampled tokens, and `messages` has the conversations.
    """

    def run(prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: Any) -> dict[str, Any]:
        episodes = [AgentEpisode(renderer, prompt, tools, run_tool or _no_tool) for prompt in prompts]
        run_episodes(episodes, lambda ids: sample(ids, trainer), max_calls)
        columns = [episode.columns() for episode in episodes]
        return {
            "prompt_ids": [column["prompt_ids"] for column in columns],
            "completion_ids": [column["completion_ids"] for column in columns],
            "logprobs": [column["logprobs"] for column in columns],
            "env_mask": [column["mask"] for column in columns],
            "messages": [list(episode.rollout().messages) for episode in episodes],
        }

    return run


def _no_tool(name: str, arguments: str) -> str:
    return f"there is no tool {name!r}"
