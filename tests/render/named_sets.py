"""The named sets of conversations that the template room is measured and compared on."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

from benchmarks.inputs import changed_pairs, exchanges, plain_records, records
from benchmarks.trajectories import trajectories
from chatmill.core.conversation import Conversation
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from tests.render.jinja.at_hand import CONVERSATIONS

OF_EACH_FILE = 7
OF_TRAJECTORIES = 10
LONG_CHATS = 3
TURNS_OF_LONG_CHAT = 1000


def _conversations(raw_records: list[dict[str, Any]]) -> list[Conversation]:
    """Read records of the OpenAI format."""
    record_format = find_shape("openai")
    return [conversation_of(record, record_format) for record in raw_records]


@cache
def records_164() -> tuple[Conversation, ...]:
    """The first seven records of each bundled file, and ten trajectories."""
    found: list[dict[str, Any]] = []
    for path in CONVERSATIONS:
        with gzip.open(path) as file:
            found += [json.loads(line) for line, _ in zip(file, range(OF_EACH_FILE), strict=False)]
    found += trajectories(plain_records(), OF_TRAJECTORIES, 0)
    return tuple(_conversations(found))


@cache
def conversations() -> tuple[Conversation, ...]:
    """All bundled conversations."""
    return tuple(_conversations(records()))


@cache
def agents(count: int = 300) -> tuple[Conversation, ...]:
    """Trajectories of which no two have the same sequence of roles and fields."""
    return tuple(_conversations(list(trajectories(plain_records(), count, 0))))


@cache
def long_chats() -> tuple[Conversation, ...]:
    """Three chats of 2,000 messages."""
    pairs = changed_pairs(exchanges(records()), LONG_CHATS * TURNS_OF_LONG_CHAT)
    chats: list[dict[str, Any]] = []
    for first in range(0, len(pairs), TURNS_OF_LONG_CHAT):
        messages: list[dict[str, str]] = []
        for asked, answered in pairs[first : first + TURNS_OF_LONG_CHAT]:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        chats.append({"id": f"long-{first}", "messages": messages})
    return tuple(_conversations(chats))
