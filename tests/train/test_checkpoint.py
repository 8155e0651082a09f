"""Checkpoints: whole or not there, read by others, and a resumed run goes exactly where an unbroken one goes."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chatmill.errors import ConfigError, FormatError
from chatmill.train.checkpoint import checkpoints, find_checkpoint, read_state
from chatmill.train.foreign_model import ForeignModel, load_foreign
from chatmill.train.generate import Sampling, generate
from chatmill.train.gpt import GPT
from chatmill.train.open_model import open_model
from chatmill.train.trainer import FitResult, RunOutcome
from tests.forked import Forked
from tests.load.sets import write_set
from tests.train.test_trainer import loader_over, small_items
from tests.train.tiny import StopAfter, tiny_gpt

STEPS = 12
OPTIONS: dict[str, Any] = {"learning_rate": 1e-2, "log_every": 1, "eval_every": 4, "eval_batches": 2}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("set")
    write_set(directory, small_items(26), small_items(8, seed=1))
    return directory


class Dropping(GPT):
    """A GPT with dropout, so that randomness must go on as well."""

    def hidden_states(self, *arguments: Any) -> torch.Tensor:
        return nn.functional.dropout(super().hidden_states(*arguments), 0.3, self.training)


def model() -> GPT:
    torch.manual_seed(0)
    return Dropping(tiny_gpt().config)


def curve(result: FitResult) -> dict[tuple[int, str], float]:
    return {(v["step"], name): v[name] for v in result.history for name in ("loss", "val_loss") if name in v}


@pytest.fixture(scope="module")
def unbroken(dataset: Path) -> dict[tuple[int, str], float]:
    return curve(model().fit(loader_over(dataset, pack=True), steps=STEPS, **OPTIONS))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stop", [1, 5, 7])
def test_a_signal_saves_and_a_resume_gives_the_same_losses(
    dataset: Path, tmp_path: Path, unbroken: dict[tuple[int, str], float], number: int, stop: int
) -> None:
    before = signal.getsignal(number)
    loader = StopAfter(loader_over(dataset, pack=True), stop, number)
    first = model().fit(loader, steps=STEPS, out=tmp_path, **OPTIONS)
    assert (first.outcome, first.step, first.signal) == (RunOutcome.STOPPED, stop, number)
    assert signal.getsignal(number) is before
    torch.manual_seed(99)  # other weights and another generator: both come from the checkpoint
    second = Dropping(tiny_gpt().config).fit(loader_over(dataset, pack=True), steps=STEPS, out=tmp_path, **OPTIONS)
    assert second.outcome is RunOutcome.FINISHED
    assert curve(first) | curve(second) == unbroken
    assert not curve(first).keys() & curve(second).keys()
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == list(range(1, STEPS + 1))
    third = model().fit(loader_over(dataset, pack=True), steps=STEPS, out=tmp_path)
    assert (third.outcome, third.loss, third.step) == (RunOutcome.ALREADY_FINISHED, None, STEPS)


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from tests.train.test_checkpoint import OPTIONS, model
from tests.train.test_trainer import loader_over
import chatmill.train.checkpoint as checkpoint
written = checkpoint._write
def slow(path, tensors):
    # while step 9 is saved, a file is there and the checkpoint is not: the moment to be killed at
    written(path, tensors)
    if "step_00000009" in str(path) and len(sys.argv) > 4:
        print("saving", flush=True)
        import time; time.sleep(600)
checkpoint._write = slow
result = model().fit(loader_over(Path(sys.argv[2]), pack=True), steps=12, out=sys.argv[3], save_every=3, **OPTIONS)
print("done", flush=True)
"""


def test_sigkill_while_saving_leaves_the_checkpoint_before_it(
    dataset: Path, tmp_path: Path, unbroken: dict[tuple[int, str], float]
) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    root = str(Path(__file__).parents[2])
    killed = Forked(script, root, dataset, tmp_path / "out", "slow")
    while killed.heard() != "saving\n":
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [3, 6]
    assert (tmp_path / "out" / "checkpoints" / ".step_00000009.partial").exists()
    resumed = model().fit(loader_over(dataset, pack=True), steps=STEPS, out=tmp_path / "out", save_every=3, **OPTIONS)
    assert curve(resumed) == {key: loss for key, loss in unbroken.items() if key[0] > 6}
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [9, 12]
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [
        "step_00000009",
        "step_00000012",
    ]
    logged = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = {(entry["step"], "loss"): entry["loss"] for entry in logged if "loss" in entry}
    assert losses == {key: loss for key, loss in unbroken.items() if key[1] == "loss"}


def test_a_changed_spec_restarts_the_warmup_and_says_so(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tokenizer:
        fingerprint = "a"

    options: dict[str, Any] = {"learning_rate": 1.0e-3, "warmup_pct": 0.5, "log_every": 1, "out": tmp_path / "run"}

    def rates(result: FitResult) -> list[float]:
        return [values["lr"] for values in result.history if "lr" in values]

    first = model().fit(loader_over(dataset), steps=4, tokenizer=Tokenizer(), **options)
    assert rates(first)[:2] == pytest.approx([5e-4, 1e-3])
    with caplog.at_level("INFO", "chatmill.train"):
        same = model().fit(loader_over(dataset), steps=6, tokenizer=Tokenizer(), **options)
        assert (same.step, len(rates(same))) == (6, 2)
        assert "warmup restarts" not in caplog.text
        Tokenizer.fingerprint = "b"
        other = model().fit(loader_over(dataset), steps=4, tokenizer=Tokenizer(), **options)
        assert rates(other) == pytest.approx(rates(first))
        assert (other.step, read_state(find_checkpoint(tmp_path / "run")).phase_start) == (10, 6)
        assert re.search(r"tokenizer \(a -> b\); the warmup restarts", caplog.text)
        write_set(tmp_path / "other", small_items(20, seed=5))
        fresh = loader_over(tmp_path / "other")
        data = model().fit(fresh, steps=4, tokenizer=Tokenizer(), **options)
        assert rates(data) == pytest.approx(rates(first))
        assert "data (" in caplog.text
        mode = model().fit(loader_over(tmp_path / "other"), post_training=True, tokenizer=Tokenizer(), **options)
        assert (mode.step, len(rates(mode))) == (14 + 5, 5)
        assert "mode (training -> post_training)" in caplog.text


def test_checkpoints_are_read_by_safetensors_and_opened_again(dataset: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trained = model()
    trained.fit(loader_over(dataset), steps=3, out=tmp_path, notes={"template": "chatml"})
    folder = find_checkpoint(tmp_path)
    assert folder == find_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == dict(trained.named_parameters()).keys()
    for name, parameter in trained.named_parameters():
        assert torch.equal(stored[name], parameter)
    moments = load_file(folder / "optimizer.safetensors")
    assert len(moments) == 3 * len(stored)
    assert read_state(folder).notes == {"template": "chatml"}
    again = open_model(tmp_path)
    assert torch.equal(again(torch.tensor([[1, 2, 3]])), trained.eval()(torch.tensor([[1, 2, 3]])))


def test_damage_and_other_models_are_told(dataset: Path, tmp_path: Path) -> None:
    model().fit(loader_over(dataset), steps=2, out=tmp_path)
    folder = find_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="holds another model"):
        tiny_gpt(hidden=64).fit(loader_over(dataset), steps=3, out=tmp_path)
    with pytest.raises(ConfigError, match="resume, or choose another"):
        model().fit(loader_over(dataset), steps=3, out=tmp_path, resume=False)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(FormatError, match="no whole safetensors file"):
        open_model(tmp_path)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"version": 9}))
    with pytest.raises(FormatError, match="version 9"):
        read_state(folder)
    (folder / "state.json").unlink()
    with pytest.raises(ConfigError, match="holds no model"):
        open_model(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint"):
        find_checkpoint(tmp_path)


def tiny_foreign(kind: str, folder: Path) -> Path:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    if kind == "gpt2":
        config: Any = hf.GPT2Config(vocab_size=97, n_layer=2, n_head=4, n_embd=32, n_positions=64)
    else:
        make = {"qwen3": hf.Qwen3Config, "llama": hf.LlamaConfig}[kind]
        config = make(**sizes, num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=64)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_transformers_folder_trains_in_the_same_trainer(kind: str, dataset: Path, tmp_path: Path) -> None:
    source = tiny_foreign(kind, tmp_path / "source")
    foreign = load_foreign(source)
    assert foreign.head_is_linear
    packed = foreign.fit(loader_over(dataset, pack=True), steps=8, out=tmp_path / "run", **OPTIONS)
    losses = [values["loss"] for values in packed.history if "loss" in values]
    assert losses[-1] < losses[0] - 0.02
    if kind != "qwen3":
        return
    whole = curve(packed)
    first = load_foreign(source).fit(
        StopAfter(loader_over(dataset, pack=True), 5, signal.SIGTERM), steps=8, out=tmp_path / "broken", **OPTIONS
    )
    second = load_foreign(source).fit(loader_over(dataset, pack=True), steps=8, out=tmp_path / "broken", **OPTIONS)
    assert curve(first) | curve(second) == whole
    opened = open_model(tmp_path / "run")
    assert isinstance(opened, ForeignModel)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(opened.inner(ids).logits, foreign.inner.eval()(ids).logits)
    said = generate(opened, [1, 2, 3], sampling=Sampling(max_new_tokens=4))
    assert len(said.ids) == 4


def test_a_foreign_model_gives_the_same_packed_and_unpacked(dataset: Path, tmp_path: Path) -> None:
    foreign = load_foreign(tiny_foreign("qwen3", tmp_path / "source"), dtype=torch.float64)
    plain = loader_over(dataset, epoch_shuffle=False, batch_size=26)
    packed = loader_over(dataset, epoch_shuffle=False, pack=True, batch_size=2, epoch_drop_last=False)
    from tests.train.test_trainer import CPU, as_batch, assert_equal_gradients, gradients

    one = gradients(foreign, [as_batch(plain.get_batch(), CPU)])  # type: ignore[arg-type]
    rows = [as_batch(packed.get_batch(), CPU) for _ in range(packed.steps_per_epoch())]
    other = gradients(foreign, rows)  # type: ignore[arg-type]
    assert one[0] == pytest.approx(other[0], abs=1e-9)
    assert_equal_gradients(one[1], other[1])


def test_a_head_that_does_more_than_a_product_takes_the_way_over_logits(dataset: Path, tmp_path: Path) -> None:
    class Capped(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.config, self.dtype = inner.config, inner.dtype

        @property
        def base_model(self) -> Any:
            return self.inner.base_model

        def get_output_embeddings(self) -> Any:
            return self.inner.get_output_embeddings()

        def forward(
            self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None, use_cache: Any = None
        ) -> Any:
            out = self.inner(
                input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=use_cache
            )
            out.logits = torch.tanh(out.logits * 10) * 2
            return out

    plain = load_foreign(tiny_foreign("llama", tmp_path / "source"))
    capped = ForeignModel(Capped(plain.inner))
    assert not capped.head_is_linear
    result = capped.fit(loader_over(dataset, pack=True), steps=2, log_every=1)
    assert len(result.history) == 3


def test_tensorboard_and_jsonl_hold_the_same_numbers(dataset: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model().fit(loader_over(dataset), steps=3, log_every=1, out=tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["loss"] for entry in logged if "loss" in entry}
    assert len(losses) == 3
    assert shown == pytest.approx(losses, rel=1e-6)
    assert {"start", "checkpoint"} <= {entry.get("event") for entry in logged}
