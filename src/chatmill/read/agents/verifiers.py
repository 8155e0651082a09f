"""Read rollouts of verifiers.

Newer releases save graphs of messages, older ones lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chatmill.errors import RecordError
from chatmill.json_values import decoded_text
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, PlainMessage
from chatmill.read.agents.request_logs import CallJoiner
from chatmill.read.agents.responses_items import plain_tools

MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_call_id", "name")
COMPACTION, ATTEMPT = "compaction", "compaction_attempt"


def is_verifiers(record: Mapping[str, Any]) -> bool:
    """Check for an episode or a trace of verifiers."""
    traces = record.get("traces")
    if isinstance(traces, list):
        first = traces[0] if traces else None
        is_empty = not traces and "env" in record and "errors" in record
        return is_empty or (isinstance(first, Mapping) and "nodes" in first)
    nodes = record.get("nodes")
    if not isinstance(nodes, list):
        return False
    return not nodes or (isinstance(nodes[0], Mapping) and "message" in nodes[0])


def is_verifiers_output(record: Mapping[str, Any]) -> bool:
    """Check for a saved output of verifiers 0.1."""
    if not {"prompt", "completion", "reward"} <= record.keys():
        return False
    return "example_id" in record or ("answer" in record and "task" in record)


def read_verifiers(file: AgentFile) -> Iterator[AgentRun]:
    """Yield one run per trace.

    An episode holds a trace for each of its agents.
    """
    for line in file.lines():
        if line.error is not None:
            yield AgentRun(f"{file.stem}:{line.number}", [], errors=[line.error])
            continue
        place = f"{file.stem}:{line.number}"
        try:
            runs = list(_line_runs(line.value, place))
        except RecordError as error:
            runs = [AgentRun(place, [], errors=[_placed(error, line.number)])]
        yield from runs


def read_verifiers_outputs(file: AgentFile) -> Iterator[AgentRun]:
    """Yield one run per saved output."""
    for line in file.lines():
        name = f"{file.stem}:{line.number}"
        if line.error is not None:
            yield AgentRun(name, [], errors=[line.error])
            continue
        try:
            yield _output_run(line.value, name)
        except RecordError as error:
            yield AgentRun(name, [], errors=[_placed(error, line.number)])


def _placed(error: RecordError, number: int) -> RecordError:
    return RecordError(f"line {number}: {error.message}", code=error.code, path=error.path)


def _line_runs(record: Any, place: str) -> Iterator[AgentRun]:
    if not isinstance(record, Mapping):
        raise RecordError("an episode must be an object", code="record_type")
    traces = record.get("traces")
    if traces is None:
        yield _Trace(record, {}, place).run()
        return
    if not isinstance(traces, list):
        raise RecordError("traces must be a list", code="bad_trace", path="traces")
    if not traces:
        raise RecordError(
            "the episode failed before it began: it has no traces", code="no_sampled_answer", path="traces"
        )
    for index, trace in enumerate(traces):
        yield _Trace(trace, record, f"{place}.{index}").run()


class _Trace:
    """A graph of messages.

    Each path from a root to a leaf is a history.
    """

    def __init__(self, trace: Any, episode: Mapping[str, Any], place: str) -> None:
        if not isinstance(trace, Mapping) or not isinstance(trace.get("nodes"), list):
            raise RecordError("a trace must be an object with a list of nodes", code="bad_trace", path="nodes")
        self._trace = trace
        self._nodes: list[Mapping[str, Any]] = []
        for index, node in enumerate(trace["nodes"]):
            if not isinstance(node, Mapping) or not isinstance(node.get("message"), Mapping):
                raise RecordError("a node must have a message", code="bad_trace", path=f"nodes[{index}]")
            self._nodes.append(node)
        self._parents = [self._parent(index) for index in range(len(self._nodes))]
        self._calls = {call["node"]: call for call in _objects(trace.get("calls")) if isinstance(call.get("node"), int)}
        name = trace.get("id") or episode.get("id") or place
        self._run = AgentRun(str(name), [])
        self._episode = episode
        agent = trace.get("agent")
        self._agent = agent if isinstance(agent, Mapping) else {}

    def run(self) -> AgentRun:
        """Return the run of the trace, one branch for each leaf."""
        lacks = self._run.lacks
        failed = sum(call.get("node") is None for call in _objects(self._trace.get("calls")))
        if failed:
            lacks.add("answers of failed calls", failed)
        sampled = [index for index, node in enumerate(self._nodes) if node.get("sampled") is True]
        with_ids = [index for index in sampled if any(self._mask(index))]
        lacks.add("token ids", len(sampled) - len(with_ids), len(sampled))
        for index in sampled:
            message = self._nodes[index]["message"]
            if message.get("provider_state"):
                lacks.add("text of provider_state")
            for call in _objects(message.get("tool_calls")):
                if call.get("namespace"):
                    lacks.add("namespaces of calls")
                if call.get("type") == "custom":
                    lacks.add("form of custom calls")
        judged = len(_objects(self._trace.get("extra_usage")))
        if judged:
            lacks.add("calls of judges", judged)
        is_trainable = self._agent.get("trainable") is not False
        if not is_trainable:
            lacks.add("agents that are for training")
        parents = set(self._parents)
        leaves = [index for index in range(len(self._nodes)) if index not in parents]
        for number, leaf in enumerate(leaves):
            path = self._path(leaf)
            branch = AgentBranch(
                turns=self._turns(path, bool(with_ids)),
                name=str(number),
                agent=str(self._agent.get("name") or ""),
                tools=plain_tools(self._nodes[path[0]].get("tools") or self._trace.get("tools") or []),
                fields=self._fields(),
                is_trained=is_trainable and self._is_trainable(leaf),
            )
            if not branch.is_trained and is_trainable:
                lacks.add("attempts at compaction that are for training")
            self._run.branches.append(branch)
        return self._run

    def _parent(self, index: int) -> int:
        """Find the index of a node's parent, -1 for a root.

        A parent must come before its children.
        """
        parent = self._nodes[index].get("parent")
        if parent is None:
            return -1
        if not isinstance(parent, int) or isinstance(parent, bool) or not 0 <= parent < index:
            raise RecordError(
                f"the parent of a node must be the index of an earlier one, found {str(parent)[:40]}",
                code="bad_trace",
                path=f"nodes[{index}].parent",
            )
        return parent

    def _path(self, leaf: int) -> list[int]:
        path: list[int] = []
        index = leaf
        while index >= 0:
            path.append(index)
            index = self._parents[index]
        return path[::-1]

    def _is_trainable(self, leaf: int) -> bool:
        """Check whether the history that ends here is trained.

        An attempt at compaction is trained if it was used.
        """
        kinds = [link.get("type") for link in _objects(self._nodes[leaf].get("semantic_parents"))]
        if ATTEMPT not in kinds:
            return True
        for node in self._nodes:
            for link in _objects(node.get("semantic_parents")):
                if link.get("node") == leaf and link.get("type") == COMPACTION:
                    return True
        return False

    def _turns(self, path: Sequence[int], with_ids: bool) -> list[AgentTurn]:
        """List the messages of a path.

        Sampled ones have the ids of their prompts if the trace has ids.
        """
        turns: list[AgentTurn] = []
        before: list[int] = []
        for index in path:
            node = self._nodes[index]
            message = _plain_message(node["message"])
            ids = self._ids(index)
            mask = self._mask(index)
            key: int | None = None
            model = ""
            if node.get("sampled") is True and message["role"] == "assistant":
                key = index
                call = self._calls.get(index, {})
                model = str(call.get("model") or "")
                reason = call.get("finish_reason") or node.get("finish_reason")
                if reason == "length":
                    message["finish_reason"] = "length"
                if any(mask):
                    message |= _sampled_tokens(node, before, ids, mask, index)
                elif with_ids:
                    # Its text has no place in a record of ids, so it is only context there.
                    key = None
            turns.append(AgentTurn(message, key, model))
            before = before + ids
        return turns

    def _ids(self, index: int) -> list[int]:
        ids = self._nodes[index].get("token_ids") or []
        if not isinstance(ids, list):
            raise RecordError("token_ids must be a list", code="bad_token_ids", path=f"nodes[{index}].token_ids")
        return ids

    def _mask(self, index: int) -> list[bool]:
        mask = self._nodes[index].get("mask") or []
        if not isinstance(mask, list) or len(mask) != len(self._ids(index)):
            raise RecordError(
                "mask must have one entry for each id of token_ids", code="bad_token_ids", path=f"nodes[{index}].mask"
            )
        return mask

    def _fields(self) -> dict[str, Any]:
        """Collect the fields of the whole rollout."""
        rewards = self._trace.get("rewards")
        task = self._trace.get("task") or self._episode.get("task")
        key = task.get("key") if isinstance(task, Mapping) else None
        fields: dict[str, Any] = {
            "reward": _total_reward(rewards),
            "rewards": rewards,
            "metrics": self._trace.get("metrics"),
            "ok": self._trace.get("ok", self._episode.get("ok")),
            "stop_condition": self._trace.get("stop_condition"),
            "episode": self._episode.get("id"),
            "task": key,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _sampled_tokens(
    node: Mapping[str, Any], before: list[int], ids: list[int], mask: list[bool], index: int
) -> dict[str, Any]:
    """Split the ids of a node into prompt and answer.

    The prompt has all ids before the first sampled one.
    """
    first = mask.index(True)
    if not all(mask[first:]):
        raise RecordError(
            "the sampled ids of a node must be its last ones", code="bad_token_ids", path=f"nodes[{index}].mask"
        )
    found: dict[str, Any] = {"prompt_token_ids": before + ids[:first], "token_ids": ids[first:]}
    logprobs = node.get("logprobs")
    if logprobs:
        found["logprobs"] = logprobs
    return found


def _plain_message(message: Mapping[str, Any]) -> PlainMessage:
    plain: PlainMessage = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    calls = [_plain_call(call) for call in _objects(message.get("tool_calls"))]
    if calls:
        plain["tool_calls"] = calls
    if "content" not in plain:
        plain["content"] = None if calls else ""
    plain.setdefault("role", None)
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return dict(call)
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _total_reward(rewards: object) -> float | None:
    """Sum up scores times weights.

    Older traces have plain numbers.
    """
    if not isinstance(rewards, Mapping):
        return None
    total = 0.0
    for reward in rewards.values():
        if isinstance(reward, Mapping) and _is_number(reward.get("score")):
            weight = reward.get("weight")
            total += reward["score"] * (weight if _is_number(weight) else 1.0)
        elif _is_number(reward):
            total += reward
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _output_run(record: Any, name: str) -> AgentRun:
    """Build the conversation of a saved output.

    Its calls are texts of JSON.
    """
    if not isinstance(record, Mapping):
        raise RecordError("a saved output must be an object", code="record_type")
    run = AgentRun(str(record.get("example_id", name)) + f"@{name}", [])
    tools = record.get("tool_defs", record.get("oai_tools"))
    tools = decoded_text(tools) if isinstance(tools, str) and tools else tools
    steps = record.get("trajectory")
    if isinstance(steps, list) and steps:
        run = _steps_run(run.id, steps, _output_tools(tools))
        for branch in run.branches:
            branch.fields = _output_fields(record)
        return run
    turns = [AgentTurn(message) for message in _output_messages(record.get("prompt"), "user", "prompt")]
    for index, message in enumerate(_output_messages(record.get("completion"), "assistant", "completion")):
        turns.append(AgentTurn(message, index if message["role"] == "assistant" else None))
    answers = sum(turn.key is not None for turn in turns)
    run.lacks.add("token ids", answers, answers)
    if record.get("is_truncated") is True and answers:
        last = [turn for turn in turns if turn.key is not None][-1]
        last.message["finish_reason"] = "length"
    run.branches.append(AgentBranch(turns, tools=_output_tools(tools), fields=_output_fields(record)))
    return run


def _output_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the fields of a saved output."""
    names = ("reward", "task", "example_id", "answer", "metrics", "is_completed", "is_truncated", "stop_condition")
    fields = {key: record[key] for key in names if record.get(key) is not None}
    fields["ok"] = not record.get("error")
    return fields


def _steps_run(name: str, steps: list[Any], tools: list[Any] | None) -> AgentRun:
    """Build the run of a rollout's steps.

    Each step is a model call with its own prompt.
    """
    calls = CallJoiner(name)
    for index, step in enumerate(steps):
        if not isinstance(step, Mapping):
            raise RecordError("a step must be an object", code="record_type", path=f"trajectory[{index}]")
        calls.add_record(_step_call(step, index, tools), f"trajectory[{index}]")
    run = calls.finish()
    if tools is None:
        for branch in run.branches:
            branch.tools = None
    return run


def _step_call(step: Mapping[str, Any], index: int, tools: list[Any] | None) -> dict[str, Any]:
    """Return a step as a logged call of chat completions."""
    prompt = list(_output_messages(step.get("prompt"), "user", f"trajectory[{index}].prompt"))
    answers = list(_output_messages(step.get("completion"), "assistant", f"trajectory[{index}].completion"))
    if len(answers) != 1:
        raise RecordError(
            f"a step must have one answer, found {len(answers)}",
            code="bad_trace",
            path=f"trajectory[{index}].completion",
        )
    response = step.get("response")
    response = response if isinstance(response, Mapping) else {}
    reason = "length" if step.get("is_truncated") is True else "stop"
    choice: dict[str, Any] = {"index": 0, "message": answers[0], "finish_reason": reason}
    answer: dict[str, Any] = {"id": f"step {index}", "model": response.get("model"), "choices": [choice]}
    tokens = step.get("tokens")
    mask = tokens.get("completion_mask") if isinstance(tokens, Mapping) else None
    if isinstance(tokens, Mapping) and isinstance(mask, list) and mask and all(mask):
        logprobs = tokens.get("completion_logprobs")
        choice["token_ids"] = tokens.get("completion_ids")
        choice["logprobs"] = {"content": [{"logprob": one} for one in logprobs] if isinstance(logprobs, list) else []}
        answer["prompt_token_ids"] = tokens.get("prompt_ids")
    return {"request": {"messages": prompt, "tools": tools}, "response": answer}


def _output_messages(value: object, role: str, path: str) -> Iterator[PlainMessage]:
    if isinstance(value, str):
        yield {"role": role, "content": value}
        return
    if value is not None and not isinstance(value, list):
        raise RecordError("must be a text or a list of messages", code="messages_type", path=path)
    for index, message in enumerate(value or ()):
        if not isinstance(message, Mapping):
            raise RecordError("a message must be an object", code="message_type", path=f"{path}[{index}]")
        calls: list[Any] = []
        listed = message.get("tool_calls") or []
        if not isinstance(listed, list):
            raise RecordError("tool_calls must be a list", code="messages_type", path=f"{path}[{index}].tool_calls")
        for call in listed:
            calls.append(decoded_text(call) if isinstance(call, str) else call)
        yield _plain_message({**message, "tool_calls": calls})


def _output_tools(tools: object) -> list[Any] | None:
    if not isinstance(tools, list):
        return None
    plain: list[Any] = []
    for tool in tools:
        if isinstance(tool, Mapping) and "function" not in tool:
            function = {key: value for key, value in tool.items() if value is not None and key != "type"}
            plain.append({"type": "function", "function": function})
        else:
            plain.append(tool)
    return plain


def _objects(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []
