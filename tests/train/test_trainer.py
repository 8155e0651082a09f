"""The trainer: packing, splits and ranks change speed and nothing else; a tiny model learns, answers and stops."""

from __future__ import annotations

import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.core.conversation import Role
from chatmill.errors import ConfigError, DataError, UnknownNameError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.make import make_loader
from chatmill.load.mixture import MixtureLoader
from chatmill.render.registry import bind
from chatmill.train.batch import TrainBatch, as_batch
from chatmill.train.config import TrainConfig
from chatmill.train.feed import span_feed
from chatmill.train.generate import FinishReason, Sampling
from chatmill.train.gpt import GPT
from chatmill.train.phase import learning_rate, warmup_steps
from chatmill.train.prompt import ask
from chatmill.train.ranks import Ranks
from chatmill.train.step import Stepper, make_optimizer
from chatmill.train.trainer import FitResult, RunOutcome, fit
from tests.load.sets import Item, items, write_set
from tests.train.ranks import run_two_ranks
from tests.train.tiny import (
    gpt2_chatml,
    prompt_of,
    short_conversations,
    tiny_gpt,
    write_episodes,
)

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world=1, device=CPU, group=None)
PAD = 96


def small_items(count: int, *, seed: int = 0, fractional: bool = False) -> list[Item]:
    """Episodes of ids below 96, some of whose tokens are trained."""
    made = items(count, seed=seed, low=2, high=14, fractional=fractional)
    return [Item(ids=[(i * 7 + t * 3) % PAD for t, i in enumerate(item.ids)], weights=item.weights) for item in made]


def loader_over(directory: Path, **options: Any) -> GPTEpisodeDataLoader:
    settings = {
        "batch_size": 4,
        "block_size": 16,
        "dataset_mode": "sft_episode",
        "pad_token_id": PAD,
        "use_loss_mask": True,
    }
    loader_options = {name: options.pop(name) for name in ("pack", "rank", "world_size") if name in options}
    made = make_loader(settings | options, directory, **loader_options)
    assert isinstance(made, GPTEpisodeDataLoader)
    return made


def gradients(model: GPT, batches: list[TrainBatch], **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    stepper = Stepper(model, TrainConfig(**options), ALONE)
    result = stepper.gradients(batches)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return stepper.values(result)["loss"], found


def assert_equal_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 10
    for name in a:
        assert (a[name] - b[name]).abs().max() < 1e-9, name
    assert max(float(grad.abs().max()) for grad in a.values()) > 1e-3


@pytest.mark.parametrize("loss", ["token", "weighted", "document"])
def test_packed_and_unpacked_give_the_same_loss_and_gradient(tmp_path: Path, loss: str) -> None:
    write_set(tmp_path, small_items(24, fractional=True), mask="<f4")
    model = tiny_gpt(init_std=0.3).double()
    plain = loader_over(tmp_path, epoch_shuffle=False, batch_size=24)
    packed = loader_over(tmp_path, epoch_shuffle=False, pack=True, batch_size=1, epoch_drop_last=False)
    one = [as_batch(plain.get_batch(), CPU)]
    rows = [as_batch(packed.get_batch(), CPU) for _ in range(packed.steps_per_epoch())]
    assert 8 <= len(rows) < 20
    loss_plain, plain_gradients = gradients(model, one, loss=loss)
    loss_packed, packed_gradients = gradients(model, rows, loss=loss)
    assert loss_packed == pytest.approx(loss_plain, abs=1e-9)
    assert_equal_gradients(plain_gradients, packed_gradients)


def test_any_split_into_micro_batches_gives_the_same(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(24))
    model = tiny_gpt(init_std=0.3, tied=False).double()
    results = []
    for size in (24, 8, 3):
        loader = loader_over(tmp_path, epoch_shuffle=False, batch_size=size)
        batches = [as_batch(loader.get_batch(), CPU) for _ in range(24 // size)]
        results.append(gradients(model, batches))
    for loss, found in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-9)
        assert_equal_gradients(found, results[0][1])


def test_the_loss_equals_a_loop_over_single_targets(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(6))
    model = tiny_gpt(init_std=0.3).double()
    x, y, mask = loader_over(tmp_path, batch_size=6).get_batch()
    losses = []
    for row, place in itertools.product(range(6), range(16)):
        if mask[row, place]:
            logits = model(x[row : row + 1, : place + 1])[0, -1]
            losses.append(-logits.log_softmax(-1)[y[row, place]].item())
    assert len(losses) > 10
    got, _ = gradients(model, [as_batch((x, y, mask), CPU)])
    assert got == pytest.approx(math.fsum(losses) / len(losses), abs=1e-9)


def test_both_loaders_and_a_mixture_fit_unchanged(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(30), small_items(9, seed=1))
    stream = make_loader({"batch_size": 4, "block_size": 16, "use_loss_mask": True}, tmp_path)
    config = {"batch_size": 4, "block_size": 16, "dataset_mode": "sft_episode", "pad_token_id": PAD}
    mixture = MixtureLoader(config | {"use_loss_mask": True}, {str(tmp_path): 1.0})
    for loader in (stream, loader_over(tmp_path), loader_over(tmp_path, pack=True), mixture):
        result = tiny_gpt().fit(loader, steps=6, learning_rate=1e-2, log_every=1, eval_batches=2)
        losses = [values["loss"] for values in result.history if "loss" in values]
        assert len(losses) == 6
        assert losses[-1] < losses[0]
        assert "val_loss" in result.history[-1]
    with pytest.raises(ConfigError, match="never ends"):
        tiny_gpt().fit(stream)


def test_epochs_count_the_batches_of_the_loader(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(22))
    result = tiny_gpt().fit(loader_over(tmp_path), epochs=3, accumulation=2)
    assert result.step == math.ceil(3 * 5 / 2)
    plain = [loader_over(tmp_path).get_batch() for _ in range(3)]
    assert tiny_gpt().fit(plain).step == 3


def test_data_that_ends_early_is_logged_measured_and_saved(tmp_path: Path) -> None:
    write_set(tmp_path / "set", small_items(22), small_items(8, seed=1))
    loader = loader_over(tmp_path / "set")
    batches = [loader.get_batch() for _ in range(5)]
    result = tiny_gpt().fit(batches, val_loader=loader, steps=50, log_every=20, out=tmp_path / "run")
    assert (result.step, result.outcome) == (5, RunOutcome.FINISHED)
    assert result.loss is not None
    assert [values["step"] for values in result.history] == [5, 5]
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step_00000005"
    with pytest.raises(ConfigError, match="plain iterable"):
        tiny_gpt().fit(batches, steps=50, out=tmp_path / "run")


@pytest.mark.filterwarnings("ignore:mkldnn")
def test_every_evaluation_reads_the_same_batches_of_a_list(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(24))
    loader = loader_over(tmp_path)
    val = [loader.get_batch() for _ in range(4)]
    result = tiny_gpt().fit(loader, val_loader=val, steps=3, eval_every=1, eval_batches=2)
    tokens = [values["val_tokens"] for values in result.history if "val_tokens" in values]
    assert tokens == [float(sum(batch[2].sum() for batch in val[:2]))] * 3
    val[0][0][0, 0] = 10_000
    with pytest.raises(DataError, match="has the id 10,000"):
        tiny_gpt().fit(loader, val_loader=val, steps=1)


def test_bfloat16_autocast_stays_near_float32(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(22))
    losses = {}
    for precision in ("fp32", "bf16"):
        result = tiny_gpt().fit(loader_over(tmp_path, pack=True), steps=4, precision=precision, log_every=1)
        losses[precision] = [values["loss"] for values in result.history]
        assert all(p.dtype == torch.float32 for p in tiny_gpt().parameters())
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.02)


def test_the_loss_of_spans_says_what_it_misses(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(22))
    with pytest.raises(ConfigError, match="stores kinds"):
        tiny_gpt().fit(loader_over(tmp_path), steps=1, loss="span")


def test_collated_and_megatron_batches_are_read(tmp_path: Path) -> None:
    class Special:
        pad_token_id = eos_token_id = 2

    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10], "document_starts": [0, 3]},
        {"input_ids": [5, 6], "document_starts": [0]},
    ]
    made = as_batch(DataCollatorForCausalLM(Special(), return_seq_idx=True)(rows), CPU)
    assert made.labels.tolist() == [[6, 7, -100, 9, 10, -100], [6, -100, -100, -100, -100, -100]]
    assert made.documents.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2]
    megatron = {
        "tokens": torch.tensor([[5, 6, 7]]),
        "labels": torch.tensor([[6, 7, 8]]),
        "loss_mask": torch.tensor([[0.0, 1.0, 1.0]]),
        "position_ids": torch.arange(3)[None],
        "span_id": torch.tensor([[0, 1, 2]]),
    }
    batch = as_batch(megatron, CPU)
    stepper = Stepper(tiny_gpt().double(), TrainConfig(loss="span", w_r=2.0, w_f=0.5), ALONE)
    values = stepper.values(stepper.gradients([batch]))
    assert values["tokens_r"] == values["tokens_f"] == 1
    assert values["loss"] == pytest.approx(2 * values["loss_r"] + 0.5 * values["loss_f"])
    assert values["spans"]["reasoning"]["loss"] == pytest.approx(values["loss_r"])
    assert values["trained_tokens"] == 2
    for bad in ((torch.ones(1, 2),), {"labels": torch.ones(1, 2)}, 5):
        with pytest.raises(DataError, match="wanted"):
            as_batch(bad, CPU)


def test_spans_come_from_the_stored_kinds(tmp_path: Path) -> None:
    from chatmill.store.episode_writer import EpisodeWriter

    header, content, reasoning, user = 33, 34, 35, 26  # assistant.header, .content, .reasoning, user.content
    kinds = [user, header, reasoning, reasoning, content, content, content]
    weights = [0, 0, 1, 1, 1, 1, 1]
    with EpisodeWriter(tmp_path, "train") as writer:
        for first in range(0, 40, 5):
            writer.append([first + t for t in range(7)], weights, kinds=kinds)
    for pack in (False, True):
        loader = loader_over(tmp_path, pack=pack)
        feed = span_feed(loader, "train")
        assert feed is not None
        for _ in range(5):
            mask = loader.get_batch()[2]
            spans = feed.batch(loader.last_step())[2]
            assert set(spans[mask > 0].tolist()) == {1, 2}
            assert int((spans == 1).sum()) * 3 == int(((spans == 2) & (mask > 0)).sum()) * 2
    result = tiny_gpt().fit(loader_over(tmp_path), steps=2, log_every=1)
    spans = result.history[0]["spans"]
    assert (spans["reasoning"]["tokens"], spans["final"]["tokens"]) == (8, 12)
    whole = (8 * spans["reasoning"]["loss"] + 12 * spans["final"]["loss"]) / 20
    assert result.history[0]["loss"] == pytest.approx(whole)
    assert span_feed(object(), "train") is None


def test_the_rate_rises_and_falls() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_pct=0.03, min_lr_ratio=0.1)
    assert warmup_steps(config, 100) == 3
    assert warmup_steps(config, 101) == 4
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(TrainConfig(warmup_pct=0.0, learning_rate=1.0), 0, 1) == pytest.approx(0.1)
    groups = make_optimizer(tiny_gpt(), config).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim == 1 for p in groups[1]["params"])


def test_clipping_bounds_the_update(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(8))
    batch = as_batch(loader_over(tmp_path).get_batch(), CPU)
    model = tiny_gpt(init_std=0.3)
    stepper = Stepper(model, TrainConfig(clip=1e-3), ALONE)
    seen: list[float] = []
    stepper.optimizer.step = lambda *a, **k: seen.append(  # type: ignore[method-assign]
        float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])))
    )
    result = stepper.step([batch], 1e-3)
    assert result.grad_norm is not None
    assert float(result.grad_norm) > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_options_are_checked() -> None:
    for bad, word in (
        ({"learning_rate": 0}, "learning_rate"),
        ({"warmup_pct": 1.5}, "warmup_pct"),
        ({"steps": 2.5}, "steps"),
        ({"loss": "mean"}, "loss"),
        ({"steps": 3, "epochs": 1}, "one of them"),
        ({"post_training": True, "epochs": 2}, "one pass"),
        ({"compile": "maybe"}, "compile"),
    ):
        with pytest.raises(ConfigError, match=word):
            TrainConfig(**bad)  # type: ignore[arg-type]
    assert TrainConfig.of({"learning_rate": "1e-3", "post_training": "1"}).post_training
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        TrainConfig.of({"learning_rat": 1})
    with pytest.raises(UnknownNameError, match="Known"):
        TrainConfig.of({"zzz": 1})


def test_padding_without_masks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_set(tmp_path, small_items(8), mask=None)
    with caplog.at_level(logging.WARNING, "chatmill.train"):
        tiny_gpt().fit(loader_over(tmp_path, use_loss_mask=False), steps=2)
    assert [record.message for record in caplog.records if "padding included" in record.message]


TWO = """
import json, sys
from pathlib import Path
import torch
from tests.train.test_trainer import loader_over
from tests.train.tiny import tiny_gpt
from chatmill.load.placement import rank_and_world
rank, world = rank_and_world()
loader = loader_over(Path(sys.argv[2]), batch_size=4 // world, pack=sys.argv[4] == "pack")
result = tiny_gpt().fit(loader, steps=12, learning_rate=1e-2, accumulation=2, log_every=1, out=sys.argv[3])
if rank == 0:
    Path(sys.argv[3], "losses.json").write_text(json.dumps(result.history))
"""


def test_one_process_and_two_give_the_same_curve(tmp_path: Path) -> None:
    write_set(tmp_path / "set", small_items(40), small_items(8, seed=1))
    script = tmp_path / "two.py"
    script.write_text(TWO)
    run_two_ranks(script, tmp_path / "set", tmp_path / "two", "pack", preload=("tests.train.test_trainer",))
    two = json.loads((tmp_path / "two" / "losses.json").read_text())
    loader = loader_over(tmp_path / "set", pack=True)
    one = tiny_gpt().fit(loader, steps=12, learning_rate=1e-2, accumulation=2, log_every=1).history
    assert len(one) == len(two) == 13
    for a, b in zip(one, two, strict=True):
        names = [name for name in ("loss", "val_loss", "trained_tokens", "grad_norm") if name in a]
        assert names
        for name in names:
            assert a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-5), (name, a, b)
    assert one[0]["loss"] - one[11]["loss"] > 0.05
    # the checkpoint of two ranks goes on with one
    more = tiny_gpt().fit(loader_over(tmp_path / "set", pack=True), steps=14, accumulation=2, out=tmp_path / "two")
    assert (more.outcome, more.step) == (RunOutcome.FINISHED, 14)


def test_a_tiny_model_overfits_real_conversations_answers_and_stops(tmp_path: Path) -> None:
    conversations = short_conversations(50)[:6]
    assert len({prompt_of(c) for c in conversations}) == 6
    write_episodes(tmp_path, conversations)
    loader = loader_over(
        tmp_path, batch_size=1, block_size=128, pad_token_id=gpt2_chatml().eos_id, pack=True, epoch_drop_last=False
    )
    model = tiny_gpt(gpt2_chatml().vocab_size)
    result: FitResult = fit(model, loader, steps=40, learning_rate=2e-2, warmup_pct=0.1, weight_decay=0.0, log_every=10)
    losses = [values["loss"] for values in result.history]
    assert losses[-1] < 0.2 < losses[0]
    template = bind("chatml", gpt2_chatml())
    answered = 0
    for conversation in conversations:
        said = [message for message in conversation.messages if message.role is not Role.ASSISTANT]
        answer = ask(model, template, said, sampling=Sampling(max_new_tokens=64))
        assert answer.generated.finish is FinishReason.STOP
        assert answer.stop == "<|im_end|>"
        answered += answer.text == conversation.messages[-1].content
    assert answered >= 3
