"""Write events of OpenHands 0.62 with its own stream, and the messages that it makes of them before each response.

    PYTHONPATH=FOLDER python tools/agent_files/openhands_v0_events.py tests/data/agents

FOLDER has openhands-ai 0.62.0, installed without what it depends on (`pip install --no-deps --target FOLDER`), and the
packages that Python then asks for; what the runtime alone needs is stubbed here. Needs nothing of Chatmill.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
STUBBED = ("openhands.runtime", "openhands_aci", "docx", "PyPDF2", "pptx", "pylatexenc")
TOOLS = [{"type": "function", "function": {"name": "execute_bash", "parameters": {"type": "object"}}}]


class _Stub(types.ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return a stub for a module of the runtime."""
        if not any(name == one or name.startswith(f"{one}.") for one in STUBBED):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make the stub."""
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def response(number: int, content: str | None, calls: list[tuple[str, str, str]]) -> Any:
    """Return what the model answered, as LiteLLM has it."""
    from litellm import ModelResponse

    listed = []
    for name, function, arguments in calls:
        listed.append({"id": name, "type": "function", "function": {"name": function, "arguments": arguments}})
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if listed:
        message["tool_calls"] = listed
    reason = "tool_calls" if listed else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return ModelResponse(id=f"r{number}", model="small", created=7, choices=[choice])


def events() -> list[tuple[Any, str]]:
    """Return the events of a conversation, with their sources."""
    from openhands.events.action import AgentFinishAction, AgentThinkAction, CmdRunAction, MessageAction
    from openhands.events.action.message import SystemMessageAction
    from openhands.events.observation import AgentThinkObservation, CmdOutputObservation, ErrorObservation
    from openhands.events.tool import ToolCallMetadata

    def about(answer: Any, name: str, function: str = "execute_bash", total: int = 1) -> Any:
        return ToolCallMetadata(
            function_name=function, tool_call_id=name, model_response=answer, total_calls_in_response=total
        )

    first = response(
        0, "I look.", [("c1", "execute_bash", '{"command":"ls"}'), ("c2", "execute_bash", '{"command":"x"}')]
    )
    second = response(1, None, [("c3", "execute_bash", '{"command": "cat a"}')])
    last = response(2, "Ready.", [("c4", "finish", '{"message": "Done."}')])
    found: list[tuple[Any, str]] = [
        (SystemMessageAction(content="Be.", tools=TOOLS), "agent"),
        (MessageAction(content="Look."), "user"),
    ]
    actions = [(CmdRunAction(command="ls", thought="I look."), first, "c1"), (CmdRunAction(command="x"), first, "c2")]
    for action, answer, name in actions:
        action.tool_call_metadata = about(answer, name, total=2)
        found.append((action, "agent"))
    results: list[tuple[Any, Any, str]] = [
        (CmdOutputObservation(content="a", command="ls", exit_code=0), first, "c1"),
        (ErrorObservation(content="x: not found"), first, "c2"),
    ]
    for result, answer, name in results:
        result.tool_call_metadata = about(answer, name, total=2)
        found.append((result, "environment"))
    action = CmdRunAction(command="cat a")
    action.tool_call_metadata = about(second, "c3")
    result = CmdOutputObservation(content="text", command="cat a", exit_code=0)
    result.metadata.working_dir = "/work"
    result.tool_call_metadata = about(second, "c3")
    finish = AgentFinishAction(final_thought="Done.", thought="Ready.")
    finish.tool_call_metadata = about(last, "c4", "finish")
    found += [(action, "agent"), (result, "environment"), (finish, "agent")]
    for text in ("More.", "Now."):
        found.append((MessageAction(content=text), "user"))
    fourth = response(3, "", [("c5", "think", '{"thought": "Hm."}')])
    think = AgentThinkAction(thought="Hm.")
    think.tool_call_metadata = about(fourth, "c5", "think")
    thought = AgentThinkObservation(content="Your thought has been logged.")
    thought.tool_call_metadata = about(fourth, "c5", "think")
    fifth = response(4, "Again.", [("c6", "execute_bash", '{"command": "ls"}')])
    again = CmdRunAction(command="ls", thought="Again.")
    again.tool_call_metadata = about(fifth, "c6")
    return [*found, (think, "agent"), (thought, "environment"), (again, "agent")]


def main(out: Path) -> None:
    """Write the events, and the messages before each response."""
    sys.meta_path.insert(0, _Finder())
    from openhands.core.config import AgentConfig
    from openhands.events import EventSource
    from openhands.events.stream import EventStream
    from openhands.memory.conversation_memory import ConversationMemory
    from openhands.storage.local import LocalFileStore

    prompts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        stream = EventStream("s", LocalFileStore(home))
        memory = ConversationMemory(AgentConfig(), None)
        for event, source in events():
            before = list(stream.search_events())
            metadata = event.tool_call_metadata
            if source == "agent" and metadata is not None and metadata.model_response.id not in prompts:
                messages = memory.process_events(before, before[1], max_message_chars=None)
                prompts[metadata.model_response.id] = [message.model_dump() for message in messages]
            stream.add_event(event, EventSource(source))
        stream.close()
        target = out / "openhands_v0"
        shutil.rmtree(target, ignore_errors=True)
        (target / "events").mkdir(parents=True)
        for path in Path(home).rglob("events/*.json"):
            shutil.copy(path, target / "events" / path.name)
    (target / "prompts.json").write_text(json.dumps(prompts) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
