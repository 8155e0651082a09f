"""Make records of the histories of a run.

Each sampled answer is trained once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chatmill.core.conversations import LACKS
from chatmill.errors import RecordError

AGENT_FORMAT = "agent_format"
"""Field of a record that names the format of the file it was read from."""
REFUSED = "refused"
"""Field with the reason why something in a file is no record."""
RECORD_FIELDS = (
    *(AGENT_FORMAT, REFUSED, "session", "branch", "agent", "model", "reward", "rewards", "metrics", "ok"),
    *("stop_condition", "episode", "task", "example_id", "answer", "is_completed", "is_truncated"),
)
"""Fields of records besides their messages, tools and id, for `where`, `pick` and trees."""
SAMPLED = ("token_ids", "prompt_token_ids", "logprobs", "finish_reason")

PlainMessage = dict[str, Any]


class UnknownPrompt(StrEnum):
    """Treatment of answers without an exact prompt in the file."""

    REFUSE = "refuse"
    CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What a recipe says of the files of a source."""

    format: str | None = None
    """Name of the record format; None: found from the file."""
    tools: tuple[Any, ...] = ()
    """Tool definitions for runs without any."""
    system: str = ""
    """System prompt for runs without one."""
    unknown_prompt: UnknownPrompt = UnknownPrompt.REFUSE

    def as_json(self) -> dict[str, Any]:
        """The options as plain values."""
        return {
            "format": self.format,
            "tools": list(self.tools),
            "system": self.system,
            "unknown_prompt": str(self.unknown_prompt),
        }


@dataclass(slots=True)
class AgentTurn:
    """One message of a history, with its origin."""

    message: PlainMessage
    """In OpenAI's form."""
    key: Hashable = None
    """What a sampled answer is known by within its run; None: no model wrote the message here."""
    model: str = ""
    """The model that wrote it."""
    unknown: str = ""
    """Why the file does not hold the exact prompt of this answer; empty where it does."""


@dataclass(slots=True)
class AgentBranch:
    """One history of a model, with its answers."""

    turns: list[AgentTurn]
    name: str = ""
    """What the branch is called within its run; default: its index."""
    agent: str = ""
    """The agent whose history it is; empty for the main one."""
    tools: list[Any] | None = None
    """Tool definitions; None where the file does not hold them."""
    has_system: bool = True
    """Whether the file holds system prompts; False: one may be given by the recipe."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More fields of its records."""
    is_trained: bool = True
    """False for a history whose answers are not for training, by what the file says."""


@dataclass(slots=True)
class Lacking:
    """Counts of missing things in a run, by name."""

    counts: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, count: int = 1, total: int | None = None) -> None:
        """Count missing things.

        Args:
            name: Name of the things.
            count: Number of missing ones.
            total: Number of all. Default: as many.
        """
        self.counts[name] += count
        self.totals[name] += count if total is None else total

    def see(self, name: str, *, is_missing: bool) -> None:
        """Count one thing as missing or present."""
        self.add(name, int(is_missing), 1)


@dataclass(slots=True)
class AgentRun:
    """All histories of one run.

    An answer is trained in its first history.
    """

    id: str
    branches: list[AgentBranch]
    lacks: Lacking = field(default_factory=Lacking)
    errors: list[RecordError] = field(default_factory=list)
    """Lines that cannot be read, and whatever else is no part of a history."""


def run_records(run: AgentRun, name: str, options: AgentOptions) -> Iterator[dict[str, Any]]:
    """Yield the records of a run.

    Args:
        run: Its histories, in the order of the file.
        name: Name of the record format.
        options: What the recipe gives for runs that lack it, and what it does with unknown prompts.
    """
    records: list[dict[str, Any]] = []
    trained: set[Hashable] = set()
    for index, branch in enumerate(run.branches):
        _complete(branch, options, run.lacks)
        records += _branch_records(run, index, trained, name, options)
    records += [_error_record(error, name) for error in run.errors]
    if not records:
        reason = RecordError("holds no answer of a model that is for training; leave it out", code="no_sampled_answer")
        records.append(_error_record(reason, name))
    # Counted once for each run, on its first record, so that sums over records are sums over runs.
    for lacking, count in sorted(run.lacks.counts.items()):
        if count:
            records[0][LACKS + lacking] = [count, run.lacks.totals[lacking]]
    for record in records:
        record.setdefault("session", run.id)
        yield record


def refusal(record: Mapping[str, Any]) -> RecordError | None:
    """Return the error in a record of a refusal."""
    reason = record.get(REFUSED)
    if AGENT_FORMAT not in record or not isinstance(reason, Mapping):
        return None
    return RecordError(str(reason.get("message")), code=str(reason.get("code")), path=str(reason.get("path", "")))


def _error_record(error: RecordError, name: str) -> dict[str, Any]:
    reason = {"code": error.code, "message": error.message, "path": error.path}
    return {AGENT_FORMAT: name, REFUSED: reason}


def _complete(branch: AgentBranch, options: AgentOptions, lacks: Lacking) -> None:
    """Add tools and system prompt from the recipe.

    What is still missing is counted.
    """
    if not branch.has_system and options.system:
        branch.turns.insert(0, AgentTurn({"role": "system", "content": options.system}))
    lacks.see("system prompt", is_missing=not branch.has_system and not options.system)
    if branch.tools is None and options.tools:
        branch.tools = list(options.tools)
    lacks.see("tools", is_missing=branch.tools is None)


def _branch_records(
    run: AgentRun, index: int, trained: set[Hashable], name: str, options: AgentOptions
) -> list[dict[str, Any]]:
    """Make the records of a branch, one for each model.

    Only answers that no earlier branch has are trained.
    """
    branch = run.branches[index]
    new: dict[str, list[int]] = {}
    unknown: dict[str, list[int]] = {}
    for position, turn in enumerate(branch.turns):
        if turn.key is None or not branch.is_trained:
            continue
        if turn.key in trained:
            continue
        trained.add(turn.key)
        group = unknown if turn.unknown else new
        group.setdefault(turn.model, []).append(position)
        run.lacks.see("exact prompt", is_missing=bool(turn.unknown))
    if not new and not unknown:
        run.lacks.add("new answers in a branch")
        return []

    label = branch.name or str(index)
    records: list[dict[str, Any]] = []
    for model, positions in new.items():
        part = label if len(new) == 1 else f"{label}/{model}"
        fields = {"branch": index, "agent": branch.agent, "model": model, **branch.fields}
        record = {"id": f"{run.id}#{part}", AGENT_FORMAT: name, "session": run.id, **fields}
        if branch.tools:
            record["tools"] = branch.tools
        record["messages"] = _messages(branch.turns, positions)
        records.append(record)
    if options.unknown_prompt is UnknownPrompt.REFUSE:
        for positions in unknown.values():
            records.append(_unknown_record(run, branch.turns, positions, name, label))
    return records


def _messages(turns: Sequence[AgentTurn], positions: Sequence[int]) -> list[PlainMessage]:
    """List the messages up to the last trained answer.

    Other answers are context.
    """
    chosen = set(positions)
    messages: list[PlainMessage] = []
    for position, turn in enumerate(turns[: positions[-1] + 1]):
        message = turn.message
        if message.get("role") == "assistant" and position not in chosen:
            message = {key: value for key, value in message.items() if key not in SAMPLED}
            message["train"] = False
        messages.append(message)
    return messages


def _unknown_record(
    run: AgentRun, turns: Sequence[AgentTurn], positions: Sequence[int], name: str, label: str
) -> dict[str, Any]:
    reasons = Counter(turns[position].unknown for position in positions)
    listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    answers = "1 answer" if len(positions) == 1 else f"{len(positions)} answers"
    error = RecordError(
        f"the file does not hold the exact prompt of {answers}: {listed}. To use them as context only: "
        "unknown_prompt: context in the source of the recipe",
        code="unknown_prompt",
    )
    return {"id": f"{run.id}#{label}?", **_error_record(error, name)}
