"""Read events of OpenHands' second generation, a tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, Lacking, PlainMessage

ROOT = "__root__"
"""The parent of an event that begins another tree."""
REJECTED = "Action rejected: "
MISSING_PARENT = "an event before it is missing"
PART_OF_ANSWER = "a condensation forgot a part of an answer"

Event = Mapping[str, Any]


@dataclass(slots=True)
class _Entry:
    """The message of one event, or of one response's actions."""

    turn: AgentTurn
    ids: list[str] = field(default_factory=list)
    response: str = ""
    """The response whose actions it is; empty for what is no action."""


class EventTree:
    """The events of one conversation."""

    def __init__(self, name: str, events: list[Event], *, is_damaged: bool = False) -> None:
        self._run = AgentRun(name, [])
        self._events = events
        self._is_damaged = is_damaged
        self._index = {str(event.get("id")): index for index, event in enumerate(events)}
        self._parents = [self._parent(index) for index in range(len(events))]

    def run(self) -> AgentRun:
        """Build the run.

        It has a branch for every leaf and for every condensed view.
        """
        parents = set(self._parents)
        for index in range(len(self._events)):
            if index not in parents:
                path = self._path(index)
                _View(self._run, self._unknown(path)).read([self._events[position] for position in path])
        return self._run

    def _parent(self, index: int) -> int:
        """Find the index of the parent, -1 for a root."""
        parent = self._events[index].get("parent_id")
        if parent == ROOT:
            return -1
        if parent is None:
            # Logs without parents are a list.
            return index - 1
        found = self._index.get(str(parent), -1)
        # What comes later cannot be a parent: so there are no circles.
        return found if found < index else -1

    def _path(self, leaf: int) -> list[int]:
        path: list[int] = []
        index = leaf
        while index >= 0:
            path.append(index)
            index = self._parents[index]
        return path[::-1]

    def _unknown(self, path: list[int]) -> str:
        """Name the reason for unknown prompts of a path.

        Returns "" for known prompts.
        """
        if self._is_damaged:
            return "an event that cannot be read"
        first = self._events[path[0]]
        if first.get("parent_id") not in (None, ROOT):
            return MISSING_PARENT
        return ""


class _View:
    """The model's view along one path of events."""

    def __init__(self, run: AgentRun, unknown: str) -> None:
        self._run = run
        self._lacks: Lacking = run.lacks
        self._unknown = unknown
        self._entries: list[_Entry] = []
        self._tools: list[Any] | None = None

    def read(self, events: list[Event]) -> None:
        """Read one path and add its branches."""
        for event in events:
            self._add(event)
        self._end_branch()

    def _add(self, event: Event) -> None:
        match event.get("kind"):
            case "SystemPromptEvent":
                self._add_system(event)
            case "MessageEvent":
                self._add_message(event)
            case "ActionEvent":
                self._add_action(event)
            case "ObservationEvent" | "UserRejectObservation" | "AgentErrorEvent":
                self._add_result(event)
            case "Condensation":
                self._condense(event)
            case "TokenEvent":
                self._add_ids(event)

    def _add_turn(self, event: Event, turn: AgentTurn, response: str = "") -> None:
        self._entries.append(_Entry(turn, [str(event.get("id"))], response))

    def _add_system(self, event: Event) -> None:
        texts = [content_text(event.get("system_prompt"))]
        if event.get("dynamic_context"):
            texts.append(content_text(event["dynamic_context"]))
        self._add_turn(event, AgentTurn({"role": "system", "content": "".join(texts)}))

    def _add_message(self, event: Event) -> None:
        told = _object(event.get("llm_message"))
        content = content_text(told.get("content")) + content_text(event.get("extended_content"))
        if told.get("role") != "assistant":
            self._add_turn(event, AgentTurn({"role": told.get("role"), "content": content}))
            return
        message: PlainMessage = {"role": "assistant", "content": content}
        if told.get("reasoning_content"):
            message["reasoning_content"] = told["reasoning_content"]
        name = str(event.get("llm_response_id") or event.get("id"))
        self._add_turn(event, AgentTurn(message, name, unknown=self._unknown))

    def _add_action(self, event: Event) -> None:
        """Add a call to its answer.

        Neighbouring calls of one response are one answer.
        """
        response = str(event.get("llm_response_id") or event.get("id"))
        call = _object(event.get("tool_call"))
        function = {"name": call.get("name"), "arguments": call.get("arguments")}
        plain = {"id": call.get("id"), "type": "function", "function": function}
        last = self._entries[-1] if self._entries else None
        if last is not None and last.response == response:
            last.turn.message["tool_calls"].append(plain)
            last.ids.append(str(event.get("id")))
            return
        message: PlainMessage = {"role": "assistant", "content": content_text(event.get("thought")) or None}
        if event.get("reasoning_content"):
            message["reasoning_content"] = event["reasoning_content"]
        message["tool_calls"] = [plain]
        self._add_turn(event, AgentTurn(message, response, unknown=self._unknown), response)

    def _add_result(self, event: Event) -> None:
        observation = _object(event.get("observation"))
        if event.get("kind") == "UserRejectObservation":
            text = REJECTED + str(event.get("rejection_reason") or "")
        elif event.get("kind") == "AgentErrorEvent":
            text = str(event.get("error") or "")
        else:
            text = content_text(observation.get("content")) + content_text(event.get("extended_content"))
        message: PlainMessage = {"role": "tool", "tool_call_id": event.get("tool_call_id"), "content": text}
        if observation.get("is_error") is True or event.get("kind") == "AgentErrorEvent":
            message["is_error"] = True
        self._add_turn(event, AgentTurn(message))

    def _condense(self, event: Event) -> None:
        """Apply a condensation to the view."""
        self._end_branch()
        listed = event.get("forgotten_event_ids")
        forgotten = {str(one) for one in listed} if isinstance(listed, list) else set()
        if not isinstance(listed, list):
            self._unknown = self._unknown or "a condensation that cannot be read"
        entries: list[_Entry] = []
        for entry in self._entries:
            kept = [one for one in entry.ids if one not in forgotten]
            if kept and len(kept) < len(entry.ids):
                self._unknown = self._unknown or PART_OF_ANSWER
            if kept:
                entries.append(entry)
        summary = event.get("summary")
        offset = event.get("summary_offset")
        if isinstance(summary, str) and isinstance(offset, int):
            turn = AgentTurn({"role": "user", "content": summary})
            entries.insert(offset, _Entry(turn, [f"{event.get('id')}-summary"]))
        self._entries = entries

    def _add_ids(self, event: Event) -> None:
        """Give token ids to the answer before them."""
        answers = [entry.turn for entry in self._entries if entry.turn.key is not None]
        if not answers or "token_ids" in answers[-1].message:
            self._lacks.add("answers of token ids")
            return
        answers[-1].message["prompt_token_ids"] = event.get("prompt_token_ids")
        answers[-1].message["token_ids"] = event.get("response_token_ids")

    def _end_branch(self) -> None:
        """Keep the view so far as a branch."""
        turns = [AgentTurn(dict(one.turn.message), one.turn.key, unknown=one.turn.unknown) for one in self._entries]
        answers = [turn for turn in turns if turn.key is not None]
        has_ids = any("token_ids" in turn.message for turn in answers)
        self._count_lacking(turns, has_ids=has_ids)
        for turn in answers:
            if has_ids and "token_ids" not in turn.message:
                # Its text has no place in a record of ids, so it is only context there.
                turn.key = None
        has_system = bool(turns) and turns[0].message.get("role") == "system"
        self._run.branches.append(AgentBranch(_merge_users(turns), tools=self._tools, has_system=has_system))

    def _count_lacking(self, turns: list[AgentTurn], *, has_ids: bool) -> None:
        has_reasoning = False
        for turn in turns:
            if turn.key is not None:
                self._lacks.see("token ids", is_missing="token_ids" not in turn.message)
                if not has_ids:
                    # Whether a prompt has the reasoning of earlier answers depends on the model.
                    self._lacks.see("word on earlier reasoning in prompts", is_missing=has_reasoning)
                has_reasoning = has_reasoning or "reasoning_content" in turn.message
            elif turn.message.get("role") == "tool" and not has_ids:
                # What a model sees of an observation is made by the class of the observation, which is in no file.
                self._lacks.add("words of observations as the model sees them")


def content_text(content: object) -> str:
    """Join the texts of a content."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return content_text(content.get("text"))
    if isinstance(content, list):
        return "".join(content_text(part) for part in content)
    return ""


def _merge_users(turns: list[AgentTurn]) -> list[AgentTurn]:
    """Merge neighbouring messages of the user."""
    merged: list[AgentTurn] = []
    for turn in turns:
        last = merged[-1].message if merged else {}
        if turn.message.get("role") == "user" and last.get("role") == "user":
            last["content"] = f"{last['content']}{turn.message['content']}"
        else:
            merged.append(turn)
    return merged


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
