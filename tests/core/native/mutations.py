"""Lines of JSONL that are almost right: real ones and hand-made ones, with bytes flipped, cut, spliced and put in."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from chatmill.read.shapes import SHAPES
from tests.conftest import CONVERSATION_FILES, DATA

SCANNED = [*(name for name, shape in SHAPES.items() if shape.lists), "alpaca", "instruction_response"]
"""Shapes that the scanner reads, and two of those whose messages are fields."""

LONGEST = 1500
"""Bytes of a line that is worth mutating: in a longer one hardly any change hits its structure."""
PIECES = [
    *(b'"', b"\\", b"\\n", b'\\"', b"\\/", b"\\u", b"\\u00e9", b"\\u0000", b"\\uD83D\\uDE00", b"\\ud800", b"\\udc00"),
    *(b"\\ud83d\\u0041", b"\\x", b"\\u12", b"\\", b"\n", b"\r", b"\t", b"\x00", b"\x1f", b"\x7f", b"\xef\xbb\xbf"),
    *("é".encode(), "漢字かな".encode(), "😀".encode(), "при вет".encode(), b"\xff", b"\xc0\x80", b"\xed\xa0\x80"),
    *(b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"{", b"}", b"[", b"]", b",", b":", b" ", b"{}", b"[]", b"null"),
    *(b"true", b"-", b"0", b"01", b"1.", b"1e5", b"-0.5E-3", b"NaN", b"9" * 70, b"[" * 120 + b"]" * 120),
    *(b'"id":"x",', b'"id":null,', b'"source":"",', b'"source":"s2",', b'"messages":[],', b'"tools":[{"a":1}],'),
    *(b'"tools":[1],', b'"tools":null,', b'"messages_json":"{}",', b'"x":{"messages":[1,{"y":2}]},', b'"x":1,'),
    *(b'"role":"user",', b'"content":null,', b'"content":"",', b'"reasoning_content":"r",', b'"name":"n",'),
    *(b'"tool_calls":[],', b'"tool_call_id":"",', b'"weight":1,', b'"tool_calls":null,', b'"\\u0069d":"x",'),
    *(b'"from":"gpt",', b'"value":"v",', b'"system":"s",', b'"input":"i",', b'"output":null,', b'"prompt":"p",'),
    *(b'"conversations":[{"from":"human","value":"h"}],', b'"history":[],', b'"chat_template_kwargs":{"a":1},'),
    *(b'"train":true,', b'"weight":0.5,', b'"channel":"final",', b'"content":[{"type":"text","text":"p"}],'),
    *(b'"tool_calls":[{"function":{"name":"f","arguments":{"a": [1]}}}],', b'"instruction":"i",', b'"thinking":"t",'),
    *(b'"tool_calls":[{"function":{"name":"f","arguments":"{}"},"id":null,"type":"function"}],', b'"margin":-1.5,'),
    *(b'"function_call":null,', b'"images":[],', b'"index":0,', b'"timestamp":{"at":[1,"2026"]},', b'"loss_mask":[],'),
    *(b'"chosen_score":8,', b'"rejected_score":2.5e0,', b'"trainable":null,', b'"annotations":[{}],'),
    *(b'"chosen":"c",', b'"chosen":{"role":"assistant","content":"c"},', b'"prompt":[{"role":"user","content":"p"}],'),
]


def real_lines() -> list[bytes]:
    """All bundled conversations and the nasty records, one line each, without line ends."""
    packed = (*CONVERSATION_FILES, DATA / "nasty.jsonl.gz")
    lines = [line for path in packed for line in gzip.decompress(path.read_bytes()).split(b"\n")]
    return [*lines, *(DATA / "nasty_raw.jsonl.bin").read_bytes().split(b"\n")]


@cache
def seeds(shape: str = "openai") -> list[bytes]:
    """Short lines, most of them read without doubt, and with every field that is."""
    records, real = (openai_records(), real_lines()) if shape == "openai" else (OTHER_RECORDS[shape], [])
    lines = [json.dumps(record, ensure_ascii=ascii_).encode() for record in records for ascii_ in (False, True)]
    lines += [json.dumps(record, separators=(",", ":")).encode() for record in records]
    real = [line for line in real if 0 < len(line) < LONGEST]
    return lines * max(len(real) // len(lines) // 4, 1) + real


def openai_records() -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é\\n"}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "think", "tool_calls": [call, call]}
    answer = {"role": "tool", "content": "ответ 漢字 😀", "tool_call_id": "c1", "name": "f"}
    plain = [{"role": "user", "content": 'Say "hi"\n'}, {"role": "assistant", "content": "hi"}]
    weighed = [{**plain[0], "train": False}, {**plain[1], "weight": 0.25, "thinking": "t", "channel": "final"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "б", "type": "input_text"}]}]
    return [
        {"messages": weighed, "id": 7, "chat_template_kwargs": {"enable_thinking": False, "é": [1, "x"]}},
        {"messages": parts, "tools": '[{"name": "f"}]', "chat_template_kwargs": {}},
        {"id": "1", "source": "s", "messages": plain, "meta": {"n": [1, -2.5e3, True, None], "t": "x"}},
        {"messages": [{"role": "system", "content": ""}, *plain], "tools": [{"name": "f", "n": 1e3}], "id": None},
        {"messages": [*plain, message, answer], "tools": [], "source": None},
        {"messages": [{"content": "order", "role": "developer"}]},
        {"messages": [plain[0], {**plain[1], "token_ids": [1, 20, 300], "logprobs": [-0.5, None, -1e-3]}]},
        {"messages": [{**plain[1], "prompt_token_ids": [0], "token_ids": [2147483647], "finish_reason": "stop"}]},
        {"a": 1, "b": "", "c": {}, "d": [[]], "messages": plain, "e": False},
        {
            "messages": [
                {**plain[0], "id": "m1", "timestamp": {"at": 1.5}},
                {**plain[1], "x": [], "function_call": None},
            ]
        },
        {"messages": [{**message, "tool_calls": [{**call, "index": 0}], "images": []}, {**answer, "prefix": True}]},
    ]


SYSTEM = [{"type": "system_content", "model_identity": "é", "channel_config": {"valid_channels": ["a"]}}]
OTHER_RECORDS: dict[str, list[dict[str, Any]]] = {
    "sharegpt": [
        {"id": "1", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ответ"}]},
        {"conversations": [{"from": "human", "value": "hi", "weight": 0}], "system": "Be brief.", "tools": "[]"},
        {"system": "", "messages": [{"value": "hi", "from": "user"}, {"from": "observation", "value": "漢"}], "x": 1},
        {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {}}'}], "source": "s"},
    ],
    "anthropic": [
        {
            "system": "Be brief.",
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": role, "content": parts}
                for role, *parts in (
                    ("user", {"type": "text", "text": "é"}),
                    ("assistant", {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}),
                    ("user", {"type": "tool_result", "tool_use_id": "c1", "content": "漢"}),
                    ("assistant", {"type": "thinking", "thinking": "t"}, {"type": "text", "text": "b"}),
                )
            ],
        },
        {"messages": [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "text"}], "id": "2"},
    ],
    "harmony": [
        {"messages": [{"role": "user", "content": "é", "channel": "c"}], "x": 1, "id": "1"},
        {"messages": [{"role": "tool", "content": [{"type": "text", "text": "é"}]}], "x": 2, "messages_json": None},
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [], "recipient": "r"}]},
        {"messages": [{"content": [{"type": "developer_content", "n": 1}], "role": "developer", "content_type": "j"}]},
    ],
}
OTHER_RECORDS |= {
    "alpaca": [
        {"id": 7, "instruction": "Say é", "input": "", "output": "é\n", "source": "s", "meta": {"n": 1}},
        {"instruction": "Say", "input": '漢 "hi"', "output": "hi", "system": "Be brief.", "history": []},
        {"output": "", "input": None, "instruction": "", "tools": [{"name": "f"}], "thinking": None},
        {"instruction": "i", "output": "o", "reasoning_content": "r", "text": "i o", "chat_template_kwargs": {"a": 1}},
    ],
    "instruction_response": [
        {"instruction": "i", "context": "c", "response": "r", "category": "open_qa", "input": "x"},
        {"response": "ответ", "context": "", "instruction": "漢"},
    ],
}
"""Records of the other shapes, with what each of them knows."""


def mutated(count: int, seed: int, shape: str = "openai") -> Iterator[bytes]:
    """So many lines without line feeds, each with one to three changes."""
    draw = random.Random(seed)
    lines = seeds(shape)
    for _ in range(count):
        line = bytearray(draw.choice(lines))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            at = draw.randrange(len(line) + 1)
            match draw.randrange(7):
                case 0 if at < len(line):
                    line[at] ^= 1 << draw.randrange(8)
                case 1:
                    del line[at : at + draw.choice((1, 1, 2, 5, 30))]
                case 2:
                    del line[at:]
                case 3:
                    other = draw.choice(lines)
                    line[at:] = other[draw.randrange(len(other) + 1) :]
                case 4:
                    line[at:at] = line[at : at + draw.choice((1, 4, 20))]
                case 5:
                    line[at:at] = draw.choice(PIECES)
                case _:  # where a key may begin, so that more of the changes are valid JSON
                    at = line.find(b'{"', at) + 1
                    line[at:at] = draw.choice(PIECES)
        yield bytes(line.replace(b"\n", b" "))
