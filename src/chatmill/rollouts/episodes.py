"""Episodes: a model and its tools in turns, with the ids of every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.types import Answer, CallStatus, ExtensionRefused, Prompt, Rollout

RunTool = Callable[[str, str], str]
"""Runs a tool, given its name and its arguments as JSON text; returns its result."""


class Sample(NamedTuple):
    """What a model sampled after one prompt."""

    ids: Sequence[int]
    """With the stop token at their end, if there is one."""
    logprobs: Sequence[float]
    finish_reason: str | None = None


SampleMany = Callable[[list[list[int]]], Sequence[Sample]]
"""Samples an answer for each list of prompt ids."""


class AgentEpisode:
    """One conversation between a model and its tools.

    Attributes:
        prompt: The prompt of the next call.
        answers: All parsed answers.
        is_over: Whether no call follows.
    """

    def __init__(
        self, renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], run_tool: RunTool
    ) -> None:
        """Render the first prompt."""
        self._renderer, self._run_tool, self._tools = renderer, run_tool, list(tools)
        self._messages: list[Mapping[str, Any]] = list(messages)
        self._prompts: list[list[int]] = []
        self._samples: list[Sample] = []
        self.prompt: Prompt = renderer.prompt(messages, tools)
        self.answers: list[Answer] = []
        self.is_over = False

    def add(self, sample: Sample) -> None:
        """Take the sampled ids of a call; run the tools that they call, and make the next prompt."""
        answer = self._renderer.parse(self.prompt, sample.ids, self._tools, sample.finish_reason)
        self._prompts.append(self.prompt.ids)
        self._samples.append(sample)
        self.answers.append(answer)
        self._messages.append(answer.message)
        calls = answer.message.get("tool_calls") or ()
        if not calls or any(call.status is not CallStatus.OK for call in answer.calls):
            self.is_over = True
            return
        results = [self._result(call) for call in calls]
        try:
            following = self._renderer.extend(self.prompt, sample.ids, results, answer=answer)
        except ExtensionRefused:
            self.is_over = True
            return
        self._messages += results
        self.prompt = following

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        content = self._run_tool(function["name"], function["arguments"])
        return {"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": content}

    def rollout(self) -> Rollout:
        """Return all calls."""
        return Rollout(
            prompts=self._prompts,
            samples=[sample.ids for sample in self._samples],
            logprobs=[sample.logprobs for sample in self._samples],
            messages=self._messages,
            tools=self._tools,
        )

    def columns(self) -> dict[str, list[Any]]:
        """Return one sequence: the first prompt, everything after it, and which of that was sampled.

        Only episodes whose prompts extend one another have one; those of `AgentEpisode` do.
        """
        first = self._prompts[0]
        completion: list[int] = []
        logprobs: list[float] = []
        mask: list[int] = []
        for prompt, sample in zip(self._prompts, self._samples, strict=True):
            between = prompt[len(first) + len(completion) :]
            completion += [*between, *sample.ids]
            logprobs += [*[0.0] * len(between), *sample.logprobs]
            mask += [*[0] * len(between), *[1] * len(sample.ids)]
        return {"prompt_ids": list(first), "completion_ids": completion, "logprobs": logprobs, "mask": mask}


def run_episodes(episodes: Sequence[AgentEpisode], sample: SampleMany, max_calls: int) -> None:
    """Run episodes side by side until all are over, or have had so many calls."""
    for _ in range(max_calls):
        running = [episode for episode in episodes if not episode.is_over]
        if not running:
            return
        samples = sample([episode.prompt.ids for episode in running])
        for episode, one in zip(running, samples, strict=True):
            episode.add(one)
