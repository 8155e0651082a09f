"""Reads an export of conversations with LLaMA-Factory's own loader and collator, and tries small models on its batches.

Packed documents are told apart by the 4D mask, and by the positions of a batch for flash attention.
"""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
from llamafactory.data.loader import get_dataset
from llamafactory.data.template import TEMPLATES

from tests.export.isolation import model_of, moved, padded_and_alone, padding_tokenizer, spans
from tests.export.sets import Document, cut, report

TOKENIZER = padding_tokenizer()


def collated(rows: list[Any], attention: str, model: Any, *, packed: bool) -> dict[str, Any]:
    """A batch as its training makes it, from the configuration that an export prints."""
    collator = SFTDataCollatorWith4DAttentionMask(
        tokenizer=TOKENIZER,
        template=TEMPLATES["empty"],
        model=model,
        pad_to_multiple_of=8,
        label_pad_token_id=-100,
        block_diag_attn=packed,
        neat_packing=packed,
        attn_implementation=attention,
        compute_dtype=torch.float32,
    )
    return dict(collator([dict(row) for row in rows]))


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, and how far they move each other's logits."""
    arguments = SimpleNamespace(tokenized_path=str(folder), streaming=False)
    rows = get_dataset(None, None, arguments, None, "sft", TOKENIZER)["train_dataset"]
    packed = "position_ids" in rows.column_names
    found: list[Document] = []
    for first in range(0, len(rows), 2):
        batch = collated([rows[i] for i in range(first, min(first + 2, len(rows)))], "sdpa", None, packed=packed)
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            if packed:
                seen = mask[0] == 0
                used = int(seen.any(dim=1).sum())
                starts = torch.unique(seen[:used].int().argmax(dim=1)).tolist()
            else:
                used, starts = int(mask.sum()), [0]
            found += cut(ids[:used].tolist(), labels[:used].tolist(), starts)
    if not packed:
        batch = collated([rows[i] for i in range(4)], "sdpa", None, packed=False)
        return found, padded_and_alone(model_of("qwen3"), batch["input_ids"], batch["attention_mask"])
    return found, measured(sorted(rows, key=lambda row: max(row["attention_mask"])))


def measured(rows: list[Any]) -> dict[str, float]:
    """How far documents of the fullest rows move each other's logits, with masks and as flash attention has them.

    Without a mask, which flash attention never gets, transformers finds the documents by their positions.
    """
    found = {}
    for kind in ("qwen3", "qwen3_vl"):
        model = model_of(kind)
        for attention, count in (("sdpa", 2), ("flash_attention_2", 1)):
            batch = collated(rows[-count:], attention, model, packed=True)
            ids = batch.pop("input_ids")
            given = {name: batch[name] for name in ("attention_mask", "position_ids")}
            bounds = []
            for number, row in enumerate(rows[-count:]):
                ends = row["packing_params"]["sequence_boundaries"][:-1]
                bounds += spans([end - start for start, end in pairwise(ends)], number)

            def logits(changed: torch.Tensor, model: Any = model, given: Any = given) -> torch.Tensor:
                return model(input_ids=changed, use_cache=False, **given).logits

            moves = moved(logits, ids, bounds)
            found |= {f"{name} {kind} {attention}": value for name, value in moves.items()}
    return found


if __name__ == "__main__":
    report(read)
