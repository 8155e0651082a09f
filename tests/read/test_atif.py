"""Trajectories of agents in ATIF, made with the package `atif`, are read, compiled and proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatmill.core.conversation import Role
from chatmill.errors import RecordError
from chatmill.read.conversations import ConversationFile
from chatmill.read.files import Raw
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import detect_shape, find_shape
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import proved, write_jsonl
from tests.data.tokenizer_files import loaded, unpacked

atif = pytest.importorskip("atif")
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


SAID = (
    '<think>\nlook\n</think>\n\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>',
    "<think>\nseen\n</think>\n\nDone: a.txt<|im_end|>",
)


def trajectory(name: str, *, ids: bool = False, prompts: bool = False, version: str = "1.7") -> dict[str, Any]:
    """A task, a call with its result, and an answer; with the tokens of the answers on request."""
    call = atif.ToolCall(tool_call_id="c1", function_name="run", arguments={"command": "ls"})
    result = atif.ObservationResult(source_call_id="c1", content="a.txt")
    called = {"tool_calls": [call], "observation": atif.Observation(results=[result])}
    first, second = (loaded("qwen3").encode_documents([text])[0].tolist() for text in SAID)
    metrics = [
        atif.Metrics(
            prompt_tokens=2,
            completion_token_ids=own if ids else None,
            prompt_token_ids=before if prompts else None,
            logprobs=[-0.5] * len(own) if ids else None,
        )
        for before, own in (([11, 12], first), ([11, 12, *first, 13], second))
    ]
    steps = [
        {"source": "system", "message": "You are an agent."},
        {"source": "user", "message": [atif.ContentPart(type="text", text="List the files.")]},
        {"source": "agent", "message": "", "reasoning_content": "look", "metrics": metrics[0]} | called,
        {"source": "agent", "message": "Done: a.txt", "reasoning_content": "seen", "metrics": metrics[1]},
    ]
    made = atif.Trajectory(
        schema_version=f"ATIF-v{version}",
        trajectory_id=name,
        agent=atif.Agent(name="tester", version="1", tool_definitions=[TOOL]),
        steps=[atif.Step(step_id=number, **step) for number, step in enumerate(steps, 1)],
    )
    return dict(made.to_json_dict())


def recipe_of(path: Path, **source: Any) -> dict[str, Any]:
    return {"sources": [{"path": str(path), **source}], "tokenizer": str(unpacked("qwen3")), "template": "qwen3"}


def test_steps_become_messages() -> None:
    record = trajectory("t")
    assert detect_shape([record], "here").name == "atif"
    found = conversation_of(record, find_shape("atif"))
    assert [message.role.value for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.id == "t"
    assert found.tools == (TOOL,)
    assert found.messages[2].reasoning == "look"
    assert found.messages[2].tool_calls[0].arguments == '{"command": "ls"}'
    assert (found.messages[3].tool_call_id, found.messages[3].name, found.messages[3].content) == ("c1", "run", "a.txt")


@pytest.mark.parametrize("version", ["1.4", "1.5", "1.6", "1.7", "1.8"])
@pytest.mark.parametrize("kind", [{}, {"ids": True}, {"ids": True, "prompts": True}], ids=str)
def test_what_no_model_said_here_is_context(version: str, kind: dict[str, bool]) -> None:
    record = trajectory("t", version=version, **kind)
    record["steps"][2]["is_copied_context"] = True
    record["steps"][3]["llm_call_count"] = 0
    found = conversation_of(record, find_shape("atif"))
    assert [message.weight for message in found.messages if message.role is Role.ASSISTANT] == [0, 0]
    record["steps"][2:] = [{**record["steps"][3], "tool_calls": None}]
    assert len(conversation_of(record, find_shape("atif")).messages) == 3


def test_a_set_of_trajectories_is_built_and_proved(tmp_path: Path) -> None:
    records = [trajectory("text"), trajectory("ids", ids=True), trajectory("calls", ids=True, prompts=True)]
    path = write_jsonl(tmp_path / "runs.jsonl", records)
    ledger = proved({**recipe_of(path), "logprobs": True}, tmp_path / "built")
    assert (ledger.total_notes("sampled_messages"), ledger.total_notes("calls_joined")) == (2, 1)
    text, ids, calls = EpisodeDataset(tmp_path / "built")
    assert text.ids.tolist() == ids.ids.tolist()
    assert text.trained == ids.trained == calls.trained
    last = records[2]["steps"][3]["metrics"]
    assert calls.ids.tolist() == [*last["prompt_token_ids"], *last["completion_token_ids"]]


def with_subagents() -> dict[str, Any]:
    """A trajectory whose call is answered by a subagent, which has a subagent that no step refers to, and one more."""
    parent, first, second, inner = (
        atif.Trajectory.model_validate(trajectory(name, ids=name == "first"))
        for name in ("parent", "first", "second", "inner")
    )
    first.subagent_trajectories = [inner]
    parent.subagent_trajectories = [first, second]
    parent.steps[2].observation.results[0].subagent_trajectory_ref = [atif.SubagentTrajectoryRef(trajectory_id="first")]
    made = atif.Trajectory.model_validate(parent.model_dump()).to_json_dict()
    return {**made, "source": "lab", "reward": 1.0}


def test_subagents_become_records_of_their_own(tmp_path: Path) -> None:
    """Each is known by its trajectory and step, is counted, refused and chosen as a record, and is proved."""
    record, other, bad = with_subagents(), with_subagents(), with_subagents()
    del other["trajectory_id"]
    other["reward"] = 0.0
    bad["trajectory_id"] = "bad"
    bad["steps"][2]["observation"]["results"][0]["content"] = None
    bad["subagent_trajectories"][0]["steps"] = []
    path = write_jsonl(tmp_path / "runs.jsonl", [record, other, bad])
    names = ["", "/step-3/first", "/step-3/first/inner", "/second"]
    errors: list[RecordError] = []
    found = list(ConversationFile(path, on_error=errors.append))
    assert [one.id for one in found] == [
        *(f"parent{name}" for name in names),
        *("" if name == "" else f"{path}:2{name}" for name in names),
        *(f"bad{name}" for name in names[2:]),
    ]
    assert [(error.record_id, error.code) for error in errors] == [
        ("bad", "null_content"),
        ("bad/step-3/first", "messages_type"),
    ]
    assert {one.source for one in found} == {"lab"}
    alone = conversation_of(trajectory("first", ids=True), find_shape("atif"))
    assert (found[1].messages, found[1].tools) == (alone.messages, alone.tools)

    recipe = {**recipe_of(path, where="reward > 0", weight=2.0), "on_error": "quarantine"}
    ledger = proved({**recipe, "gates": {"records_left_out": 1.0}}, tmp_path / "built")
    assert ledger.reasons("quarantined", "skipped") == {"null_content": 1, "messages_type": 1, "where": 4}
    keys = [episode.record_id for episode in EpisodeDataset(tmp_path / "built")]
    used = [*(f"parent{name}" for name in names), *(f"bad{name}" for name in names[2:])]
    assert keys == [name for name in used for _ in range(2)]


def step(source: str, message: Any = "", **more: Any) -> dict[str, Any]:
    return {"steps": [{"source": source, "message": message, **more}]}


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        ({"schema_version": "ATIF-v2.0"}, "bad_step", "schema_version"),
        ({"steps": []}, "messages_type", "steps"),
        (step("tool"), "unknown_role", "steps[0].source"),
        (step("user", 3), "content_type", "steps[0].content"),
        (step("user", observation={"results": [{}]}), "bad_step", "steps[0].observation"),
        (step("agent", observation={"results": [{}]}), "null_content", "steps[0].observation.results[0].content"),
        (step("agent", observation=3), "bad_step", "steps[0].observation"),
        (step("agent", observation={"results": 3}), "bad_step", "steps[0].observation.results"),
        (step("agent", llm_call_count=2, metrics={"completion_token_ids": [1]}), "bad_token_ids", "steps[0].metrics"),
        *(
            ({"subagent_trajectories": held}, "bad_step", "subagent_trajectories")
            for held in (3, [3], [{}], [{"trajectory_id": "a"}, {"trajectory_id": "a"}])
        ),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], code: str, path: str) -> None:
    (raw,) = find_shape("atif").embedded(Raw("", {**trajectory("t"), **change}))
    with pytest.raises(RecordError) as caught:
        conversation_of(raw.value, find_shape("atif"))
    assert (caught.value.code, caught.value.path) == (code, path)
