"""Write a small `results.jsonl` as verifiers 0.1 saves outputs, with and without the column `trajectory`.

    python tools/agent_files/verifiers_outputs.py tests/data/agents/verifiers-0.1.14

Needs verifiers 0.1.14 in the environment, and nothing of Chatmill.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from verifiers.types import (
    AssistantMessage,
    Response,
    ResponseMessage,
    State,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from verifiers.utils.save_utils import save_outputs, states_to_outputs

TOOL = Tool(name="add", description="Add.", parameters={"type": "object"})


def make_state(seed: int) -> Any:
    """Build the state of a rollout with a call and an answer after it."""
    prompt = [SystemMessage(content="Add."), UserMessage(content=f"{seed}+1?")]
    call = ToolCall(id="c1", name="add", arguments=f'{{"a":{seed}, "b": 1}}')
    first = AssistantMessage(content=None, reasoning_content="I add.", tool_calls=[call])
    result = ToolMessage(tool_call_id="c1", content=str(seed + 1))
    last = AssistantMessage(content=f"It is {seed + 1}.")
    steps = [
        make_step(prompt, first, [1, 2, 3, seed], [50 + seed, 51], seed),
        make_step([*prompt, first, result], last, [1, 2, 3, seed, 50 + seed, 51, 4], [60, 61, 62], seed),
    ]
    return State(
        example_id=seed,
        prompt=prompt,
        completion=[first, result, last],
        answer=str(seed + 1),
        reward=1.0 - seed / 2,
        metrics={"turns": 2.0},
        tool_defs=[TOOL],
        timing={"total_ms": 0.0},
        is_completed=True,
        is_truncated=seed == 2,
        stop_condition="done",
        trajectory=steps,
    )


def make_step(prompt: list[Any], answer: Any, prompt_ids: list[int], ids: list[int], seed: int) -> dict[str, Any]:
    """Build one step, with the tokens of its call."""
    tokens = {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": ids,
        "completion_mask": [1] * len(ids),
        "completion_logprobs": [-0.25] * len(ids),
        "overlong_prompt": False,
        "is_truncated": False,
        "routed_experts": None,
    }
    reason = "tool_calls" if answer.tool_calls else "stop"
    message = ResponseMessage(**answer.model_dump(), finish_reason=reason, is_truncated=False)
    response = Response(id=f"r{seed}", created=0, model="small", message=message)
    step = {"prompt": prompt, "completion": [answer], "response": response, "tokens": tokens, "reward": None}
    return {**step, "advantage": None, "is_truncated": False, "trajectory_id": f"t{seed}", "extras": {}}


def main(folder: Path) -> None:
    """Write both files."""
    states = [make_state(seed) for seed in range(3)]
    for name, columns in (("plain", []), ("with_trajectory", ["trajectory"])):
        save_outputs(states_to_outputs(states, columns), folder / name)
    for path in folder.glob("*/results.jsonl"):
        assert all(json.loads(line) for line in path.read_text().splitlines())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
