"""Records read as lines, as rows of Arrow and one by one must agree; records in other shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_by_source
from chatmill.read.columns import Lines, Read, read_lines
from chatmill.read.record_shape import Shape, conversation_of
from chatmill.read.rows import read_rows

Record = dict[str, Any]
SHAREGPT_ROLES = {"user": "human", "assistant": "gpt", "tool": "observation"}


KEPT = frozenset({"x", "prefix"})
"""Fields of messages without a meaning here that the readers of columns are asked to keep."""


def bare(conversation: Conversation) -> Conversation:
    """Without what is counted and not kept by the readers of columns."""
    messages, rejected = (
        tuple(
            one._replace(extra={name: value for name, value in one.extra.items() if name in KEPT}) for one in messages
        )
        for messages in (conversation.messages, conversation.rejected)
    )
    return conversation._replace(messages=messages, rejected=rejected, metadata={})


def as_lines(records: list[Record], shape: Shape) -> Read:
    """What the lines of a file with these records give."""
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    return read_lines(data, Lines(0, len(data), 1, len(records)), before="f:", source="s", shape=shape, kept=KEPT)


def batch_of(rows: list[Record], schema: Any = None) -> Any:
    """Records as one Arrow batch, with all columns that any of them has."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    filled = [{name: row.get(name) for name in names} for row in rows]
    table = pa.Table.from_pylist(filled, schema=schema).combine_chunks()
    return table.to_batches()[0] if len(table) else pa.RecordBatch.from_pylist([], schema=table.schema)


def every_way(shape: Shape, records: list[Record], *, as_text: str = "") -> list[Conversation]:
    """The conversations of records, after a comparison of three ways to read them.

    `as_text`: the field that is a text of JSON in the rows, where its values have no one type.
    """
    slow = [conversation_of(record, shape, where=f"f:{n}", source="s") for n, record in enumerate(records, 1)]
    fast, errors = as_lines(records, shape)
    assert not errors
    assert list(map(bare, fast)) == list(map(bare, slow))
    given = [{**record, as_text: json.dumps(record[as_text])} for record in records] if as_text else records
    rows, errors = read_rows(batch_of(given), first=1, path="f", source="s", shape=shape, kept=KEPT)
    assert not errors
    assert fast.unused == rows.unused == unused_by_source(slow)
    assert [bare(item)._replace(where="") for item in rows] == [bare(item)._replace(where="") for item in slow]
    return slow


def sharegpt(record: Record) -> Record:
    """Calls as `function_call` turns where that is all a message says, else next to its text."""
    rest = {key: value for key, value in record.items() if key != "messages"}
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
        return {"conversations": items[1:], "system": items[0]["value"], **rest}
    return {**rest, "conversations": items}


def harmony(record: Record) -> Record:
    """Every content as a text part, and a channel for every answer."""
    items = []
    for message in record["messages"]:
        text = message.get("content")
        item = {**message, "content": [{"type": "text", "text": text}] if isinstance(text, str) else text}
        items.append({**item, "channel": "final"} if message["role"] == "assistant" else item)
    rest = {key: value for key, value in record.items() if key != "messages"}
    return {**rest, "messages_json": json.dumps({"messages": items}, ensure_ascii=len(items) % 2 == 0)}


FROM_OPENAI: Mapping[str, Callable[[Record], Record]] = {"openai": dict, "sharegpt": sharegpt, "harmony": harmony}
