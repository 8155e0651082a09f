"""Batches of trees: what tokens see, losses and gradients are those of rows one by one, and the check that says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from chatmill.cli.app import app
from chatmill.compiler.run import run_build
from chatmill.core.shift import IGNORE_INDEX, shift_left
from chatmill.errors import ConfigError, DataError
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.document_masks import dense_mask, flex_mask, mask_mod
from chatmill.store.episodes import EpisodeDataset
from chatmill.train.tree_isolation import check_trees
from tests.compiler.builds import apart, thinking_chats, write_jsonl
from tests.load.sets import Special, loader
from tests.train.tiny import tiny_model

LONGEST = 700


def tiny(attention: str, architecture: str = "GPT2", dtype: torch.dtype = torch.float64) -> Any:
    sizes = {"max_position_embeddings": 2048, "initializer_range": 0.3, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"num_key_value_heads": 1, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    made = tiny_model(300, kind=architecture, attn_implementation=attention, **sizes)
    return made.to(dtype)


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


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def one_by_one(model: Any, built: Path) -> tuple[float, int]:
    """Sum of the losses over the targets of all rows, each row alone; gradients gather in the model."""
    total, count = 0.0, 0
    for episode in EpisodeDataset(built):
        for ids, weights, older in apart(episode):
            row = torch.from_numpy(ids.astype(np.int64))[None]
            trained = torch.from_numpy(weights.astype(bool))
            trained[:older] = False
            labels = torch.where(trained, row, IGNORE_INDEX)[:, 1:]
            loss = summed(model(input_ids=row, use_cache=False).logits[:, :-1], labels)
            loss.backward()
            total, count = total + loss.item(), count + int((labels != IGNORE_INDEX).sum())
    return total, count


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def steps(road: str, model: Any, built: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The inputs and targets of batches of all trees."""
    if road == "collator":
        packed = list(to_hf_dataset(built, max_length=LONGEST, packed=True))
        batch = DataCollatorForCausalLM(Special(), model=model, pad_to_multiple_of=64)(packed)
        assert "ends" not in batch
        yield batch, shift_left(batch.pop("labels"), IGNORE_INDEX)
        return
    made = loader(built, 2, LONGEST, epoch_drop_last=False, pad_token_id=0, pack=True)
    for _ in range(made.steps_per_epoch()):
        got: Any = made.get_batch()
        yield got.inputs(model), torch.where(got.mask > 0, got.y, IGNORE_INDEX)


# Qwen3's norms, and its eager attention, are in float32 whatever the dtype of the model
@pytest.mark.parametrize(("architecture", "attention", "bound"), [("GPT2", "sdpa", 1e-9), ("Qwen3", "eager", 1e-5)])
@pytest.mark.parametrize("road", ["collator", "loader"])
def test_loss_and_gradients_are_those_of_rows_one_by_one(
    built: Path, architecture: str, attention: str, bound: float, road: str
) -> None:
    model = tiny(attention, architecture)
    wanted, count = one_by_one(model, built)
    by_rows = gradients(model)
    model.zero_grad()
    total, seen, rows = 0.0, 0, 0
    for inputs, labels in steps(road, model, built):
        loss = summed(model(**inputs).logits, labels)
        loss.backward()
        total, seen = total + loss.item(), seen + int((labels != IGNORE_INDEX).sum())
        rows += int((labels != IGNORE_INDEX).any(1).sum())
    assert seen == count > 100
    assert rows < len(EpisodeDataset(built))
    assert total == pytest.approx(wanted, rel=bound)
    assert torch.allclose(gradients(model), by_rows, rtol=0, atol=bound * by_rows.abs().max().item())


def test_block_masks_are_the_dense_rule(built: Path) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

    packed = list(to_hf_dataset(built, max_length=LONGEST, packed=True))
    batch = DataCollatorForCausalLM(Special(), model="sdpa", padding="max_length", max_length=LONGEST)(packed)
    ends = (torch.arange(1, LONGEST + 1)[:, None] * (batch["attention_mask"][:, 0] == 0)).amax(1).to(torch.int32)
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

    rows = list(to_hf_dataset(built, max_length=LONGEST, packed=True))
    hybrid = hf.Qwen3NextConfig(num_hidden_layers=2, attn_implementation="sdpa")
    windows = hf.MistralConfig(sliding_window=64, attn_implementation="sdpa")
    removed = [{name: row[name] for name in ("input_ids", "labels", "position_ids")} for row in rows]
    for model, given, words in (
        ("flash_attention_2", rows, "FlashAttention.*flex_attention.*--expand turns"),
        (hybrid, rows, "state.*--expand turns"),
        (windows, rows, "window"),
        (None, rows, "give the collator your model"),
        ("sdpa", removed, "remove_unused_columns=False"),
        ("sdpa", [{**row, "position_ids": [0] * len(row["input_ids"])} for row in rows], "not of the same rows"),
        ("sdpa", [{**row, "ends": [0] * len(row["input_ids"])} for row in rows], "a token sees itself"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            DataCollatorForCausalLM(Special(), model=model)(given)
    with pytest.raises(ConfigError, match="pack=True"):
        loader(built, 2, LONGEST)
    with pytest.raises(ConfigError, match="last turn"):
        loader(built, 2, LONGEST, pack=True, policy="last_turn")
    batch: Any = loader(built, 2, LONGEST, pack=True).get_batch()
    with pytest.raises(ConfigError, match="flex_attention"):
        batch.inputs("flash_attention_2")


def whole(built: Path, length: int, **options: Any) -> Any:
    """All trees in one batch."""
    return loader(built, 30, length, pack=True, epoch_shuffle=False, epoch_drop_last=False, **options).get_batch()


def test_cut_trees_are_trees_and_policies_at_load_train_no_copy(built: Path) -> None:
    short = LONGEST // 3
    batch = whole(built, short)  # the first tokens of a tree see what they saw in the whole of it
    closed = [torch.cumsum(torch.bincount(row, minlength=short + 1), 0)[:-1] for row in batch.ends.long()]
    assert torch.equal(batch.position_ids, torch.arange(short)[None] - torch.stack(closed))
    stored, again, everything = (whole(built, LONGEST, policy=policy) for policy in (None, "assistant", "all"))
    assert torch.equal(stored.mask, again.mask)
    jumps = everything.position_ids.diff(dim=1) != 1
    assert jumps.any()
    assert (everything.mask[:, :-1][jumps] == 0).all()


# ---- the isolation check


def two_rows(built: Path) -> list[dict[str, Any]]:
    return list(to_hf_dataset(built, max_length=LONGEST, packed=True))[:2]


def test_trees_train_as_their_rows_do(built: Path) -> None:
    report = check_trees(tiny("eager"), two_rows(built), gradients=True)
    assert report.passed, str(report)
    assert report.moved == 0
    assert len(report.documents) > 5
    assert report.trained["gradients"] < 1e-9
    assert str(report).startswith("isolated")


@pytest.mark.parametrize("leaks", [True, False])
def test_a_model_that_reads_another_mask_is_seen(built: Path, leaks: bool) -> None:
    """Branches see each other; or, cut off by their positions, not even what they branch from."""
    model = tiny("sdpa")
    forward = model.forward

    def call(**inputs: Any) -> Any:
        mask = inputs.get("attention_mask")
        wide = None if mask is None or not leaks else torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
        return forward(**{**inputs, "attention_mask": wide})

    model.forward = call
    report = check_trees(model, two_rows(built))
    assert not report.passed
    assert (report.moved > report.moved_tolerance) == leaks
    assert report.alone > report.alone_tolerance
    assert report.trained["loss"] > report.trained_tolerance
    assert "NOT ISOLATED" in str(report)


def test_rows_without_branches_show_nothing() -> None:
    ids = list(range(8))
    with pytest.raises(DataError, match="no tree of these rows has a branch"):
        check_trees(tiny("sdpa"), [{"input_ids": ids, "labels": ids, "position_ids": ids, "ends": [8] * 8}])


def test_the_command_checks_an_export_of_trees(built: Path, tmp_path: Path) -> None:
    tiny("sdpa", "Qwen3", torch.float32).save_pretrained(tmp_path / "model")
    export_dataset(built, "hf", tmp_path / "hf", max_length=LONGEST)
    call = ["isolate", str(tmp_path / "model"), str(tmp_path / "hf"), "--split", "train", "--max-length", str(LONGEST)]
    done = CliRunner().invoke(app, [*call, "--gradients", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["trained"].keys() == {"loss", "gradients"}
    assert CliRunner().invoke(app, [*call[:2], "--gradients"]).exit_code != 0
