"""Logs of requests and responses: whatever API, streamed or not, each answer is trained once after its own prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.read.agents.branches import UnknownPrompt
from chatmill.read.agents.request_logs import CallJoiner
from chatmill.read.agents.streams import join_stream, stream_events
from chatmill.read.conversations import ConversationFile
from tests.read.agent_runs import DATA, codes, lacks, records_of, trained_texts, write_lines

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def chat(messages: list[Any], answer: Any, name: str = "r", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    choice = {"index": 0, "message": message, "finish_reason": "stop", **more.pop("choice", {})}
    return {
        "request": {"model": "m", "messages": messages, "tools": TOOLS},
        "response": {"id": name, "model": "m", "choices": [choice], **more},
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_calls_that_go_on_are_one_conversation_and_a_rewritten_history_is_another(tmp_path: Path) -> None:
    first = chat([user("a")], "1", "r1")
    second = chat([user("a"), said("1"), user("b")], "2", "r2")
    rewritten = chat([user("a"), said("one"), user("c")], "3", "r3")
    path = write_lines(tmp_path / "log.jsonl", [first, second, rewritten])
    assert trained_texts(path) == [["1", "2"], ["3"]]
    assert len({record["session"] for record in records_of(path)}) == 1, "they share a tree"


def test_a_repeated_response_is_one_answer_and_a_retry_is_another(tmp_path: Path) -> None:
    first = chat([user("a")], "1", "r1")
    path = write_lines(
        tmp_path / "log.jsonl", [first, first, chat([user("a")], "1", "r2"), chat([user("a")], "x", "r3")]
    )
    assert trained_texts(path) == [["1"], ["1"], ["x"]]
    assert lacks(path)["difference between repeats of a call"] == (1, 1)
    assert lacks(path)["mark which of several answers to one prompt was used"] == (2, 2)


def test_all_choices_are_answers_to_the_same_prompt(tmp_path: Path) -> None:
    record = chat([user("a")], "1")
    record["response"]["choices"].append({"index": 1, "message": said("2"), "finish_reason": "length"})
    first, second = ConversationFile(write_lines(tmp_path / "log.jsonl", [record]))
    assert (first.messages[-1].finish_reason, second.messages[-1].finish_reason) == (None, "length")


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"prompt_token_ids": [1, 2], "choice": {"token_ids": [3]}}, ((1, 2), (3,))),
        ({"choice": {"prompt_token_ids": [1, 2], "response_token_ids": [3]}}, ((1, 2), (3,))),
        ({"prompt_token_ids": [1, 2], "choice": {"provider_specific_fields": {"token_ids": [3]}}}, ((1, 2), (3,))),
        ({"choice": {"logprobs": {"content": [{"token": "token_id:3", "logprob": -0.5}]}}}, (None, (3,))),
    ],
    ids=["vllm", "sglang", "litellm", "vllm-before"],
)
def test_ids_of_servers_are_kept(more: dict[str, Any], tokens: tuple[Any, Any], tmp_path: Path) -> None:
    (one,) = ConversationFile(write_lines(tmp_path / "log.jsonl", [chat([user("a")], "1", **more)]))
    assert (one.messages[-1].prompt_token_ids, one.messages[-1].token_ids) == tokens


def test_ids_that_the_usage_does_not_count_are_refused(tmp_path: Path) -> None:
    record = chat([user("a")], "1", choice={"token_ids": [3]}, usage={"completion_tokens": 2})
    assert codes(write_lines(tmp_path / "log.jsonl", [record])) == ["bad_token_ids"]


def chunks(texts: list[str], pieces: list[str], *, has_end: bool = True) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text} for text in texts]
    deltas += [
        {"tool_calls": [{"index": 2, "id": "c1", "function": {"name": "add", "arguments": piece}}]} for piece in pieces
    ]
    base = {"id": "r", "model": "m", "object": "chat.completion.chunk"}
    events = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if has_end:
        events.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return events


def as_sse(events: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@given(st.lists(st.text(min_size=1)), st.lists(st.text(min_size=1)), st.booleans())
def test_a_joined_stream_is_what_was_cut_into_it(texts: list[str], pieces: list[str], is_text: bool) -> None:
    events = chunks(texts, pieces)
    response, is_whole = join_stream(stream_events(as_sse(events) if is_text else events))
    message = response["choices"][0]["message"]
    assert is_whole
    assert (message["content"] or "") == "".join(texts)
    if pieces:
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": "".join(pieces)}


def test_a_cut_stream_is_never_an_answer(tmp_path: Path) -> None:
    record = chat([user("a")], "1")
    record["response"] = as_sse(chunks(["1"], [], has_end=False))
    path = write_lines(tmp_path / "log.jsonl", [record, chat([user("b")], "2")])
    assert trained_texts(path) == [["2"]]
    assert lacks(path)["end of cut streams"] == (1, 1)


ANTHROPIC_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m", "model": "c", "role": "assistant", "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m."}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
    {"type": "ping"},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "c1", "name": "add"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"b":2,'}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ' "a": 1}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    {"type": "message_stop"},
]  # fmt: skip


def anthropic(messages: list[Any], **response: Any) -> dict[str, Any]:
    request = {
        "system": [{"type": "text", "text": "Be."}],
        "messages": messages,
        "tools": [{"name": "add", "input_schema": {}}],
    }
    return {"request": request, "response": {"id": "m", "model": "c", "role": "assistant", **response}}


def test_a_stream_of_anthropic_keeps_the_text_of_arguments(tmp_path: Path) -> None:
    record = {**anthropic([user("a")]), "response": None, "events": ANTHROPIC_EVENTS}
    path = write_lines(tmp_path / "log.jsonl", [record])
    (one,) = ConversationFile(path)
    assert [message.role.value for message in one.messages] == ["system", "user", "assistant"]
    assert one.messages[-1].reasoning == "Hmm."
    assert one.messages[-1].tool_calls[0].arguments == '{"b":2, "a": 1}'
    assert one.tools[0]["function"]["name"] == "add"


def test_arguments_are_objects_in_the_history_of_anthropic(tmp_path: Path) -> None:
    """The text of a stream is what the model wrote; the next request holds the object, and goes on from there."""
    first = {**anthropic([user("a")]), "response": None, "events": ANTHROPIC_EVENTS}
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}}
    thinking = {"type": "thinking", "thinking": "Hmm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
    history = [user("a"), {"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [result]}]
    second = anthropic(history, content=[{"type": "text", "text": "3"}], stop_reason="end_turn")
    (one,) = ConversationFile(write_lines(tmp_path / "log.jsonl", [first, second]))
    answers = [message for message in one.messages if message.role == "assistant"]
    assert [message.weight for message in answers] == [None, None]
    assert answers[0].tool_calls[0].arguments == '{"b":2, "a": 1}'


def test_results_and_edits_of_anthropic(tmp_path: Path) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "no"}], "is_error": True}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}]}
    texts = [{"type": "text", "text": "ok"}]
    good = anthropic([user("a"), use, {"role": "user", "content": [result]}], content=texts, stop_reason="end_turn")
    edited = anthropic([user("b")], content=texts, context_management={"applied_edits": [{"type": "clear"}]})
    path = write_lines(tmp_path / "log.jsonl", [good, edited])
    (one,) = ConversationFile(path, on_error=lambda error: None)
    assert one.messages[3].extra == {"is_error": True}
    assert one.messages[2].weight == 0
    assert codes(path) == ["unknown_prompt"]
    assert trained_texts(path, unknown=UnknownPrompt.CONTEXT) == [["ok"]]


def responses(given: Any, output: list[Any], name: str = "r", **more: Any) -> dict[str, Any]:
    request = {"instructions": "Be.", "input": given, "tools": [{"type": "function", "name": "add", "parameters": {}}]}
    response = {"id": name, "model": "m", "object": "response", "status": "completed", "output": output}
    return {"request": {**request, **more}, "response": response}


def output_text(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def test_responses_keep_arguments_and_find_the_history_by_its_id(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Add."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    path = write_lines(
        tmp_path / "log.jsonl",
        [
            responses("1+1?", [reasoning, call], "r1"),
            responses([result], [output_text("2")], "r2", previous_response_id="r1"),
            responses([result], [output_text("x")], "r3", previous_response_id="elsewhere"),
        ],
    )
    (one,) = ConversationFile(path, on_error=lambda error: None)
    roles = [message.role.value for message in one.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert one.messages[2].tool_calls[0].arguments == '{"a":1}'
    assert one.messages[2].reasoning == "Add."
    assert [message.weight for message in one.messages if message.role == "assistant"] == [None, None]
    assert codes(path) == ["unknown_prompt"]


def test_rollouts_of_nemo_gym_have_results_between_their_answers(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    ids = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    more = {"prompt_token_ids": [1, 2, 3, 4], "generation_token_ids": [5], "generation_log_probs": [-0.25]}
    output = [
        {**call, **ids},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {**output_text("2"), **more},
    ]
    record = {
        "responses_create_params": {"input": [user("1+1?")]},
        "response": {"id": "r", "model": "m", "output": output},
        "reward": 1.0,
    }
    path = write_lines(tmp_path / "rollouts.jsonl", [record])
    (one,) = ConversationFile(path)
    answers = [message for message in one.messages if message.role == "assistant"]
    assert [(m.prompt_token_ids, m.token_ids, m.logprobs) for m in answers] == [
        ((1, 2), (3,), (-0.5,)),
        ((1, 2, 3, 4), (5,), (-0.25,)),
    ]
    assert records_of(path)[0]["reward"] == 1.0


def rollout(*output: Any, **more: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [user("1+1?")]},
        "response": {"id": "r", "model": "m", "output": list(output), **more},
        "reward": 1.0,
    }


def sampled(item: dict[str, Any], prompt: list[int], ids: list[int]) -> dict[str, Any]:
    logprobs = [-0.5] * len(ids)
    return {**item, "prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": logprobs}


def test_a_rollout_of_one_answer_keeps_its_ids_and_a_group_of_them_is_no_retry(tmp_path: Path) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}]}
    answer = sampled(output_text("2"), [1, 2], [3, 4])
    lines = [rollout(thought, answer, id=f"r{number}") for number in range(3)]
    path = write_lines(tmp_path / "rollouts.jsonl", lines)
    found = list(ConversationFile(path))
    assert [one.messages[-1].token_ids for one in found] == [(3, 4)] * 3
    assert [one.messages[-1].prompt_token_ids for one in found] == [(1, 2)] * 3
    assert not [name for name in lacks(path) if name.startswith("mark which")]


def test_answers_of_a_rollout_without_results_between_end_at_their_ids(tmp_path: Path) -> None:
    first = sampled(output_text("1"), [1, 2], [3])
    second = sampled(output_text("2"), [1, 2, 3, 4], [5])
    path = write_lines(tmp_path / "rollouts.jsonl", [rollout(first, second)])
    (one,) = ConversationFile(path)
    assert [message.token_ids for message in one.messages[1:]] == [(3,), (5,)]

    # An answer without ids is context where others have them.
    path = write_lines(tmp_path / "half.jsonl", [rollout(CALL_ITEM, RESULT_ITEM, second)])
    assert trained_texts(path) == [["2"]]
    assert lacks(path)["token ids"] == (1, 2)


def test_transitions_of_a_rollout_train_each_answer_once(tmp_path: Path) -> None:
    task = {"type": "message", **user("1+1?")}
    call = {**CALL_ITEM, "call_id": "c2"}
    steps = [[task, CALL_ITEM, RESULT_ITEM], [task, CALL_ITEM, RESULT_ITEM, output_text("2")]]
    record = {**rollout(*steps), "responses_create_params": {"input": []}}
    path = write_lines(tmp_path / "rollouts.jsonl", [record])
    (one,) = ConversationFile(path)
    assert [(message.role.value, message.weight) for message in one.messages] == [
        ("user", None),
        ("assistant", None),
        ("tool", None),
        ("assistant", None),
    ]
    assert lacks(path)["token ids"] == (2, 2)

    # A step that hides an earlier state is another history, in which only its own answer is new.
    hidden = {"type": "message", **user("hidden")}
    later = [hidden, CALL_ITEM, RESULT_ITEM, call, {**RESULT_ITEM, "call_id": "c2"}]
    more = rollout(steps[0], later, [*later, output_text("2")], status="incomplete")
    path = write_lines(tmp_path / "hidden.jsonl", [{**more, "responses_create_params": {"input": []}}])
    first, second = ConversationFile(path)
    assert [message.weight for message in first.messages if message.role == "assistant"] == [None]
    assert [message.weight for message in second.messages if message.role == "assistant"] == [0.0, None, None]
    assert len({record["session"] for record in records_of(path)}) == 1

    damaged = write_lines(tmp_path / "damaged.jsonl", [rollout([task], "x"), record])
    assert codes(damaged) == ["message_type"]


def test_payloads_of_litellm(tmp_path: Path) -> None:
    response = chat([], "1")["response"]
    good = {"id": "1", "call_type": "acompletion", "messages": [user("a")], "model_parameters": {"tools": TOOLS}}
    path = write_lines(
        tmp_path / "log.jsonl",
        [
            {**good, "response": response, "status": "success"},
            {**good, "messages": [user("b")], "status": "failure", "response": {}},
            {**good, "messages": [user("litellm_truncated 300 chars")], "response": response},
            {**good, "messages": [user("redacted-by-litellm")], "response": response},
        ],
    )
    assert trained_texts(path) == [["1"]]
    assert codes(path) == ["text_cut", "text_cut"]
    assert lacks(path)["answers of failed calls"] == (1, 1)


def test_payloads_that_litellm_wrote(tmp_path: Path) -> None:
    """Two conversations with a call each, one streamed, and a call that failed."""
    path = DATA / "litellm" / "payloads.jsonl"
    found = list(ConversationFile(path))
    assert [[m.role.value for m in one.messages] for one in found] == [["user", "assistant", "tool", "assistant"]] * 2
    for one in found:
        assert one.messages[1].tool_calls[0].arguments == '{"b":1, "a":1}'
        assert [m.weight for m in one.messages if m.role == "assistant"] == [None, None]
        assert one.tools[0]["function"]["name"] == "add"
    assert lacks(path)["answers of failed calls"] == (1, 1)


def test_a_damaged_log_loses_no_other_line(tmp_path: Path) -> None:
    good = chat([user("a")], "1")
    bad = [
        {**good, "request": {"messages": 3}},
        {**good, "request": {}},
        {**good, "response": {"choices": [3]}},
        {**good, "response": {"id": "x"}},
        {**good, "response": "data: {torn"},
        [1],
        json.dumps(good)[:-9],
    ]
    path = write_lines(tmp_path / "log.jsonl", [good, *bad])
    assert trained_texts(path) == [["1"]]
    assert len(codes(path)) == len(bad)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab")), min_size=1, max_size=12))
def test_nothing_is_trained_twice_and_nothing_before_its_prompt(steps: list[tuple[int, str]]) -> None:
    histories: list[list[Any]] = [[]]
    joiner = CallJoiner("log")
    asked: list[tuple[list[Any], str]] = []
    for number, (parent, text) in enumerate(steps):
        messages = [*histories[parent % len(histories)], user(text)]
        answer = f"answer {number}"
        asked.append((messages, answer))
        histories.append([*messages, said(answer)])
        joiner.add_record(chat(messages, answer, f"r{number}"), str(number))
    found: list[tuple[list[Any], str]] = []
    seen = set()
    for branch in joiner.finish().branches:
        for position, turn in enumerate(branch.turns):
            if turn.key is not None and turn.key not in seen:
                seen.add(turn.key)
                found.append(([one.message for one in branch.turns[:position]], turn.message["content"]))
    assert sorted(found, key=str) == sorted(asked, key=str)
