"""Datasets to look at, and a viewer that runs while a test needs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import chatmill
from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.look.dataset import open_for_looking
from chatmill.look.viewer.opened import open_splits
from chatmill.look.viewer.pages import Viewer
from chatmill.look.viewer.server import ViewServer
from chatmill.store.episode_writer import EpisodeWriter
from tests.compiler.builds import chats, thinking_chats, write_jsonl
from tests.data.tokenizer_files import unpacked

RARE = "Zymurgy"
"""Stands in a few records alone."""
HOSTILE = {
    "script": b"<script>window.pwned = 1; alert(1)</script>",
    "image": b"<img src=x onerror='window.pwned=1'><svg onload=alert(1)>",
    "breaks out": b"</span></div></script><!-- ]]> {{7*7}} ${7*7} %00 \\u003cscript\\u003e",
    "link": b"javascript:alert(1) https://example.com/x.js //example.com/y.css",
    "direction": "safe \u202eegassem desrever\u202c \u2066isolate\u2069 \u200f \u05d0\u05d1 \u0645\u0631".encode(),
    "nul": b"a\x00b\x01\x1b[31mred\x7f\x08\x0c\r\n\x85",
    "no utf-8": b"cut \xe2\x82 lone \xff\xfe \xed\xa0\x80 \xf0\x9f\x98",
    "joiners": "a\u200d\u200b\ufeff\u2028\u2029zalgo Z\u0351\u036b\u0343".encode(),
}
LARGE = b"<b>big</b> " * 95_326
"""More than a megabyte of text in one message."""
TURNS = 12
"""Of the long chat, which is the last of the hostile episodes."""


@dataclass(frozen=True)
class Sets:
    """Folders of the datasets that tests look at."""

    episodes: Path
    rows: Path
    """The same records, packed."""
    hostile: Path


def make_sets(folder: Path) -> Sets:
    call = {"role": "assistant", "content": None,
            "tool_calls": [{"function": {"name": "grind", "arguments": '{"grain": 1}'}}]}  # fmt: skip
    records = chats(131, 7, words=20)
    for record in records[5::37]:
        record["messages"][-2]["content"] += f" {RARE}"
    for record in records[::5]:
        record["messages"][-1:-1] = [call, {"role": "tool", "content": "flour"}]
    recipe = {
        "tokenizer": str(unpacked("gpt2")),
        "template": "qwen3_training",  # Later messages change no turn: each record is one row under each policy.
        "policy": "assistant",
        "add_control_tokens": True,
        "split": {"val_fraction": 0.1},
        "sources": [{"path": str(write_jsonl(folder / "chats.jsonl", records))}],
    }
    chatmill.build(recipe, folder / "episodes", workers=0)
    chatmill.build({**recipe, "pack": {"length": 384}}, folder / "rows", workers=0)
    write_hostile(folder / "hostile")
    return Sets(folder / "episodes", folder / "rows", folder / "hostile")


def make_trees(folder: Path) -> Path:
    """Trees of agents' conversations, from a file with records that cannot be used; one trains nothing."""
    records: list[Any] = thinking_chats(14, 3)
    records[2:2] = [{"id": "no words", "messages": []}, {"id": "a <b>list</b>", "messages": [1]}]
    records.append({"id": "silent", "messages": [{"role": "user", "content": "Is anyone there?"}]})
    recipe = {
        "tokenizer": str(unpacked("gpt2")),
        "template": "qwen3",
        "add_control_tokens": True,
        "expand": "tree",
        "on_error": "quarantine",
        "gates": {"records_left_out": None, "records_without_trained_tokens": None},
        "sources": [{"path": str(write_jsonl(folder / "agents.jsonl", records))}],
    }
    chatmill.build(recipe, folder / "trees", workers=0)
    return folder / "trees"


def write_hostile(folder: Path) -> None:
    """Episodes of bytes that no template would write, with ids and sources that are as bad."""
    source = "<script>alert('source')</script>"
    with EpisodeWriter(folder, "train") as writer:

        def append(name: str, source: str, *messages: tuple[RoleCode, Sequence[int]]) -> None:
            ids = np.concatenate([np.array(list(text), dtype=np.uint32) for _, text in messages])
            roles = np.repeat([role for role, _ in messages], [len(text) for _, text in messages])
            kinds = np.array([kind(RoleCode(role), Part.CONTENT) for role in roles.tolist()], dtype=np.uint8)
            writer.append(ids, roles == RoleCode.ASSISTANT, kinds=kinds, source=source, record_id=name, turns=1)

        for name, raw in {**HOSTILE, "large": LARGE}.items():
            asked, answer = [256, *raw, 257], [*b"answer ", *raw[:200], 257]
            name = f"<img src=x onerror=alert(1)> \u202e{name}"
            append(name, source, (RoleCode.USER, asked), (RoleCode.ASSISTANT, answer))
        append("unknown ids", "plain", (RoleCode.USER, [104, 105, 4_000_000_000, 999]))
        turns = [(RoleCode.USER, b"Question %d"), (RoleCode.ASSISTANT, b"Said %d")] * TURNS
        said = [(role, [*text % (number // 2)]) for number, (role, text) in enumerate(turns)]
        append("long chat", "plain", (RoleCode.SYSTEM, b"You are a careful miller. " * 20), *said)


@dataclass(frozen=True)
class Running:
    """A viewer that answers at `url`."""

    url: str
    viewer: Viewer


@contextlib.contextmanager
def running(path: Path, tokenizer: Any = None, host: str = "127.0.0.1", use_token: bool = False) -> Iterator[Running]:
    viewer = Viewer(open_splits(open_for_looking(path, tokenizer=tokenizer)))
    with ViewServer(viewer, host=host, port=0, use_token=use_token) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Running(server.url, viewer)
        finally:
            server.shutdown()
