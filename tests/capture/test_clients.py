"""The libraries of OpenAI and Anthropic get the same bytes and events through the proxy as without it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from tests.capture.conftest import Running, capturing

KEY = "sk-secret-0123456789abcdef"
TOOLS: dict[str, list[Any]] = {
    "chat": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "responses": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}],
    "messages": [{"name": "add", "input_schema": {"type": "object"}}],
}
APIS = ("chat", "responses", "messages")


def resource(api: str, address: str) -> tuple[Any, Any]:
    """A client without retries, and what it calls for an API."""
    if api == "messages":
        made = anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key=KEY, max_retries=0)
        return made, made.messages
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    return client, client.chat.completions if api == "chat" else client.responses


def ask(api: str, text: str, **more: Any) -> dict[str, Any]:
    if api == "responses":
        return {"model": "m", "input": text, **more}
    limit = {"max_tokens": 99} if api == "messages" else {}
    return {"model": "m", "messages": [{"role": "user", "content": text}], **limit, **more}


def whole_bytes(api: str, address: str, **given: Any) -> tuple[int, bytes]:
    client, calls = resource(api, address)
    with client, calls.with_streaming_response.create(**given) as answer:
        return answer.status_code, b"".join(answer.iter_bytes())


def parsed(api: str, address: str, **given: Any) -> list[str]:
    """The events of a stream, or the answer, as the client's own objects say them."""
    client, calls = resource(api, address)
    with client:
        found = calls.create(**given)
        return [event.model_dump_json() for event in found] if given.get("stream") else [found.model_dump_json()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", ["proxy", "asking_proxy"])
def test_bytes_and_events_are_the_same(
    kind: str, api: str, stream: bool, model_server: str, request: pytest.FixtureRequest
) -> None:
    running: Running = request.getfixturevalue(kind)
    for more in ({}, {"tools": TOOLS[api]}):
        given = ask(api, f"{kind} {bool(more)}", stream=stream, **more)
        status, expected = whole_bytes(api, f"{model_server}/v1", **given)
        assert status == 200
        assert whole_bytes(api, running.openai, **given) == (status, expected)
        assert parsed(api, running.openai, **given) == parsed(api, f"{model_server}/v1", **given)
    call = running.calls()[-1]
    assert call["dialect"] == api
    assert (call["complete"], call["stream"], call["status"]) == (True, stream, 200)
    # Another client asks for more itself, and keeps what it asked for.
    if api == "chat":
        given = ask(api, "own ids", stream=stream, extra_body={"return_token_ids": True}, logprobs=True)
        assert whole_bytes(api, running.openai, **given) == whole_bytes(api, f"{model_server}/v1", **given)


@pytest.mark.parametrize("text", ["spaced", "packed", "plain"])
@pytest.mark.parametrize("kind", ["proxy", "asking_proxy"])
def test_every_spelling_of_an_answer_is_recorded_exactly(
    kind: str, text: str, model_server: str, request: pytest.FixtureRequest
) -> None:
    running: Running = request.getfixturevalue(kind)
    given = ask("chat", f"{text} {kind}")
    assert whole_bytes("chat", running.openai, **given) == whole_bytes("chat", f"{model_server}/v1", **given)
    call = running.calls()[-1]
    assert call["request"] == given
    answer = call["response"]
    asked = ask("chat", f"{text} {kind}", extra_body={"return_token_ids": True}, logprobs=True)
    expected = asked if kind == "asking_proxy" else given
    assert answer == json.loads(whole_bytes("chat", f"{model_server}/v1", **expected)[1])


def test_errors_of_the_server_reach_the_client_and_keys_in_them_never_the_disk(proxy: Running) -> None:
    for api in APIS:
        client, calls = resource(api, proxy.openai)
        with client, pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as found:
            calls.create(**ask(api, f"fail, and my key is {KEY}"))
        assert KEY in str(getattr(found.value, "body", ""))
        call = proxy.calls()[-1]
        assert call["status"] == 418
        assert "[key removed by chatmill capture]" in call["response"]["error"]["message"]
        assert "[key removed by chatmill capture]" in json.dumps(call["request"])
    assert KEY.encode() not in proxy.out.read_bytes()


def fetch(url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = urllib.request.Request(url, data=body, method=method, headers=sent)
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", "/v1/messages/count_tokens?beta=true"),
        ("PUT", "/a%2Fb/../c%7C?x=%20&y"),
        ("DELETE", "/"),
    ],
)
def test_other_requests_are_only_passed_on(method: str, path: str, proxy: Running, model_server: str) -> None:
    before = proxy.out.read_bytes()
    body = b"\x00\xff" if method in ("POST", "PUT") else None
    ours, theirs = (exchange(address, method, path, body) for address in (proxy.root, model_server))
    assert ours[:2] == theirs[:2]
    # Headers between neighbours go no further.
    for name in ("x-hop", "connection"):
        assert name in theirs[2]["headers"]
        del theirs[2]["headers"][name]
    if body is None:
        # No length and the length 0 are the same.
        ours[2]["headers"].pop("content-length", None)
    assert ours[2] == theirs[2]
    assert proxy.out.read_bytes() == before


def exchange(address: str, method: str, path: str, body: bytes | None) -> tuple[int, list[str], Any]:
    """Send a request with a header for the neighbour; return status, names of headers and what the server got."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    headers = {"X-Own": "1", "Connection": "x-hop", "X-Hop": "1", "Accept-Encoding": "gzip"}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    names = sorted(name.lower() for name, _ in answer.getheaders())
    found = answer.status, names, json.loads(answer.read())
    connection.close()
    return found


def test_a_run_is_named_by_the_address_or_a_header(proxy: Running) -> None:
    root = proxy.root
    given = json.dumps(ask("chat", "runs")).encode()
    for path, headers, name in (
        ("/run/a.1/v1/chat/completions", {"x_session_id": "other"}, "a.1"),
        ("/v1/chat/completions?key=secret", {"x_session_id": "s7"}, "s7"),
        ("/v1/chat/completions", {"x_session_id": "no name!"}, None),
    ):
        status, _, _ = fetch(root + path, "POST", given, content_type="application/json", **headers)
        call = proxy.calls()[-1]
        assert (status, call["run"], call["path"]) == (200, name, "/v1/chat/completions")
    assert fetch(f"{root}/run/a b/v1/x".replace(" ", "%20"))[0] == 403
    assert fetch(f"{root}/v1/models", Host="example.org")[0] == 403


def test_a_stream_that_the_server_cuts_is_cut_for_the_client_and_marked(proxy: Running, asking_proxy: Running) -> None:
    for running in (proxy, asking_proxy):
        for api in APIS:
            client, calls = resource(api, running.openai)
            with client, pytest.raises(Exception, match=r"(?i)peer closed|incomplete|connection"):
                list(calls.create(**ask(api, "cut", stream=True)))
            call = running.calls()[-1]
            assert call["complete"] is False
            assert len(call["events"]) > 2
            assert call["error"]


def wait_until(holds: Any) -> None:
    while not holds():
        time.sleep(0.01)


def test_a_client_that_leaves_ends_the_call(proxy: Running) -> None:
    before = len(proxy.calls())
    client, calls = resource("chat", proxy.openai)
    with client, calls.create(**ask("chat", "together leaving 2", stream=True)) as stream:
        next(iter(stream))
    wait_until(lambda: len(proxy.calls()) > before)
    call = proxy.calls()[-1]
    assert (call["complete"], call["error"]) == (False, "the client closed the connection")

    # And a client that leaves before the answer begins, when its request has come to the server.
    connection = http.client.HTTPConnection(urlsplit(proxy.root).netloc)
    hanging = int(fetch(f"{proxy.root}/hanging")[2])
    connection.request("POST", "/v1/chat/completions", json.dumps(ask("chat", "hang")))
    wait_until(lambda: int(fetch(f"{proxy.root}/hanging")[2]) > hanging)
    connection.close()
    wait_until(lambda: len(proxy.calls()) > before + 1)
    call = proxy.calls()[-1]
    assert (call["status"], call["complete"], call["response"]) == (None, False, None)


def test_a_server_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with capturing("http://127.0.0.1:9", tmp_path / "calls.jsonl") as running:
        for api in APIS:
            client, calls = resource(api, running.openai)
            with client, pytest.raises((openai.InternalServerError, anthropic.InternalServerError)) as found:
                calls.create(**ask(api, "hello"))
            assert "the server cannot be reached" in str(found.value)
        assert [call["status"] for call in running.calls()] == [None] * 3
        assert fetch(f"{running.root}/v1/models")[0] == 502


def test_what_cannot_be_written_is_still_forwarded_and_counted(model_server: str, tmp_path: Path) -> None:
    given = ask("chat", "full")
    with capturing(model_server, Path("/dev/full")) as running:
        direct = whole_bytes("chat", f"{model_server}/v1", **given)
        assert whole_bytes("chat", running.openai, **given) == direct
        counts = json.loads(running.stop())
    assert (counts["calls"], counts["lost"]) == (1, 1)


async def stream_of(client: openai.AsyncOpenAI, text: str) -> str:
    stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def answers_at_once(address: str, texts: list[str]) -> list[str]:
    async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=300) as client:
        return list(await asyncio.gather(*(stream_of(client, text) for text in texts)))


@pytest.mark.parametrize("kind", ["proxy", "asking_proxy"])
def test_two_hundred_streams_at_once(kind: str, model_server: str, request: pytest.FixtureRequest) -> None:
    running: Running = request.getfixturevalue(kind)
    before = len(running.calls())
    texts = [f"together {kind} 200 {number}" for number in range(200)]
    through = asyncio.run(answers_at_once(running.openai, texts))
    assert len(set(through)) == 200
    assert through == asyncio.run(answers_at_once(f"{model_server}/v1", texts))
    calls = running.calls()[before:]
    assert sorted(call["request"]["messages"][0]["content"] for call in calls) == sorted(texts)
    assert all(call["complete"] for call in calls)
    spans = [(call["started"], call["ended"]) for call in calls]
    assert max(start for start, _ in spans) < min(end for _, end in spans), "the server has waited for all"


def test_another_machine_needs_the_token(model_server: str, tmp_path: Path) -> None:
    token = "a-token-of-our-own"
    out = tmp_path / "calls.jsonl"
    with capturing(model_server, out, "--host", "0.0.0.0", CHATMILL_CAPTURE_TOKEN=token) as running:
        root = running.root.replace("0.0.0.0", "127.0.0.1")
        assert root.endswith(f"/token/{token}")
        given = json.dumps(ask("chat", "token")).encode()
        path = "/run/r1/v1/chat/completions"
        assert fetch(root + path, "POST", given)[0] == 200
        bare = root.removesuffix(f"/token/{token}")
        for wrong in ("", "/token/", "/token/another-token-of-ours", f"/token/{token}x"):
            assert fetch(bare + wrong + path, "POST", given)[0] == 403
        (call,) = running.calls()
    assert (call["run"], call["path"]) == ("r1", "/v1/chat/completions")
    assert token.encode() not in out.read_bytes()


def test_two_captures_do_not_share_a_file(proxy: Running, model_server: str) -> None:
    with pytest.raises(json.JSONDecodeError), contextlib.ExitStack() as stack:
        stack.enter_context(capturing(model_server, proxy.out))
