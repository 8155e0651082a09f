"""Read rollout files of Codex.

Items are in order, with compactions and rollbacks between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.errors import RecordError
from chatmill.read.agents.agent_file import AgentFile, AgentLine
from chatmill.read.agents.answer_parts import AnswerParts
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, Lacking
from chatmill.read.agents.dialects import item_turns
from chatmill.read.agents.responses_items import add_answer_item, is_answer_item, other_message, plain_tools
from chatmill.read.agents.timestamps import copied_before, timestamp_seconds

SCREEN_TYPES = ("world_state", "inter_agent_communication_metadata", "security_risk_score", "state")
BOUNDARIES = ("token_usage_record",)
"""Lines that end the items of one response."""
LINE_TYPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted", *SCREEN_TYPES, *BOUNDARIES)
IGNORED_ITEMS = ("ghost_snapshot", "other")
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
INJECTED = ("<", "# AGENTS.md instructions")
"""What messages begin with that have the role of a user, and are the program's."""
COPY_SECONDS = 0.5
"""A fork writes the copied lines at once, when its file begins."""


def is_codex(record: Mapping[str, Any]) -> bool:
    """Check for a line of a rollout file."""
    if record.get("type") in LINE_TYPES and isinstance(record.get("payload"), Mapping):
        return True
    return {"id", "timestamp", "instructions"} <= record.keys()


def read_codex(file: AgentFile) -> Iterator[AgentRun]:
    """Yield the one run of a rollout file."""
    rollout = _Rollout(file.stem)
    for line in file.lines():
        rollout.add(line)
    yield rollout.run()


class _Rollout:
    """The history of a rollout while its lines come by."""

    def __init__(self, stem: str) -> None:
        self._lacks = Lacking()
        self._run = AgentRun(stem, [], self._lacks)
        self._meta: Mapping[str, Any] | None = None
        self._history: list[AgentTurn] = []
        self._parts = AnswerParts(self._lacks)
        self._parts_copied = False
        self._answers = 0
        self._model = ""
        self._unknown = ""
        """Why prompts from here on are not known exactly."""
        self._start: float | None = None

    def add(self, line: AgentLine) -> None:
        """Add one line of the file."""
        if line.error is not None or not isinstance(line.value, Mapping):
            reason = RecordError(f"line {line.number}: a line must be an object", code="record_type")
            self._run.errors.append(line.error or reason)
            self._unknown = self._unknown or "a line before it cannot be read"
            return
        record = line.value
        if self._start is None:
            self._start = timestamp_seconds(record)
        payload = record.get("payload")
        kind = record.get("type")
        if not isinstance(payload, Mapping):
            # Files of the first releases have items and their session without a frame.
            payload = record
            kind = "session_meta" if "instructions" in record else "response_item"
            if record.get("record_type") is not None:
                return
        self._add_payload(str(kind), payload, record)

    def run(self) -> AgentRun:
        """Return the run, with one branch for each history."""
        self._flush()
        self._end_branch()
        return self._run

    def _add_payload(self, kind: str, payload: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        if kind == "session_meta":
            self._begin(payload)
        elif kind == "turn_context":
            self._flush()
            self._model = str(payload.get("model") or "")
        elif kind == "response_item":
            self._add_item(payload, record)
        elif kind == "event_msg":
            self._add_event(payload)
        elif kind == "compacted":
            self._compact(payload)
        elif kind in BOUNDARIES:
            self._flush()
        elif kind not in SCREEN_TYPES:
            self._lacks.add(f"meaning of lines of type {kind[:40]}")

    def _begin(self, meta: Mapping[str, Any]) -> None:
        """Take the first session of the file.

        Later ones were copied from the source of a fork.
        """
        if self._meta is not None:
            return
        self._meta = meta
        self._run.id = str(meta.get("id") or self._run.id)
        if meta.get("history_base"):
            self._unknown = "the history begins in another file (history_base)"
        instructions = meta.get("base_instructions", meta.get("instructions"))
        if isinstance(instructions, Mapping):
            instructions = instructions.get("text")
        if isinstance(instructions, str) and instructions:
            self._history.append(AgentTurn({"role": "system", "content": instructions}))

    def _add_item(self, item: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        kind = item.get("type")
        if kind in IGNORED_ITEMS:
            return
        if kind in COMPACTIONS:
            self._flush()
            self._unknown = self._unknown or "a compaction that is encrypted"
            return
        if is_answer_item(item):
            self._parts_copied = self._parts_copied or self._is_copy(record)
            add_answer_item(self._parts, item)
            if kind in ("web_search_call", "image_generation_call"):
                self._flush()
                self._unknown = self._unknown or f"what a {kind} gave is not in the file"
            return
        self._flush()
        message = other_message(item, self._lacks)
        if message is None:
            self._unknown = self._unknown or f"an item of type {kind}"
            return
        self._history.append(AgentTurn(message))

    def _add_event(self, event: Mapping[str, Any]) -> None:
        match event.get("type"):
            case "token_count":
                self._flush()
            case "turn_aborted":
                # A response that was stopped has no end that could be trained.
                self._flush(is_cut=True)
            case "thread_rolled_back":
                self._flush()
                self._roll_back(event.get("num_turns"))

    def _flush(self, *, is_cut: bool = False) -> None:
        """End the current answer."""
        if not self._parts:
            return
        message = self._parts.message()
        if is_cut:
            message["finish_reason"] = "length"
        key: int | None = self._answers
        if self._parts_copied:
            self._lacks.add("answers that were copied from another session")
            key = None
        self._history.append(AgentTurn(message, key, self._model, self._unknown or self._parts.doubt))
        self._answers += 1
        self._parts = AnswerParts(self._lacks)
        self._parts_copied = False

    def _end_branch(self) -> None:
        """Keep the history so far as a branch."""
        meta = self._meta or {}
        has_system = bool(self._history) and self._history[0].message.get("role") == "system"
        tools = plain_tools(meta.get("dynamic_tools")) or None
        agent = meta.get("agent_nickname") or meta.get("agent_role") or ""
        branch = AgentBranch(list(self._history), agent=str(agent), tools=tools, has_system=has_system)
        self._run.branches.append(branch)

    def _compact(self, payload: Mapping[str, Any]) -> None:
        """Begin the history after a compaction."""
        self._flush()
        self._end_branch()
        system = [turn for turn in self._history[:1] if turn.message.get("role") == "system"]
        replacement = payload.get("replacement_history")
        if not isinstance(replacement, list):
            self._unknown = self._unknown or "a compaction without the history that replaced the one before"
            message = {"role": "user", "content": str(payload.get("message") or "")}
            self._history = [*system, AgentTurn(message)]
            return
        items: list[Any] = []
        for item in replacement:
            if isinstance(item, Mapping) and item.get("type") in COMPACTIONS:
                self._unknown = self._unknown or "a compaction that is encrypted"
            else:
                items.append(item)
        try:
            turns = item_turns(items, self._lacks)
        except RecordError as error:
            self._run.errors.append(error)
            self._unknown = self._unknown or "a compaction that cannot be read"
            turns = []
        self._history = [*system, *turns]

    def _roll_back(self, count: object) -> None:
        """Take back the last turns of the user."""
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            self._unknown = self._unknown or "a rollback of an unknown number of turns"
            return
        if count == 0:
            return
        self._end_branch()
        starts = [index for index, turn in enumerate(self._history) if _is_real_user(turn)]
        if count > len(starts):
            self._unknown = self._unknown or "a rollback over more turns than there are"
            count = len(starts)
        if count:
            self._history = self._history[: starts[-count]]

    def _is_copy(self, record: Mapping[str, Any]) -> bool:
        """Check for a line copied by a fork."""
        is_fork = self._meta is not None and bool(self._meta.get("forked_from_id"))
        return is_fork and copied_before(record, self._start, -COPY_SECONDS)


def _is_real_user(turn: AgentTurn) -> bool:
    """Check for a message of a person, not of the program."""
    content = turn.message.get("content")
    if turn.message.get("role") != "user":
        return False
    return not (isinstance(content, str) and content.startswith(INJECTED))
