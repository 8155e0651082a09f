"""The reference loop: packing, batch sizes, kills and resumes change nothing in what is learnt."""

from __future__ import annotations

import copy
import itertools
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.core.publish import temporary_beside
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.load.stream_blocks import StreamBlockLoader
from chatmill.load.token_stream import make_loader
from chatmill.train.checkpoint import checkpoints, read_state
from chatmill.train.options import TrainOptions, checked
from chatmill.train.trainer import Batch, FitResult, RunOutcome, _Run, fit, learning_rate, make_optimizer
from tests.load.hybrids import model as hybrid
from tests.load.hybrids import tiny_config
from tests.load.sets import Item, write_set
from tests.train.tiny import StopAfter, loader_over, numbered, small_items, tiny_model

STEPS = 12
OPTIONS: dict[str, Any] = {"learning_rate": 1e-2, "log_every": 1, "eval_every": 4}
Targets = Counter[tuple[int, int]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set"), small_items(26), small_items(8, seed=1))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of all steps that are taken from here on."""
    batches: list[Batch] = []
    gradients = _Run._gradients

    def recorded(run: _Run, given: list[Batch]) -> Any:
        batches.extend(given)
        return gradients(run, given)

    monkeypatch.setattr(_Run, "_gradients", recorded)
    return batches


def targets_of(batches: list[Batch]) -> Targets:
    """What is trained, as (the token before, the target)."""
    found: Targets = Counter()
    for batch in batches:
        here = batch.weights != 0
        found.update(zip(batch.inputs["input_ids"][here].tolist(), batch.labels[here].tolist(), strict=True))
    return found


def gradients(model: Any, loader: Any, batches: int) -> tuple[float, dict[str, torch.Tensor]]:
    run = _Run(model, loader, None, TrainOptions())
    loss = run._gradients([run._batch(loader.get_batch()) for _ in range(batches)]).values()["loss"]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss, found


# ---- what a step computes


def test_packed_unpacked_and_any_micro_batches_give_the_same_loss_and_gradient(tmp_path: Path) -> None:
    """And the loss is what its definition says."""
    write_set(tmp_path, small_items(24, fractional=True), mask="<f4")
    model = tiny_model(initializer_range=0.3).double()
    packed = loader_over(tmp_path, epoch_shuffle=False, pack=True, batch_size=1, epoch_drop_last=False)
    assert 8 <= packed.steps_per_epoch() < 20
    x, y, mask = loader_over(tmp_path, epoch_shuffle=False, batch_size=24).get_batch()
    with torch.no_grad():
        logprobs = model(x).logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    loss = -float((logprobs * mask).sum() / mask.sum())
    wanted: dict[str, torch.Tensor] = {}
    for size in (24, 8, 3, 1):
        one = packed if size == 1 else loader_over(tmp_path, epoch_shuffle=False, batch_size=size)
        other, found = gradients(model, one, packed.steps_per_epoch() if size == 1 else 24 // size)
        wanted = wanted or found
        assert other == pytest.approx(loss, abs=1e-9)
        assert found.keys() == wanted.keys()
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-9
    assert max(float(grad.abs().max()) for grad in wanted.values()) > 1e-3


def test_a_hybrid_that_cannot_read_packed_rows_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_set(tmp_path, small_items(12))
    bare = AutoModelForCausalLM.from_config(tiny_config("nemotron_h"))
    for model, why in ((bare, "without `causal_conv1d`"), (hybrid("jamba"), "nothing that a batch can hold")):
        with pytest.raises(ConfigError, match=f"(?s){why}.*pack: false"):
            fit(model, loader_over(tmp_path, pack=True), steps=1)
        fit(copy.deepcopy(model), loader_over(tmp_path), steps=1)
    batch: Any = loader_over(tmp_path, pack=True, block_size=12).get_batch()
    with pytest.raises(ConfigError, match=r"12 tokens.*multiple of 8"):
        batch.inputs(hybrid("nemotron_h"))


def test_the_rate_rises_and_falls_and_vectors_do_not_decay() -> None:
    options = TrainOptions(learning_rate=1.0)
    rates = [learning_rate(options, step, 100) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    groups = make_optimizer(tiny_model(), options).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim == 1 for p in groups[1]["params"])


# ---- data and length


def test_what_does_not_fit_is_refused(dataset: Path, tmp_path: Path) -> None:
    write_set(tmp_path / "large", [Item(ids=[2, 3, 97, 4], weights=[1] * 4)])
    write_set(tmp_path / "idle", [Item(ids=[2, 3, 4, 5], weights=[0] * 4)] * 4)
    write_set(tmp_path / "plain", small_items(9))
    leaking = tiny_model(attn_implementation="eager")
    forward = leaking.forward
    leaking.forward = lambda input_ids, **boundaries: forward(input_ids, use_cache=False)
    for model, loader, options, error, says in (
        (
            None,
            loader_over(tmp_path / "large", batch_size=1),
            {},
            DataError,
            "the id 97, and the model has 97 embeddings",
        ),
        (None, loader_over(tmp_path / "idle"), {"out": tmp_path}, DataError, "no token was trained in 2 steps"),
        (leaking, loader_over(dataset, pack=True), {}, ConfigError, r"see each other(.|\n)*NOT ISOLATED"),
    ):
        with pytest.raises(error, match=says):
            fit(model or tiny_model(), loader, steps=2, **options)
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"learning_rate": 0}, r"learning_rate: .* \(found 0\)"),
        ({"warmup_pct": 1.5}, r"warmup_pct: .* \(found 1.5\)"),
        ({"steps": 2.5}, r"steps: .* \(found 2.5\)"),
        ({"loss": "span"}, "unknown training option 'loss'"),
        ({"steps": 3, "epochs": 1}, "one of them"),
        ({"post_training": True, "epochs": 2}, "one pass"),
        ({"learning_rat": 1}, "Did you mean 'learning_rate'"),
    ],
)
def test_options_are_checked(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(TrainOptions, bad)
    text = checked(TrainOptions, {"learning_rate": "1e-3", "post_training": "1", "steps": "4"})
    assert (text.learning_rate, text.post_training, text.steps) == (1e-3, True, 4)


# ---- stopping and resuming


def dropping() -> Any:
    """A model with dropout, so that randomness must resume as well."""
    return tiny_model(attention_dropout=0.3)


def curve(*results: FitResult) -> dict[tuple[int, str], float]:
    history = itertools.chain.from_iterable(result.history for result in results)
    return {(v["step"], name): v[name] for v in history for name in ("loss", "val_loss") if name in v}


def logged_steps(folder: Path) -> list[int]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [entry["step"] for entry in entries if "loss" in entry]


@pytest.fixture(scope="module")
def unbroken(dataset: Path) -> dict[tuple[int, str], float]:
    return curve(fit(dropping(), loader_over(dataset, pack=True), steps=STEPS, **OPTIONS))


@pytest.mark.parametrize(("number", "stop"), [(signal.SIGTERM, 1), (signal.SIGINT, 5)])
def test_a_signal_saves_and_a_resume_gives_the_same_losses(
    dataset: Path, tmp_path: Path, unbroken: dict[tuple[int, str], float], number: int, stop: int
) -> None:
    before = signal.getsignal(number)
    loader = loader_over(dataset, pack=True)
    StopAfter(loader, stop, number)
    first = fit(dropping(), loader, steps=STEPS, out=tmp_path, **OPTIONS)
    assert (first.outcome, first.step, first.signal) == (RunOutcome.STOPPED, stop, number)
    assert signal.getsignal(number) is before
    other = dropping()
    torch.nn.init.zeros_(other.lm_head.weight)  # weights come from the checkpoint
    second = fit(other, loader_over(dataset, pack=True), steps=STEPS, out=tmp_path, **OPTIONS)
    assert second.outcome is RunOutcome.FINISHED
    assert curve(first, second) == unbroken
    assert logged_steps(tmp_path) == list(range(1, STEPS + 1))
    third = fit(dropping(), loader_over(dataset, pack=True), steps=STEPS, out=tmp_path)
    assert (third.outcome, third.loss, third.step) == (RunOutcome.ALREADY_FINISHED, None, STEPS)


def test_a_kill_while_saving_leaves_the_checkpoint_before_it(
    dataset: Path, tmp_path: Path, unbroken: dict[tuple[int, str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill leaves is what stood there at that moment: the folder with a temporary name."""
    model, saved = dropping(), []
    save = type(model).save_pretrained

    def killed(self: Any, folder: Path, **more: Any) -> None:
        save(self, folder, **more)
        saved.append(folder)
        if len(saved) == 3:
            folder.rename(temporary_beside(folder))  # else the exit removes it
            raise SystemExit

    monkeypatch.setattr(type(model), "save_pretrained", killed)
    with pytest.raises(SystemExit):
        fit(model, loader_over(dataset, pack=True), steps=STEPS, out=tmp_path, save_every=3, **OPTIONS)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000003", "step_00000006"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
    resumed = fit(dropping(), loader_over(dataset, pack=True), steps=STEPS, out=tmp_path, save_every=3, **OPTIONS)
    assert curve(resumed) == {key: loss for key, loss in unbroken.items() if key[0] > 6}
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000009", "step_00000012"]
    assert logged_steps(tmp_path) == [*range(1, 10), *range(7, STEPS + 1)]


@pytest.mark.parametrize(
    ("data", "before", "after"),
    [
        ("stream", (2, 1), (1, 3)),
        ("episodes", (1, 3), (16, 1)),
        ("packed", (16, 1), (2, 1)),
        ("packed", (2, 1), (1, 3)),
    ],
)
def test_a_run_resumes_with_another_batch_size_and_sees_the_rest_once(
    data: str, before: Any, after: Any, dataset: Path, tmp_path: Path, trained: list[Batch]
) -> None:
    """`before` and `after` are batch sizes and accumulations before and after the stop."""

    def loader(size: int) -> Any:
        if data == "stream":
            return StreamBlockLoader(numbered(), batch_size=size, eos_id=0)
        return loader_over(dataset, batch_size=size, pack=data == "packed", epoch_drop_last=False)

    length = {"post_training": True} if data == "stream" else {"epochs": 2}
    fit(tiny_model(num_hidden_layers=1), loader(8), **length)
    wanted = targets_of(trained)
    trained.clear()
    for (size, accumulation), is_first in ((before, True), (after, False)):
        taken = loader(size)
        if is_first:
            StopAfter(taken, accumulation, signal.SIGTERM)
        how = {"accumulation": accumulation, "log_every": 1, "warmup_pct": 0.0, **length}
        done = fit(tiny_model(num_hidden_layers=1), taken, out=tmp_path, **how)
        assert done.outcome is (RunOutcome.STOPPED if is_first else RunOutcome.FINISHED)
    assert targets_of(trained) == wanted
    assert [v["lr"] for v in done.history if "lr" in v][-1] == pytest.approx(3e-5), "the schedule ends with the data"
    again = fit(tiny_model(num_hidden_layers=1), loader(3), out=tmp_path, **length)
    assert again.outcome is RunOutcome.ALREADY_FINISHED


def test_a_changed_spec_restarts_the_warmup_and_says_so(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "chatmill.train")

    def run(folder: Path = dataset, **more: Any) -> tuple[int, list[float]]:
        own = {"learning_rate": 1.0e-3, "warmup_pct": 0.5, "log_every": 1, "out": tmp_path / "run", "steps": 4, **more}
        result = fit(tiny_model(), loader_over(folder, epoch_drop_last=False), **own)
        return result.step, [values["lr"] for values in result.history if "lr" in values]

    _, first = run(tokenizer="a")
    assert first[:2] == pytest.approx([5e-4, 1e-3])
    step, same = run(tokenizer="a", steps=6)
    assert (step, len(same)) == (6, 2)
    assert "warmup restarts" not in caplog.text
    assert run(tokenizer="b") == (10, pytest.approx(first))
    assert read_state(checkpoints(tmp_path / "run")[-1]).phase_start == 6
    assert "tokenizer (a -> b); the warmup restarts" in caplog.text
    write_set(tmp_path / "other", small_items(20, seed=5))
    assert run(tmp_path / "other", tokenizer="b") == (14, pytest.approx(first))
    assert "data (" in caplog.text
    step, rates = run(tmp_path / "other", tokenizer="b", post_training=True, steps=None)
    assert (step, rates[:4]) == (14 + 5, pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 5.5e-4]))
    assert len(rates) == 5
    assert "mode (training -> post_training)" in caplog.text


def test_checkpoints_are_models_of_transformers_and_damage_is_told(dataset: Path, tmp_path: Path) -> None:
    import transformers as hf

    model = tiny_model()
    folder = fit(model, loader_over(dataset), steps=2, out=tmp_path).checkpoint
    assert folder is not None
    ids = torch.tensor([[1, 2, 3]])
    stored = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(stored(ids).logits, model.eval()(ids).logits)

    def refused(says: str, vocabulary: int = 97, **options: Any) -> None:
        with pytest.raises(ConfigError, match=says):
            fit(tiny_model(vocabulary), loader_over(dataset), steps=3, out=tmp_path, **options)

    refused("holds another model", 120)
    refused("resume, or choose another", resume=False)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    refused("or is damaged")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"version": 9}))
    with pytest.raises(FormatError, match="version 9"):
        read_state(folder)


def test_both_loaders_learn_and_say_how_long(dataset: Path, trained: list[Batch]) -> None:
    wanted = sum(weight != 0 for item in small_items(8, seed=1) for weight in item.weights[1:])
    stream = make_loader({"batch_size": 4, "block_size": 16, "use_loss_mask": True}, dataset)
    for loader in (stream, loader_over(dataset), loader_over(dataset, pack=True)):
        history = fit(tiny_model(), loader, steps=6, **OPTIONS | {"eval_every": 2}).history
        losses = [v["loss"] for v in history if "loss" in v]
        assert len(losses) == 6
        assert losses[-1] < losses[0]
        if loader is not stream:  # an evaluation reads all of val, and moves nothing
            assert [entry["val_tokens"] for entry in history if "val_loss" in entry] == [wanted] * 3
    with pytest.raises(ConfigError, match="never ends"):
        fit(tiny_model(), stream, epochs=1)
    with pytest.raises(ConfigError, match="set steps or epochs"):
        fit(tiny_model(), loader_over(dataset))
    # A pass ends with its data: 7 batches at 2 a step are 4 steps, and the last has one, not one of the next epoch.
    trained.clear()
    assert fit(tiny_model(), loader_over(dataset, epoch_drop_last=False), epochs=1, accumulation=2).step == 4
    assert len(trained) == 7
