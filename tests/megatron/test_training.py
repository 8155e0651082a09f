"""The training example on megatron-core's own parts: gradients, micro-batches, evaluation, ranks without a loader."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from chatmill.core.harmony_ids import EOD, VOCAB_SIZE
from chatmill.train.losses import span_normalized_loss
from tests.kd_manifest import ZEROS, write_kd_manifest
from tests.megatron.kd_sets import Document, make_documents, write_root
from tests.train.ranks import run_two_ranks

HERE = Path(__file__).parent
FEW_TOKENS_EOD = 20
"""In the vocabulary of `train_ranks`."""
EXAMPLE = HERE.parents[1] / "examples" / "megatron" / "pretrain_synth_kd.py"


def write_few(root: Path, eod: int) -> Path:
    """Documents of few different tokens, so that a few steps teach something."""

    def few(count: int, seed: int) -> list[Document]:
        made = make_documents(count, seed)
        return [Document(ids=[*(number % 20 for number in d.ids[:-1]), eod], spans=d.spans) for d in made]

    write_root(root, {"train": [few(30, 1), few(11, 2)], "valid": [few(9, 3)]})
    tokenizer = {"name": "few", "path": "x", "sha256": ZEROS, "vocab_size": eod + 1, "eod_id": eod}
    write_kd_manifest(root, tokenizer=tokenizer)
    return root


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found, each for itself."""
    out = tmp_path_factory.mktemp("ranks") / "found"
    root = write_few(out.with_name("root"), FEW_TOKENS_EOD)
    parts = ("parallel_state", "distributed", "models.gpt", "optimizer", "pipeline_parallel", "tensor_parallel")
    run_two_ranks(HERE / "train_ranks.py", root, out, preload=tuple(f"megatron.core.{part}" for part in parts))
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("how", ["data", "tensor"])
def test_two_ranks_have_the_gradients_of_one_process(ranks: list[dict[str, Any]], how: str, per_token: bool) -> None:
    """Megatron divides in another way for each setting; float32 sums in another order are all that may differ."""
    for found in ranks:
        step = found[f"{how} parallel, per token {per_token}"]
        values = step["values"]
        assert step["error"] < 1e-5
        assert values["lm loss"] == pytest.approx(step["whole"], rel=1e-5)
        assert min(values[f"{span} tokens"] for span in ("reasoning", "answer")) > 20
        assert values["lm loss"] == pytest.approx(0.5 * values["reasoning loss"] + values["answer loss"], rel=1e-5)


def test_ranks_evaluate_and_learn_together_and_only_the_first_of_tensor_parallel_ones_has_a_loader(
    ranks: list[dict[str, Any]],
) -> None:
    assert [found["has_loader"] for found in ranks] == [True, False]
    data, tensor = (ranks[1][f"{how} parallel, per token True"]["whole"] for how in ("data", "tensor"))
    assert tensor == pytest.approx(data, rel=1e-5)
    for found in ranks:
        assert found["evaluation"]["loss"] == pytest.approx(found["evaluation"]["whole"], rel=1e-5)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0] - 0.5


FEW_PACKAGES = """
import runpy, sys
for name in "gigatoken tokenizers datasets pyarrow typer rich yaml".split():
    sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script where the rest of what Chatmill depends on is not installed, as on many training machines."""


def trained(folder: Path, options: str, *before: str) -> list[str]:
    """The lines of the example's command, in a process of its own."""
    root = write_few(folder / "root", EOD)
    paths = f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, *before, EXAMPLE, root, "--cache", folder / "cache", *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_the_command_in_one_process(tmp_path: Path) -> None:
    steps = "--steps 2 --sequence-length 32 --micro-batch 1 --global-batch 2 --eval-every 2 --eval-steps 1"
    lines = trained(tmp_path, f"{steps} --layers 1 --hidden 16 --heads 2", "-c", FEW_PACKAGES)
    assert [line.split(" | ")[0] for line in lines] == ["step     1", "step     2", "valid    2", "done"]
    for name in ("lm loss", "reasoning loss", "answer loss", "reasoning tokens", "answer tokens", "w_r", "w_f"):
        assert f"{name}: " in lines[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("option", ["--no-bf16", "--bf16"])
def test_the_loss_falls_on_a_gpu(tmp_path: Path, option: str) -> None:
    steps = f"--steps 20 --sequence-length 32 --global-batch 8 --lr 0.01 {option}"
    lines = trained(tmp_path, f"{steps} --layers 1 --hidden 64 --heads 2")
    first, last = re.findall(r"(?:first|last): ([\d.]+)", lines[-1])
    assert float(last) < float(first) - 1


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_synth_kd", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


def test_the_tokenizer_of_the_example(example: ModuleType) -> None:
    tokenizer = example.HarmonyTokenizer()
    assert (tokenizer.eod, tokenizer.vocab_size) == (EOD, VOCAB_SIZE)
    assert len({tokenizer.pad, tokenizer.eod, tokenizer.eos, tokenizer.bos}) == 4
    assert tokenizer.eod not in tokenizer.tokenize("<|endoftext|>")
    assert tokenizer.detokenize(tokenizer.tokenize("a <|return|> b")) == "a <|return|> b"
    assert tokenizer.vocab["<|return|>"] == tokenizer.eos


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("spans", ["both", "one without answers", "nothing trained"])
def test_what_megatrons_schedule_divides_by_is_undone(example: ModuleType, per_token: bool, spans: str) -> None:
    """3 micro-batches on each of 4 ranks of data and context parallelism, divided as megatron-core divides."""
    generator = torch.Generator().manual_seed(1)
    losses = torch.rand((4, 3, 2, 8), generator=generator, dtype=torch.float64, requires_grad=True)
    span_id = torch.randint(0, 3, losses.shape, generator=generator)
    span_id[0, 0] = 0  # a micro-batch without a trained token
    if spans == "one without answers":
        span_id[span_id == 2] = 1
    elif spans == "nothing trained":
        span_id[:] = 0
    mask = (span_id > 0).float()
    whole = span_normalized_loss(losses, span_id, mask, 0.25, 2.0)
    wanted = torch.autograd.grad(whole.loss, losses)[0]
    counts = torch.stack((whole.tokens_r, whole.tokens_f))
    training = example.SpanTraining(lambda _: 3, w_r=0.25, w_f=2.0)
    total, tokens, reports = torch.zeros((), dtype=torch.float64), 0, []
    for place in ((rank, number) for rank in range(4) for number in range(3)):
        batch = {"span_id": span_id[place], "loss_mask": mask[place], "step_counts": counts}
        loss, num_tokens, report = training.loss_func(
            batch, losses[place], micro_batches=3, ranks=4, per_token=per_token
        )
        assert num_tokens.dtype == torch.int
        total = total + (loss if per_token else loss / num_tokens.clamp(min=1) / 3 / 4)
        tokens += int(num_tokens)
        reports.append(report)
    if per_token:
        total = total / max(tokens, 1)
    assert torch.allclose(torch.autograd.grad(total, losses)[0], wanted, rtol=1e-12, atol=1e-12)
    read = {name: torch.vstack([report[name] for report in reports]).sum(dim=0) for name in reports[0]}
    names = {"lm loss": whole.loss.detach(), "reasoning loss": whole.loss_r, "answer loss": whole.loss_f}
    for name, value in {**names, "answer tokens": whole.tokens_f}.items():
        assert float(read[name][0] / read[name][1]) == pytest.approx(float(value), rel=1e-5, abs=1e-9)
