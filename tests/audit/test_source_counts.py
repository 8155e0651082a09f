"""Records of the source that cannot be read are counted, not passed over."""

from __future__ import annotations

import json
from pathlib import Path

import chatmill
from chatmill.read.conversations import read_conversations
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer


def test_records_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    good, bad = json.dumps({"messages": messages}), json.dumps({"messages": [{"role": "nobody", "content": 1}]})
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{good}\n{bad}\n")
    model = bind("chatml", byte_tokenizer(find_template("chatml").control_tokens))
    tokens = render(list(read_conversations(path, on_error=lambda _: None)), model).tokens
    trained = [
        i if kind & 7 in (2, 5) and 32 < kind < 40 else -100 for i, kind in zip(tokens.ids, tokens.kinds, strict=True)
    ]
    row = {"input_ids": tokens.ids.tolist(), "labels": [int(one) for one in trained]}
    report = chatmill.audit([row], model, source=path)
    assert report.source is not None
    assert report.source["records"] == 2
    assert sum(report.source["refused"].values()) == 1
