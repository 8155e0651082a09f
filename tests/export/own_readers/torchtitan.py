"""Reads an export as torchtitan's trainer does: the data loader is built from its config, and resumes."""

from pathlib import Path

import torch
from torchtitan.models.common.attention import get_document_mask_mod

from chatmill.torchtitan import ChatmillDataLoader
from tests.export.isolation import Bounds, measured, model_of
from tests.export.sets import Document, aligned, cut, report

PAD = 258


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, and how far those of a batch move each other's logits."""
    config = ChatmillDataLoader.Config(dataset_path=str(folder), infinite=False, seed=7)

    def built(rank: int, ranks: int = 1) -> ChatmillDataLoader:
        given = {"dp_world_size": ranks, "dp_rank": rank, "tokenizer": None, "seq_len": length}
        return config.build(**given, local_batch_size=2, snapshot_every_n_steps=1)

    found: list[Document] = []
    batches = list(built(0))
    fullest: Bounds = []
    for inputs, labels in batches:
        sees = seen(inputs["positions"])
        bounds: Bounds = []
        for row, (ids, shifted) in enumerate(zip(inputs["input"], labels, strict=True)):
            starts = [0, *(p for p in range(1, len(ids)) if not sees[row, p, p - 1])]
            documents = list(cut(ids.tolist(), aligned(shifted.tolist()), starts))
            found += [one for one in documents if set(one[0]) != {PAD}]
            bounds += [(row, start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        if len(bounds) > len(fullest):
            fullest, batch = bounds, inputs
    resumes(built, batches)
    moves = measured(model_of("qwen3"), batch["input"], seen(batch["positions"]), batch["positions"], fullest)
    return found, moves


def seen(positions: torch.Tensor) -> torch.Tensor:
    """What its attention lets tokens of a batch see."""
    in_one_document = get_document_mask_mod(positions)
    rows, width = positions.shape
    row, place = torch.arange(rows)[:, None, None], torch.arange(width)
    query, key = place[None, :, None], place[None, None, :]
    return in_one_document(row, 0, query, key) & (key <= query)


def resumes(built, batches) -> None:  # type: ignore[no-untyped-def]
    """A loader goes on after three batches, and ranks have rows of their own."""
    half = built(0)
    reading = iter(half)
    begun = [next(reading) for _ in range(3)]
    again = built(0)
    again.load_state_dict(half.state_dict())
    resumed = [*begun, *again]
    assert len(resumed) == len(batches) > 4
    for (one, ones), (two, twos) in zip(resumed, batches, strict=True):
        assert torch.equal(one["input"], two["input"])
        assert torch.equal(ones, twos)
    ranks = [[row for inputs, _ in built(rank, 2) for row in inputs["input"].tolist()] for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1])
    assert not {tuple(row) for row in ranks[0]} & {tuple(row) for row in ranks[1]}


report(read)
