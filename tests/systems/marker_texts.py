"""Transcripts with markers, their ids, and real conversations to make them of."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from chatmill.systems.post_training import (
    MARKERS,
    encode_transcripts,
)
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.data.tokenizer_files import loaded

CONVERSATIONS = Path(__file__).parent.parent / "data" / "conversations"
BYTES = byte_tokenizer(MARKERS)


@cache
def qwen3() -> Any:
    return loaded("qwen3")


@cache
def real_conversations(name: str, count: int) -> list[dict[str, Any]]:
    with gzip.open(CONVERSATIONS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(count), file, strict=False)]


def ids_of(transcript: str, tokenizer: Any = BYTES) -> list[int]:
    return encode_transcripts([transcript], tokenizer=tokenizer).ids.tolist()
