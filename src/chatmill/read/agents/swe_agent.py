"""Trajectories of SWE-agent and mini-swe-agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.errors import RecordError
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.answer_parts import AnswerParts
from chatmill.read.agents.anthropic_content import result_content
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, Lacking, PlainMessage
from chatmill.read.agents.responses_items import add_answer_item, other_message

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The one tool of mini-swe-agent 2."""
REASONING = ("reasoning_content", "reasoning")
FIRST_INFO = {"exit_status", "submission", "model_stats"}


def is_swe_agent(record: Mapping[str, Any]) -> bool:
    """Check for a trajectory or demonstration of SWE-agent."""
    history = record.get("history")
    if not isinstance(history, list) or not all(isinstance(item, Mapping) for item in history):
        return False
    if "trajectory" in record or "replay_config" in record:
        return True
    return bool(history) and all("role" in item and "agent" in item for item in history)


def is_mini_swe_agent(record: Mapping[str, Any]) -> bool:
    """Check for a trajectory of mini-swe-agent."""
    if not isinstance(record.get("messages"), list):
        return False
    # Early releases write no name of their format.
    return isinstance(record.get("trajectory_format"), str) or _info(record).keys() >= FIRST_INFO


def read_swe_agent(file: AgentFile) -> Iterator[AgentRun]:
    """Yield one run per attempt.

    The chosen attempt is at the top too, and is read once.
    """
    document = _document(file)
    attempts = document.get("attempts")
    wholes = [one for one in attempts if isinstance(one, Mapping)] if isinstance(attempts, list) else []
    for index, attempt in enumerate(wholes or [document]):
        name = f"{file.stem}/{index}" if wholes else file.stem
        fields = _info_fields(attempt.get("info"))
        if wholes:
            fields["ok"] = index == _info(document).get("best_attempt_idx")
        yield _swe_run(attempt, name, fields)


def read_mini_swe_agent(file: AgentFile) -> Iterator[AgentRun]:
    """Yield the one run of a trajectory."""
    document = _document(file)
    run = AgentRun(file.stem, [])
    config = _info(document).get("config")
    model = config.get("model") if isinstance(config, Mapping) else None
    name = str(model.get("model_name") or "") if isinstance(model, Mapping) else ""
    turns: list[AgentTurn] = []
    for index, message in enumerate(document.get("messages") or ()):
        if not isinstance(message, Mapping):
            run.errors.append(RecordError(f"messages[{index}] must be an object", code="message_type"))
            continue
        turns += _mini_turns(message, index, name, run.lacks)
    has_calls = any(turn.message.get("tool_calls") for turn in turns)
    run.branches.append(
        AgentBranch(turns, tools=[BASH] if has_calls else [], fields=_info_fields(document.get("info")))
    )
    yield run


def _document(file: AgentFile) -> Mapping[str, Any]:
    document = file.document()
    return document if isinstance(document, Mapping) else {}


def _info(document: Mapping[str, Any]) -> Mapping[str, Any]:
    info = document.get("info")
    return info if isinstance(info, Mapping) else {}


def _info_fields(info: object) -> dict[str, Any]:
    """Collect the fields about the end of a trajectory."""
    status = info.get("exit_status") if isinstance(info, Mapping) else None
    return {} if status is None else {"stop_condition": status}


def _swe_run(document: Mapping[str, Any], name: str, fields: dict[str, Any]) -> AgentRun:
    """Build the run of one attempt.

    It is made of the queries that were sent, or else of the history that was kept.
    """
    run = AgentRun(name, [])
    history = document.get("history")
    history = history if isinstance(history, list) else []
    steps = document.get("trajectory")
    steps = [step for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
    answers = [item for item in history if _is_answer(item)]
    queries = [step.get("query") for step in steps]
    has_queries = bool(steps) and all(isinstance(query, list) and query for query in queries)
    if has_queries:
        _add_queries(run, steps, answers)
    else:
        _add_history(run, history, steps)
    for branch in run.branches:
        branch.fields |= fields
        has_calls = any(turn.message.get("tool_calls") for turn in branch.turns)
        branch.tools = None if has_calls else []
    return run


def _add_queries(run: AgentRun, steps: list[Mapping[str, Any]], answers: list[Mapping[str, Any]]) -> None:
    """Add a history for each call.

    A call that continues the one before extends its history.
    """
    position = 0
    for number, step in enumerate(steps):
        turns = [AgentTurn(_plain(item, run.lacks)) for item in step["query"] if isinstance(item, Mapping)]
        answer: PlainMessage = {"role": "assistant", "content": str(step.get("response") or "")}
        # The history has the calls and the reasoning of an answer, the step has its text alone.
        is_kept = position < len(answers) and _same_words(answers[position], step)
        if is_kept:
            answer = _plain(answers[position], run.lacks)
            position += 1
        else:
            run.lacks.add("calls of answers that were asked for again")
        branch = run.branches[-1] if run.branches else None
        known = [turn.message for turn in branch.turns] if branch is not None else []
        own = [turn.message for turn in turns]
        if branch is None or own[: len(known)] != known:
            branch = AgentBranch([])
            run.branches.append(branch)
            known = []
        branch.turns += [*turns[len(known) :], AgentTurn(answer, number if is_kept else None)]


def _add_history(run: AgentRun, history: list[Any], steps: list[Mapping[str, Any]]) -> None:
    """Add the history that was kept.

    The prompts may have differed.
    """
    turns: dict[str, list[AgentTurn]] = {}
    kept = sum(_is_answer(item) for item in history)
    unknown = ""
    if steps and len(steps) > kept:
        unknown = "answers that were asked for again are not in the history"
    for number, item in enumerate(history):
        if not isinstance(item, Mapping):
            run.errors.append(RecordError(f"history[{number}] must be an object", code="message_type"))
            continue
        own = turns.setdefault(str(item.get("agent") or ""), [])
        own.append(AgentTurn(_plain(item, run.lacks), number if _is_answer(item) else None, unknown=unknown))
    run.lacks.add("queries that were sent")
    for agent, own in turns.items():
        run.branches.append(AgentBranch(own, agent=agent))


def _is_answer(item: object) -> bool:
    return isinstance(item, Mapping) and item.get("role") == "assistant" and not item.get("is_demo")


def _same_words(item: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    """Check whether a message is the answer of a step."""
    content = item.get("content")
    return content == step.get("response") or bool(item.get("tool_calls"))


def _plain(item: Mapping[str, Any], lacks: Lacking) -> PlainMessage:
    """Reduce an item of a history to the sent fields."""
    message: PlainMessage = {"role": item.get("role"), "content": result_content(item.get("content"), lacks)}
    if item.get("tool_calls"):
        message["tool_calls"] = item["tool_calls"]
    ids = item.get("tool_call_ids")
    if item.get("role") == "tool" and isinstance(ids, list) and ids:
        message["tool_call_id"] = ids[0]
    thoughts = item.get("thinking_blocks")
    texts = [str(block.get("thinking") or "") for block in thoughts or () if isinstance(block, Mapping)]
    if "".join(texts):
        message["reasoning_content"] = "".join(texts)
    return message


def _mini_turns(message: Mapping[str, Any], index: int, model: str, lacks: Lacking) -> list[AgentTurn]:
    """Return the turns of one message of mini-swe-agent."""
    if isinstance(message.get("output"), list):
        return [_response_turn(message, index, model, lacks)]
    if message.get("type") == "function_call_output":
        plain = other_message(message, lacks)
        return [] if plain is None else [AgentTurn(plain)]
    role = message.get("role")
    if role == "exit":
        return []
    extra = message.get("extra")
    response = extra.get("response") if isinstance(extra, Mapping) else None
    if role != "assistant":
        plain = {"role": role, "content": result_content(message.get("content"), lacks)}
        if message.get("tool_call_id"):
            plain["tool_call_id"] = message["tool_call_id"]
        if role == "user" and isinstance(response, Mapping):
            # Newer releases keep a malformed answer only beside the message that complains about it.
            lacks.add("malformed answers in the history")
        return [AgentTurn(plain)]
    plain = {"role": role, "content": message.get("content")}
    for name in REASONING:
        if isinstance(message.get(name), str) and message[name]:
            plain["reasoning_content"] = message[name]
            break
    if message.get("tool_calls"):
        plain["tool_calls"] = message["tool_calls"]
    elif plain["content"] is None:
        plain["content"] = ""
    if "reasoning_content" not in plain and _has_reasoning(response):
        # The first generation sends no reasoning back, so it is in no message.
        lacks.add("place of reasoning in answers")
    own = response.get("model") if isinstance(response, Mapping) else None
    return [AgentTurn(plain, index, str(own or model))]


def _has_reasoning(response: object) -> bool:
    """Check whether a response of chat completions has reasoning."""
    choices = response.get("choices") if isinstance(response, Mapping) else None
    for choice in choices if isinstance(choices, list) else ():
        message = choice.get("message") if isinstance(choice, Mapping) else None
        if isinstance(message, Mapping) and any(message.get(name) for name in REASONING):
            return True
    return False


def _response_turn(response: Mapping[str, Any], index: int, model: str, lacks: Lacking) -> AgentTurn:
    """Convert a whole response of the Responses API."""
    parts = AnswerParts(lacks)
    for item in response["output"]:
        if isinstance(item, Mapping):
            add_answer_item(parts, item)
    return AgentTurn(parts.message(), index, str(response.get("model") or model), parts.doubt)
