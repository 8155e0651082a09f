"""A run that OpenHands' own SDK wrote becomes the prompts that it really sent, with the ids of its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatmill.read.conversations import ConversationFile
from tests.read.agent_runs import DATA, codes, lacks, records_of, trained_texts, write_lines

RUN = DATA / "openhands"


def told(message: dict[str, Any]) -> tuple[Any, ...]:
    """What a message says, without its reasoning, which this run did not send again."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return message["role"], content, json.dumps(calls, sort_keys=True), message.get("tool_call_id")


def trained_prompts(path: Path) -> list[tuple[list[tuple[Any, ...]], tuple[Any, ...]]]:
    """The messages before each answer that is trained, and the answer's ids."""
    found = []
    for record in records_of(path):
        for position, message in enumerate(record.get("messages", ())):
            if message["role"] == "assistant" and message.get("train") is not False:
                ids = (tuple(message["prompt_token_ids"]), tuple(message["token_ids"]))
                found.append(([told(one) for one in record["messages"][:position]], ids))
    return found


@pytest.mark.parametrize("folder", ["events", "completions"])
def test_every_trained_answer_comes_after_a_prompt_that_was_sent(folder: str) -> None:
    requests = json.loads((RUN / "requests.json").read_text())
    sent = [[told(message) for message in request["messages"]] for request in requests]
    # Events do not hold the call that wrote the summary of the condensed history.
    is_summary = [len(prompt) == 1 for prompt in sent]
    expected = [prompt for prompt, skips in zip(sent, is_summary, strict=True) if folder == "completions" or not skips]
    assert is_summary.count(True) == 1
    ours = trained_prompts(RUN / folder)
    assert sorted(str(prompt) for prompt, _ in ours) == sorted(map(str, expected))
    assert len({ids for _, ids in ours}) == len(ours), "each answer once"


def test_the_ids_of_events_are_those_of_the_logged_calls() -> None:
    logged = {ids: prompt for prompt, ids in trained_prompts(RUN / "completions")}
    for prompt, ids in trained_prompts(RUN / "events"):
        assert logged[ids] == prompt


def test_what_these_files_lack() -> None:
    """Tools are there by name and description alone; ids take the place of all doubts about words."""
    assert lacks(RUN / "events").keys() == lacks(RUN / "completions").keys() == {"tools"}


def test_prompts_of_the_first_generation_are_those_that_it_makes_itself() -> None:
    """Results have the words that the model saw; a finish is a text in later prompts."""
    folder = DATA / "openhands_v0"
    expected = json.loads((folder / "prompts.json").read_text())
    ours = []
    for record in records_of(folder / "events"):
        for position, message in enumerate(record["messages"]):
            if message["role"] == "assistant" and message.get("train") is not False:
                ours.append([told(one) for one in record["messages"][:position]])
    assert ours == [[told(message) for message in prompt] for prompt in expected.values()]
    assert len(ours) == 5
    assert lacks(folder / "events") == {}


def event(kind: str, number: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "id": f"e{number}", "source": "agent", **more}


def said(number: int, role: str, text: str, **more: Any) -> dict[str, Any]:
    told_by = {"role": role, "content": [{"type": "text", "text": text}]}
    return event("MessageEvent", number, llm_message=told_by, **more)


def test_without_ids_it_is_said_that_words_of_prompts_are_not_known(tmp_path: Path) -> None:
    call = {"id": "c1", "name": "bash", "arguments": "{}"}
    path = write_lines(
        tmp_path / "events.jsonl",
        [
            said(0, "user", "a"),
            event("ActionEvent", 1, tool_call=call, llm_response_id="r", reasoning_content="Hm."),
            event("UserRejectObservation", 2, tool_call_id="c1", rejection_reason="no"),
            said(3, "assistant", "b"),
        ],
    )
    (one,) = ConversationFile(path)
    assert one.messages[2].content == "Action rejected: no"
    found = lacks(path)
    assert found["words of observations as the model sees them"] == (1, 1)
    assert found["word on earlier reasoning in prompts"] == (1, 2)
    assert found["token ids"] == (2, 2)


def test_branches_of_the_tree_and_missing_parents(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "events.jsonl",
        [
            said(0, "user", "a", parent_id="__root__"),
            said(1, "assistant", "1", parent_id="e0"),
            said(2, "user", "b", parent_id="e1"),
            said(3, "assistant", "2", parent_id="e2"),
            said(4, "user", "c", parent_id="e1"),
            said(5, "assistant", "3", parent_id="e4"),
            said(6, "user", "d", parent_id="gone"),
            said(7, "assistant", "4", parent_id="e6"),
            said(8, "user", "x", parent_id="__root__"),
            said(9, "assistant", "5", parent_id="e8"),
        ],
    )
    assert trained_texts(path) == [["1", "2"], ["3"], ["5"]]
    assert codes(path) == ["unknown_prompt"]


def test_an_answer_of_which_a_part_was_forgotten_has_no_known_successor(tmp_path: Path) -> None:
    call = {"id": "c1", "name": "bash", "arguments": "{}"}
    path = write_lines(
        tmp_path / "events.jsonl",
        [
            said(0, "user", "a"),
            event("ActionEvent", 1, tool_call=call, llm_response_id="r"),
            event("ActionEvent", 2, tool_call={**call, "id": "c2"}, llm_response_id="r"),
            event("Condensation", 3, forgotten_event_ids=["e1"], llm_response_id="s"),
            said(4, "assistant", "b"),
        ],
    )
    assert trained_texts(path) == [[""]]
    assert codes(path) == ["unknown_prompt"]
