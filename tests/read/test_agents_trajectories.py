"""Trajectories of SWE-agent and mini-swe-agent, and files of OpenHands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatmill.read.conversations import ConversationFile
from tests.read.agent_runs import DATA, codes, lacks, records_of, trained_texts, write_lines

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "agent": "main", **more}


def test_a_trajectory_of_mini_swe_agent_is_one_conversation_with_its_one_tool() -> None:
    (one,) = ConversationFile(DATA / "mini_swe_agent" / "add.traj.json")
    roles = [message.role.value for message in one.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert one.messages[2].tool_calls[0].arguments == '{"command":"echo one"}'
    assert one.tools[0]["function"]["name"] == "bash"
    assert records_of(DATA / "mini_swe_agent" / "add.traj.json")[0]["stop_condition"] == "Submitted"


def test_an_early_mini_swe_agent_has_commands_in_texts_and_no_name_of_its_format(tmp_path: Path) -> None:
    path = DATA / "mini_swe_agent-1.1.0" / "add.traj.json"
    assert len(trained_texts(path)[0]) == 3
    record = records_of(path)[0]
    assert record["agent_format"] == "mini_swe_agent"
    assert [message["role"] for message in record["messages"]] == ["system", *["user", "assistant"] * 3]

    # Later releases of this generation keep reasoning in the response alone.
    document = json.loads(path.read_text())
    response = {"model": "small", "choices": [{"message": {"content": "", "reasoning_content": "Hm."}}]}
    document["messages"][2]["extra"] = {"response": response}
    copy = tmp_path / "a.traj.json"
    copy.write_text(json.dumps(document))
    assert lacks(copy)["place of reasoning in answers"] == (1, 1)


def test_swe_agent_is_read_by_the_queries_that_were_sent(tmp_path: Path) -> None:
    system, task = said("system", "Be."), said("user", "Fix.")
    first = said("assistant", "look", tool_calls=[CALL])
    result = said("tool", "long", tool_call_ids=["c1"])
    elided = {**result, "content": "(elided)"}
    steps = [
        {"query": [system, task], "response": "look"},
        {"query": [system, task, first, result], "response": "malformed"},
        {"query": [system, task, first, elided], "response": "done"},
    ]
    document = {"history": [system, task, first, result, said("assistant", "done")], "trajectory": steps, "info": {}}
    path = tmp_path / "a.traj"
    path.write_text(json.dumps(document))
    found = [[m["content"] for m in record["messages"]] for record in records_of(path)]
    assert found == [["Be.", "Fix.", "look"], ["Be.", "Fix.", "look", "(elided)", "done"]]
    assert trained_texts(path) == [["look"], ["done"]]
    assert lacks(path)["calls of answers that were asked for again"] == (1, 1)


def test_a_history_without_queries_says_so_and_demonstrations_are_context(tmp_path: Path) -> None:
    demo = [said("user", "Demo", is_demo=True), said("assistant", "demo", is_demo=True)]
    path = tmp_path / "a.traj"
    history = [*demo, said("user", "Fix."), said("assistant", "ok")]
    path.write_text(json.dumps({"history": history, "trajectory": [{"response": "ok"}]}))
    assert trained_texts(path) == [["ok"]]
    assert lacks(path)["queries that were sent"] == (1, 1)
    path.write_text(json.dumps({"history": history, "trajectory": [{"response": "bad"}, {"response": "ok"}]}))
    assert codes(path) == ["unknown_prompt"]


def test_completion_logs_of_openhands_are_calls_as_they_were_sent(tmp_path: Path) -> None:
    response = {"id": "r", "model": "m", "choices": [{"message": {"role": "assistant", "content": "<function=ls>"}}]}
    mocked = {
        "messages": [{"role": "user", "content": "a"}],
        "fncall_messages": [{"role": "user", "content": "other"}],
        "response": response,
        "kwargs": {"temperature": 0},
        "cost": 0,
    }
    path = tmp_path / "m-1.json"
    path.write_text(json.dumps(mocked))
    (one,) = ConversationFile(path)
    assert [message.content for message in one.messages] == ["a", "<function=ls>"]
    newer = {**mocked, "tools": [{"kind": "T", "title": "bash", "description": "d"}]}
    path.write_text(json.dumps(newer, indent=1))
    assert lacks(path)["tools"] == (1, 1)


def test_events_of_both_generations_of_openhands(tmp_path: Path) -> None:
    answer = {"id": "r1", "model": "m", "choices": [{"message": {"content": "Look.", "tool_calls": [CALL]}}]}
    meta = {"function_name": "bash", "tool_call_id": "c1", "model_response": answer}
    first: list[dict[str, Any]] = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "Be.", "tools": []}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix."}},
        {"id": 2, "source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": meta},
        {"id": 3, "source": "agent", "observation": "run", "content": "a.py", "tool_call_metadata": meta, "extras": {}},
        {"id": 4, "source": "agent", "action": "condensation", "args": {"forgotten_event_ids": [1]}},
        {
            "id": 5,
            "source": "agent",
            "action": "think",
            "args": {},
            "tool_call_metadata": {"model_response": {**answer, "id": "r2"}},
        },
    ]
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(first))
    (one,) = ConversationFile(path, on_error=lambda error: None)
    assert [message.role.value for message in one.messages] == ["system", "user", "assistant"]
    assert codes(path) == ["unknown_prompt"]

    text = [{"type": "text", "text": "Look."}]
    call = {"id": "c1", "name": "bash", "arguments": "{}"}
    second = [
        {"kind": "SystemPromptEvent", "id": "1", "source": "agent", "system_prompt": {"text": "Be."}, "tools": []},
        {"kind": "MessageEvent", "id": "2", "source": "user", "llm_message": {"role": "user", "content": text}},
        {
            "kind": "ActionEvent",
            "id": "3",
            "source": "agent",
            "thought": text,
            "tool_call": call,
            "llm_response_id": "r",
        },
        {
            "kind": "ActionEvent",
            "id": "4",
            "source": "agent",
            "tool_call": {**call, "id": "c2"},
            "llm_response_id": "r",
        },
        {
            "kind": "ObservationEvent",
            "id": "5",
            "source": "environment",
            "tool_call_id": "c1",
            "observation": {"content": text, "is_error": True},
        },
    ]
    (one,) = ConversationFile(write_lines(tmp_path / "events.jsonl", second))
    assert [call.id for call in one.messages[2].tool_calls] == ["c1", "c2"]
    assert lacks(tmp_path / "events.jsonl")["tools"] == (1, 1)
