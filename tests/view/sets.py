"""Datasets to look at, and a viewer that runs while a test needs it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import chatmill
from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.look.viewer.opened import open_viewed
from chatmill.look.viewer.pages import Viewer
from chatmill.look.viewer.server import ViewServer
from chatmill.prove.compare.diff import diff_datasets
from chatmill.store.episode_writer import EpisodeWriter
from tests.compiler.builds import write_jsonl
from tests.data.tokenizer_files import unpacked

WORDS = ["mill", "wheel", "grain", "flour", "stone", "river", "Löwe", "水車", "🙂", "naïve", "x = 1", "quern"]
RARE = "Zymurgy"
"""Stands in a few records alone."""


def record(rng: random.Random, number: int) -> dict[str, Any]:
    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    messages: list[dict[str, Any]] = []
    if number % 3 == 0:
        messages.append({"role": "system", "content": text(6)})
    for turn in range(rng.randint(1, 3)):
        messages.append(
            {"role": "user", "content": f"{RARE if number % 37 == 5 and not turn else ''} {text(20)}".strip()}
        )
        if number % 5 == 0:
            messages.append(
                {"role": "assistant", "content": None,
                 "tool_calls": [{"function": {"name": "grind", "arguments": '{"grain": 1}'}}]}
            )  # fmt: skip
            messages.append({"role": "tool", "content": text(5)})
        messages.append({"role": "assistant", "content": text(25)})
    if number % 11 == 0:
        messages[-1]["weight"] = 0.5
    return {"id": f"rec-{number:03d}", "source": ["wiki", "forum", "code"][number % 3], "messages": messages}


def records(count: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [record(rng, number) for number in range(count)]


@dataclass(frozen=True)
class Sets:
    """Folders of the datasets that tests look at."""

    episodes: Path
    other: Path
    """The same records under the policy last_turn; one changed, one gone, one new."""
    rows: Path
    """The same records, packed."""
    hostile: Path


def make_sets(folder: Path) -> Sets:
    chats = records(130)
    changed = [dict(one) for one in chats if one["id"] != "rec-020"]
    changed[3] = {
        **changed[3],
        "messages": [*changed[3]["messages"][:-1], {"role": "assistant", "content": "new words"}],
    }
    changed.append({**records(131)[130], "id": "rec-new"})
    recipe = {
        "tokenizer": str(unpacked("gpt2")),
        "template": "qwen3_training",  # Later messages change no turn: each record is one row under each policy.
        "policy": "assistant",
        "add_control_tokens": True,
        "split": {"val_fraction": 0.1},
    }
    first, second = write_jsonl(folder / "chats.jsonl", chats), write_jsonl(folder / "changed.jsonl", changed)
    chatmill.build({**recipe, "sources": [{"path": str(first)}]}, folder / "episodes", workers=0)
    chatmill.build({**recipe, "sources": [{"path": str(second)}], "policy": "last_turn"}, folder / "other", workers=0)
    packed = {"pack": {"length": 384}}
    chatmill.build({**recipe, **packed, "sources": [{"path": str(first)}]}, folder / "rows", workers=0)
    write_hostile(folder / "hostile")
    return Sets(folder / "episodes", folder / "other", folder / "rows", folder / "hostile")


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


def write_hostile(folder: Path) -> None:
    """Episodes of bytes that no template would write, with ids and sources that are as bad."""
    user, answer = kind(RoleCode.USER, Part.CONTENT), kind(RoleCode.ASSISTANT, Part.CONTENT)
    with EpisodeWriter(folder, "train") as writer:
        for name, raw in {**HOSTILE, "large": LARGE}.items():
            ids = np.array([256, *raw, 257, *b"answer ", *raw[:200], 257], dtype=np.uint32)
            kinds = np.full(len(ids), user, dtype=np.uint8)
            kinds[len(raw) + 2 :] = answer
            writer.append(
                ids,
                (kinds == answer).astype(np.uint8),
                kinds=kinds,
                source="<script>alert('source')</script>",
                record_id=f"<img src=x onerror=alert(1)> \u202e{name}",
                turns=1,
            )
        unknown = np.array([104, 105, 4_000_000_000, 999], dtype=np.uint32)
        writer.append(
            unknown,
            np.zeros(4, np.uint8),
            kinds=np.full(4, user, np.uint8),
            source="plain",
            record_id="unknown ids",
            turns=0,
        )


@dataclass(frozen=True)
class Running:
    """A viewer that answers at `url`."""

    url: str
    viewer: Viewer


@contextlib.contextmanager
def running(*paths: Path, tokenizer: Any = None, host: str = "127.0.0.1", use_token: bool = False) -> Iterator[Running]:
    opened = open_viewed(paths, tokenizer=tokenizer)
    compare = (lambda note: diff_datasets(*paths, show=100, on_progress=note).as_json()) if len(paths) == 2 else None
    viewer = Viewer(opened, compare=compare)
    with ViewServer(viewer, host=host, port=0, use_token=use_token) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Running(server.url, viewer)
        finally:
            server.shutdown()
