"""The straightforward build: official renderer, one document at a time, Megatron's own builder; slow and obvious.

Nothing of the fast build is used here but the vocabulary file, so that the two can be compared.
"""

from __future__ import annotations

import json
from decimal import Decimal
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.tokenizer.assets import find_o200k

EOD, START = 199999, 200006


def build(folder: Path, root: Path, *, valid_fraction: float, rows: int | None = None) -> dict[str, int]:
    """All shards of a folder (or the first `rows` of each), into `root`; the number of rows and tokens."""
    import openai_harmony
    import pyarrow.parquet
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_ENCODINGS_BASE", str(find_o200k().parent))
        encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    config = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)
    counts = {"rows": 0, "tokens": 0}
    for shard in sorted(folder.glob("synth_harmony_shard_*.parquet")):
        builders: dict[Path, Any] = {}
        batches = pyarrow.parquet.ParquetFile(shard).iter_batches(1024, columns=["synth_id", "messages_json"])
        for row in islice((row for batch in batches for row in batch.to_pylist()), rows):
            number = int.from_bytes(blake2b(row["synth_id"].encode(), digest_size=8).digest(), "big")
            split = "valid" if number < int(Decimal(str(valid_fraction)) * 2**64) else "train"
            conversation = openai_harmony.Conversation.from_json(row["messages_json"])
            ids = encoding.render_conversation_for_training(conversation, config)
            messages, span, spans = iter(json.loads(row["messages_json"])["messages"]), 0, []
            for token in ids:
                if token == START:
                    message = next(messages)
                    span = {"analysis": 1, "final": 2}[message["channel"]] if message["role"] == "assistant" else 0
                spans.append(span)
            spans = [*spans[1:], 0, 0]
            columns = {"tokens": [*ids, EOD], "lossmask": [1 if span else 0 for span in spans], "span": spans}
            for column, values in columns.items():
                prefix = root / split / f"shard_{shard.stem.rsplit('_', 1)[1]}_{column}"
                if prefix not in builders:
                    prefix.parent.mkdir(parents=True, exist_ok=True)
                    dtype = np.int32 if column == "tokens" else np.uint8
                    builders[prefix] = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
                builders[prefix].add_item(torch.tensor(values))
                builders[prefix].end_document()
            counts = {"rows": counts["rows"] + 1, "tokens": counts["tokens"] + len(columns["tokens"])}
        for prefix, builder in builders.items():
            builder.finalize(f"{prefix}.idx")
    return counts
