"""Our reading of agents' files next to that of harbor and of the agents' makers: every difference has a name.

`tools/agent_files/other_readers.py` ran them; docs/agents.md has the table.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.pages import DOCS
from tests.read.agent_runs import DATA, records_of

OTHERS = json.loads((DATA / "other_readers.json").read_text())
Message = dict[str, Any]


def plain_text(content: Any) -> str:
    """A content without white space, by its texts."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return "".join(str(content or "").split())


def told(message: Message) -> tuple[Any, ...]:
    calls = [one["function"]["name"] for one in message.get("tool_calls") or ()]
    return message["role"], plain_text(message.get("content")), tuple(calls), message.get("tool_call_id")


def our_answers(name: str) -> list[tuple[list[Message], Message]]:
    """Each answer that a file trains, with the messages before it."""
    found = []
    for record in records_of(DATA / name):
        for position, message in enumerate(record.get("messages", ())):
            if message["role"] == "assistant" and message.get("train") is not False:
                found.append((record["messages"][:position], message))
    return found


def test_openhands_prompts_are_those_of_its_own_sdk() -> None:
    theirs = Counter(str([told(message) for message in prompt]) for prompt in OTHERS["openhands-sdk"].values())
    ours = Counter(str([told(message) for message in prompt]) for prompt, _ in our_answers("openhands/events"))
    assert ours == theirs
    assert ours.total() == 6


def harbor_messages(steps: list[Message]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Harbor's steps as messages: role, text, and the ids of calls or of the call that was answered."""
    messages: list[tuple[str, str, tuple[str, ...]]] = []
    for step in steps:
        role = "assistant" if step["source"] == "agent" else step["source"]
        messages.append((role, plain_text(step["text"]), tuple(call for call, _ in step["calls"])))
        for call, text in step["results"]:
            messages.append(("tool", plain_text(text), (call,)))
    return messages


def as_harbor(message: Message) -> tuple[str, str, tuple[str, ...]]:
    ids = [call["id"] for call in message.get("tool_calls") or ()]
    if message["role"] == "tool":
        ids = [message["tool_call_id"]]
    role = "system" if message["role"] == "developer" else message["role"]
    return role, plain_text(message["content"]), tuple(ids)


def outline(messages: list[tuple[str, str, Any]]) -> list[tuple[str, str]]:
    """Messages without the system prompt, and without the words and ids of results, which are counted by themselves."""
    return [(role, "" if role == "tool" else text) for role, text, _ in messages if role != "system"]


def differences(name: str) -> Counter[str]:
    """Count how harbor's reading of a file differs from ours."""
    found: Counter[str] = Counter()
    theirs = harbor_messages(OTHERS["harbor"][name])
    answers = our_answers(name)
    trained = Counter(as_harbor(message)[1:] for _, message in answers)
    shown = Counter(message[1:] for message in theirs if message[0] == "assistant")
    assert trained <= shown, "harbor has all that we train"
    for answer, count in (shown - trained).items():
        is_synthetic = answer[0].startswith("Noresponse")
        found["text of the program as an answer" if is_synthetic else "copies of a fork as answers"] += count
    found["results without their call"] += sum(one[0] == "tool" and one[2] == (None,) for one in theirs)
    for prompt, message in answers:
        ours = outline([as_harbor(one) for one in prompt])
        ends = [index for index, one in enumerate(theirs) if one == as_harbor(message)]
        if not any(outline(theirs[:end]) == ours for end in ends):
            found["answers after another history"] += 1
    our_results = {as_harbor(one) for prompt, _ in answers for one in prompt if one["role"] == "tool"}
    ids = {one[2] for one in our_results}
    found["results in other words"] += len({one for one in theirs if one[0] == "tool" and one[2] in ids} - our_results)
    ours_system = {as_harbor(one)[1] for prompt, _ in answers for one in prompt if one["role"] == "system"}
    found["system prompts left out"] += len(ours_system - {one[1] for one in theirs})
    return +found


EXPECTED = {
    "claude_code/session_0.jsonl": {
        "text of the program as an answer": 1,
        "answers after another history": 3,
        "results in other words": 9,
    },
    "claude_code/session_1.jsonl": {
        "text of the program as an answer": 1,
        "copies of a fork as answers": 4,
        "answers after another history": 3,
        "results in other words": 6,
    },
    "codex/session_0.jsonl": {"system prompts left out": 1},
    "mini_swe_agent/add.traj.json": {"results without their call": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_difference_from_harbor_is_known(name: str) -> None:
    assert differences(name) == EXPECTED[name]


def test_the_page_names_every_difference() -> None:
    page = (DOCS / "agents.md").read_text()
    for counts in EXPECTED.values():
        for what in counts:
            assert f"| {what} |" in page


def test_claude_codes_own_sdk_shows_the_last_history_and_leaves_out_what_the_model_saw() -> None:
    """Its reader is for people: it leaves out messages that the program adds, and all histories but the last."""
    for name, shown in OTHERS["claude-agent-sdk"].items():
        ours = our_answers(name)
        answers = {message["message"]["id"] if "message" in message else message.get("id") for message in shown}
        prompt, last = ours[-1]
        texts = [
            plain_text(block.get("text")) for m in shown if isinstance(m["content"], list) for block in m["content"]
        ]
        assert plain_text(last["content"]) in texts
        assert len(ours) >= 1
        assert answers
        hidden = [m for m in prompt if m["role"] == "user" and plain_text(m["content"]).startswith("Continuefrom")]
        assert hidden, "the model saw it"
        assert not any(isinstance(m["content"], str) and m["content"].startswith("Continue from") for m in shown)
