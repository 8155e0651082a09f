"""Write a small `traces.jsonl` with verifiers' own graph, and what its own code says of every branch.

    python tools/agent_files/verifiers_traces.py tests/data/agents/verifiers-0.4.0

Needs verifiers 0.2.0 or newer in the environment, and nothing of Chatmill.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import verifiers
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Response, SystemMessage, ToolCall, ToolMessage, TurnTokens, UserMessage

IDS = 200
"""Ids of tokens are below this."""
FIXED = {"id": "trace", "verifiers": {"version": verifiers.__version__}, "task": {"type": "Add", "data": {"idx": 0}}}


def make_trace(seed: int) -> Any:
    """Build one trace: some turns, a rewritten history, a retry and a turn of another root."""
    choose = random.Random(seed)
    trace = Trace.model_construct(id=f"trace-{seed}", nodes=[], calls=[], tools=[])
    messages: list[Any] = [SystemMessage(content="Add."), UserMessage(content=f"{seed}+1?")]
    prompt = _ids(choose, 6)
    for turn in range(3):
        is_last = turn == 2
        answer = _answer(f"c{turn}", is_call=not is_last, number=seed + turn)
        completion = _commit(trace, messages, prompt, answer, choose)
        if turn == 1:
            # A retried request: the same prompt, another answer that nothing continues.
            _commit(trace, messages, prompt, _answer("again", is_call=True, number=seed), choose)
        if not is_last:
            messages = [*messages, answer, ToolMessage(tool_call_id=f"c{turn}", content=str(seed + turn))]
            prompt = [*prompt, *completion, *_ids(choose, 4)]
    # History that was tokenised anew: the messages are the same, the ids are not.
    retokenised = [*prompt[:8], *_ids(choose, 9)]
    _commit(trace, messages, retokenised, _answer("x", is_call=False, number=0), choose)
    _commit(trace, [UserMessage(content="Name it.")], _ids(choose, 5), _answer("t", is_call=False, number=7), choose)
    return trace


def _ids(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(IDS) for _ in range(count)]


def _answer(name: str, *, is_call: bool, number: int) -> Any:
    if not is_call:
        return AssistantMessage(content=f"It is {number}.")
    call = ToolCall(id=name, name="add", arguments=f'{{"a":{number}, "b": 1}}')
    return AssistantMessage(content=None, reasoning_content="I add.", tool_calls=[call])


def _commit(trace: Any, messages: list[Any], prompt: list[int], answer: Any, choose: random.Random) -> list[int]:
    completion = _ids(choose, choose.randrange(2, 6))
    logprobs = [-round(choose.random(), 4) for _ in completion]
    tokens = TurnTokens(prompt_ids=prompt, completion_ids=completion, completion_logprobs=logprobs)
    reason = "tool_calls" if answer.tool_calls else "stop"
    response = Response(id="r", created=0, model="m", message=answer, finish_reason=reason, tokens=tokens)
    prepare_turn(trace, messages).commit(response)
    return completion


def main(folder: Path) -> None:
    """Write the episodes and the branches."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    expected: list[Any] = []
    for seed in range(3):
        trace = make_trace(seed)
        nodes = [node.model_dump(mode="json", exclude_none=True) for node in trace.nodes]
        for node in nodes:
            node.pop("timestamp", None)
        record = {**FIXED, "id": trace.id, "nodes": nodes, "rewards": {"right": {"score": 1.0, "weight": 0.5}}}
        is_episode = not verifiers.__version__.startswith("0.2")
        if is_episode:
            record = {"id": f"episode-{seed}", "env": {"id": "add"}, "ok": True, "errors": [], "traces": [record]}
        lines.append(json.dumps(record))
        branches = Trace.branches.fget(trace)
        expected.append(
            [{"ids": one.token_ids, "mask": one.sampled_mask, "logprobs": one.logprobs} for one in branches]
        )
    (folder / "traces.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "branches.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
