"""verifiers' rollouts give the ids, masks and log-probabilities that its own code gives, and train each answer once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill import build
from chatmill.read.agents.branches import AgentOptions, AgentRun, run_records
from chatmill.read.agents.verifiers import _line_runs
from chatmill.read.conversations import ConversationFile
from tests.read.agent_runs import DATA, codes, lacks, records_of, trained_texts, write_lines

VERSIONS = ("0.2.0", "0.2.1", "0.3.0", "0.4.0")


def sampled_runs(branches: list[dict[str, Any]]) -> set[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """The prompt, the sampled ids and their log-probabilities of every answer, from verifiers' own branches."""
    found = set()
    for branch in branches:
        ids, mask, logprobs = branch["ids"], branch["mask"], branch["logprobs"]
        start = 0
        while start < len(ids):
            stop = start
            while stop < len(ids) and mask[stop]:
                stop += 1
            if stop > start:
                found.add((tuple(ids[:start]), tuple(ids[start:stop]), tuple(logprobs[start:stop])))
            start = max(stop, start + 1)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_prompts_sampled_ids_and_logprobs_are_those_of_its_own_branches(version: str) -> None:
    folder = DATA / f"verifiers-{version}"
    expected = json.loads((folder / "branches.json").read_text())
    records = records_of(folder / "traces.jsonl")
    for number, branches in enumerate(expected):
        ours = Counter(
            (tuple(message["prompt_token_ids"]), tuple(message["token_ids"]), tuple(message["logprobs"]))
            for record in records
            if record["session"] == f"trace-{number}"
            for message in record["messages"]
            if "token_ids" in message
        )
        theirs = sampled_runs(branches)
        assert len(branches) > 2
        assert set(ours) == theirs
        assert set(ours.values()) == {1}, "an answer that several branches show is trained once"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_built_dataset_trains_every_sampled_id_once(version: str, tmp_path: Path) -> None:
    folder = DATA / f"verifiers-{version}"
    expected = json.loads((folder / "branches.json").read_text())
    tokens = sum(len(ids) for branches in expected for _, ids, _ in sampled_runs(branches))
    recipe = {
        "sources": [{"path": str(folder / "traces.jsonl")}],
        "tokenizer": "bytes",
        "template": "chatml",
        "add_control_tokens": True,
        "expand": "tree",
        "tree": {"group": "session"},
        "logprobs": True,
        "gates": {"untrained_terminators": None},
    }
    result = build(recipe, tmp_path / "built")
    assert result.manifest["ledger"]["tokens"]["traces"]["assistant"]["trained"] == tokens


def test_a_trace_names_its_reward_and_its_run() -> None:
    (first, *_) = records_of(DATA / "verifiers-0.4.0" / "traces.jsonl")
    assert first["reward"] == 0.5
    assert first["session"] == "trace-0"
    assert first["episode"] == "episode-0"


def test_what_cannot_be_read_is_one_reason_each(tmp_path: Path) -> None:
    good = json.loads((DATA / "verifiers-0.4.0" / "traces.jsonl").read_text().splitlines()[0])
    (trace,) = good["traces"]
    own = {**trace, "nodes": [{**trace["nodes"][0], "parent": 0}]}
    late = {**trace, "nodes": [{**trace["nodes"][0], "parent": 7}]}
    no_message = {**trace, "nodes": [{"sampled": True}]}
    short_mask = {**trace, "nodes": [{**trace["nodes"][0], "mask": [True]}]}
    damaged = [{**good, "traces": [one]} for one in (own, late, no_message, short_mask)]
    failed = {**good, "traces": []}
    path = write_lines(tmp_path / "traces.jsonl", [good, *damaged, failed, json.dumps(good)[:-40]])
    assert codes(path) == [*["bad_trace"] * 3, "bad_token_ids", "no_sampled_answer", "invalid_json"]
    assert (
        len(list(ConversationFile(path, on_error=lambda error: None)))
        == len(list(ConversationFile(DATA / "verifiers-0.4.0" / "traces.jsonl"))) // 3
    )


def test_traces_of_evaluations_have_no_ids_and_train_their_text(tmp_path: Path) -> None:
    episode = json.loads((DATA / "verifiers-0.4.0" / "traces.jsonl").read_text().splitlines()[0])
    for node in episode["traces"][0]["nodes"]:
        node |= {"token_ids": [], "mask": [], "logprobs": []}
    path = write_lines(tmp_path / "traces.jsonl", [episode])
    trained = [
        message.content
        for one in ConversationFile(path)
        for message in one.messages
        if message.role == "assistant" and message.weight != 0
    ]
    assert sorted(trained) == sorted(["", "", "", "It is 2.", "It is 0.", "It is 7."])
    assert lacks(path)["token ids"] == (6, 6)


def test_what_calls_say_beside_their_text_is_counted(tmp_path: Path) -> None:
    calls = [
        {"id": "c1", "type": "function", "name": "add", "namespace": "math", "arguments": "{}"},
        {"id": "c2", "type": "custom", "name": "patch", "arguments": "+1"},
    ]
    answer = {"role": "assistant", "tool_calls": calls, "provider_state": [{"type": "reasoning"}]}
    nodes = [{"message": {"role": "user", "content": "q"}}, {"parent": 0, "message": answer, "sampled": True}]
    path = write_lines(tmp_path / "traces.jsonl", [{"id": "t", "nodes": nodes, "extra_usage": [{"prompt_tokens": 1}]}])
    found = lacks(path)
    names = ("namespaces of calls", "form of custom calls", "text of provider_state", "calls of judges")
    assert [found[name] for name in names] == [(1, 1)] * 4


def test_outputs_that_verifiers_0_1_saved() -> None:
    plain = DATA / "verifiers-0.1.14" / "plain" / "results.jsonl"
    steps = DATA / "verifiers-0.1.14" / "with_trajectory" / "results.jsonl"
    found = list(ConversationFile(plain))
    assert [message.role.value for message in found[0].messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one.tool_calls[0].arguments for one in (found[1].messages[2],)] == ['{"a":1, "b": 1}']
    assert [one.messages[-1].finish_reason for one in found] == [None, None, "length"]
    assert lacks(plain)["token ids"] == (6, 6)

    with_ids = list(ConversationFile(steps))
    for number, one in enumerate(with_ids):
        answers = [message for message in one.messages if message.role == "assistant"]
        assert [(m.prompt_token_ids, m.token_ids, m.logprobs) for m in answers] == [
            ((1, 2, 3, number), (50 + number, 51), (-0.25, -0.25)),
            ((1, 2, 3, number, 50 + number, 51, 4), (60, 61, 62), (-0.25, -0.25, -0.25)),
        ]
        assert one.tools[0]["function"]["name"] == "add"
    assert [record["reward"] for record in records_of(steps)] == [1.0, 0.5, 0.0]
    assert "token ids" not in lacks(steps)


def test_saved_outputs_of_older_releases_have_calls_as_texts(tmp_path: Path) -> None:
    call = json.dumps({"id": "c1", "name": "add", "arguments": '{"a":1}'})
    row = {
        "example_id": 3,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
        "reward": 1.0,
        "is_truncated": False,
        "tool_defs": [{"name": "add", "description": "", "parameters": {"type": "object"}}],
    }
    (one,) = ConversationFile(write_lines(tmp_path / "results.jsonl", [row]))
    assert one.messages[1].tool_calls[0].arguments == '{"a":1}'
    assert one.tools[0]["function"]["name"] == "add"
    assert [message.weight for message in one.messages] == [None] * 4


NODES = st.lists(
    st.tuples(st.integers(-1, 30), st.sampled_from(["user", "assistant", "made up", "tool"]), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)


def graph(drawn: list[tuple[int, str, int]]) -> list[dict[str, Any]]:
    """Nodes of a training run: every sampled one has ids, of which the last are sampled."""
    nodes: list[dict[str, Any]] = []
    for number, (parent, kind, context) in enumerate(drawn):
        is_sampled = kind == "assistant"
        role = "assistant" if kind == "made up" else kind
        ids = [number * 10 + step for step in range(context + 2 * is_sampled)]
        mask = [False] * context + [True, True] * is_sampled
        node: dict[str, Any] = {"message": {"role": role, "content": f"said {number}"}, "sampled": is_sampled}
        node |= {"token_ids": ids, "mask": mask, "logprobs": [-0.5] * sum(mask)}
        if parent >= 0 and number:
            node["parent"] = parent % number
        nodes.append(node)
    return nodes


def ancestors(nodes: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The nodes from the root down to the one before a node, the obvious way."""
    found: list[dict[str, Any]] = []
    while "parent" in nodes[index]:
        index = nodes[index]["parent"]
        found.insert(0, nodes[index])
    return found


@given(NODES)
def test_nothing_is_trained_twice_and_nothing_before_its_prompt(drawn: list[tuple[int, str, int]]) -> None:
    nodes = graph(drawn)
    (run,) = _runs({"id": "t", "nodes": nodes})
    expected = []
    for index, node in enumerate(nodes):
        if node["sampled"]:
            before = ancestors(nodes, index)
            context = [one for one, sampled in zip(node["token_ids"], node["mask"], strict=True) if not sampled]
            prompt = [token for one in before for token in one["token_ids"]] + context
            answer = node["token_ids"][len(context) :]
            expected.append(([one["message"]["content"] for one in before], node["message"]["content"], prompt, answer))
    found = []
    for record in run_records(run, "verifiers", AgentOptions()):
        for position, message in enumerate(record.get("messages", ())):
            if "token_ids" in message:
                assert message.get("train") is not False
                texts = [one["content"] for one in record["messages"][:position]]
                found.append((texts, message["content"], message["prompt_token_ids"], message["token_ids"]))
            elif message["role"] == "assistant":
                assert message["train"] is False
    assert sorted(found) == sorted(expected)


def _runs(trace: dict[str, Any]) -> list[AgentRun]:
    return list(_line_runs(trace, "traces:1"))


def test_attempts_at_compaction_count_if_they_were_used_and_other_agents_never(tmp_path: Path) -> None:
    def said(role: str, text: str, **more: Any) -> dict[str, Any]:
        return {"message": {"role": role, "content": text}, "sampled": role == "assistant", **more}

    attempt = {"semantic_parents": [{"node": 1, "type": "compaction_attempt"}]}
    nodes = [
        said("user", "q"),
        said("assistant", "1", parent=0),
        said("user", "sum up", parent=1),
        said("assistant", "used", parent=2, **attempt),
        said("assistant", "not used", parent=2, **attempt),
        said("user", "summary", semantic_parents=[{"node": 3, "type": "compaction"}]),
        said("assistant", "2", parent=5),
    ]
    trace = {"id": "t", "nodes": nodes}
    judge = {"id": "j", "nodes": nodes, "agent": {"name": "judge", "trainable": False}}
    path = write_lines(tmp_path / "traces.jsonl", [trace, judge])
    assert trained_texts(path) == [["1", "used"], ["2"]]
    assert lacks(path)["attempts at compaction that are for training"] == (1, 1)
    assert codes(path) == ["no_sampled_answer"]
