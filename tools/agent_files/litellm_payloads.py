"""Write payloads that LiteLLM logs of its calls, as its own callbacks get them.

    python tools/agent_files/litellm_payloads.py tests/data/agents

Needs litellm in the environment (`make test-agents` has it), and nothing of Chatmill. A stand-in on loopback answers,
streamed and not, with a call, and once with an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
KEPT = (
    *("id", "trace_id", "call_type", "stream", "status", "model", "model_parameters", "messages", "response"),
    *("error_str", "startTime", "endTime", "prompt_tokens", "completion_tokens", "total_tokens"),
)
"""Fields of a payload that do not say where it was made."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b":1, "a":1}'}}


class Model(BaseHTTPRequestHandler):
    """Answers with a call to a user, and with a text to a result."""

    def do_POST(self) -> None:
        """Answer one call."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = request["messages"][-1]
        if last["content"] == "fail":
            self._send(400, b'{"error": {"message": "no", "type": "bad"}}', "application/json")
            return
        is_result = last["role"] == "tool"
        message: dict[str, Any] = {"role": "assistant", "content": "It is 2."}
        if not is_result:
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        reason = "stop" if is_result else "tool_calls"
        base = {"id": f"chat-{len(request['messages'])}", "created": 7, "model": "small"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        if not request.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            body = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
            self._send(200, json.dumps(body).encode(), "application/json")
            return
        if message.get("tool_calls"):
            start = {**CALL, "index": 0, "function": {"name": "add", "arguments": ""}}
            pieces = [{"index": 0, "function": {"arguments": text}} for text in ('{"b":1,', ' "a":1}')]
            deltas: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [one]} for one in (start, *pieces)]
        else:
            deltas = [{"role": "assistant", "content": text} for text in ("It is", " 2.")]
        base["object"] = "chat.completion.chunk"
        chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self._send(200, text.encode(), "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


async def record(address: str) -> list[dict[str, Any]]:
    """Make some calls, and return the payload of each."""
    import litellm
    from litellm.integrations.custom_logger import CustomLogger

    payloads: list[dict[str, Any]] = []

    class Logger(CustomLogger):
        async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            payloads.append(kwargs["standard_logging_object"])

        async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            payloads.append(kwargs["standard_logging_object"])

    litellm.callbacks = [Logger()]
    given: dict[str, Any] = {"model": "openai/small", "api_base": address, "api_key": "none", "tools": TOOLS}
    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": f"1+1? {stream}"}]
        for _ in range(2):
            answer: Any = await litellm.acompletion(messages=messages, stream=stream, **given)
            if stream:
                answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
            message = answer.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
            messages = [*messages, message, result]
            await wait_for(payloads)
    try:
        await litellm.acompletion(messages=[{"role": "user", "content": "fail"}], num_retries=0, **given)
    except litellm.BadRequestError:
        await wait_for(payloads)
    return payloads


async def wait_for(payloads: list[dict[str, Any]]) -> None:
    """Wait until the payload of the last call has come, which LiteLLM hands over in the background."""
    before = len(payloads)
    for _ in range(200):
        await asyncio.sleep(0.05)
        if len(payloads) > before:
            return


def main(out: Path) -> None:
    """Write the payloads as lines."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    payloads = asyncio.run(record(f"http://127.0.0.1:{server.server_port}/v1"))
    server.shutdown()
    folder = out / "litellm"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "payloads.jsonl").open("w") as file:
        for payload in payloads:
            kept = {name: payload[name] for name in KEPT if name in payload}
            file.write(json.dumps(kept, default=str) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
