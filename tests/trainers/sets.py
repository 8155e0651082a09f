"""Small datasets for the adapters, and the loss of a step as an obvious loop computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from chatmill.compiler.run import run_build
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import thinking_chats, write_jsonl
from tests.export.isolation import bounds_of
from tests.load.sets import Item, write_set

VOCABULARY = 320
QUIET = ("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def weighted_items(count: int = 24, *, seed: int = 4, fractional: bool = True) -> list[Item]:
    """Documents of random ids below 250; some tokens are trained with weights of 0.5 and 0.25."""
    rng = np.random.RandomState(seed)
    choices = [0, 0, 0.25, 0.5, 1] if fractional else [0, 1]
    made = []
    for _ in range(count):
        length = int(rng.randint(5, 12))
        made.append(Item(ids=rng.randint(1, 250, length).tolist(), weights=rng.choice(choices, length).tolist()))
    return made


def weighted_set(folder: Path, items: list[Item]) -> Path:
    return write_set(folder, items, weighted_items(5, seed=5), mask="<f4")


def trees(folder: Path) -> Path:
    """Build conversations as trees, packed into rows of 700 tokens."""
    chats = thinking_chats(7, seed=3, turns=4)
    for record in chats:
        for message in record["messages"]:
            message.pop("weight", None)
    path = write_jsonl(folder / "chats.jsonl", chats)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    run_build({**recipe, "expand": "tree", "packing": {"max_length": 700}}, folder / "built", workers=0)
    return folder / "built"


def weights_by_document(folder: Path, split: str = "train") -> dict[tuple[int, ...], list[float]]:
    """Return the weights of each document, by its ids; the first token has none."""
    found = {}
    for episode in EpisodeDataset(folder, split):
        assert episode.weights is not None
        found[tuple(episode.ids.tolist())] = [0.0, *episode.weights[1:].astype(float).tolist()]
    return found


def obvious_loss(model: Any, batches: list[torch.Tensor], weights: dict[tuple[int, ...], list[float]]) -> float:
    """Add up weighted losses of the documents in batches, each run alone, and divide by all weights."""
    total = 0.0
    divisor = 0.0
    for ids in batches:
        for row, first, last in bounds_of(ids.tolist(), set(weights)):
            document = ids[row, first:last]
            weight = torch.tensor(weights[tuple(document.tolist())])[1:]
            with torch.no_grad():
                logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            losses = cross_entropy(logits, document[1:], reduction="none")
            total += float((losses * weight).sum())
            divisor += float(weight.sum())
    return total / divisor
