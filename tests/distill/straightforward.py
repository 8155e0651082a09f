"""The straightforward build: official renderer, one document at a time, Megatron's own builder; slow and obvious.

Nothing of the fast build is used here but the vocabulary file, so that the two can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.tokenizer.assets import find_o200k

EOD, START, CHANNEL, MESSAGE = 199999, 200006, 200005, 200008


@cache
def official_encoding() -> Any:
    import openai_harmony

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_ENCODINGS_BASE", str(find_o200k().parent))
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


class Straightforward:
    """Rows to ids, loss mask and spans as lists, as one would write it first."""

    def __init__(self) -> None:
        import openai_harmony

        self.encoding = official_encoding()
        self.conversation = openai_harmony.Conversation
        self.config = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)

    def row(self, messages_json: str) -> tuple[list[int], list[int], list[int]]:
        """Ids with EOD; loss mask and spans, label-aligned."""
        messages = json.loads(messages_json)["messages"]
        conversation = self.conversation.from_json(messages_json)
        ids = self.encoding.render_conversation_for_training(conversation, self.config)
        spans: list[int] = []
        number, span = -1, 0
        for token in ids:
            if token == START:
                number += 1
                message = messages[number]
                span = {"analysis": 1, "final": 2}[message["channel"]] if message["role"] == "assistant" else 0
            spans.append(span)
        ids = [*ids, EOD]
        spans.append(0)
        spans = [*spans[1:], 0]
        return ids, [1 if span else 0 for span in spans], spans


def is_valid(synth_id: str, valid_fraction: float) -> bool:
    number = int.from_bytes(blake2b(synth_id.encode("utf-8"), digest_size=8).digest(), "big")
    return number < int(Decimal(str(valid_fraction)) * 2**64)


def read_rows(shard: Path) -> Iterator[tuple[str, str]]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(shard).iter_batches(1024, columns=["synth_id", "messages_json"]):
        for row in batch.to_pylist():
            yield row["synth_id"], row["messages_json"]


def build(folder: Path, root: Path, *, valid_fraction: float = 0.001, rows: int | None = None) -> dict[str, int]:
    """All shards of a folder (or the first `rows` of each), into `root`; the number of rows and tokens."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    renderer = Straightforward()
    counts = {"rows": 0, "tokens": 0}
    for shard in sorted(folder.glob("synth_harmony_shard_*.parquet")):
        name = "shard_" + shard.stem.rsplit("_", 1)[1]
        builders: dict[tuple[str, str], Any] = {}
        for number, (synth_id, messages_json) in enumerate(read_rows(shard)):
            if number == rows:
                break
            split = "valid" if is_valid(synth_id, valid_fraction) else "train"
            (root / split).mkdir(parents=True, exist_ok=True)
            columns = dict(zip(("tokens", "lossmask", "span"), renderer.row(messages_json), strict=True))
            for column, values in columns.items():
                dtype = np.int32 if column == "tokens" else np.uint8
                if (split, column) not in builders:
                    path = str(root / split / f"{name}_{column}.bin")
                    builders[split, column] = IndexedDatasetBuilder(path, dtype=dtype)
                builders[split, column].add_item(torch.tensor(values))
                builders[split, column].end_document()
            counts["rows"] += 1
            counts["tokens"] += len(columns["tokens"])
        for (split, column), builder in builders.items():
            builder.finalize(str(root / split / f"{name}_{column}.idx"))
    return counts
