"""Agent trajectories (ATIF, version 1): steps become messages, with the tokens that their metrics hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.core.conversation import Message, Role
from chatmill.core.message_parser import mistyped, parse_message
from chatmill.core.part_training import refuse_part_training
from chatmill.errors import RecordError
from chatmill.read.files import Raw

VERSION = "ATIF-v1."
SUBAGENTS, INHERITED = "subagent_trajectories", ("source", "chat_template_kwargs")
ATIF_FIELDS = ("schema_version", "agent", "steps", SUBAGENTS)
ROLES = {"system": Role.SYSTEM, "user": Role.USER, "agent": Role.ASSISTANT}
TOKENS = {"prompt_token_ids": "prompt_token_ids", "completion_token_ids": "token_ids", "logprobs": "logprobs"}
"""What the metrics of a step call the fields of a message."""


def is_trajectory(record: Mapping[str, Any]) -> bool:
    """Return whether a record looks like a trajectory."""
    return isinstance(record.get("steps"), list) and str(record.get("schema_version", "")).startswith("ATIF-")


def with_subagents(raw: Raw) -> Iterator[Raw]:
    """A trajectory without its subagents, then each of these as a record of its own, and those that it has itself.

    The id of a subagent names the trajectory, the step that refers to it if one does, and the subagent. If the list
    of subagents cannot be read it stays in the record, which is refused for it.
    """
    waiting = [raw]
    while waiting:
        raw = waiting.pop()
        record = raw.value
        embedded = record.get(SUBAGENTS) if isinstance(record, Mapping) else None
        if not embedded or _bad_subagents(embedded):
            yield raw
            continue
        yield raw._replace(value={key: value for key, value in record.items() if key != SUBAGENTS})
        steps, parent = dict(_references(record.get("steps"))), str(record.get("trajectory_id") or raw.where)
        inherited = {key: record[key] for key in INHERITED if key in record}
        for subagent in reversed(embedded):
            own = subagent["trajectory_id"]
            names = (parent, f"step-{steps[own]}", own) if own in steps else (parent, own)
            waiting.append(raw._replace(value=inherited | subagent | {"trajectory_id": "/".join(names)}))


def _bad_subagents(embedded: Any) -> bool:
    """Return whether these are no objects that each have an id of its own."""
    if not isinstance(embedded, list) or not all(isinstance(one, Mapping) for one in embedded):
        return True
    ids = [one.get("trajectory_id") for one in embedded]
    return not all(isinstance(one, str) and one for one in ids) or len(set(ids)) < len(ids)


def _references(steps: Any) -> Iterator[tuple[str, int]]:
    """Yield the ids that results refer to, with the number of the step; the last steps first."""
    for number, step in reversed(list(enumerate(steps if isinstance(steps, list) else (), 1))):
        for result in _listed(step, "observation", "results"):
            referred = (one.get("trajectory_id") for one in _listed(result, "subagent_trajectory_ref"))
            yield from ((own, number) for own in referred if isinstance(own, str))


def _listed(value: Any, *keys: str) -> list[Mapping[str, Any]]:
    """The objects in a list inside others; what is not as it must be is left out, and refused where it is read."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def trajectory_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of a trajectory."""
    version, steps = record.get("schema_version"), record.get("steps")
    if not isinstance(version, str) or not version.startswith(VERSION):
        raise RecordError(
            f"the trajectory has the version {str(version)[:40]!r}; this reads {VERSION}x",
            code="bad_step",
            path="schema_version",
        )
    if not isinstance(steps, list) or not steps:
        raise mistyped("expected a list of steps that is not empty", steps, code="messages_type", path="steps")
    if record.get(SUBAGENTS):
        raise RecordError(
            "must be a list of trajectories, each with a 'trajectory_id' that no other has",
            code="bad_step",
            path=SUBAGENTS,
        )
    paths = [f"steps[{number}]" for number in range(len(steps))]
    made = ((message, path) for step, path in zip(steps, paths, strict=True) for message in _messages(step, path))
    return tuple(parse_message(message, path) for message, path in made)


def _messages(step: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield one step in OpenAI's form: what was said, and what came back."""
    if not isinstance(step, Mapping):
        raise mistyped("a step must be an object", step, code="message_type", path=path)
    refuse_part_training(step, path)
    role = ROLES.get(str(step.get("source")))
    if role is None:
        known = ", ".join(ROLES)
        raise RecordError(
            f"unknown source {step.get('source')!r}; known: {known}", code="unknown_role", path=f"{path}.source"
        )
    message: dict[str, Any] = {"role": role, "content": step.get("message")}
    calls = step.get("tool_calls") or []
    if role is Role.ASSISTANT:
        message |= {"reasoning_content": step.get("reasoning_content"), "tool_calls": _calls(calls, path)}
        message |= _sampled(step, path)
    yield message
    yield from _results(step, calls, path)


def _calls(calls: Any, path: str) -> list[dict[str, Any]] | None:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RecordError("tool_calls must be a list of objects", code="bad_tool_call", path=f"{path}.tool_calls")
    for number, call in enumerate(calls):
        refuse_part_training(call, f"{path}.tool_calls[{number}]")
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
    metrics, count = _object(step, "metrics", path), step.get("llm_call_count")
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
    """Yield what came back: results of calls, or, where nothing was called, what the environment says to the agent."""
    results = _object(step, "observation", path).get("results") or []
    if not isinstance(results, list):
        raise mistyped("expected a list of results", results, code="bad_step", path=f"{path}.observation.results")
    if results and step.get("source") != "agent":
        raise RecordError(
            "an observation of a step that is not the agent's: nothing says who is told it. Make it a step",
            code="bad_step",
            path=f"{path}.observation",
        )
    for number, result in enumerate(results):
        content = result.get("content") if isinstance(result, Mapping) else None
        if content is None:
            raise RecordError(
                "the result has no content: what a subagent gave back cannot be known",
                code="null_content",
                path=f"{path}.observation.results[{number}].content",
            )
        refuse_part_training(result, f"{path}.observation.results[{number}]")
        called = result.get("source_call_id")
        if called is None and len(calls) == 1:
            called = calls[0].get("tool_call_id")
        if calls:
            names = (call.get("function_name") for call in reversed(calls) if call.get("tool_call_id") == called)
            yield {"role": "tool", "content": content, "tool_call_id": called, "name": next(names, None)}
        else:
            yield {"role": "user", "content": content}


def _object(step: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    found = step.get(key) or {}
    if not isinstance(found, Mapping):
        raise mistyped(f"{key!r} must be an object", found, code="bad_step", path=f"{path}.{key}")
    return found
