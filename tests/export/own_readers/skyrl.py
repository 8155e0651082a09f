"""Reads an export with SkyRL's own loader for pretokenized datasets, and its two collators."""

import typing
from pathlib import Path
from types import SimpleNamespace

import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # the package is for Python 3.12, where pydantic takes both
from skyrl.train.dataset.collators import PackedDataCollator  # noqa: E402
from skyrl.train.dataset.pretokenized import load_from_pretokenized  # noqa: E402
from skyrl.train.sft_trainer import collate_sft_batch  # noqa: E402

from tests.export.isolation import measured, model_of, padded_and_alone, segments_of, spans, within  # noqa: E402
from tests.export.sets import Document, report  # noqa: E402

TOKENIZER = SimpleNamespace(pad_token_id=258)


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, and how far those of a packed batch, and padding, move logits."""
    rows = list(load_from_pretokenized(str(folder), max_length=length))
    found: list[Document] = []
    for row in rows:
        first = len(row["input_ids"]) - row["num_actions"]
        assert row["attention_mask"] == [1] * len(row["input_ids"])
        places = tuple(first + place for place, value in enumerate(row["loss_mask"]) if value)
        found.append((tuple(row["input_ids"]), places))
    model = model_of("qwen3")
    padded = collate_sft_batch(rows[:4], TOKENIZER)
    for row, trained in zip(rows, padded["loss_mask"], strict=False):
        assert trained[-row["num_actions"] :].tolist() == row["loss_mask"]
    moves = padded_and_alone(model, padded["sequences"], padded["attention_mask"])

    sizes = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "dp_size": 1, "micro_train_batch_size_per_gpu": 1}
    packs = PackedDataCollator(TOKENIZER, max_tokens_per_microbatch=length, batch_size=len(rows), **sizes)
    batch = packs(rows, batch_size=len(rows))
    number = max(range(len(batch["sequences"])), key=lambda row: len(batch["sub_seq_lengths"][row]))
    lengths = batch["sub_seq_lengths"][number].tolist()
    ids = batch["sequences"][number][None]
    segments, positions = segments_of(lengths, ids.shape[1])
    targets = dict(found)
    for _, start, end in spans(lengths):
        trained = torch.argwhere(batch["loss_mask"][number][start : end - 1])[:, 0] + 1
        assert tuple(trained.tolist()) == targets[tuple(ids[0, start:end].tolist())]
    return found, moves | measured(model, ids, within(segments[None]), positions[None], spans(lengths))


report(read)
