"""A small server on loopback that answers as models do, by a script, and keeps the requests.

    python tools/agent_files/stand_in_server.py PORT requests.jsonl

It speaks just enough of Anthropic Messages and of the Responses API, streamed, for Claude Code and Codex to run.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCRIPT: list[list[dict[str, Any]]] = [
    [
        {"type": "thinking", "thinking": "I look first.", "signature": "c2ln"},
        {"type": "text", "text": "I look."},
        {"type": "call", "id": "call_1", "command": "echo one"},
        {"type": "call", "id": "call_2", "command": "cat missing"},
    ],
    [{"type": "call", "id": "call_3", "command": "echo two"}],
    [{"type": "text", "text": "There are one and two."}],
]


DELEGATE = "Delegate."
"""The text of a user to which the answer is a subagent with a task."""
DELEGATION = [[{"type": "task", "id": "call_t", "prompt": "Look around."}], [{"type": "text", "text": "It looked."}]]


class Handler(BaseHTTPRequestHandler):
    """Answers requests by the script."""

    requests = ""
    answers = 0

    def do_POST(self) -> None:
        """Answer a call of a model."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        request = json.loads(body or b"{}")
        if "count_tokens" in self.path:
            self._send(b'{"input_tokens": 10}', "application/json")
            return
        with open(Handler.requests, "a") as log:
            log.write(json.dumps({"path": self.path, "request": request}) + "\n")
        Handler.answers += 1
        has_tools = bool(request.get("tools"))
        if self.path.startswith("/v1/messages"):
            script = DELEGATION if delegates(request) else SCRIPT
            blocks = script[min(results(request), len(script) - 1)] if has_tools else SCRIPT[-1]
            self._send(anthropic_stream(blocks, f"msg_{Handler.answers}", request.get("model")), "text/event-stream")
        else:
            blocks = SCRIPT[min(outputs(request), len(SCRIPT) - 1)]
            self._send(responses_stream(blocks, f"resp_{Handler.answers}", request.get("model")), "text/event-stream")

    def do_GET(self) -> None:
        """Answer questions about models and the like."""
        self._send(b'{"data": [], "models": []}', "application/json")

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def delegates(request: dict[str, Any]) -> bool:
    """Return whether the last text of the user asks for a subagent."""
    for message in reversed(request["messages"]):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [part.get("text", "") for part in parts if part.get("type") == "text"]
        if message["role"] == "user" and texts:
            return any(DELEGATE in text for text in texts)
    return False


def results(request: dict[str, Any]) -> int:
    """Count the rounds of results after the last text of the user."""
    rounds = 0
    for message in request["messages"]:
        content = message["content"]
        is_result = isinstance(content, list) and any(part.get("type") == "tool_result" for part in content)
        if message["role"] == "user":
            rounds = rounds + 1 if is_result else 0
    return rounds


def outputs(request: dict[str, Any]) -> int:
    """Count the rounds of outputs after the last text of the user."""
    rounds = 0
    was_output = False
    for item in request["input"]:
        is_output = item.get("type", "").endswith("_output")
        if item.get("type") == "message" and item.get("role") == "user":
            rounds = 0
        elif is_output and not was_output:
            rounds += 1
        was_output = is_output
    return rounds


def events(parts: list[dict[str, Any]]) -> bytes:
    """Return server-sent events."""
    return "".join(f"event: {part['type']}\ndata: {json.dumps(part)}\n\n" for part in parts).encode()


def anthropic_stream(blocks: list[dict[str, Any]], name: str, model: Any) -> bytes:
    """Return a stream of the Messages API."""
    start = {"id": name, "type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None}
    start |= {"stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 1}}
    parts: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(blocks):
        at = {"index": index}
        if block["type"] == "call":
            own = {"type": "tool_use", "id": f"toolu_{name}_{block['id']}", "name": "Bash", "input": {}}
            arguments = json.dumps({"command": block["command"], "description": "Run"})
            deltas = [{"type": "input_json_delta", "partial_json": arguments}]
        elif block["type"] == "task":
            own = {"type": "tool_use", "id": f"toolu_{name}_{block['id']}", "name": "Agent", "input": {}}
            task = {"description": "Look", "prompt": block["prompt"], "subagent_type": "general-purpose"}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(task)}]
        elif block["type"] == "thinking":
            own = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            own = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        parts.append({"type": "content_block_start", **at, "content_block": own})
        parts += [{"type": "content_block_delta", **at, "delta": delta} for delta in deltas]
        parts.append({"type": "content_block_stop", **at})
    reason = "tool_use" if any(block["type"] in ("call", "task") for block in blocks) else "end_turn"
    delta = {"stop_reason": reason, "stop_sequence": None}
    parts.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 20}})
    parts.append({"type": "message_stop"})
    return events(parts)


def responses_stream(blocks: list[dict[str, Any]], name: str, model: Any) -> bytes:
    """Return a stream of the Responses API."""
    items: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        own = f"{name}_{index}"
        if block["type"] == "call":
            arguments = json.dumps({"cmd": block["command"]}, separators=(",", ":"))
            call = {"type": "function_call", "id": own, "name": "exec_command", "arguments": arguments}
            items.append({**call, "call_id": f"{name}_{block['id']}", "status": "completed"})
        elif block["type"] == "thinking":
            summary = [{"type": "summary_text", "text": block["thinking"]}]
            items.append({"type": "reasoning", "id": own, "summary": summary, "encrypted_content": "gAAA"})
        else:
            content = [{"type": "output_text", "text": block["text"], "annotations": []}]
            items.append({"type": "message", "id": own, "role": "assistant", "content": content, "status": "completed"})
    base = {"id": name, "object": "response", "model": model, "status": "in_progress", "output": []}
    parts: list[dict[str, Any]] = [{"type": "response.created", "response": base}]
    for index, item in enumerate(items):
        parts.append({"type": "response.output_item.added", "output_index": index, "item": item})
        parts.append({"type": "response.output_item.done", "output_index": index, "item": item})
    usage = {"input_tokens": 10, "input_tokens_details": None, "output_tokens": 20, "output_tokens_details": None}
    done = {**base, "status": "completed", "output": items, "usage": {**usage, "total_tokens": 30}}
    parts.append({"type": "response.completed", "response": done})
    return events(parts)


if __name__ == "__main__":
    Handler.requests = sys.argv[2]
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
