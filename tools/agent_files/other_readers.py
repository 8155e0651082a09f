"""Read the files of tests/data/agents as others do: harbor's converters, and the readers of the agents' makers.

    python tools/agent_files/other_readers.py tests/data/agents

Needs Python 3.12 with harbor, claude-agent-sdk and openhands-sdk, and nothing of Chatmill: `make test-agents` makes
that environment. What they say is written to `other_readers.json`, which the tests compare our reading with.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["OPENHANDS_SUPPRESS_BANNER"] = "1"

Message = dict[str, Any]


def harbor_sessions(path: Path) -> list[Message]:
    """Return the steps that harbor makes of a session of Claude Code or Codex."""
    from harbor.agents.installed.claude_code import ClaudeCode
    from harbor.agents.installed.codex import Codex

    agent_class = ClaudeCode if path.parent.name == "claude_code" else Codex
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        agent = agent_class(logs_dir=Path(folder), model_name="vendor/model")
        trajectory = agent._convert_events_to_trajectory(Path(folder))
    return plain_steps(trajectory.to_json_dict())


def harbor_mini(path: Path) -> list[Message]:
    """Return the steps that harbor makes of a trajectory of mini-swe-agent."""
    from harbor.agents.installed.mini_swe_agent import convert_mini_swe_agent_to_atif

    return plain_steps(convert_mini_swe_agent_to_atif(json.loads(path.read_text()), "session").to_json_dict())


def plain_steps(trajectory: dict[str, Any]) -> list[Message]:
    """Return the steps of an ATIF trajectory with what a model could have seen of them."""
    steps: list[Message] = []
    for step in trajectory["steps"]:
        calls = [[call["tool_call_id"], call["function_name"]] for call in step.get("tool_calls") or ()]
        observation = step.get("observation") or {}
        results = [[one.get("source_call_id"), one.get("content")] for one in observation.get("results", ())]
        found = {"source": step["source"], "text": step.get("message") or "", "calls": calls, "results": results}
        steps.append({**found, "reasoning": step.get("reasoning_content") or ""})
    return steps


def vendor_claude(path: Path) -> list[Message]:
    """Return the messages that the SDK of Claude Code shows of a session."""
    from claude_agent_sdk._internal import sessions

    entries = sessions._parse_transcript_entries(path.read_text())
    return [one.message for one in sessions._entries_to_session_messages(entries, None, 0)]


def vendor_openhands(folder: Path) -> dict[str, list[Message]]:
    """Return the messages that OpenHands' SDK makes of the events before each response, by its id."""
    import openhands.sdk.tool.builtins  # noqa: F401  (registers the classes of observations)
    from openhands.sdk.context.view import View
    from openhands.sdk.event import ActionEvent, Event, MessageEvent
    from openhands.sdk.event.base import LLMConvertibleEvent

    events = [Event.model_validate_json(path.read_text()) for path in sorted(folder.glob("event-*.json"))]
    by_id = {event.id: event for event in events}
    prompts: dict[str, list[Message]] = {}
    for event in events:
        response = getattr(event, "llm_response_id", None)
        is_answer = isinstance(event, ActionEvent | MessageEvent) and event.source == "agent"
        if not is_answer or response in prompts:
            continue
        path: list[Any] = []
        parent = event.parent_id
        while parent is not None:
            path.append(by_id[parent])
            parent = by_id[parent].parent_id
        view = View.from_events(path[::-1])
        messages = LLMConvertibleEvent.events_to_messages(view.events)
        prompts[response] = [
            message.to_chat_dict(
                cache_enabled=False,
                vision_enabled=False,
                function_calling_enabled=True,
                force_string_serializer=False,
                send_reasoning_content=False,
            )
            for message in messages
        ]
    return prompts


def main(folder: Path) -> None:
    """Write what all of them say."""
    found: dict[str, Any] = {"harbor": {}, "claude-agent-sdk": {}}
    for path in sorted([*folder.glob("claude_code/*.jsonl"), *folder.glob("codex/*.jsonl")]):
        found["harbor"][f"{path.parent.name}/{path.name}"] = harbor_sessions(path)
        if path.parent.name == "claude_code":
            found["claude-agent-sdk"][f"{path.parent.name}/{path.name}"] = vendor_claude(path)
    mini = folder / "mini_swe_agent" / "add.traj.json"
    found["harbor"]["mini_swe_agent/add.traj.json"] = harbor_mini(mini)
    found["openhands-sdk"] = vendor_openhands(folder / "openhands" / "events")
    (folder / "other_readers.json").write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
