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


def harmony(record: Record) -> Record:
    """Every content as a text part, and a channel for every answer."""
    items = []
    for message in record["messages"]:
        text = message.get("content")
        item = {**message, "content": [{"type": "text", "text": text}] if isinstance(text, str) else text}
        items.append({**item, "channel": "final"} if message["role"] == "assistant" else item)
    return {**_rest(record), "messages_json": json.dumps({"messages": items}, ensure_ascii=len(items) % 2 == 0)}


FROM_OPENAI: Mapping[str, Callable[[Record], Record]] = {
    "openai": lambda record: record,
    "sharegpt": sharegpt,
    "harmony": harmony,
}


@cache
def converted(shape: str) -> list[bytes]:
    """All bundled conversations in a shape, a line each."""
    return [json.dumps(FROM_OPENAI[shape](record), ensure_ascii=False).encode() for record in real_records()]


def batch_of(rows: list[Record], schema: Any = None) -> Any:
    """Records as one Arrow batch, with all columns that any of them has."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    filled = [{name: row.get(name) for name in names} for row in rows]
    table = pa.Table.from_pylist(filled, schema=schema).combine_chunks()
    return table.to_batches()[0] if len(table) else pa.RecordBatch.from_pylist([], schema=table.schema)
