"""A run that an agent left in several files is read as one: events, logged calls, a session with its subagents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatmill import build, verify_dataset
from chatmill.compiler.paths import not_read_sentences, resolve_paths
from chatmill.read.conversations import ConversationFile
from chatmill.read.folders import folder_files
from chatmill.read.run_folders import agent_inputs, run_files
from tests.cli.run import here
from tests.read.agent_runs import lacks, trained_texts, write_lines

RECIPE: dict[str, Any] = {
    "tokenizer": "bytes",
    "template": "chatml",
    "add_control_tokens": True,
    "expand": "tree",
    "tree": {"group": "session"},
}


def write_events(folder: Path, events: list[Any], name: str = "event-{:05d}-{}.json") -> Path:
    """Write events as OpenHands does, but for their line ends, which nothing may depend on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, event in enumerate(events):
        text = event if isinstance(event, str) else json.dumps(event, indent=1)
        (folder / name.format(number, f"abc-{number}")).write_text(text)
    return folder


def message(number: int, role: str, text: str) -> dict[str, Any]:
    told = {"role": role, "content": [{"type": "text", "text": text}]}
    source = "agent" if role == "assistant" else role
    return {"kind": "MessageEvent", "id": f"e{number}", "source": source, "llm_message": told}


def events_of(count: int, word: str) -> list[dict[str, Any]]:
    texts = [(("user", "assistant")[number % 2], f"{word} {number}") for number in range(count)]
    return [message(number, role, text) for number, (role, text) in enumerate(texts)]


def test_events_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "c1").mkdir()
    (tmp_path / "c1" / "base_state.json").write_text("{}")
    write_events(tmp_path / "c1" / "events", events_of(12, "a"), name="event-{}-{}.json")
    for named in (tmp_path / "c1", tmp_path / "c1" / "events"):
        found = run_files(named)
        assert found is not None
        assert [int(path.name.split("-")[1]) for path in found.files] == list(range(12))
        (one,) = ConversationFile(named)
        assert [m.content for m in one.messages] == [f"a {number}" for number in range(12)]


def test_all_conversations_below_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("c1", "c2"):
        write_events(tmp_path / "runs" / name / "events", events_of(4, name))
    old = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "hi"}},
        {"id": 1, "source": "agent", "action": "finish", "args": {"final_thought": "bye"}},
    ]
    write_events(tmp_path / "runs" / "users" / "u" / "conversations" / "c3" / "events", old, name="{}.json")
    paths = resolve_paths([str(tmp_path / "runs")])
    assert [path.name for path in paths] == ["c1", "c2", "c3"]
    assert not_read_sentences([str(tmp_path / "runs")]) == []


def test_a_damaged_event_is_one_reason_and_what_follows_has_no_known_prompt(tmp_path: Path) -> None:
    events: list[Any] = events_of(4, "a")
    events[2] = json.dumps(events[2])[:-9]
    folder = write_events(tmp_path / "events", events)
    errors: list[str] = []
    list(ConversationFile(folder, on_error=lambda error: errors.append(error.code)))
    assert errors == ["unknown_prompt", "invalid_json"]


def test_completion_logs_of_a_folder_are_one_history(tmp_path: Path) -> None:
    messages: list[Any] = []
    for number in (9, 10, 11):
        messages.append({"role": "user", "content": f"q{number}"})
        answer = {"role": "assistant", "content": f"a{number}"}
        response = {"id": f"r{number}", "model": "m", "choices": [{"message": answer, "finish_reason": "stop"}]}
        log = {"messages": list(messages), "response": response, "kwargs": {"tools": []}, "args": []}
        path = tmp_path / "llm" / f"openai__m-{number}.25.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(log))
        messages.append(answer)
    assert trained_texts(tmp_path / "llm") == [["a9", "a10", "a11"]]


def line(kind: str, name: str, parent: str | None, text: str, **more: Any) -> dict[str, Any]:
    content: Any = text if kind == "user" else [{"type": "text", "text": text}]
    told: dict[str, Any] = {"role": kind, "content": content}
    if kind == "assistant":
        told |= {"id": more.pop("id", name), "model": "m"}
    return {"type": kind, "uuid": name, "parentUuid": parent, "sessionId": "s", "message": told, **more}


def write_session(project: Path) -> Path:
    """Write a session with a subagent, whose file repeats an answer of the main agent."""
    project.mkdir(parents=True)
    write_lines(
        project / "s.jsonl", [line("user", "u1", None, "a"), line("assistant", "a1", "u1", "main"), {"type": "mode"}]
    )
    side = {"isSidechain": True, "agentId": "x1"}
    (project / "s" / "subagents").mkdir(parents=True)
    write_lines(
        project / "s" / "subagents" / "agent-x1.jsonl",
        [
            line("user", "v1", None, "a", **side),
            line("assistant", "b1", "v1", "main", id="a1", **side),
            line("user", "v2", "b1", "look", **side),
            line("assistant", "b2", "v2", "side", **side),
        ],
    )
    write_lines(project / "t.jsonl", [line("user", "u1", None, "b"), line("assistant", "a1", "u1", "other")])
    return project


def test_a_session_is_read_with_its_subagents_and_no_answer_twice(tmp_path: Path) -> None:
    project = write_session(tmp_path / "project")
    assert [Path(path).name for path in agent_inputs(project)] == ["s", "t.jsonl"]
    assert not_read_sentences([str(project)]) == []
    assert trained_texts(project / "s") == [["main"], ["side"]]
    assert lacks(project / "s")["answers of the main agent, which a subagent repeats"] == (1, 1)
    assert trained_texts(project) == [["main"], ["side"], ["other"]]


def test_a_built_and_proved_dataset_of_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_session(tmp_path / "project")
    for name in ("c1", "c2"):
        write_events(tmp_path / "runs" / name / "events", events_of(4, name))
    sources = [{"path": "project"}, {"path": "runs"}]
    for _ in range(2):
        result = build({**RECIPE, "sources": sources}, "built", resume=True)
    names = [file["path"] for file in result.manifest["inputs"]]
    assert names == ["project/s", "project/t.jsonl", "runs/c1", "runs/c2"]
    assert verify_dataset("built", deep=True).passed
    assert here("inspect", "project", "-t", "bytes", "-T", "chatml", "--set", "add_control_tokens=true").returncode == 0
    # A build whose input has changed is another build.
    write_events(tmp_path / "runs" / "c2" / "events", events_of(6, "c2"))
    assert not verify_dataset("built", deep=True).passed


def test_folders_of_other_files_are_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('[{"messages": []}]')
    (tmp_path / "gpt-4.json").write_text('[{"messages": []}]')
    assert agent_inputs(tmp_path) == []


def test_files_of_runs_in_folders_of_their_own_are_found(tmp_path: Path) -> None:
    trajectory = {"history": [said("user", "q"), said("assistant", "a")], "trajectory": [{"response": "a"}], "info": {}}
    for name in ("one/one.traj", "two/two.traj.json"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True)
        (tmp_path / "runs" / name).write_text(json.dumps(trajectory))
    (tmp_path / "runs" / "preds.json").write_text("{}")
    assert trained_texts(tmp_path / "runs") == [["a"], ["a"]]
    (sentence,) = not_read_sentences([str(tmp_path / "runs")])
    assert "preds.json" in sentence

    # Codex has a folder for each day, and packs old files; one may be there twice.
    day = tmp_path / "sessions" / "2026" / "08" / "01"
    day.mkdir(parents=True)
    names = [f"rollout-2026-08-01T10-00-0{number}-abc.jsonl" for number in range(2)]
    for name in (*names, f"{names[0]}.zst", "notes.jsonl"):
        (day / name).write_text("{}")
    assert [Path(path).name for path in agent_inputs(tmp_path / "sessions")] == names
    assert [Path(path).name for path in folder_files(day)] == ["notes.jsonl", *names]


def test_all_projects_of_claude_code_are_found(tmp_path: Path) -> None:
    session = "0cd1d5c2-7f7e-4f0e-9b0e-2f6a6d6b8a1c"
    for project in ("one", "two"):
        write_session(tmp_path / project)
        (tmp_path / project / "s.jsonl").rename(tmp_path / project / f"{session}.jsonl")
        (tmp_path / project / "s").rename(tmp_path / project / session)
    (tmp_path / "two" / "agent-0a1b.jsonl").write_text("{}")
    found = [str(Path(path).relative_to(tmp_path)) for path in agent_inputs(tmp_path)]
    assert found == [f"one/{session}", f"two/{session}", "two/agent-0a1b.jsonl"]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text, "agent": "main"}
