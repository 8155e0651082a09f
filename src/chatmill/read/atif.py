"""Agent trajectories (ATIF, version 1): steps become messages, with the tokens that their metrics hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.core.conversation import Message, mistyped, parse_messages
from chatmill.errors import RecordError

VERSION = "ATIF-v1."
ATIF_FIELDS = ("schema_version", "agent", "steps")
ROLES = {"system": "system", "user": "user", "agent": "assistant"}
TOKENS = {"prompt_token_ids": "prompt_token_ids", "completion_token_ids": "token_ids", "logprobs": "logprobs"}
"""What the metrics of a step call the fields of a message."""


def is_trajectory(record: Mapping[str, Any]) -> bool:
    """Whether a record looks like a trajectory."""
    return isinstance(record.get("steps"), list) and str(record.get("schema_version", "")).startswith("ATIF-")


def trajectory_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a trajectory."""
    version, steps = record.get("schema_version"), record.get("steps")
    if not isinstance(version, str) or not version.startswith(VERSION):
        raise RecordError(
            f"the trajectory has the version {str(version)[:40]!r}; this reads {VERSION}x",
            code="bad_step",
            path="schema_version",
        )
    if not isinstance(steps, list) or not steps:
        raise mistyped("expected a list of steps that is not empty", steps, code="messages_type", path="steps")
    messages: list[Message] = []
    for number, step in enumerate(steps):
        path = f"steps[{number}]"
        try:
            messages += parse_messages(list(_messages(step, path)))
        except RecordError as error:  # which names the message that was made of the step
            error.path = path + error.path.partition("]")[2] if error.path.startswith("messages[") else error.path
            raise
    return tuple(messages)


def _messages(step: Any, path: str) -> Iterator[dict[str, Any]]:
    """One step in OpenAI's form: what was said, and what came back."""
    if not isinstance(step, Mapping):
        raise mistyped("a step must be an object", step, code="message_type", path=path)
    role = ROLES.get(str(step.get("source")))
    if role is None:
        known = ", ".join(ROLES)
        raise RecordError(
            f"unknown source {step.get('source')!r}; known: {known}", code="unknown_role", path=f"{path}.source"
        )
    message: dict[str, Any] = {"role": role, "content": step.get("message")}
    calls = step.get("tool_calls") or []
    if role == "assistant":
        message |= {"reasoning_content": step.get("reasoning_content"), "tool_calls": _calls(calls, path)}
        message |= _sampled(step, path)
    yield message
    yield from _results(step, calls, path)


def _calls(calls: Any, path: str) -> list[dict[str, Any]] | None:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RecordError("tool_calls must be a list of objects", code="bad_tool_call", path=f"{path}.tool_calls")
    return [
        {
            "id": call.get("tool_call_id"),
            "type": "function",
            "function": {"name": call.get("function_name"), "arguments": call.get("arguments")},
        }
        for call in calls
    ] or None


def _sampled(step: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The tokens of a step, and whether it is trained: what no model said here, or said elsewhere, is context."""
    metrics, count = step.get("metrics") or {}, step.get("llm_call_count")
    found = {name: metrics[key] for key, name in TOKENS.items() if metrics.get(key) is not None}
    if "token_ids" in found and isinstance(count, int) and count > 1:
        raise RecordError(
            f"the metrics are of {count} calls together: whose tokens these are cannot be known. Remove the ids",
            code="bad_token_ids",
            path=f"{path}.metrics",
        )
    is_context = step.get("is_copied_context") is True or count == 0
    return {**(found if "token_ids" in found else {}), **({"train": False} if is_context else {})}


def _results(step: Mapping[str, Any], calls: list[Any], path: str) -> Iterator[dict[str, Any]]:
    """What came back: results of calls, or, where nothing was called, what the environment says to the agent."""
    results = (step.get("observation") or {}).get("results") or []
    if results and step.get("source") != "agent":
        raise RecordError(
            "an observation of a step that is not the agent's: nothing says who is told it. Make it a step",
            code="bad_step",
            path=f"{path}.observation",
        )
    names = {call.get("tool_call_id"): call.get("function_name") for call in calls}
    for number, result in enumerate(results):
        content = result.get("content") if isinstance(result, Mapping) else None
        if content is None:
            raise RecordError(
                "the result has no content: what a subagent gave back cannot be known",
                code="null_content",
                path=f"{path}.observation.results[{number}].content",
            )
        called = result.get("source_call_id")
        if called is None and len(calls) == 1:
            called = calls[0].get("tool_call_id")
        if calls:
            yield {"role": "tool", "content": content, "tool_call_id": called, "name": names.get(called)}
        else:
            yield {"role": "user", "content": content}
