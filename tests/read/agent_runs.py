"""Reads files of agents in tests, and what a record of them trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from chatmill.read.agents.branches import AgentOptions, UnknownPrompt
from chatmill.read.conversations import ConversationFile
from chatmill.read.files import read_records

DATA = Path(os.environ.get("CHATMILL_AGENT_DATA") or Path(__file__).parent.parent / "data" / "agents")
"""`make test-agents` makes some of these files anew, elsewhere."""


def records_of(path: Path, agent: AgentOptions | None = None) -> list[dict[str, Any]]:
    """Return the records that a file gives."""
    return [raw.value for raw in read_records(path, agent)]


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write values as JSON lines, and texts as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def trained_texts(path: Path, *, unknown: UnknownPrompt = UnknownPrompt.REFUSE) -> list[list[str]]:
    """Return what each conversation of a file trains, and leave its errors out."""
    agent = AgentOptions(unknown_prompt=unknown)
    found = ConversationFile(path, agent=agent, on_error=lambda error: None)
    return [[m.content for m in one.messages if m.role == "assistant" and m.weight != 0] for one in found]


def codes(path: Path) -> list[str]:
    """Return the reasons of what a file holds that is no conversation."""
    errors: list[str] = []
    list(ConversationFile(path, on_error=lambda error: errors.append(error.code)))
    return errors


def lacks(path: Path, agent: AgentOptions | None = None) -> dict[str, tuple[int, int]]:
    """Return what a file does not hold: how many, and of how many."""
    total: dict[str, tuple[int, int]] = {}
    for record in records_of(path, agent):
        for name, value in record.items():
            if name.startswith("lacks "):
                before = total.get(name[6:], (0, 0))
                total[name[6:]] = (before[0] + value[0], before[1] + value[1])
    return total
