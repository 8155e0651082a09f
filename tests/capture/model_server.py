"""A model server that says the same to the same request, as vLLM, SGLang, OpenAI and Anthropic write it.

    python -m tests.capture.model_server

It prints its port. The last text of a request says how the answer goes: `fail`, `cut`, `hang` and `together` are words
that it knows. Token ids are the bytes of a text.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from aiohttp import web

HANG_SECONDS = 600.0
HANGING: list[str] = []
"""Calls that the server has begun to wait in."""
BARRIERS: dict[str, asyncio.Barrier] = {}
"""By the name of a group of calls that go on at the same time."""
END = 260


def answer_to(body: dict[str, Any]) -> tuple[str, str]:
    """Return the reasoning and the text of the answer to a request."""
    name = hashlib.sha256(repr(body.get("messages") or body.get("input")).encode()).hexdigest()[:12]
    return f"Think {name[:4]}. ", f"Answer {name}: naïve → ✓"


def last_text(body: dict[str, Any]) -> str:
    given = body.get("messages") or body.get("input")
    if isinstance(given, str):
        return given
    content = given[-1].get("content") or ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text") or "") for part in content)
    return str(content)


def pieces(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def chat_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what vLLM streams: ids are null where nobody asked, and empty deltas only come with ids."""
    reasoning, text = answer_to(body)
    asked = bool(body.get("return_token_ids"))
    base = {"id": "chat-" + text[7:19], "object": "chat.completion.chunk", "created": 7, "model": body["model"]}
    prompt_ids = list(json.dumps(body["messages"]).encode()) if asked else None
    first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
    yield {**base, "choices": [{**first, "finish_reason": None}], "prompt_token_ids": prompt_ids}

    def chunk(delta: dict[str, Any], ids: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": chr(0x20), "logprob": -0.5, "top_logprobs": []} for _ in ids]}
        if reason is not None:
            choice["stop_reason"] = None
        choice["token_ids"] = ids if asked else None
        return {**base, "choices": [choice]}

    for piece in pieces(reasoning):
        yield chunk({"reasoning": piece}, list(piece.encode()), None)
    if asked or body.get("logprobs"):
        # A token that is no text yet: vLLM sends the chunk for its ids alone.
        yield chunk({}, [257], None)
    for piece in pieces(text):
        yield chunk({"content": piece}, list(piece.encode()), None)
    if body.get("tools"):
        start = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
        yield chunk({"tool_calls": [start]}, [258], None)
        for piece in ('{"a": 1', ', "b":2}'):
            yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}, list(piece.encode()), None)
    yield chunk({"content": ""}, [END], "tool_calls" if body.get("tools") else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**base, "choices": [], "usage": usage_of(body)}


def sampled_ids(body: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    for chunk in chat_chunks({**body, "return_token_ids": True, "stream_options": None}):
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
    return ids


def usage_of(body: dict[str, Any]) -> dict[str, int]:
    prompt = sum(len(str(message["content"])) for message in body["messages"])
    sampled = len(sampled_ids(body))
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def whole_chat(body: dict[str, Any], server: str) -> dict[str, Any]:
    reasoning, text = answer_to(body)
    asked = bool(body.get("return_token_ids"))
    message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning": reasoning, "tool_calls": []}
    if body.get("tools"):
        function = {"name": "add", "arguments": '{"a": 1, "b":2}'}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    prompt_ids = list(json.dumps(body["messages"]).encode()) if asked else None
    ids = sampled_ids(body)
    logprobs = None
    if body.get("logprobs"):
        logprobs = {"content": [{"token": " ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]}
    reason = "tool_calls" if body.get("tools") else "stop"
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
    response: dict[str, Any] = {"id": "chat-" + text[7:19], "object": "chat.completion", "created": 7}
    response |= {"model": body["model"], "choices": [choice], "usage": usage_of(body)}
    if server == "sglang":
        # SGLang writes no key where nobody asked.
        if asked:
            choice["prompt_token_ids"] = prompt_ids
            choice["response_token_ids"] = ids
        return response
    choice["token_ids"] = ids if asked else None
    response["prompt_token_ids"] = prompt_ids
    return response


def messages_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    reasoning, text = answer_to(body)
    start = {"id": "msg-" + text[7:19], "type": "message", "role": "assistant", "model": body["model"], "content": []}
    start |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": 1}}
    yield {"type": "message_start", "message": start}
    yield {"type": "ping"}
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [
                *({"type": "thinking_delta", "thinking": piece} for piece in pieces(reasoning)),
                {"type": "signature_delta", "signature": "c2ln"},
            ],
        ),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(text)]),
    ]
    if body.get("tools"):
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"a": 1', ', "b":2}')]
        blocks.append(({"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}, deltas))
    for index, (block, deltas) in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    reason = "tool_use" if body.get("tools") else "end_turn"
    delta = {"stop_reason": reason, "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}
    yield {"type": "message_stop"}


def whole_message(body: dict[str, Any]) -> dict[str, Any]:
    reasoning, text = answer_to(body)
    content: list[dict[str, Any]] = [{"type": "thinking", "thinking": reasoning, "signature": "c2ln"}]
    content.append({"type": "text", "text": text})
    if body.get("tools"):
        content.append({"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}})
    message = {"id": "msg-" + text[7:19], "type": "message", "role": "assistant", "model": body["model"]}
    reason = "tool_use" if body.get("tools") else "end_turn"
    end = {"stop_reason": reason, "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": 9}}
    return {**message, "content": content, **end}


def whole_response(body: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    _, text = answer_to(body)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 9, "total_tokens": 14}
    usage["output_tokens_details"] = {"reasoning_tokens": 0}
    base = {"id": "resp-" + text[7:19], "object": "response", "created_at": 7, "model": body["model"], "error": None}
    base |= {"incomplete_details": None, "instructions": body.get("instructions"), "metadata": {}, "tools": []}
    base |= {"parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "top_p": 1.0, "status": status}
    return {**base, "output": [item] if status == "completed" else [], "usage": usage}


def responses_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    whole = whole_response(body)
    (item,) = whole["output"]
    events: list[dict[str, Any]] = [{"type": "response.created", "response": whole_response(body, "in_progress")}]
    events.append({"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}})
    for piece in pieces(item["content"][0]["text"]):
        at = {"item_id": "m1", "output_index": 0, "content_index": 0}
        events.append({"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []})
    events.append({"type": "response.output_item.done", "output_index": 0, "item": item})
    events.append({"type": "response.completed", "response": whole})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def as_events(api: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Yield server-sent events, each in two pieces."""
    found: Iterator[dict[str, Any]] = {
        "chat": lambda: chat_chunks(body),
        "messages": lambda: messages_events(body),
        "responses": lambda: responses_events(body),
    }[api]()
    for event in found:
        name = "" if api == "chat" else f"event: {event['type']}\n"
        yield (name + "data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":"))).encode()
        yield b"\n\n"
    if api == "chat":
        yield b": a comment\n\n"
        yield b"data: [DONE]\n\n"


async def call(request: web.Request) -> web.StreamResponse:
    """Answer a call of a model."""
    body = json.loads(await request.read())
    server = str(request.headers.get("x-server", "vllm"))
    api = request.path.rsplit("/", 1)[1].replace("completions", "chat")
    text = last_text(body)
    if "fail" in text:
        key = request.headers.get("authorization") or request.headers.get("x-api-key")
        return web.json_response({"error": {"message": f"no: {key}", "type": "bad"}}, status=418)
    if "hang" in text:
        HANGING.append(text)
        await asyncio.sleep(HANG_SECONDS)
    if not body.get("stream"):
        whole = {
            "chat": lambda: whole_chat(body, server),
            "messages": lambda: whole_message(body),
            "responses": lambda: whole_response(body),
        }[api]()
        data = json.dumps(whole, ensure_ascii=False, indent=1 if "spaced" in text else None).encode()
        headers = {"content-type": "application/json", "x-request-id": "r7"}
        if "packed" in text and "gzip" in request.headers.get("accept-encoding", ""):
            data = gzip.compress(data, mtime=0)
            headers["content-encoding"] = "gzip"
        return web.Response(body=data, headers=headers)

    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", "x-request-id": "r7"})
    await response.prepare(request)
    for number, piece in enumerate(as_events(api, body)):
        if number == 2 and "together" in text:
            # All calls of a group are under way at the same time, however long that takes.
            _, key, size = text.split()[:3]
            await BARRIERS.setdefault(key, asyncio.Barrier(int(size))).wait()
        if "cut" in text and number == 9:
            assert request.transport is not None
            request.transport.abort()
            return response
        try:
            await response.write(piece)
        except ConnectionError:
            return response
    await response.write_eof()
    return response


async def hanging(request: web.Request) -> web.Response:
    """Answer with the number of calls that hang."""
    return web.json_response(len(HANGING))


async def echo(request: web.Request) -> web.Response:
    """Answer with what came."""
    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() != "host"}
    body = (await request.read()).decode("latin-1")
    found = {"method": request.method, "path": request.raw_path, "headers": headers, "body": body}
    return web.json_response(found, status=203, headers={"x-one": "1", "set-cookie": "a=b"})


def app() -> web.Application:
    made = web.Application(client_max_size=0)
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        made.router.add_post(path, call)
    made.router.add_get("/hanging", hanging)
    made.router.add_route("*", "/{path:.*}", echo)
    return made


async def serve() -> None:
    runner = web.AppRunner(app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
