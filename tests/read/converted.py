"""The bundled conversations in every shape that records come in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tests.core.native.mutations import real_records

Record = dict[str, Any]
SHAREGPT_ROLES = {"user": "human", "assistant": "gpt", "tool": "observation"}


def _rest(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "messages"}


def sharegpt(record: Record) -> Record:
    """Calls as `function_call` turns where that is all a message says, else next to its text."""
    items = []
    for message in record["messages"]:
        item = {key: value for key, value in message.items() if key not in ("role", "content")}
        role, text = message["role"], message.get("content")
        if item.get("tool_calls") and not text:
            calls = [call["function"] for call in item.pop("tool_calls")]
            items.append({"from": "function_call", "value": json.dumps(calls[0] if len(calls) == 1 else calls), **item})
        else:
            items.append({"from": SHAREGPT_ROLES.get(role, role), "value": text, **item})
    if items[0]["from"] == "system" and len(items) > 1:
        return {"conversations": items[1:], "system": items[0]["value"], **_rest(record)}
    return {**_rest(record), "conversations": items}


def _plain_pair(record: Record) -> tuple[str, str] | None:
    texts = [message.get("content") for message in record["messages"]]
    roles = [message["role"] for message in record["messages"]]
    return (texts[0], texts[1]) if roles == ["user", "assistant"] and all(type(t) is str for t in texts) else None


def alpaca(record: Record) -> Record | None:
    """The first line of a question is the instruction, the rest its input."""
    pair = _plain_pair(record)
    if pair is None:
        return None
    instruction, _, more = pair[0].partition("\n")
    return {"instruction": instruction, "input": more, "output": pair[1], **_rest(record)}


def prompt_completion(record: Record) -> Record:
    """Texts if there are two of them, else lists of messages."""
    pair, items = _plain_pair(record), record["messages"]
    prompt, completion = pair or (items[:-1] or items, items[-1:])
    return {**_rest(record), "prompt": prompt, "completion": completion}


def harmony(record: Record) -> Record:
    """Every content as a text part, and a channel for every answer."""
    items = []
    for message in record["messages"]:
        text = message.get("content")
        item = {**message, "content": [{"type": "text", "text": text}] if isinstance(text, str) else text}
        items.append({**item, "channel": "final"} if message["role"] == "assistant" else item)
    return {**_rest(record), "messages_json": json.dumps({"messages": items}, ensure_ascii=len(items) % 2 == 0)}


FROM_OPENAI: Mapping[str, Callable[[Record], Record | None]] = {
    "openai": lambda record: record,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "prompt_completion": prompt_completion,
    "harmony": harmony,
}


@cache
def converted(shape: str) -> list[bytes]:
    """All bundled conversations that can be written in a shape, a line each."""
    records = [FROM_OPENAI[shape](record) for record in real_records()]
    return [json.dumps(record, ensure_ascii=False).encode() for record in records if record is not None]


def batch_of(rows: list[Record], schema: Any = None) -> Any:
    """Records as one Arrow batch, with all columns that any of them has."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    filled = [{name: row.get(name) for name in names} for row in rows]
    table = pa.Table.from_pylist(filled, schema=schema).combine_chunks()
    return table.to_batches()[0] if len(table) else pa.RecordBatch.from_pylist([], schema=table.schema)
