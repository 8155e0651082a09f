"""Read session files of Claude Code.

A session is a tree of lines, with one line for each content block of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from chatmill.errors import RecordError
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.answer_parts import AnswerParts
from chatmill.read.agents.anthropic_content import add_answer_blocks, user_messages
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, Lacking
from chatmill.read.agents.timestamps import copied_before, timestamp_seconds

TREE_TYPES = ("user", "assistant", "system", "attachment", "progress")
SCREEN_TYPES = (
    *("summary", "file-history-snapshot", "queue-operation", "custom-title", "ai-title", "agent-name", "agent-setting"),
    *("mode", "permission-mode", "last-prompt", "pr-link", "bridge-session", "continued-in", "tag"),
)
"""Lines about the session and its screen, which are in no prompt."""
REPLACED_RESULTS = "content-replacement"
SYNTHETIC = "<synthetic>"
INTERRUPTED = "[Request interrupted by user]"
COPY_SECONDS = 1.0
"""Lines that are so much older than the beginning of their file were copied into it."""

Entry = Mapping[str, Any]


def is_claude_code(record: Mapping[str, Any]) -> bool:
    """Check for a line of a session file."""
    kind = record.get("type")
    if kind in TREE_TYPES:
        return "uuid" in record and "sessionId" in record
    if kind == "summary":
        return "leafUuid" in record
    if kind == "file-history-snapshot":
        return "messageId" in record
    return kind in ("queue-operation", "mode", "permission-mode") and "sessionId" in record


def read_claude_code(file: AgentFile) -> Iterator[AgentRun]:
    """Yield the one run of a session file."""
    session = _Session(file.stem)
    for line in file.lines():
        session.add(line.value, line.number, line.error)
    yield session.run()


@dataclass(slots=True)
class _Step:
    """An answer with the results of its calls, or another line."""

    entries: list[Entry]
    parent: int = -1
    results: list[Entry] = field(default_factory=list)
    unknown: str = ""
    """Why prompts from here on are not known exactly."""


class _Session:
    """The lines of a session, and the steps they make."""

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self._entries: dict[str, Entry] = {}
        self._errors: list[RecordError] = []
        self._lacks = Lacking()
        self._start: float | None = None
        """Time of the first line that has one."""
        self._has_replaced_results = False
        self._steps: list[_Step] = []
        self._step_of: dict[str, int] = {}
        self._answered: dict[tuple[int, str], str] = {}
        """Results by the answer and the call that they belong to."""
        self._unnamed: dict[str, str] = {}
        """First lines of answers without identifiers, by their later lines."""
        self._own_answers: set[str] = set()
        """Answers of the main agent, which the files of its subagents may repeat."""

    def add(self, entry: Any, number: int, error: RecordError | None) -> None:
        """Add one line of the file."""
        if error is not None:
            self._errors.append(error)
            return
        if not isinstance(entry, Mapping):
            self._errors.append(RecordError(f"line {number}: a line must be an object", code="record_type"))
            return
        if self._start is None:
            self._start = timestamp_seconds(entry)
        kind = entry.get("type")
        uuid = entry.get("uuid")
        if kind in TREE_TYPES and isinstance(uuid, str):
            if uuid in self._entries:
                self._lacks.add("difference between repeats of a line")
                return
            self._entries[uuid] = entry
        elif kind == REPLACED_RESULTS:
            self._has_replaced_results = True
        elif kind not in SCREEN_TYPES:
            self._lacks.add(f"meaning of lines of type {str(kind)[:40]}")

    def run(self) -> AgentRun:
        """Return the run, one branch for each end of the tree."""
        self._make_steps()
        first = next(iter(self._entries.values()), {})
        name = str(first.get("sessionId") or self._stem)
        agent = first.get("agentId")
        run = AgentRun(f"{name}/{agent}" if agent else name, [], self._lacks, self._errors)
        parents = {step.parent for step in self._steps}
        positions = {uuid: position for position, uuid in enumerate(self._entries)}
        leaves = [index for index in range(len(self._steps)) if index not in parents]
        leaves.sort(key=lambda index: positions[str(self._steps[index].entries[0]["uuid"])])
        reached: set[int] = set()
        shown: set[int] = set()
        for leaf in leaves:
            path = self._path(leaf)
            new = [index for index in path if index not in reached and self._is_answer(index)]
            reached.update(path)
            if new:
                run.branches.append(self._branch(path))
                shown.update(path)
        for index, step in enumerate(self._steps):
            if index not in shown and _is_command_output(step.entries[0]):
                self._lacks.add("place of outputs of commands in the prompt")
        lost = len(self._steps) - len(reached)
        if lost:
            run.errors.append(RecordError(f"{lost} lines follow each other in a circle", code="bad_trace"))
        return run

    def _is_answer(self, index: int) -> bool:
        return self._steps[index].entries[0].get("type") == "assistant"

    def _make_steps(self) -> None:
        """Group the lines of answers with the results of their calls."""
        answers: dict[Any, int] = {}
        owners: dict[Any, int] = {}
        for uuid, entry in self._entries.items():
            if entry.get("type") != "assistant":
                continue
            key = (self._answer_name(uuid, entry), *_writer(entry))
            if not entry.get("isSidechain"):
                self._own_answers.add(key[0])
            if key not in answers:
                answers[key] = len(self._steps)
                self._steps.append(_Step([]))
            step = self._steps[answers[key]]
            self._step_of[uuid] = answers[key]
            if any(_is_same_content(entry, other) for other in step.entries):
                # Some releases wrote a whole history again, with other identifiers of its lines.
                self._lacks.add("difference between repeats of a line")
                continue
            step.entries.append(entry)
            for block in _blocks(entry, "tool_use"):
                owners.setdefault((block.get("id"), *_writer(entry)), answers[key])
        # Steps are in the order of the file, so answers and other lines take turns.
        others: list[tuple[str, Entry]] = []
        for uuid, entry in self._entries.items():
            if entry.get("type") == "assistant":
                continue
            if not self._take_results(uuid, entry, owners):
                others.append((uuid, entry))
        for uuid, entry in others:
            self._step_of[uuid] = len(self._steps)
            self._steps.append(_Step([entry]))
        for step in self._steps:
            self._link(step)
        self._move_preserved()

    def _take_results(self, uuid: str, entry: Entry, owners: Mapping[Any, int]) -> bool:
        """Give the results in a line to their answer.

        Returns False for a line with anything else in it.
        """
        results = _blocks(entry, "tool_result")
        message = entry.get("message")
        content = message.get("content") if isinstance(message, Mapping) else None
        if not results or not isinstance(content, list) or len(results) < len(content):
            return False
        found = [owners.get((block.get("tool_use_id"), *_writer(entry))) for block in results]
        step = found[0]
        if step is None or any(other != step for other in found):
            return False
        self._step_of[uuid] = step
        answered = {(step, str(block.get("tool_use_id"))): json.dumps(block, sort_keys=True) for block in results}
        known = [self._answered[call] for call in answered if call in self._answered]
        if known == list(answered.values()):
            self._lacks.add("difference between repeats of a line")
            return True
        if known:
            self._lacks.add("which of several results of a call was shown")
            return False
        self._answered |= answered
        self._steps[step].results.append(entry)
        return True

    def _answer_name(self, uuid: str, entry: Entry) -> str:
        """Find the identifier of the answer that a line is a part of.

        Some gateways give none. There a line belongs to the answer that it follows.
        """
        name = _message_id(entry)
        if name is not None or not _is_from_model(entry):
            return name or uuid
        parent = self._entries.get(str(entry.get("parentUuid")), {})
        if parent.get("type") != "assistant" or _message_id(parent) or not _is_from_model(parent):
            return uuid
        if _writer(parent) != _writer(entry):
            return uuid
        before = str(parent["uuid"])
        self._unnamed[uuid] = self._unnamed.get(before, before)
        return self._unnamed[uuid]

    def _link(self, step: _Step) -> None:
        """Find the parent of a step, and reasons for unknown prompts."""
        entry = step.entries[0]
        parent = entry.get("parentUuid")
        own = self._step_of[str(entry["uuid"])]
        if isinstance(parent, str) and parent in self._step_of:
            step.parent = self._step_of[parent]
            if step.parent == own:
                step.parent = -1
                step.unknown = "its line names itself as its parent"
        for one in (*step.entries, *step.results):
            before = one.get("parentUuid")
            is_known = isinstance(before, str) and before in self._entries
            if before is not None and not is_known:
                step.unknown = "a line before it is missing"
        subtype = entry.get("subtype")
        if subtype == "microcompact_boundary":
            step.unknown = "old results were cleared (microcompact_boundary)"

    def _move_preserved(self) -> None:
        """Move messages that a compaction preserved behind its summary."""
        for step in list(self._steps):
            entry = step.entries[0]
            metadata = entry.get("compactMetadata")
            if entry.get("subtype") != "compact_boundary" or not isinstance(metadata, Mapping):
                continue
            preserved = metadata.get("preservedMessages")
            if not isinstance(preserved, Mapping):
                if metadata.get("preservedSegment"):
                    step.unknown = "a compaction preserved messages that it does not name"
                continue
            anchor = preserved.get("anchorUuid")
            uuids = preserved.get("uuids")
            if not isinstance(anchor, str) or anchor not in self._step_of or not isinstance(uuids, list):
                step.unknown = "a compaction preserved messages that are not there"
                continue
            self._copy_behind(self._step_of[anchor], uuids, step)

    def _copy_behind(self, anchor: int, uuids: list[Any], boundary: _Step) -> None:
        """Copy steps behind an anchor.

        The earlier followers of the anchor come after the copies.
        """
        steps: list[int] = []
        for uuid in uuids:
            index = self._step_of.get(uuid) if isinstance(uuid, str) else None
            if index is None:
                boundary.unknown = "a compaction preserved messages that are not there"
                return
            if index not in steps:
                steps.append(index)
        if any(self._steps[index].parent == anchor for index in steps):
            # A fork has them there already.
            return
        last = anchor
        for index in steps:
            original = self._steps[index]
            self._steps.append(_Step(original.entries, last, original.results))
            last = len(self._steps) - 1
        for index, step in enumerate(self._steps):
            if step.parent == anchor and index < len(self._steps) - len(steps):
                step.parent = last

    def _path(self, leaf: int) -> list[int]:
        path: list[int] = []
        seen: set[int] = set()
        index = leaf
        while index >= 0 and index not in seen:
            seen.add(index)
            path.append(index)
            index = self._steps[index].parent
        return path[::-1]

    def _branch(self, path: list[int]) -> AgentBranch:
        """Build the history of a path through the tree."""
        turns: list[AgentTurn] = []
        unknown = "results were replaced (content-replacement)" if self._has_replaced_results else ""
        agent = ""
        for index in path:
            step = self._steps[index]
            entry = step.entries[0]
            unknown = unknown or step.unknown
            if entry.get("isSidechain"):
                agent = str(entry.get("agentId") or "sidechain")
            if entry.get("type") == "assistant":
                turns += self._answer(step, unknown)
                continue
            turns += [AgentTurn(message) for message in self._others(entry)]
            if _text(entry).startswith(INTERRUPTED) and len(turns) > 1:
                # The answer before was stopped, so it has no end that could be trained.
                before = turns[-2]
                if before.key is not None and not before.message.get("tool_calls"):
                    before.message["finish_reason"] = "length"
        return AgentBranch(turns, agent=agent, tools=None, has_system=False)

    def _answer(self, step: _Step, unknown: str) -> list[AgentTurn]:
        first = step.entries[0]
        message = first.get("message")
        message = message if isinstance(message, Mapping) else {}
        model = str(message.get("model") or "")
        if first.get("isApiErrorMessage"):
            self._lacks.add("place of errors of the API in the prompt")
            return []
        is_synthetic = model == SYNTHETIC
        parts = AnswerParts(Lacking() if is_synthetic else self._lacks)
        for entry in step.entries:
            own = entry.get("message")
            add_answer_blocks(parts, own.get("content") if isinstance(own, Mapping) else None)
        if not parts:
            return []
        plain = parts.message()
        last = step.entries[-1].get("message")
        if isinstance(last, Mapping) and last.get("stop_reason") == "max_tokens":
            plain["finish_reason"] = "length"
        name = str(_message_id(first) or first.get("uuid"))
        key: Any = (name, *_writer(first))
        if first.get("isSidechain") and name in self._own_answers:
            self._lacks.add("answers of the main agent, which a subagent repeats")
            key = None
        elif is_synthetic:
            key = None
        elif self._is_copy(first):
            self._lacks.add("answers that were copied from another session")
            key = None
        turns = [AgentTurn(plain, key, model, unknown or parts.doubt)]
        for entry in step.results:
            turns += [AgentTurn(result) for result in self._others(entry)]
        return turns

    def _others(self, entry: Entry) -> list[dict[str, Any]]:
        """Return the prompt's messages for a line without an answer."""
        kind = entry.get("type")
        if kind == "user":
            message = entry.get("message")
            content = message.get("content") if isinstance(message, Mapping) else None
            return user_messages(content, self._lacks)
        if _is_command_output(entry):
            # The program sends what a command of the user printed, and no other line of this type.
            return user_messages(entry.get("content"), self._lacks)
        if kind == "attachment":
            return self._attachment(entry.get("attachment"))
        return []

    def _attachment(self, attachment: object) -> list[dict[str, Any]]:
        """Return the text of a person typed while the model worked.

        The file lacks the words of all other reminders.
        """
        what = attachment if isinstance(attachment, Mapping) else {}
        self._lacks.add(f"words of {what.get('type')} reminders")
        if what.get("type") == "queued_command" and isinstance(what.get("prompt"), str):
            return [{"role": "user", "content": what["prompt"]}]
        return []

    def _is_copy(self, entry: Entry) -> bool:
        """Check for a line that a fork copied from another session."""
        if entry.get("forkedFrom"):
            return True
        return copied_before(entry, self._start, COPY_SECONDS)


def _message_id(entry: Entry) -> Any:
    message = entry.get("message")
    found = message.get("id") if isinstance(message, Mapping) else None
    found = found or entry.get("requestId")
    return found if isinstance(found, str) else None


def _writer(entry: Entry) -> tuple[bool, str]:
    """Identify the agent of a line."""
    return bool(entry.get("isSidechain")), str(entry.get("agentId") or "")


def _is_from_model(entry: Entry) -> bool:
    """Check for an answer of a model, not of the program."""
    message = entry.get("message")
    model = message.get("model") if isinstance(message, Mapping) else None
    return model != SYNTHETIC and not entry.get("isApiErrorMessage")


def _is_command_output(entry: Entry) -> bool:
    return entry.get("type") == "system" and entry.get("subtype") == "local_command"


def _is_same_content(entry: Entry, other: Entry) -> bool:
    """Check whether two lines hold the same block of an answer."""
    messages = (entry.get("message"), other.get("message"))
    contents = [message.get("content") if isinstance(message, Mapping) else None for message in messages]
    return bool(contents[0]) and contents[0] == contents[1]


def _blocks(entry: Entry, kind: str) -> list[Mapping[str, Any]]:
    message = entry.get("message")
    content = message.get("content") if isinstance(message, Mapping) else None
    blocks = content if isinstance(content, list) else []
    found = [block for block in blocks if isinstance(block, Mapping) and block.get("type") == kind]
    names = {"tool_use": "id", "tool_result": "tool_use_id"}
    return [block for block in found if isinstance(block.get(names[kind]), str)]


def _text(entry: Entry) -> str:
    """Return the first text of a line."""
    message = entry.get("message")
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list) and content and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if isinstance(content, str) else ""
