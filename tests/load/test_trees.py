"""Batches of trees: what tokens see, and that losses and gradients are those of rows one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.compiler.run import run_build
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.document_masks import dense_mask, flex_mask, mask_mod
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
from tests.compiler.tree_rows import apart, thinking_chats

VOCABULARY = 300
LONGEST = 700


class Special:
    eos_token_id = pad_token_id = 2


def tiny(attention: str, architecture: str = "gpt2", dtype: torch.dtype = torch.float64) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    if architecture == "gpt2":
        plain = hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=2048, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation=attention,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(plain).to(dtype)
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, initializer_range=0.3,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config).to(dtype)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    chats = thinking_chats(7, seed=3, turns=4)
    for record in chats:
        for message in record["messages"]:
            message.pop("weight", None)
    path = write_jsonl(folder / "chats.jsonl", chats)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    run_build({**recipe, "expand": "tree", "packing": {"max_length": LONGEST}}, folder / "built", workers=0)
    return folder / "built"


def one_by_one(model: Any, built: Path) -> tuple[float, int]:
    """Sum of the losses over the targets of all rows, each row alone; gradients gather in the model."""
    total, count = 0.0, 0
    for episode in EpisodeDataset(built):
        for ids, weights, older in apart(episode):
            trained = weights.astype(bool)
            trained[:older] = False
            labels = np.where(trained, ids.astype(np.int64), IGNORE_INDEX)
            row = torch.from_numpy(ids.astype(np.int64))[None]
            logits = model(input_ids=row, use_cache=False).logits[0, :-1]
            targets = torch.from_numpy(labels)[1:]
            loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
            loss.backward()
            total, count = total + loss.item(), count + int((targets != IGNORE_INDEX).sum())
    return total, count


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


# Qwen3's norms, and its eager attention, are in float32 whatever the dtype of the model
@pytest.mark.parametrize(
    ("architecture", "attention", "bound"),
    [("gpt2", "sdpa", 1e-9), ("qwen3", "eager", 1e-5)],
)
@pytest.mark.parametrize("road", ["collator", "loader"])
def test_loss_and_gradients_are_those_of_rows_one_by_one(
    built: Path, architecture: str, attention: str, bound: float, road: str
) -> None:
    model = tiny(attention, architecture)
    wanted, count = one_by_one(model, built)
    by_rows = gradients(model)
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    seen = rows = 0
    if road == "collator":
        packed = to_hf_dataset(built, max_length=LONGEST, pack=True)
        collate = DataCollatorForCausalLM(Special(), model=model, pad_to_multiple_of=64)
        batch = collate(list(packed))
        labels = batch.pop("labels")
        assert "ends" not in batch
        logits, targets = model(**batch).logits[:, :-1], labels[:, 1:]
        rows = len(packed)
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        seen = int((targets != IGNORE_INDEX).sum())
        total.backward()
    else:
        config = {"batch_size": 2, "block_size": LONGEST, "dataset_mode": "sft_episode", "epoch_drop_last": False}
        loader = GPTEpisodeDataLoader(
            {**config, "pad_token_id": 0, "use_loss_mask": True}, dataset_dir=built, pack=True
        )
        for _ in range(loader.steps_per_epoch()):
            got = loader.get_batch()
            logits = model(**got.inputs(model)).logits
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), got.y.flatten(), reduction="none")
            loss = (losses * got.mask.flatten()).sum()
            loss.backward()
            total = total + loss.detach()
            seen, rows = seen + int((got.mask > 0).sum()), rows + int((got.mask > 0).any(1).sum())
    assert seen == count > 100
    assert rows < len(EpisodeDataset(built))
    assert total.item() == pytest.approx(wanted, rel=bound)
    assert torch.allclose(gradients(model), by_rows, rtol=0, atol=bound * by_rows.abs().max().item())


def ends_of_rows(built: Path) -> torch.Tensor:
    packed = to_hf_dataset(built, max_length=LONGEST, pack=True)
    batch = DataCollatorForCausalLM(Special(), model="sdpa", padding="max_length", max_length=LONGEST)(list(packed))
    allowed = batch["attention_mask"][:, 0] == 0
    place = torch.arange(LONGEST)
    return torch.where(allowed, place[None, :, None] + 1, 0).amax(1).to(torch.int32)


def test_block_masks_are_the_dense_rule(built: Path) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

    ends = ends_of_rows(built)
    rows, width = ends.shape
    dense = dense_mask(ends, torch.float64) == 0
    assert torch.equal(create_mask(mask_mod(ends), rows, 1, width, width, device="cpu"), dense)
    made = flex_mask(ends)
    slow = create_block_mask(mask_mod(ends), B=rows, H=None, Q_LEN=width, KV_LEN=width, device="cpu")
    assert torch.equal(made.to_dense(), slow.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(slow, name)), name
    assert int(made.full_kv_num_blocks.sum()) > 0
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, 2, width, 16) for _ in range(3))
    with pytest.warns(UserWarning, match="flex_attention"):
        got = flex_attention(q, k, v, block_mask=made)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    assert torch.allclose(got, wanted, atol=1e-5)


def test_what_cannot_read_trees_is_refused(built: Path) -> None:
    import transformers as hf

    rows = list(to_hf_dataset(built, max_length=LONGEST, pack=True))
    hybrid = hf.Qwen3NextConfig(num_hidden_layers=2, attn_implementation="sdpa")
    windows = hf.MistralConfig(sliding_window=64, attn_implementation="sdpa")
    for model, words in (
        ("flash_attention_2", "FlashAttention.*flex_attention.*--expand turns"),
        (hybrid, "state.*--expand turns"),
        (windows, "window"),
        (None, "give the collator your model"),
    ):
        with pytest.raises(ConfigError, match=words):
            DataCollatorForCausalLM(Special(), model=model)(rows)
    config = {"batch_size": 2, "block_size": LONGEST, "dataset_mode": "sft_episode", "pad_token_id": 0}
    with pytest.raises(ConfigError, match="pack=True"):
        GPTEpisodeDataLoader(config, dataset_dir=built).get_batch()
    batch = GPTEpisodeDataLoader(config, dataset_dir=built, pack=True).get_batch()
    with pytest.raises(ConfigError, match="flex_attention"):
        batch.inputs("flash_attention_2")
    with pytest.raises(ConfigError, match="last turn"):
        GPTEpisodeDataLoader(config, dataset_dir=built, pack=True, policy="last_turn").get_batch()
    removed = [{name: row[name] for name in ("input_ids", "labels", "position_ids")} for row in rows]
    with pytest.raises(DataError, match="remove_unused_columns=False"):
        DataCollatorForCausalLM(Special(), model="sdpa")(removed)
    wrong = [{**row, "position_ids": [0] * len(row["input_ids"])} for row in rows]
    with pytest.raises(DataError, match="not of the same rows"):
        DataCollatorForCausalLM(Special(), model="sdpa")(wrong)
    wrong = [{**row, "ends": [0] * len(row["input_ids"])} for row in rows]
    with pytest.raises(DataError, match="a token sees itself"):
        DataCollatorForCausalLM(Special(), model="sdpa")(wrong)


def test_cut_trees_are_trees(built: Path) -> None:
    """The first tokens of a tree see what they saw in the whole of it."""
    short = LONGEST // 3
    config = {"batch_size": 30, "block_size": short, "dataset_mode": "sft_episode", "pad_token_id": 0}
    loader = GPTEpisodeDataLoader({**config, "epoch_drop_last": False}, dataset_dir=built, pack=True)
    batch = loader.get_batch()
    depth = torch.arange(short)[None] - torch.stack(
        [torch.cumsum(torch.bincount(row, minlength=short + 1), 0)[:-1] for row in batch.ends.long()]
    )
    assert torch.equal(batch.position_ids, depth)


def test_policies_at_load_train_no_copy(built: Path) -> None:
    config = {"batch_size": 30, "block_size": LONGEST, "dataset_mode": "sft_episode", "pad_token_id": 0}
    config |= {"epoch_shuffle": False, "epoch_drop_last": False, "use_loss_mask": True}
    stored, again, everything = (
        GPTEpisodeDataLoader(config, dataset_dir=built, pack=True, policy=policy).get_batch()
        for policy in (None, "assistant", "all")
    )
    assert torch.equal(stored.mask, again.mask)
    positions = everything.position_ids
    jumps = positions[:, 1:] - positions[:, :-1] != 1
    assert jumps.any()
    assert (everything.mask[:, :-1][jumps] == 0).all()
