"""Write a small run of OpenHands with its own SDK: events, logged calls, and the requests that were really sent.

    python tools/agent_files/openhands_run.py tests/data/agents

Needs openhands-sdk (Python 3.12) in the environment, and nothing of Chatmill: `make test-agents` makes that
environment. A stand-in on loopback answers by a script, with token ids if it is asked for them. Texts of the SDK
(system prompts, descriptions of tools) are cut to their first letters.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["OPENHANDS_SUPPRESS_BANNER"] = "1"
LONGEST = 400
CUT = 40


def call(name: str, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call; its arguments have a spelling of their own."""
    text = json.dumps(arguments, separators=(",", ": "))
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": text}}


SCRIPT: list[dict[str, Any]] = [
    {
        "content": "I think twice.",
        "reasoning_content": "Two thoughts at once.",
        "tool_calls": [call("c1", "think", thought="one"), call("c2", "think", thought="two")],
    },
    {"content": None, "tool_calls": [call("c3", "no_such_tool", a=1)]},
    {"content": "It is done.", "tool_calls": [call("c4", "finish", message="Three thoughts.")]},
    {"content": "You are welcome."},
    # After the history is condensed, which the model is asked for.
    {"content": "The user asked for thoughts, and got three."},
    {"content": "I go on."},
    # Back at the first message, another way.
    {"content": "Another way."},
]
WORDS = 1000
"""Ids of prompts are below this: each stands for a message, by its text."""


def prompt_ids(request: dict[str, Any]) -> list[int]:
    """Return an id for each message of a request, or the ids that were sampled for it."""
    ids: list[int] = []
    for message in request["messages"]:
        sampled = Model.sampled.get(message_text(message))
        ids += sampled or [sum(message_text(message).encode()) % WORDS]
    return ids


def message_text(message: dict[str, Any]) -> str:
    """Return a message as a text, without its reasoning."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return json.dumps([message["role"], content, calls], sort_keys=True)


class Model(BaseHTTPRequestHandler):
    """Answers by the script, one line of it after the other."""

    requests: ClassVar[list[dict[str, Any]]] = []
    sampled: ClassVar[dict[str, list[int]]] = {}
    """Ids of the answers without reasoning, by their texts."""

    def do_POST(self) -> None:
        """Answer one call."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = len(Model.requests)
        Model.requests.append(request)
        message = {"role": "assistant", **SCRIPT[number]}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer: dict[str, Any] = {"id": f"chat-{number}", "object": "chat.completion", "created": 7, "model": "small"}
        prompt = prompt_ids(request)
        ids = [WORDS + 10 * number + step for step in range(3)]
        if not message.get("reasoning_content"):
            Model.sampled[message_text(message)] = ids
        if request.get("return_token_ids"):
            choice["token_ids"] = ids
            answer["prompt_token_ids"] = prompt
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 3, "total_tokens": len(prompt) + 3}
        body = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def run(home: Path, address: str) -> None:
    """Run a conversation, condense it, go on, and begin again from its first message."""
    from openhands.sdk import LLM, Agent, Conversation
    from openhands.sdk.context.condenser import LLMSummarizingCondenser
    from pydantic import SecretStr

    llm = LLM(
        model="openai/small",
        base_url=address,
        api_key=SecretStr("none"),
        log_completions=True,
        log_completions_folder=str(home / "completions"),
        litellm_extra_body={"return_token_ids": True},
        native_tool_calling=True,
    )
    (home / "work").mkdir()
    conversation = Conversation(
        agent=Agent(llm=llm, tools=[], condenser=LLMSummarizingCondenser(llm=llm, keep_first=1)),
        workspace=str(home / "work"),
        persistence_dir=str(home / "conversations"),
        conversation_id=uuid.UUID(int=7),
        visualizer=None,
    )
    for text in ("Think.", "Thank you."):
        conversation.send_message(text)
        conversation.run()
    conversation.condense()
    conversation.send_message("Go on.")
    conversation.run()
    first = next(event.id for event in conversation.state.events if event.source == "user")
    conversation.navigate_to(first)
    conversation.send_message(" Again.")
    conversation.run()
    conversation.close()


def cut(value: Any) -> Any:
    """Return a value with its long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:CUT]}..."
    if isinstance(value, list):
        return [cut(one) for one in value]
    if isinstance(value, dict):
        return {key: cut(one) for key, one in value.items()}
    return value


def write(path: Path, value: Any, home: Path) -> None:
    """Write JSON without long texts, and without the name of the folder that it was made in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(cut(value), ensure_ascii=False)
    path.write_text(re.sub(re.escape(str(home)), "/home", text) + "\n")


def main(out: Path) -> None:
    """Run it, and copy what it left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(home, f"http://127.0.0.1:{server.server_port}/v1")
        target = out / "openhands"
        for path in sorted((home / "conversations").rglob("event-*.json")):
            write(target / "events" / path.name, json.loads(path.read_text()), home)
        for path in sorted((home / "completions").rglob("*.json")):
            write(target / "completions" / path.name, json.loads(path.read_text()), home)
        write(target / "requests.json", Model.requests, home)
    server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
