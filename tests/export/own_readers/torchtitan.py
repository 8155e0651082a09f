"""Reads an export as torchtitan's trainer does: the data loader is built from its config, and resumes."""

import sys

import torch
from torchtitan.models.common.attention import get_document_mask_mod

from chatmill.torchtitan import ChatmillDataLoader
from tests.export.sets import aligned, cut, written

PAD = 258
config = ChatmillDataLoader.Config(dataset_path=sys.argv[1], infinite=False, seed=7)


def built(rank: int, ranks: int = 1) -> ChatmillDataLoader:
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        seq_len=6000,
        local_batch_size=2,
        snapshot_every_n_steps=1,
    )


found = []
batches = list(built(0))
for inputs, labels in batches:
    for ids, positions, shifted in zip(inputs["input"], inputs["positions"], labels, strict=True):
        sees = get_document_mask_mod(positions[None])
        places = torch.arange(len(ids))
        starts = [0, *(p for p in range(1, len(ids)) if not sees(0, 0, places[p], places[p - 1]))]
        documents = list(cut(ids.tolist(), aligned(shifted.tolist()), starts))
        found += [one for one in documents if set(one[0]) != {PAD}]

half = built(0)
read = iter(half)
begun = [next(read) for _ in range(3)]
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
written(found)
