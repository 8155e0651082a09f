"""Real conversations, rendered with a real tokenizer, through the writer, the reader and the loader."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.core.conversation import Conversation
from chatmill.label.presets import find_policy
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.render.render import render
from chatmill.store.episode_writer import EpisodeWriter
from tests.load.sets import Item, batch, epoch_steps, same

BLOCK = 512


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory, qwen3: Any, real_conversations: Callable[[int], list[Conversation]]
) -> tuple[Path, list[Item]]:
    """A sharded dataset of real conversations, and its episodes as plain lists."""
    conversations = real_conversations(12)
    rendered = render(conversations, "chatml", qwen3, collect_failures=True)
    tokens = rendered.tokens
    weights = tokens.per_token(find_policy("assistant").run_weights(tokens))
    directory = tmp_path_factory.mktemp("real")
    kept = [conversations[i] for i in rendered.kept]
    with EpisodeWriter(directory, "train", shard_tokens=30_000) as writer:
        offsets = tokens.offsets.tolist()
        for c, a, b in zip(kept, offsets[:-1], offsets[1:], strict=True):
            writer.append(
                tokens.ids[a:b], weights[a:b], kinds=tokens.kinds[a:b],
                source=c.source or "unknown", turns=len(c.messages), record_id=c.id,
            )  # fmt: skip
    made = [Item(ids=tokens.ids[a:b].tolist(), weights=weights[a:b].tolist()) for a, b in pairwise(offsets)]
    assert len(made) > 150
    return directory, made


def config(qwen3: Any) -> dict[str, Any]:
    return {"batch_size": 8, "block_size": BLOCK, "dataset_mode": "sft_episode", "pad_token_id": qwen3.eos_id}


def test_batches_equal_the_slow_reference(stored: tuple[Path, list[Item]], qwen3: Any) -> None:
    """The pad id is the end of turn, which is in every conversation: real ones are never lost to padding."""
    directory, made = stored
    loader = GPTEpisodeDataLoader(config(qwen3), None, directory, use_loss_mask=True)
    for rows in epoch_steps(made, seed=1337, epoch=0, step=8):
        assert same(loader.get_batch(), batch(rows, BLOCK, qwen3.eos_id))


def test_the_policy_of_the_build_at_load_gives_the_stored_masks(stored: tuple[Path, list[Item]], qwen3: Any) -> None:
    directory, _ = stored
    one = GPTEpisodeDataLoader(config(qwen3), None, directory, use_loss_mask=True)
    other = GPTEpisodeDataLoader(config(qwen3), None, directory, policy="assistant")
    last = GPTEpisodeDataLoader(config(qwen3), None, directory, policy="last_turn")
    fewer = 0
    for _ in range(one.steps_per_epoch()):
        x, y, mask = one.get_batch()
        assert same((x, y, mask), other.get_batch())
        narrowed = last.get_batch()[2]
        assert bool((narrowed <= mask).all())
        fewer += int((narrowed < mask).sum())
    assert fewer > 1000


def test_packed_rows_train_the_same_tokens(stored: tuple[Path, list[Item]], qwen3: Any) -> None:
    directory, made = stored
    options = {**config(qwen3), "epoch_drop_last": False, "use_loss_mask": True}
    loader = GPTEpisodeDataLoader(options, None, directory, pack=True)
    trained, positions = [], 0
    for _ in range(loader.steps_per_epoch()):
        got = loader.get_batch()
        assert isinstance(got, PackedBatch)
        trained.append(got.y[got.mask > 0])
        positions += got.x.numel()
    wanted = [t for item in made for t, w in list(zip(item.ids, item.weights, strict=True))[1 : BLOCK + 1] if w]
    assert torch.equal(torch.cat(trained).sort().values, torch.tensor(sorted(wanted)))
    tokens = sum(min(len(item.ids), BLOCK + 1) for item in made)
    assert positions < 1.2 * tokens < np.ceil(len(made) / 8) * 8 * BLOCK
