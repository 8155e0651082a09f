"""Read completion logs and events of OpenHands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.errors import RecordError
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, Lacking, PlainMessage
from chatmill.read.agents.dialects import chat_message
from chatmill.read.agents.openhands_tree import EventTree
from chatmill.read.agents.request_logs import CallJoiner

CONDENSED = "condensed events"
SEPARATOR = "\n\n"
OBSERVED = "\nObserved result of command executed by user:\n"
PLAIN_OBSERVATIONS = ("read", "mcp", "think", "task_tracking", "condense", "download", "browse")
"""Observations that a model sees by their content."""
LONGEST_OBSERVATION = 30_000
"""Characters up to which an observation is not cut in its middle, unless the configuration says so."""


def read_completion_log(file: AgentFile) -> Iterator[AgentRun]:
    """Yield the run of one logged call."""
    calls = CallJoiner(file.path.name.removesuffix(".json").removesuffix(".jsonl"))
    for line in file.lines():
        if line.error is not None:
            calls.run.errors.append(line.error)
            continue
        calls.add_record(_as_call(line.value), f"line {line.number}")
    run = calls.finish()
    for branch in run.branches:
        if branch.tools and any(not _has_parameters(tool) for tool in branch.tools):
            # The second generation writes names and descriptions of its tools, and no parameters.
            branch.tools = None
    yield run


def read_openhands_events(file: AgentFile) -> Iterator[AgentRun]:
    """Yield one run per list of events.

    The list is the file itself, or in each result of a benchmark.
    """
    events: list[Mapping[str, Any]] = []
    errors: list[RecordError] = []
    for line in file.lines():
        if line.error is not None:
            errors.append(line.error)
        elif not isinstance(line.value, Mapping):
            errors.append(RecordError(f"entry {line.number} must be an object", code="record_type"))
        elif isinstance(line.value.get("history"), list):
            yield _event_run(str(line.value.get("instance_id")), _flat(line.value["history"]))
        else:
            events.append(line.value)
    if events or errors:
        run = _event_run(file.stem, events, is_damaged=bool(errors))
        run.errors += errors
        yield run


def _flat(history: list[Any]) -> list[Mapping[str, Any]]:
    """Flatten the events of a history.

    Older files have pairs of an action and its observation.
    """
    events: list[Mapping[str, Any]] = []
    for entry in history:
        for event in entry if isinstance(entry, list) else [entry]:
            if isinstance(event, Mapping):
                events.append(event)
    return events


def _as_call(record: Any) -> Any:
    """Return a completion log as a logged call.

    Mocked calls are left as the text that the model wrote: `messages` and `response` hold that, `fncall_messages` not.
    """
    if not isinstance(record, Mapping):
        return record
    kwargs = record.get("kwargs")
    request = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    for name in ("messages", "input", "instructions"):
        if record.get(name) is not None:
            request[name] = record[name]
    if not request.get("tools") and isinstance(record.get("tools"), list):
        request["tools"] = [_plain_tool(tool) for tool in record["tools"]]
    return {"request": request, "response": record.get("response"), "error": record.get("error")}


def _plain_tool(tool: Any) -> Any:
    if isinstance(tool, Mapping) and "function" not in tool and "title" in tool:
        return {"type": "function", "function": {"name": tool["title"], "description": tool.get("description")}}
    return tool


def _has_parameters(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and "parameters" in function


def _event_run(name: str, events: list[Mapping[str, Any]], *, is_damaged: bool = False) -> AgentRun:
    """Return the run of a conversation, of either generation."""
    if any(isinstance(event.get("kind"), str) for event in events):
        return EventTree(name, events, is_damaged=is_damaged).run()
    return _Events(name, events, is_damaged=is_damaged).run()


def observation_text(event: Mapping[str, Any]) -> tuple[str, bool]:
    """Format an observation as the model sees it.

    The second value tells whether the words are exact.

    As `ConversationMemory` of the last release of the first generation (0.62) writes them.
    """
    content = str(event.get("content") or "")
    extras = event.get("extras")
    extras = extras if isinstance(extras, Mapping) else {}
    kind = event.get("observation")
    is_exact = len(content) <= LONGEST_OBSERVATION
    if kind == "run":
        return _command_text(content, extras.get("metadata")), is_exact
    if kind == "error":
        return f"{content}\n[Error occurred in processing last action]", is_exact
    if kind == "user_rejected":
        return f"OBSERVATION:\n{content}\n[Last action has been rejected by the user]", is_exact
    return content, is_exact and kind in PLAIN_OBSERVATIONS


def _command_text(content: str, metadata: object) -> str:
    """Format the output of a command with its metadata."""
    known = metadata if isinstance(metadata, Mapping) else {}
    text = f"{known.get('prefix') or ''}{content}{known.get('suffix') or ''}"
    if known.get("working_dir"):
        text += f"\n[Current working directory: {known['working_dir']}]"
    if known.get("py_interpreter_path"):
        text += f"\n[Python interpreter: {known['py_interpreter_path']}]"
    exit_code = known.get("exit_code", -1)
    if exit_code != -1:
        text += f"\n[Command finished with exit code {exit_code}]"
    return text


class _Events:
    """The events of one conversation of the first generation."""

    def __init__(self, name: str, events: list[Mapping[str, Any]], *, is_damaged: bool = False) -> None:
        self._run = AgentRun(name, [])
        self._lacks: Lacking = self._run.lacks
        self._events = events
        self._turns: list[AgentTurn] = []
        self._tools: list[Any] | None = None
        self._answers: set[str] = set()
        self._unknown = "an event that cannot be read" if is_damaged else ""

    def run(self) -> AgentRun:
        """Return the run with its one history."""
        for event in self._events:
            self._add(event)
        self._end_branch()
        return self._run

    def _end_branch(self) -> None:
        """Keep the history so far as a branch."""
        has_system = bool(self._turns) and self._turns[0].message.get("role") == "system"
        self._run.branches.append(AgentBranch(list(self._turns), tools=self._tools, has_system=has_system))

    def _add(self, event: Mapping[str, Any]) -> None:
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, Mapping) else {}
        action = event.get("action")
        metadata = event.get("tool_call_metadata")
        if action == "system":
            if isinstance(arguments.get("tools"), list):
                self._tools = arguments["tools"]
            self._turns.append(AgentTurn({"role": "system", "content": arguments.get("content")}))
        elif action == "condensation":
            self._unknown = self._unknown or CONDENSED
        elif action == "delegate":
            self._unknown = self._unknown or "another agent's events"
        elif isinstance(metadata, Mapping) and action is not None:
            self._add_response(metadata)
            if action == "finish":
                self._end_in_text(arguments)
        elif action == "message" and event.get("source") == "user":
            self._add_user(arguments.get("content"))
        elif action is None:
            self._add_observation(event, metadata)
        elif action in ("message", "finish") and event.get("source") == "agent":
            # Without the response nobody knows what of it the model wrote.
            self._lacks.add("responses behind actions")
            text = arguments.get("content") or arguments.get("final_thought") or ""
            self._turns.append(AgentTurn({"role": "assistant", "content": text}))
        elif action is not None and event.get("source") == "agent":
            self._lacks.add("responses behind actions")

    def _add_user(self, content: Any) -> None:
        """Add a message of the user.

        An empty line separates it from a message of the user before it.
        """
        is_second = bool(self._turns) and self._turns[-1].message.get("role") == "user"
        if is_second and isinstance(content, str):
            content = SEPARATOR + content
        self._turns.append(AgentTurn({"role": "user", "content": content}))

    def _add_observation(self, event: Mapping[str, Any], metadata: object) -> None:
        """Add the result of an action, in the words for the model."""
        text, is_exact = observation_text(event)
        if not isinstance(metadata, Mapping):
            if event.get("observation") == "run":
                # A command of the user.
                self._add_user(OBSERVED + text)
            elif event.get("observation") == "recall":
                self._lacks.add("words of recalled context")
            return
        self._lacks.see("words of observations as the model sees them", is_missing=not is_exact)
        message: PlainMessage = {"role": "tool", "tool_call_id": metadata.get("tool_call_id"), "content": text}
        if event.get("observation") == "error":
            message["is_error"] = True
        self._turns.append(AgentTurn(message))

    def _end_in_text(self, arguments: Mapping[str, Any]) -> None:
        """End the history at a finish.

        Later prompts hold its thought as a text, and no call.
        """
        if not self._turns or self._turns[-1].key is None:
            return
        self._end_branch()
        content = str(self._turns[-1].message.get("content") or "")
        thought = str(arguments.get("thought") or "")
        text = content if thought in ("", content) else f"{thought}\n{content}"
        self._turns[-1] = AgentTurn({"role": "assistant", "content": text})

    def _add_response(self, metadata: Mapping[str, Any]) -> None:
        """Add the response behind an action.

        All actions of one response are one answer.
        """
        response = metadata.get("model_response")
        choices = response.get("choices") if isinstance(response, Mapping) else None
        if not isinstance(response, Mapping) or not isinstance(choices, list) or not choices:
            self._lacks.add("responses behind actions")
            return
        name = str(response.get("id"))
        if name in self._answers:
            return
        choice = choices[0] if isinstance(choices[0], Mapping) else {}
        try:
            message = chat_message({**dict(choice.get("message") or {}), "role": "assistant"}, self._lacks)
        except (RecordError, TypeError, ValueError):
            self._run.errors.append(RecordError("a response has no message", code="missing_field"))
            return
        self._add_answer(name, message, str(response.get("model") or ""))

    def _add_answer(self, name: str, message: PlainMessage, model: str) -> None:
        self._answers.add(name)
        self._turns.append(AgentTurn(message, name, model, self._unknown))
