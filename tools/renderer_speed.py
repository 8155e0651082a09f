"""The cost of a warm parse and of a next prompt, for an agent conversation of 50 messages.

python -m tools.renderer_speed
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import Prompt, Proof
from tools.renderer_table import bound_file

TEMPLATES = Path(__file__).parents[1] / "tests" / "data" / "templates"
NAMES = ("trl/qwen3.jinja", "trl/qwen3_6.jinja", "trl/glm4moe.jinja", "trl/gptoss_training.jinja")
PROPERTIES = {"path": {"type": "string"}, "line": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "d", "parameters": {"type": "object", "properties": PROPERTIES}},
}


def agent_messages(count: int, index: int) -> list[dict[str, Any]]:
    """Return messages of an agent up to a tool's result, different for each index."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Mend the fault {index} in this project. " * 20}]
    while len(messages) < count:
        turn = len(messages)
        arguments = json.dumps({"path": f"src/file_{index}_{turn}.py", "line": turn})
        call = {"id": f"call{turn:05d}", "type": "function", "function": {"name": "read", "arguments": arguments}}
        thought = f"I have to look at place {turn} of {index}. " * 8
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]})
        result = f"{turn}: def function_{index}(): ...\n" * 40
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "read", "content": result})
    return messages


def milliseconds(function: Callable[[], Any]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    function()
    return 1000 * (time.process_time() - start)


def answer_ids(renderer: Renderer, prompt: Prompt, index: int) -> list[int]:
    """Return the ids of a call that a model could sample."""
    following = agent_messages(len(prompt.conversation.messages) + 2, index)[-2]
    from chatmill.rollouts.messages import conversation

    whole = prompt.conversation
    whole = whole._replace(messages=(*whole.messages, *conversation([following], None).messages))
    answer = renderer.template.answer(whole)
    text = "".join(span.text for span in answer.spans) + answer.stop
    ids: list[int] = renderer.tokenizer.encode_documents([text])[0].tolist()
    return ids


def measure(name: str) -> None:
    """Print the figures of one template."""
    renderer = Renderer(RolloutTemplate(bound_file(TEMPLATES / name, {})))
    parses: list[float] = []
    extends: list[float] = []
    work: list[tuple[Prompt, list[int]]] = []
    for index in range(30):
        prompt = renderer.prompt(agent_messages(49, index), [TOOL])
        ids = answer_ids(renderer, prompt, index)
        work.append((prompt, ids))
        answer = renderer.parse(prompt, ids)
        assert answer.proof is Proof.WRITTEN, (name, answer)
        result = {"role": "tool", "name": "read", "tool_call_id": "call00024", "content": "done " * 50}
        result["tool_call_id"] = answer.message["tool_calls"][0]["id"]
        parses.append(milliseconds(lambda p=prompt, i=ids: renderer.parse(p, i)))
        extends.append(milliseconds(lambda p=prompt, i=ids, r=result, a=answer: renderer.extend(p, i, [r], answer=a)))
    print(f"| {name} | parse {median(parses[5:]):.2f} ms | extend {median(extends[5:]):.2f} ms |", flush=True)
    with ThreadPoolExecutor(8) as pool:
        many = [work[index % len(work)] for index in range(1000)]
        answers = list(pool.map(lambda one: renderer.parse(*one), many))
    assert all(answer.proof is Proof.WRITTEN for answer in answers)
    start = time.process_time()
    text = "a" * (1 << 20)
    prompt = renderer.prompt([{"role": "user", "content": "x"}])
    renderer.parse(prompt, [*renderer.tokenizer.encode(text), renderer.stops[-1]])
    print(f"    1,000 parses in 8 threads keep their proofs; 1 MiB of one token: {time.process_time() - start:.2f} s")


if __name__ == "__main__":
    for one in NAMES:
        measure(one)
