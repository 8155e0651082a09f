"""Run by two ranks on the CPU: the example's own functions against plain autograd over the whole batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron"))

import pretrain_synth_kd as example

from chatmill.train.losses import span_normalized_loss

W_R, W_F = 0.5, 1.0
EOD = 20


class FewTokens(example.HarmonyTokenizer):  # type: ignore[misc]
    """As many as the documents have: with 201,088 of them, four steps are seconds of softmax."""

    vocab_size, eod, pad = 24, EOD, 21


example.HarmonyTokenizer = FewTokens


def compare(options: Any, dataset: Any, everything: dict[str, torch.Tensor], micro_batches: int) -> dict[str, float]:
    """One step through Megatron's schedule: its loss, and how far its gradients are from those of one big batch."""
    torch.manual_seed(options.seed)
    model = example.build_model(options)
    training = example.SpanTraining(lambda _: micro_batches, w_r=W_R, w_f=W_F)
    model.zero_grad_buffer()
    batches = None if dataset is None else example.loader(dataset, options)
    values = example.read_report(example.run_step(training, batches, model, options, forward_only=False))
    # Gradients by hand do not pass Megatron's hooks, so `main_grad` holds what the schedule made.
    losses = model.module(everything["tokens"], everything["position_ids"], None, labels=everything["labels"])
    whole = span_normalized_loss(losses, everything["span_id"], everything["loss_mask"], W_R, W_F)
    parameters = list(model.module.parameters())
    difference = largest = 0.0
    for parameter, wanted in zip(parameters, torch.autograd.grad(whole.loss, parameters), strict=True):
        difference = max(difference, float((parameter.main_grad - wanted).abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return {"whole": float(whole.loss), "error": difference / largest, "values": values}


def evaluated(options: Any, dataset: Any) -> dict[str, float]:
    """Evaluation over two steps, and the same by hand."""
    torch.manual_seed(options.seed)
    model = example.build_model(options)
    training = example.SpanTraining(lambda _: 2, w_r=W_R, w_f=W_F)
    values = example.evaluate(training, dataset, model, options._replace(eval_steps=2))
    size, losses = options.global_batch, []
    for step in range(2):
        batch = torch.utils.data.default_collate([dataset[step * size + i] for i in range(size)])
        found = model.module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        losses.append(float(span_normalized_loss(found, batch["span_id"], batch["loss_mask"], W_R, W_F).loss))
    return {"loss": values["lm loss"], "whole": sum(losses) / 2}


def main(root: str, out: str) -> None:
    options = example.Options(
        root, steps=4, sequence_length=32, micro_batch=1, global_batch=4, eval_every=4, eval_steps=1, lr=0.05,
        layers=1, hidden=16, heads=2, cache=f"{out}-cache",
    )  # fmt: skip
    with example.megatron(options):
        train_set, valid_set, _ = example.build_datasets(root, 32, [4, 8, 0], cache=options.cache)
        everything = torch.utils.data.default_collate([train_set[i] for i in range(4)])
        found: dict[str, Any] = {}
        for per_token in (True, False):
            chosen = options._replace(per_token_loss=per_token)
            found[f"data parallel, per token {per_token}"] = compare(chosen, train_set, everything, 2)
        found["evaluation"] = evaluated(options, valid_set)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        for per_token in (True, False):
            chosen = options._replace(per_token_loss=per_token, tensor_parallel=2)
            dataset = train_set if example.has_loader() else None
            found[f"tensor parallel, per token {per_token}"] = compare(chosen, dataset, everything, 4)
        found["has_loader"] = example.has_loader()
        found["losses"] = [values["lm loss"] for values in example.train(options._replace(tensor_parallel=2))]
        rank = torch.distributed.get_rank()
    Path(f"{out}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[2:])
