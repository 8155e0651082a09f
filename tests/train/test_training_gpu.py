"""On a CUDA device: every kernel gives the same loss and gradient, and a resumed run goes on exactly."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.load.make import make_loader
from chatmill.train.batch import as_batch
from chatmill.train.config import TrainConfig
from chatmill.train.gpt import GPT, GPTConfig
from chatmill.train.ranks import Ranks
from chatmill.train.step import Stepper
from chatmill.train.trainer import RunOutcome
from tests.train.tiny import StopAfter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG: dict[str, Any] = {"batch_size": 4, "block_size": 256, "dataset_mode": "sft_episode", "pad_token_id": 500}


def written(directory: Path) -> Path:
    """Episodes of 20 to 120 tokens, half of them trained."""
    random = np.random.RandomState(0)
    lengths = random.randint(20, 121, 60)
    (directory / "train").mkdir(parents=True)
    random.randint(0, 500, lengths.sum()).astype("<u4").tofile(directory / "train" / "tokens.bin")
    random.randint(0, 2, lengths.sum()).astype("u1").tofile(directory / "train" / "mask.bin")
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    np.stack([starts, lengths], axis=1).astype("<u8").tofile(directory / "train" / "episodes.idx")
    return directory


def model(attention: str = "auto") -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=512, layers=2, hidden=256, heads=4, kv_heads=2, init_std=0.05), attention=attention)


def gradients(directory: Path, attention: str, precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    ranks = Ranks(rank=0, world=1, device=torch.device("cuda"), group=None)
    own = model(attention)
    stepper = Stepper(own, TrainConfig(precision=precision), ranks)  # type: ignore[arg-type]
    loader = make_loader(CONFIG | {"use_loss_mask": True}, directory, pack=True)
    result = stepper.gradients([as_batch(loader.get_batch(), ranks.device)])
    found = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return stepper.values(result)["loss"], found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize(("attention", "precision"), [("flex", "fp32"), ("varlen", "bf16"), ("flex", "bf16")])
def test_every_kernel_gives_the_same_loss_and_gradient(tmp_path: Path, attention: str, precision: str) -> None:
    directory = written(tmp_path)
    wanted_loss, wanted = gradients(directory, "sdpa", "fp32")
    loss, found = gradients(directory, attention, precision)
    tolerance = 1e-3 if precision == "fp32" else 4e-2
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    for name, grad in wanted.items():
        assert float((found[name] - grad).norm() / grad.norm()) < tolerance, name


def test_a_resumed_run_gives_the_losses_of_an_unbroken_one(tmp_path: Path) -> None:
    directory = written(tmp_path / "set")

    def loader() -> Any:
        return make_loader(CONFIG | {"use_loss_mask": True}, directory, pack=True, device="cuda")

    options: dict[str, Any] = {"steps": 8, "learning_rate": 1e-3, "log_every": 1}
    whole = model().fit(loader(), **options).history
    first = model().fit(StopAfter(loader(), 5, signal.SIGTERM), out=tmp_path / "run", **options)
    assert (first.outcome, first.step) == (RunOutcome.STOPPED, 5)
    second = model().fit(loader(), out=tmp_path / "run", **options)
    broken = [*first.history, *second.history]
    assert [values["step"] for values in broken] == list(range(1, 9))
    losses = [values["loss"] for values in whole]
    assert [values["loss"] for values in broken] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
