"""Large inputs from the real conversations: tiled, with changes in every copy, so that caches do not flatter."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import CONVERSATION_FILES

SYLLABLES = (
    "ba",
    "co",
    "di",
    "fu",
    "ga",
    "he",
    "ji",
    "ko",
    "lu",
    "ma",
    "ne",
    "po",
    "qua",
    "ri",
    "so",
    "tu",
    "va",
    "we",
)
SYLLABLES += ("xi", "yo", "zu", "tra", "ster", "ing", "ment", "ly", "pre", "con", "dis")
WORD = re.compile(r"\b[a-zA-Z]{4,}\b")
SHARE_CHANGED = 0.08
"""Share of the words (of four letters and more) that are replaced in every copy."""


def records() -> list[dict[str, Any]]:
    """The bundled real conversations, decoded."""
    return [json.loads(line) for path in CONVERSATION_FILES for line in gzip.open(path)]


def _changed(text: str, rng: random.Random) -> str:
    def replace(found: re.Match[str]) -> str:
        if rng.random() >= SHARE_CHANGED:
            return found.group()
        return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))

    return WORD.sub(replace, text)


def copies(originals: list[dict[str, Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless changed copies of the records; copy k of a record is always the same."""
    number = 0
    while True:
        rng = random.Random(f"{seed}-{number}")
        for record in originals:
            messages = []
            for message in record["messages"]:
                changed = dict(message)
                for key in ("content", "reasoning_content"):
                    if isinstance(changed.get(key), str):
                        changed[key] = _changed(changed[key], rng)
                messages.append(changed)
            yield {**record, "id": f"{record['id']}-{number}", "messages": messages}
        number += 1


def write_tiled(path: Path, size: int, *, originals: list[dict[str, Any]] | None = None) -> Path:
    """A JSONL file of at least `size` bytes; a file that is there with that size is kept."""
    if path.exists() and path.stat().st_size >= size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in copies(originals or records()):
            line = json.dumps(record, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())
            if written >= size:
                break
    temporary.rename(path)
    return path
