"""Write a small file of calls with `chatmill capture`, from the libraries of OpenAI and Anthropic.

    PYTHONPATH=. python tools/agent_files/captured_calls.py tests/data/agents

The model server of the tests answers, each API streamed and not, with a call and without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anthropic
import openai

from tests.capture.conftest import capturing

CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CLAUDE_TOOLS: list[Any] = [{"name": "add", "input_schema": {"type": "object"}}]


def talk(root: str) -> None:
    """Make two calls of each kind, the second after the first."""
    for stream in (False, True):
        with openai.OpenAI(base_url=f"{root}/run/{'streamed' if stream else 'whole'}/v1", api_key="none") as client:
            messages: list[Any] = [{"role": "user", "content": "one"}]
            answer: Any = client.chat.completions.create(model="m", messages=messages, stream=stream, tools=CHAT_TOOLS)
            if stream:
                list(answer)
            answer = client.responses.create(model="m", input="one", stream=stream)
            if stream:
                list(answer)
        with anthropic.Anthropic(base_url=root, api_key="none") as claude:
            answer = claude.messages.create(
                model="m", max_tokens=9, system="Be.", messages=messages, stream=stream, tools=CLAUDE_TOOLS
            )
            if stream:
                list(answer)


def main(folder: Path) -> None:
    """Write the calls, without the times and ids of this run."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.capture.model_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "calls.jsonl")
        with capturing(address, out, "--token-ids", "vllm", "--logprobs") as running:
            talk(running.root)
            calls = running.calls()
    server.communicate()
    for number, call in enumerate(calls):
        call |= {"id": f"call-{number}", "started": "2026-11-19T20:00:00+00:00", "ended": "2026-11-19T20:00:01+00:00"}
    (folder / "capture").mkdir(exist_ok=True)
    lines = [json.dumps(call, ensure_ascii=False) for call in calls]
    (folder / "capture" / "calls.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
