"""What a proxy recorded is a training set without conversion, and the report says what became of every call."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anthropic
import openai

from chatmill import build
from chatmill.capture.report import read_report
from chatmill.read.conversations import ConversationFile
from tests.capture.conftest import Running, capturing
from tests.cli.run import here as run_command
from tests.read.agent_runs import codes, lacks, records_of, trained_texts, write_lines


def converse(client: openai.OpenAI, texts: list[str], *, stream: bool) -> list[str]:
    """Talk for some turns, with the whole history each time, and return the answers."""
    messages: list[Any] = []
    answers: list[str] = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        given: Any = {"model": "small", "messages": messages, "stream": stream}
        if stream:
            chunks = list(client.chat.completions.create(**given, stream_options={"include_usage": True}))
            answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        else:
            answers.append(client.chat.completions.create(**given).choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_from_clients_to_a_proved_dataset(model_server: str, tmp_path: Path) -> None:
    out = tmp_path / "calls.jsonl"
    with capturing(model_server, out, "--token-ids", "vllm", "--logprobs") as running:
        said = []
        for number, stream in enumerate((True, False)):
            address = f"{running.root}/run/r{number}/v1"
            with openai.OpenAI(base_url=address, api_key="sk-none") as client:
                said.append(converse(client, ["one", "two"], stream=stream))
        assert said[0] == said[1], "the same answers, streamed or not"
    records = records_of(out)
    assert {record["session"] for record in records} == {"r0", "r1"}
    # The clients leave the reasoning out of the history, so that each call has a prompt of its own.
    assert len(records) == 4
    sampled = [message for record in records for message in record["messages"] if "token_ids" in message]
    assert len(sampled) == 4
    for message in sampled:
        assert len(message["logprobs"]) == len(message["token_ids"])
        text = message["reasoning_content"] + message["content"]
        assert bytes(one for one in message["token_ids"] if one < 256).decode() == text
    recipe = {
        "sources": [{"path": str(out)}],
        "tokenizer": "bytes",
        "template": "chatml",
        "add_control_tokens": True,
        "expand": "tree",
        "tree": {"group": "session"},
        "logprobs": True,
        "gates": {"untrained_terminators": None},
    }
    result = build(recipe, tmp_path / "built")
    assert result.manifest["ledger"]["tokens"]["calls"]["assistant"]["trained"] == sum(
        len(message["token_ids"]) for message in sampled
    )
    assert run_command("verify", str(tmp_path / "built"), "--deep").returncode == 0
    reports = read_report(out)
    assert [(one.run, one.calls, one.roots, one.branches) for one in reports] == [("r0", 2, 1, 1), ("r1", 2, 1, 1)]
    assert all(one.trained_share == 1.0 and one.without_ids == 0 for one in reports)


def test_all_apis_are_read_without_conversion(proxy: Running, tmp_path: Path) -> None:
    before = len(proxy.calls())
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    with anthropic.Anthropic(base_url=f"{proxy.root}/run/all", api_key="sk-none") as client:
        for text in ("whole", "streamed", "streamed"):
            given: Any = {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}
            if text == "whole":
                client.messages.create(**given, tools=tools)
            else:
                with client.messages.stream(**given, tools=tools) as stream:
                    stream.get_final_message()
    with openai.OpenAI(base_url=f"{proxy.root}/run/all/v1", api_key="sk-none") as client:
        first = client.responses.create(model="small", input="begin")
        client.responses.create(
            model="small", input="together alone 2", previous_response_id=first.id, stream=True
        ).close()
        list(client.responses.create(model="small", input="more", previous_response_id=first.id, stream=True))
    while len(proxy.calls()) < before + 6:
        time.sleep(0.01)
    path = write_lines(tmp_path / "calls.jsonl", proxy.calls()[before:])
    found = list(ConversationFile(path))
    trained = [[m.content for m in one.messages if m.role == "assistant" and m.weight != 0] for one in found]
    assert [len(texts) for texts in trained] == [1, 1, 2]
    # The text of the arguments is what the model wrote, where the API has it.
    assert [one.messages[-1].tool_calls[0].arguments for one in found[:2]] == ['{"a": 1, "b": 2}', '{"a": 1, "b":2}']
    (report,) = read_report(path)
    assert (report.calls, report.roots, report.joined, report.repeated, report.cut) == (6, 3, 1, 1, 1)
    assert report.without_ids == 4


def captured(text: str, answer: str | None, **more: Any) -> dict[str, Any]:
    """A line as the proxy writes it."""
    message = {"role": "assistant", "content": answer}
    response = {
        "id": f"r-{answer}",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    response["usage"] = {"completion_tokens": 10}
    line: dict[str, Any] = {"version": 1, "id": "x", "run": "a", "dialect": "chat", "path": "/v1/chat/completions"}
    line |= {"status": 200, "complete": True, "stream": False, "added": []}
    line |= {"request": {"messages": [{"role": "user", "content": text}]}, "response": response}
    return {**line, **more}


def test_answers_of_tries_that_the_client_gave_up_are_not_trained(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "calls.jsonl",
        [captured("q", "lost"), captured("q", "taken", retry=1), captured("q", "other", run="b")],
    )
    assert trained_texts(path) == [["taken"], ["other"]]
    assert lacks(path)["use of answers that were asked for again"] == (1, 1)
    first, second = read_report(path)
    assert (first.unused_tries, first.unresolved_retries, first.trained_share) == (1, 1, 0.5)
    assert (second.calls, second.roots) == (1, 1)


def test_a_repeated_call_that_a_failure_explains_leaves_all_answers(tmp_path: Path) -> None:
    """Several samples of one prompt: that one of their calls failed first says nothing about the others."""
    failed = captured("q", None, response=None, status=None, complete=False, error="ConnectionReset")
    lines = [captured("q", "1"), failed, captured("q", "2"), captured("q", "3", retry=1)]
    path = write_lines(tmp_path / "calls.jsonl", lines)
    assert trained_texts(path) == [["1"], ["2"], ["3"]]
    # Without a failure it is not known which of two answers was not taken.
    path = write_lines(tmp_path / "calls.jsonl", [captured("q", "1"), captured("q", "2"), captured("q", "3", retry=1)])
    assert trained_texts(path) == [["1"], ["2"], ["3"]]
    assert lacks(path)["mark which of several answers was asked for again"] == (1, 1)


def test_every_end_of_a_call_has_its_place_in_the_report(tmp_path: Path) -> None:
    chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    good = captured("q", "1")
    more = {
        "messages": [
            *good["request"]["messages"],
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "r"},
        ]
    }
    mismatch = captured("ids", "2")
    mismatch["response"]["choices"][0]["token_ids"] = [1, 2]
    lines: list[Any] = [
        good,
        captured("", "3", request=more),
        captured("q", None, response=None, events=[chunk, 'data: {"to'], complete=False, stream=True),
        captured("q", None, response=None, status=None, complete=False, error="ConnectionRefused"),
        captured("q", None, response={"error": {"message": "no"}}, status=429),
        captured("q", "4", request={"base64": "AA=="}),
        captured("my [key removed by chatmill capture]", "5"),
        mismatch,
        captured("last", "6", lost=2),
        json.dumps(good)[:-30],
    ]
    path = write_lines(tmp_path / "calls.jsonl", lines)
    assert trained_texts(path) == [["1", "3"], ["6"]]
    assert codes(path) == ["invalid_json", "text_cut", "bad_token_ids", "invalid_json"]
    named, torn = read_report(path)
    assert (named.calls, named.roots, named.joined) == (9, 2, 1)
    assert (named.cut, named.failed, named.ids_differ_from_usage, named.lost) == (1, 2, 1, 2)
    assert named.unreadable == {"invalid_json": 1, "text_cut": 1}
    assert torn.unreadable == {"torn line": 1}
    done = run_command("capture", "--report", str(path))
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "30 of 40 sampled tokens are trained (75.0%)." in done.stdout
    assert json.loads(run_command("capture", "--report", str(path), "--json").stdout)[0]["cut"] == 1


def test_ids_that_do_not_continue_begin_another_history(tmp_path: Path) -> None:
    """The messages go on, but the prompt was tokenized anew."""
    first = captured("q", "1")
    first["response"] |= {"prompt_token_ids": [1, 2], "usage": None}
    first["response"]["choices"][0]["token_ids"] = [3, 4]
    history = [*first["request"]["messages"], {"role": "assistant", "content": "1"}, {"role": "user", "content": "r"}]
    for prompt, count in (([1, 2, 3, 4, 5], 1), ([1, 2, 34, 5], 2)):
        second = captured("", "2", request={"messages": history})
        second["response"] |= {"prompt_token_ids": prompt, "usage": None}
        second["response"]["choices"][0]["token_ids"] = [6]
        path = write_lines(tmp_path / "calls.jsonl", [first, second])
        records = records_of(path)
        assert len(records) == count
        answers = [m["token_ids"] for record in records for m in record["messages"] if "token_ids" in m]
        assert answers == [[3, 4], [6]]
