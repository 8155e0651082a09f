"""Sessions of Claude Code and Codex become the prompts that the programs really sent, each answer trained once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chatmill.read.agents.agent_file import AgentFile, AgentLine
from chatmill.read.agents.branches import AgentOptions, AgentRun, Lacking, UnknownPrompt
from chatmill.read.agents.claude_code import read_claude_code
from chatmill.read.agents.codex import read_codex
from chatmill.read.agents.dialects import item_turns, read_request
from chatmill.read.conversations import ConversationFile
from tests.read.agent_runs import DATA, codes, lacks, records_of, trained_texts, write_lines

CLAUDE = DATA / "claude_code"
CODEX = DATA / "codex"


def told(message: dict[str, Any]) -> tuple[Any, ...]:
    """What a message says: role, text, reasoning, calls."""
    calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ()]
    # The API takes neighbouring texts as parts, so white space between them is nobody's.
    content = "".join(str(message.get("content") or "").split())
    return message["role"], content, message.get("reasoning_content"), tuple(calls)


def joined(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Messages with neighbouring texts of the user as one, as the API takes them."""
    found: list[tuple[Any, ...]] = []
    for message in map(told, messages):
        if message[0] == "user" and found and found[-1][0] == "user":
            found[-1] = ("user", found[-1][1] + message[1], None, ())
        else:
            found.append(message)
    return found


def sent_by_claude(folder: Path = CLAUDE) -> list[list[tuple[Any, ...]]]:
    """The prompts that Claude Code sent, without its reminders."""
    prompts = []
    for line in (folder / "requests.json").read_text().splitlines():
        messages = json.loads(line)
        for message in messages:
            if isinstance(message["content"], list):
                parts = message["content"]
                message["content"] = [part for part in parts if part.get("text") != ""]
        request = {"anthropic_version": "1", "messages": messages}
        turns, _, _ = read_request(request, Lacking())
        prompts.append(joined([dict(turn.message) for turn in turns]))
    return prompts


def trained_prompts(path: Path) -> list[list[tuple[Any, ...]]]:
    """The messages before each answer that a file trains."""
    return [
        joined(record["messages"][:position])
        for record in records_of(path)
        for position, message in enumerate(record.get("messages", ()))
        if message["role"] == "assistant" and message.get("train") is not False
    ]


def test_every_trained_answer_of_claude_code_comes_after_a_prompt_that_was_sent() -> None:
    sent = sent_by_claude()
    ours = trained_prompts(CLAUDE / "session_0.jsonl") + trained_prompts(CLAUDE / "session_1.jsonl")
    assert len(ours) == 12
    asked = Counter(str(prompt) for prompt in sent)
    assert Counter(str(prompt) for prompt in ours) - asked == Counter()
    left = asked - Counter(str(prompt) for prompt in ours)
    assert left.total() == 1, "the call that wrote the summary is in no file"


def test_a_session_with_a_subagent_is_two_histories_that_were_sent() -> None:
    folder = DATA / "claude_code_subagents"
    ours = trained_prompts(folder / "session_0")
    assert Counter(map(str, ours)) == Counter(map(str, sent_by_claude(folder)))
    assert len(ours) == 5
    main, side = records_of(folder / "session_0")
    assert (main["agent"], side["agent"][0]) == ("", "a")
    assert main["session"] == side["session"]


def test_every_trained_answer_of_codex_comes_after_a_prompt_that_was_sent() -> None:
    sent = []
    for line in (CODEX / "requests.json").read_text().splitlines():
        turns = item_turns(json.loads(line), Lacking())
        # The instructions are the first message of a request, and the session of a file.
        sent.append(joined([dict(turn.message) for turn in turns[1:]]))
    (record,) = records_of(CODEX / "session_0.jsonl")
    assert record["messages"][0]["role"] == "system"
    record["messages"] = record["messages"][1:]
    ours = [
        joined(record["messages"][:position])
        for position, message in enumerate(record["messages"])
        if message["role"] == "assistant"
    ]
    assert len(ours) == 6
    assert ours == sent


def test_what_the_files_of_vendors_do_not_hold_is_said() -> None:
    found = lacks(CLAUDE / "session_0.jsonl")
    assert found["tools"] == found["system prompt"] == (2, 2)
    assert found["text of arguments"][0] == found["text of arguments"][1]
    given = AgentOptions(tools=({"type": "function", "function": {"name": "Bash"}},), system="Be.")
    assert not {"tools", "system prompt"} & lacks(CLAUDE / "session_0.jsonl", given).keys()
    first = records_of(CLAUDE / "session_0.jsonl", given)[0]
    assert first["messages"][0] == {"role": "system", "content": "Be."}
    assert first["tools"][0]["function"]["name"] == "Bash"
    assert "system prompt" not in lacks(CODEX / "session_0.jsonl")
    assert lacks(CODEX / "session_0.jsonl")["reasoning itself, in place of its summary"] == (2, 2)


def test_answers_in_the_file_of_a_fork_are_context() -> None:
    copied = lacks(CLAUDE / "session_1.jsonl")["answers that were copied from another session"]
    assert copied == (4, 4)


def line(kind: str, name: str, parent: str | None, words: Any = "", **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": kind, "content": words}
    if kind == "assistant":
        message |= {"id": more.pop("id", name), "model": more.pop("model", "m")}
    return {"type": kind, "uuid": name, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def use(name: str) -> list[dict[str, Any]]:
    return [{"type": "tool_use", "id": name, "name": "Bash", "input": {}}]


def result(name: str, words: str) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": name, "content": words}]


def test_parallel_calls_are_one_answer_with_all_results(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            line("user", "u1", None, "List and date"),
            line("assistant", "a1", "u1", [{"type": "thinking", "thinking": "", "signature": "E"}], id="m1"),
            line("assistant", "a2", "a1", use("c1"), id="m1"),
            line("assistant", "a3", "a2", use("c2"), id="m1"),
            line("user", "t1", "a2", result("c1", "a.py")),
            line("user", "t2", "a3", result("c2", "Mon")),
            line("assistant", "a4", "t2", text("Done."), id="m2"),
        ],
    )
    (one,) = ConversationFile(path)
    assert [message.role.value for message in one.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call.id for call in one.messages[1].tool_calls] == ["c1", "c2"]
    assert lacks(path)["thinking text"] == (1, 1)


def test_lines_of_an_answer_without_identifier_follow_each_other(tmp_path: Path) -> None:
    lines = [
        line("user", "u1", None, "List"),
        line("assistant", "a1", "u1", text("I look."), id=None),
        line("assistant", "a2", "a1", use("c1"), id=None),
        line("assistant", "a3", "a2", use("c2"), id=None),
        line("user", "t1", "a2", result("c1", "a.py")),
        line("user", "t2", "a3", result("c2", "b.py")),
        line("assistant", "a4", "t2", text("Done."), id=None),
    ]
    (one,) = ConversationFile(write_lines(tmp_path / "s.jsonl", lines))
    assert [message.role.value for message in one.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call.id for call in one.messages[1].tool_calls] == ["c1", "c2"]


def test_what_a_command_of_the_user_printed_was_sent(tmp_path: Path) -> None:
    def printed(name: str, parent: str) -> dict[str, Any]:
        return line("system", name, parent, subtype="local_command", content="<local-command-stdout>5 tokens")

    lines = [
        line("user", "u1", None, "a"),
        line("assistant", "a1", "u1", text("1")),
        line("user", "u2", "a1", "<command-name>/cost</command-name>"),
        printed("s1", "u2"),
        line("user", "u3", "s1", "b"),
        line("assistant", "a2", "u3", text("2")),
        printed("s2", "u2"),
    ]
    path = write_lines(tmp_path / "s.jsonl", lines)
    (one,) = ConversationFile(path)
    assert [message.content for message in one.messages][3] == "<local-command-stdout>5 tokens"
    assert len(one.messages) == 6
    assert lacks(path)["place of outputs of commands in the prompt"] == (1, 1)


def test_a_history_that_was_written_twice_is_read_once(tmp_path: Path) -> None:
    def history(prefix: str) -> list[dict[str, Any]]:
        return [
            line("user", f"{prefix}u1", None, "List"),
            line("assistant", f"{prefix}a1", f"{prefix}u1", text("I look."), id="m1"),
            line("assistant", f"{prefix}a2", f"{prefix}a1", use("c1"), id="m1"),
            line("user", f"{prefix}t1", f"{prefix}a2", result("c1", "a.py")),
            line("assistant", f"{prefix}a3", f"{prefix}t1", text("Done."), id="m2"),
        ]

    more = [line("user", "u9", "second-a3", "More"), line("assistant", "a9", "u9", text("No."), id="m9")]
    path = write_lines(tmp_path / "s.jsonl", [*history("first-"), *history("second-"), *more])
    (one,) = ConversationFile(path)
    assert [message.role.value for message in one.messages] == [
        "user",
        *["assistant", "tool", "assistant"],
        "user",
        "assistant",
    ]
    assert lacks(path)["difference between repeats of a line"] == (4, 4)


def test_a_rewound_prompt_is_a_branch_and_text_of_the_harness_is_never_trained(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            line("user", "u1", None, "a"),
            line("assistant", "a1", "u1", text("1")),
            line("user", "u2", "a1", "b"),
            line("assistant", "a2", "u2", text("2")),
            line("user", "u3", "a1", "c"),
            line("assistant", "a3", "u3", text("No response requested."), model="<synthetic>"),
            line("user", "u4", "a3", "d"),
            line("assistant", "a4", "u4", text("API Error"), isApiErrorMessage=True),
            line("assistant", "a5", "a4", text("3"), model="other"),
        ],
    )
    assert trained_texts(path) == [["1", "2"], ["3"]]
    assert [record["model"] for record in records_of(path)] == ["m", "other"]


def test_an_answer_that_was_stopped_has_no_end(tmp_path: Path) -> None:
    lines = [
        line("user", "u1", None, "a"),
        line("assistant", "a1", "u1", text("1, 2")),
        line("user", "u2", "a1", text("[Request interrupted by user]")),
        line("assistant", "a2", "u2", text("ok")),
    ]
    (one,) = ConversationFile(write_lines(tmp_path / "s.jsonl", lines))
    assert [m.finish_reason for m in one.messages if m.role == "assistant"] == ["length", None]


def test_answers_whose_prompt_is_not_known_are_refused_or_context(tmp_path: Path) -> None:
    cleared = {"type": "system", "subtype": "microcompact_boundary", "uuid": "x", "parentUuid": "a1", "sessionId": "s"}
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            line("user", "u1", None, "a"),
            line("assistant", "a1", "u1", text("1")),
            cleared,
            line("user", "u2", "x", "b"),
            line("assistant", "a2", "u2", text("2")),
            line("user", "u9", "gone", "c"),
            line("assistant", "a9", "u9", text("3")),
        ],
    )
    assert trained_texts(path) == [["1"]]
    assert codes(path) == ["unknown_prompt", "unknown_prompt"]
    assert lacks(path)["exact prompt"] == (2, 3)
    context = AgentOptions(unknown_prompt=UnknownPrompt.CONTEXT)
    errors: list[Any] = []
    assert len(list(ConversationFile(path, agent=context, on_error=errors.append))) == 1
    assert not errors


def test_a_circle_of_lines_is_one_reason(tmp_path: Path) -> None:
    lines = [line("user", "u1", "a1", "a"), line("assistant", "a1", "u1", text("1"))]
    assert codes(write_lines(tmp_path / "s.jsonl", lines)) == ["bad_trace"]


@given(st.lists(st.tuples(st.integers(-1, 30), st.sampled_from(["user", "assistant", "system"])), max_size=25))
def test_nothing_is_trained_twice_and_nothing_before_its_prompt(tree: list[tuple[int, str]]) -> None:
    lines: list[dict[str, Any]] = []
    for number, (parent, kind) in enumerate(tree):
        name = f"n{parent % number}" if parent >= 0 and number else None
        lines.append(line(kind, f"n{number}", name, f"said {number}"))
    run = run_of(lines)
    answers = {one["uuid"]: one for one in lines if one["type"] == "assistant"}
    seen: set[Any] = set()
    trained = []
    for branch in run.branches:
        for position, turn in enumerate(branch.turns):
            if turn.key is None or turn.key in seen:
                continue
            seen.add(turn.key)
            trained.append(turn.key[0])
            before = [one.message["content"] for one in branch.turns[:position]]
            assert before == ancestors(lines, turn.key[0])
    assert sorted(trained) == sorted(answers)


class Lines(AgentFile):
    """Lines that are in no file."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        super().__init__(Path("s.jsonl"))
        self._entries = entries

    def lines(self) -> Iterator[AgentLine]:
        return (AgentLine(number, one) for number, one in enumerate(self._entries, 1))


def run_of(lines: list[dict[str, Any]]) -> AgentRun:
    (run,) = read_claude_code(Lines(lines))
    return run


def ancestors(lines: list[dict[str, Any]], name: str) -> list[str]:
    """The texts from the root down to the line before a line, the obvious way."""
    by_name = {one["uuid"]: one for one in lines}
    texts: list[str] = []
    parent = by_name[name]["parentUuid"]
    while parent is not None:
        if by_name[parent]["type"] != "system":
            texts.append(by_name[parent]["message"]["content"])
        parent = by_name[parent]["parentUuid"]
    return texts[::-1]


def item(payload: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "2026-08-01T10:00:00Z", "type": "response_item", "payload": payload}


def event(payload: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "2026-08-01T10:00:00Z", "type": "event_msg", "payload": payload}


def asked(words: str) -> dict[str, Any]:
    return item({"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]})


def answered(words: str) -> dict[str, Any]:
    return item({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]})


META: dict[str, Any] = {
    "timestamp": "2026-08-01T10:00:00Z",
    "type": "session_meta",
    "payload": {"id": "t1", "base_instructions": {"text": "You are."}},
}
CONTEXT: dict[str, Any] = {"timestamp": "2026-08-01T10:00:00Z", "type": "turn_context", "payload": {"model": "gpt"}}


def test_a_compaction_and_a_rollback_of_codex_are_branches(tmp_path: Path) -> None:
    compacted = {
        "type": "compacted",
        "payload": {"message": "s", "replacement_history": [asked("a")["payload"], asked("summary")["payload"]]},
    }
    path = write_lines(
        tmp_path / "r.jsonl",
        [
            *(META, CONTEXT, asked("<environment_context>"), asked("a"), answered("1")),
            *(asked("b"), answered("2"), event({"type": "thread_rolled_back", "num_turns": 1})),
            *(asked("c"), answered("3"), compacted, asked("d"), answered("4")),
        ],
    )
    assert trained_texts(path) == [["1", "2"], ["3"], ["4"]]
    found = [[m["content"] for m in record["messages"]] for record in records_of(path)]
    assert found[1] == ["You are.", "<environment_context>", "a", "1", "c", "3"]
    assert found[2] == ["You are.", "a", "summary", "d", "4"]


def test_what_codex_does_not_write_down_makes_prompts_unknown(tmp_path: Path) -> None:
    search = item({"type": "web_search_call", "action": {"type": "search", "query": "q"}})
    custom = item({"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"})
    base = {**META, "payload": {**META["payload"], "history_base": {"thread_id": "t0"}}}
    for lines in (
        [META, CONTEXT, asked("a"), answered("1"), asked("b"), search, answered("2")],
        [META, CONTEXT, asked("a"), answered("1"), asked("b"), custom],
        [META, CONTEXT, asked("a"), answered("1"), event({"type": "token_count"}), "{torn", asked("b"), answered("2")],
        [META, CONTEXT, asked("a"), answered("1"), {"type": "compacted", "payload": {"message": "s"}}, answered("2")],
        [
            META,
            CONTEXT,
            asked("a"),
            answered("1"),
            item({"type": "compaction", "encrypted_content": "g"}),
            answered("2"),
        ],
    ):
        path = write_lines(tmp_path / "r.jsonl", lines)
        assert trained_texts(path) == [["1"]]
        assert "unknown_prompt" in codes(path)
    assert trained_texts(write_lines(tmp_path / "r.jsonl", [base, CONTEXT, asked("a"), answered("1")])) == []


def test_an_aborted_answer_of_codex_has_no_end(tmp_path: Path) -> None:
    lines = [META, CONTEXT, asked("a"), answered("1"), event({"type": "turn_aborted"}), asked("b"), answered("2")]
    (one,) = ConversationFile(write_lines(tmp_path / "r.jsonl", lines))
    assert [m.finish_reason for m in one.messages if m.role == "assistant"] == ["length", None]


STEPS = st.lists(
    st.sampled_from(["ask", "ask", "answer", "answer", "call", "compact", "back 1", "back 2"]), max_size=16
)


@given(STEPS)
def test_a_rollout_trains_each_answer_once_after_its_own_history(steps: list[str]) -> None:
    """The history is kept the obvious way: a list of texts, which compactions replace and rollbacks cut."""
    lines: list[dict[str, Any]] = [META, CONTEXT]
    history: list[tuple[str, str]] = []
    expected: list[tuple[list[str], str]] = []
    for number, step in enumerate(steps):
        name = f"{step} {number}"
        if step == "ask":
            lines.append(asked(name))
            history.append(("user", name))
        elif step in ("answer", "call"):
            payload = answered(name)["payload"]
            if step == "call":
                payload = {"type": "function_call", "name": "sh", "arguments": json.dumps(name), "call_id": name}
            # The line that ends a response; without one, neighbouring items are one answer.
            lines += [item(payload), event({"type": "token_count"})]
            expected.append(([text for _, text in history], name))
            history.append(("assistant", name))
        elif step == "compact":
            replacement = [asked(name)["payload"]]
            lines.append({"type": "compacted", "payload": {"message": "", "replacement_history": replacement}})
            history = [("user", name)]
        else:
            count = int(step[-1])
            starts = [index for index, (role, _) in enumerate(history) if role == "user"]
            if count > len(starts):
                continue
            lines.append(event({"type": "thread_rolled_back", "num_turns": count}))
            history = history[: starts[-count]]
    (run,) = read_codex(Lines(lines))
    found = []
    seen: set[Any] = set()
    for branch in run.branches:
        texts = [said_in(turn.message) for turn in branch.turns]
        assert texts[:1] in ([], ["You are."])
        for position, turn in enumerate(branch.turns):
            if turn.key is not None and turn.key not in seen:
                seen.add(turn.key)
                assert not turn.unknown
                found.append((texts[1:position], texts[position]))
    assert sorted(found) == sorted(expected)


def said_in(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return json.loads(calls[0]["function"]["arguments"]) if calls else message["content"]
