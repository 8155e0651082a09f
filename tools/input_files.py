"""Writes the small files of tests/data/inputs: one for each kind of input that people bring.

    python -m tools.input_files

`CASES` says what each file is; `tools.input_table` makes the table in docs/records.md of them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

INPUTS = Path(__file__).parents[1] / "tests" / "data" / "inputs"
Q, A = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
FROM_Q, FROM_A = {"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 2}}
USED = {"type": "tool_result", "tool_use_id": "c1", "content": "4"}
TALK = {"messages": [Q, A]}
PAIR = {"question": "What is 2 + 2?", "answer": "4"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


class Case(NamedTuple):
    """One kind of input."""

    name: str
    """The file in tests/data/inputs."""
    what: str
    content: Any
    """A record, a list of records, bytes, or a function that writes the file."""
    map: tuple[str, ...] = ()
    """`--map` words it is read with."""


def _answer(**fields: Any) -> dict[str, Any]:
    return {"messages": [Q, {**A, **fields}]}


def _part(kind: str, value: str) -> dict[str, Any]:
    return {"type": kind, "value": value}


def _lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


MESSAGES = [
    Case("openai.jsonl", "OpenAI `messages`", TALK),
    Case("openai-system.jsonl", "a system message first", {"messages": [SYSTEM, Q, A]}),
    Case("openai-developer.jsonl", "a developer message", {"messages": [{**SYSTEM, "role": "developer"}, Q, A]}),
    Case(
        "openai-tools.jsonl",
        "tool calls, results and definitions",
        {"messages": [Q, CALLED, RESULT, A], "tools": [TOOL]},
    ),
    Case(
        "openai-arguments.jsonl",
        "arguments of calls as objects",
        {"messages": [Q, {**CALLED, "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}, RESULT, A]},
    ),
    Case(
        "openai-function-call.jsonl",
        "the older `function_call`, with `functions`",
        {"messages": [Q, {**A, "function_call": {"name": "add", "arguments": "{}"}}], "functions": [TOOL["function"]]},
    ),
    Case("openai-tools-text.jsonl", "`tools` as a text of JSON", {**TALK, "tools": json.dumps([TOOL])}),
    Case("openai-null.jsonl", "null content and no call", {"messages": [Q, {**A, "content": None}]}),
    Case("openai-parts.jsonl", "contents as lists of text parts", _answer(content=[{"type": "text", "text": "4"}])),
    Case("openai-image.jsonl", "an image in a message", {"messages": [{**Q, "content": [IMAGE]}, A]}),
    Case("images.jsonl", "top-level `images`", {**TALK, "images": ["a.png"]}),
    Case("top-system.jsonl", "top-level `system` next to `messages`", {**TALK, "system": "Be brief."}),
    Case("weights.jsonl", "weights of messages", _answer(weight=0.5)),
    Case("train.jsonl", "`train: false` on an answer", _answer(train=False)),
    Case("reasoning-content.jsonl", "`reasoning_content` of an answer", _answer(reasoning_content="Two twos.")),
    Case("thinking.jsonl", "`thinking` of an answer", _answer(thinking="Two twos.")),
    Case("reasoning.jsonl", "`reasoning` of an answer", _answer(reasoning="Two twos.")),
    Case("think-tags.jsonl", "`<think>` in the content", _answer(content="<think>Two twos.</think>4")),
    Case(
        "template-options.jsonl", "`chat_template_kwargs`", {**TALK, "chat_template_kwargs": {"enable_thinking": False}}
    ),
    Case("metadata.jsonl", "other fields next to the messages", {**TALK, "id": 7, "score": 0.5, "lang": "en"}),
    Case("conversations-role.jsonl", "`conversations` with role and content", {"conversations": [Q, A]}),
    Case("messages-text.jsonl", "`messages` as a text of JSON", {"messages": json.dumps([Q, A])}),
    Case("conversations-text.jsonl", "ShareGPT as a text of JSON", {"conversations": json.dumps([FROM_Q, FROM_A])}),
    Case("list-lines.jsonl", "a bare list of messages a line", [[Q, A], [Q, A]]),
    Case("unknown-role.jsonl", "a role nobody knows", {"messages": [{**Q, "role": "narrator"}, A]}),
    Case("no-messages.jsonl", "an empty list of messages", {"messages": []}),
    Case("twice.jsonl", "the key `messages` twice", b'{"messages": [], "messages": []}\n'),
]
SHAPES = [
    Case("sharegpt.jsonl", "ShareGPT", {"conversations": [FROM_Q, FROM_A]}),
    Case("sharegpt-system.jsonl", "ShareGPT with `system`", {"conversations": [FROM_Q, FROM_A], "system": "Be brief."}),
    Case(
        "sharegpt-call.jsonl",
        "ShareGPT with calls and observations",
        {
            "conversations": [
                FROM_Q,
                {"from": "function_call", "value": '{"name": "add", "arguments": {}}'},
                {"from": "observation", "value": "4"},
                FROM_A,
            ]
        },
    ),
    Case("sharegpt-messages.jsonl", "ShareGPT under `messages`", {"messages": [FROM_Q, FROM_A]}),
    Case(
        "sharegpt-roles.jsonl",
        "ShareGPT with user and chatgpt",
        {"conversations": [{**FROM_Q, "from": "user"}, {**FROM_A, "from": "chatgpt"}]},
    ),
    Case("alpaca.jsonl", "Alpaca", {"instruction": "Add.", "input": "2 and 2", "output": "4"}),
    Case(
        "alpaca-history.jsonl",
        "Alpaca with `history`",
        {"instruction": "Add.", "output": "4", "history": [["Hi", "Hello"]]},
    ),
    Case("prompt-completion.jsonl", "prompt and completion", {"prompt": "2 + 2?", "completion": "4"}),
    Case("prompt-completion-lists.jsonl", "prompt and completion as messages", {"prompt": [Q], "completion": [A]}),
    Case("question-answer.jsonl", "question and answer", PAIR),
    Case("instruction-response.jsonl", "instruction and response", {"instruction": "Add 2 and 2.", "response": "4"}),
    Case(
        "dolly.jsonl",
        "Dolly: instruction, context, response",
        {"instruction": "Add.", "context": "2 and 2", "response": "4", "category": "math"},
    ),
    Case("harmony.jsonl", "Harmony channels", {"messages": [Q, {**A, "channel": "final"}]}),
    Case("harmony-text.jsonl", "Harmony in `messages_json`", {"messages_json": json.dumps({"messages": [Q, A]})}),
    Case(
        "anthropic.jsonl",
        "Anthropic tool use",
        {
            "system": "Be brief.",
            "messages": [Q, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [USED]}, A],
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        },
    ),
    Case(
        "anthropic-thinking.jsonl",
        "Anthropic thinking",
        _answer(content=[{"type": "thinking", "thinking": "Two twos."}, {"type": "text", "text": "4"}]),
    ),
    Case(
        "anthropic-system.jsonl",
        "Anthropic `system` as parts",
        {"system": [{"type": "text", "text": "Be brief."}], "messages": [Q, {**A, "content": [USE]}]},
    ),
    Case("anthropic-order.jsonl", "Anthropic text after a call", _answer(content=[USE, {"type": "text", "text": "4"}])),
    Case(
        "anthropic-image.jsonl",
        "Anthropic with an image",
        {"messages": [{**Q, "content": [{"type": "image", "source": {}}]}, {**A, "content": [USE]}]},
    ),
    Case(
        "llamafactory-v1.jsonl",
        "LLaMA-Factory v1",
        {
            "messages": [
                {"role": "user", "content": [_part("text", "2 + 2?")], "loss_weight": 0.0},
                {"role": "assistant", "content": [_part("text", "4")], "loss_weight": 1.0},
            ]
        },
    ),
    Case("dpo.jsonl", "DPO: prompt, chosen, rejected", {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}),
    Case("dpo-messages.jsonl", "DPO as messages", {"chosen": [Q, A], "rejected": [Q, {**A, "content": "5"}]}),
    Case(
        "dpo-sharegpt.jsonl",
        "DPO of LLaMA-Factory",
        {"conversations": [FROM_Q], "chosen": FROM_A, "rejected": {**FROM_A, "value": "5"}},
    ),
    Case("kto.jsonl", "KTO: prompt, completion, label", {"prompt": "2 + 2?", "completion": "4", "label": True}),
    Case("kto-false.jsonl", "KTO with a bad answer", {"prompt": "2 + 2?", "completion": "5", "label": False}),
    Case("gemini.jsonl", "Gemini `contents`", {"contents": [{"role": "user", "parts": [{"text": "2 + 2?"}]}]}),
    Case(
        "oasst.jsonl",
        "rows of a message tree",
        {"message_id": "m1", "parent_id": None, "text": "2 + 2?", "role": "prompter"},
    ),
    Case("text.jsonl", "plain texts", {"text": "Two and two make four."}),
    Case("own-fields.jsonl", "fields of your own", {"ticket": 7, "customer_asks": "2 + 2?", "agent_reply": "4"}),
    Case(
        "own-fields-mapped.jsonl",
        "the same",
        {"ticket": 7, "customer_asks": "2 + 2?", "agent_reply": "4"},
        ("user=customer_asks", "assistant=agent_reply", "id=ticket"),
    ),
    Case(
        "own-list.jsonl",
        "a list of your own",
        {"dialog": [{"speaker": "customer", "text": "2 + 2?"}, {"speaker": "agent", "text": "4"}]},
    ),
    Case(
        "own-list-mapped.jsonl",
        "the same",
        {"dialog": [{"speaker": "customer", "text": "2 + 2?"}, {"speaker": "agent", "text": "4"}]},
        ("messages=dialog", "role=speaker", "content=text", "user=customer", "assistant=agent"),
    ),
    Case("openorca.jsonl", "OpenOrca", {"system_prompt": "Be brief.", "question": "2 + 2?", "response": "4"}),
    Case(
        "openorca-mapped.jsonl",
        "the same",
        {"system_prompt": "Be brief.", "question": "2 + 2?", "response": "4"},
        ("system=system_prompt", "user=question", "assistant=response"),
    ),
    Case(
        "joined-mapped.jsonl",
        "two fields that make one message",
        {"task": "Add.", "data": "2 and 2", "result": "4"},
        ("user=task+data", "assistant=result"),
    ),
]
PRETTY = json.dumps(TALK, indent=2).encode()
FILES = [
    Case("lines.ndjson", "`.ndjson`", TALK),
    Case("lines.jsonl.gz", "gzip", gzip.compress(_lines(TALK), mtime=0)),
    Case("lines.jsonl.zst", "Zstandard", "zstd"),
    Case("list.json", "a JSON list", json.dumps([TALK, TALK]).encode()),
    Case("list.json.gz", "a JSON list, gzip", gzip.compress(json.dumps([TALK]).encode(), mtime=0)),
    Case("lines.json", "a record a line under `.json`", _lines(TALK, TALK)),
    Case("one.json", "one object, pretty-printed", PRETTY),
    Case("pretty-list.jsonl", "a pretty-printed list under `.jsonl`", json.dumps([TALK, TALK], indent=2).encode()),
    Case("pretty-objects.jsonl", "pretty-printed objects under `.jsonl`", PRETTY + b"\n" + PRETTY + b"\n"),
    Case("one-line-list.jsonl", "a JSON list in one line under `.jsonl`", json.dumps([TALK, TALK]).encode()),
    Case("data-key.json", "a list inside of an object", json.dumps({"version": 1, "data": [TALK]}, indent=1).encode()),
    Case("bom.jsonl", "a byte order mark", b"\xef\xbb\xbf" + _lines(TALK)),
    Case("utf16.jsonl", "UTF-16", _lines(TALK).decode().encode("utf-16")),
    Case("utf16-no-bom.jsonl", "UTF-16 without a mark", _lines(TALK).decode().encode("utf-16-le")),
    Case("latin1.jsonl", "Latin-1", _lines(_answer(content="né")).decode().encode("latin-1")),
    Case("crlf.jsonl", "lines that end in CR LF", _lines(TALK, TALK).replace(b"\n", b"\r\n")),
    Case("blank-lines.jsonl", "blank lines between", b"\n" + _lines(TALK) + b"\n  \n" + _lines(TALK)),
    Case("empty.jsonl", "an empty file", b""),
    Case("broken-line.jsonl", "a line that is cut off", _lines(TALK, TALK) + b'{"messages": ['),
    Case("nan.jsonl", "`NaN`", b'{"messages": [], "score": NaN}\n'),
    Case("gzip.jsonl", "gzip under the name `.jsonl`", gzip.compress(_lines(TALK), mtime=0)),
    Case("cut.jsonl.gz", "a cut-off archive", gzip.compress(_lines(*[TALK] * 9), mtime=0)[:-12]),
    Case("pairs.csv", "CSV", b"question,answer\nWhat is 2 + 2?,4\n"),
    Case(
        "quoted.csv", "CSV with commas, quotes and lines in cells", b'question,answer\r\n"What, ""is""\n2 + 2?",4\r\n'
    ),
    Case(
        "messages.csv",
        "CSV with messages as JSON",
        b'id,messages\n7,"%s"\n' % json.dumps([Q, A]).replace('"', '""').encode(),
    ),
    Case("semicolons.csv", "CSV with semicolons", b"question;answer\nWhat is 2 + 2?;4\n"),
    Case("empty-cells.csv", "CSV with an empty answer", b"question,answer\nWhat is 2 + 2?,4\nWhat is 2 + 3?,\n"),
    Case("short-row.csv", "CSV with a short row", b"question,answer\nWhat is 2 + 2?\n"),
    Case("latin1.csv", "CSV in Windows-1252", "question,answer\nné?,4\n".encode("cp1252")),
    Case("twice.csv", "CSV with a name twice", b"question,answer,answer\n2 + 2?,4,5\n"),
    Case("pairs.tsv", "TSV", b"question\tanswer\nWhat is 2 + 2?\t4\n"),
    Case("rows.parquet", "Parquet", "parquet"),
    Case("text-rows.parquet", "Parquet with messages as JSON", "text_parquet"),
    Case("rows.arrow", "an Arrow file", "arrow"),
    Case("stream.arrow", "an Arrow stream", "stream"),
    Case("rows.feather", "Feather", "feather"),
    Case("saved", "a folder of `Dataset.save_to_disk`", "saved"),
    Case("saved-splits", "a folder of `DatasetDict.save_to_disk`", "splits"),
    Case("folder", "a folder of files", "folder"),
    Case("sheet.xlsx", "an Excel sheet", b"PK\x03\x04"),
]
CASES = [*MESSAGES, *SHAPES, *FILES]


def write(case: Case, folder: Path) -> None:
    """Write the file, or the folder, of a case."""
    path, content = folder / case.name, case.content
    if isinstance(content, str):
        _write_packed(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_bytes(_lines(*(content if isinstance(content, list) else [content])))


def _write_packed(path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    table = pa.Table.from_pylist([TALK, TALK])
    match kind:
        case "zstd":
            with pa.CompressedOutputStream(str(path), "zstd") as out:
                out.write(_lines(TALK))
        case "parquet":
            pyarrow.parquet.write_table(table, path)
        case "text_parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist([{"messages": json.dumps([Q, A])}]), path)
        case "arrow":
            with pa.ipc.new_file(path, table.schema) as out:
                out.write_table(table)
        case "stream":
            with pa.ipc.new_stream(path, table.schema) as out:
                out.write_table(table)
        case "feather":
            pyarrow.feather.write_feather(table, path)
        case "folder":
            path.mkdir(exist_ok=True)
            (path / "a.jsonl").write_bytes(_lines(TALK))
            (path / "b.csv").write_bytes(b"question,answer\n2 + 2?,4\n")
            (path / "README.md").write_text("Not a file of records.\n")
        case _:
            import datasets

            rows = datasets.Dataset.from_list([TALK, TALK])
            saved = rows if kind == "saved" else datasets.DatasetDict({"train": rows, "test": rows})
            saved.save_to_disk(str(path))


if __name__ == "__main__":
    INPUTS.mkdir(exist_ok=True)
    for each in CASES:
        write(each, INPUTS)
