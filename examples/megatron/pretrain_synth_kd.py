"""Trains a GPT on a distillation set with megatron-core's own parts: model, schedule, DDP, optimizer, blended datasets.

    chatmill synth-kd data/synth_harmony --out data/kd --valid-fraction 0.1
    python examples/megatron/pretrain_synth_kd.py data/kd --steps 200
    torchrun --nproc-per-node 8 examples/megatron/pretrain_synth_kd.py data/kd --tensor-parallel 2

`build_datasets`, `get_batch` and `SpanTraining.forward_step` go into a copy of Megatron-LM's pretrain_gpt.py as they
are: docs/megatron.md says where. The rest is the smallest loop around them. It runs on one GPU or many; without one
it runs on CPUs with gloo, for which `on_cpu.py` says what has to be set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor

from chatmill import SynthKDDataset, span_normalized_loss, synth_kd_blends
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.losses import span_counts

Batch = dict[str, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class HarmonyTokenizer(MegatronTokenizerBase):
    """The ids of these datasets for Megatron; `tokenize` never makes a control token of text."""

    vocab_size, eod, pad, eos, bos = 201088, 199999, 201087, 200002, 199998

    def __init__(self) -> None:
        super().__init__("o200k", {"library": "chatmill", "class_name": "HarmonyTokenizer"})
        self.unique_identifiers = {"class": "HarmonyTokenizer", "vocabulary": "o200k_harmony"}

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text."""
        return load_tokenizer(self.path).encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return load_tokenizer(self.path).decode(ids)

    @property
    def vocab(self) -> Mapping[str, int]:
        """The control tokens by name; ordinary tokens are bytes and have none."""
        return load_tokenizer(self.path).control_ids

    def apply_chat_template(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise NotImplementedError("conversations were rendered when the dataset was built")


def build_datasets(
    root: str, sequence_length: int, samples: Sequence[int], *, seed: int = 1234, cache: str | None = None
) -> tuple[SynthKDDataset | None, SynthKDDataset | None, None]:
    """Train, valid and test, as Megatron-LM's `train_valid_test_datasets_provider` returns them."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=synth_kd_blends(root),  # None where a split has no documents
        tokenizer=HarmonyTokenizer(),
        path_to_cache=cache,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.5,  # the default, 0.005, is too little for shards of a few samples
    )
    sizes = [size if blend else 0 for size, blend in zip(samples, config.blend_per_split, strict=True)]
    return tuple(BlendedMegatronDatasetBuilder(SynthKDDataset, sizes, has_loader, config).build())


def has_loader() -> bool:
    """Whether this rank reads data: of each tensor-parallel group only the first, which broadcasts."""
    return parallel_state.get_tensor_model_parallel_rank() == 0


class StepBatches:
    """The micro-batches of an iterator, each with the counts of its whole step: `step_counts`, reasoning and answer.

    A backward pass needs the counts of all micro-batches and all ranks, so a step is read ahead when its first
    micro-batch is asked for.
    """

    def __init__(self, batches: Iterator[Batch], micro_batches: Callable[[], int]) -> None:
        self.batches, self._micro_batches = batches, micro_batches
        self._ready: deque[Batch] = deque()

    def __iter__(self) -> StepBatches:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            step = [next(self.batches) for _ in range(self._micro_batches())]
            counts = [span_counts(batch["span_id"], batch["loss_mask"]) for batch in step]
            total = torch.stack(counts).sum(0).to(DEVICE)
            # Over data-parallel ranks alone: the ranks of a context-parallel group all read the same whole sequences.
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
            self._ready.extend({**batch, "step_counts": total} for batch in step)
        return self._ready.popleft()


def get_batch(batches: Iterator[Batch] | None) -> Batch:
    """One micro-batch on every rank of a tensor-parallel group; those without a loader give None and receive it."""
    data = None if batches is None else next(batches)
    received = {}
    for names, dtype in (
        (("tokens", "labels", "position_ids", "span_id"), torch.int64),
        (("loss_mask",), torch.float32),
        (("step_counts",), torch.float64),
    ):
        received |= tensor_parallel.broadcast_data(list(names), data, dtype)
    return received


class SpanTraining:
    """The loss `w_r * mean(loss | reasoning) + w_f * mean(loss | answer)` for Megatron's schedules."""

    def __init__(self, micro_batches: Callable[[bool], int], *, w_r: float = 1.0, w_f: float = 1.0) -> None:
        """`micro_batches(training)` is their number in a step of training, or of evaluation."""
        self.micro_batches, self.w_r, self.w_f = micro_batches, w_r, w_f
        self._steps: dict[bool, StepBatches] = {}

    def forward_step(self, data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> tuple[Tensor, Any]:
        """What Megatron's schedules call for each micro-batch, in training and in evaluation."""
        micro_batches = partial(self.micro_batches, model.training)
        steps = self._steps.get(model.training)
        if data_iterator is not None and (steps is None or steps.batches is not data_iterator):
            steps = self._steps[model.training] = StepBatches(data_iterator, micro_batches)
        batch = get_batch(steps)
        # With context parallelism the batch is cut here; `step_counts` stays whole.
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return losses, partial(
            self.loss_func,
            batch,
            micro_batches=micro_batches(),
            ranks=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            per_token=get_model_config(model).calculate_per_token_loss,
        )

    def loss_func(
        self, batch: Batch, losses: Tensor, *, micro_batches: int, ranks: int, per_token: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss, number of tokens, and `[sum, count]` for each name of the log: what Megatron-LM's loop reads.

        The schedule divides the loss, and how depends on `calculate_per_token_loss`. This loss holds its counts
        already, so it is multiplied by what it will be divided by. `ranks` are those of data and context parallelism.
        """
        counts = batch["step_counts"]
        part = span_normalized_loss(losses, batch["span_id"], batch["loss_mask"], self.w_r, self.w_f, counts=counts)
        num_tokens = (part.tokens_r + part.tokens_f).to(torch.int)
        if per_token:  # gradients are added over ranks, then divided by the tokens of all micro-batches and ranks
            divided_by = counts.sum()
        else:  # the loss is divided by its own tokens and the micro-batches, and gradients are averaged over ranks
            divided_by = num_tokens.clamp(min=1) * micro_batches * ranks
        share = 1.0 / (micro_batches * ranks)
        report = {
            "lm loss": sum_and_count(part.loss, share),
            "reasoning loss": sum_and_count(part.sum_r, part.tokens_r),
            "answer loss": sum_and_count(part.sum_f, part.tokens_f),
            "reasoning tokens": sum_and_count(part.tokens_r, share),
            "answer tokens": sum_and_count(part.tokens_f, share),
        }
        return (part.loss * divided_by).to(losses.dtype), num_tokens, report


def sum_and_count(total: Tensor, count: Tensor | float) -> Tensor:
    """A pair that Megatron-LM's loop adds up over micro-batches and ranks, and then divides."""
    # A count of 0 would give NaN; 1e-12 is lost as soon as there is one token.
    counts = torch.as_tensor(count, dtype=torch.float32, device=total.device).clamp(min=1e-12)
    return torch.stack((total.detach().float(), counts))


def read_report(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The values of a step, read from what the loss function gave for each micro-batch, as Megatron-LM's loop does."""
    values = {}
    for name in reports[0]:
        total = torch.vstack([report[name].view(-1) for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        values[name] = float(total[0] / total[1])
    return values


# --- the loop that Megatron-LM has of its own ----------------------------------------------------------------------


class Options(NamedTuple):
    """What the command line sets."""

    root: str
    steps: int = 100
    sequence_length: int = 512
    micro_batch: int = 4
    global_batch: int = 16
    eval_every: int = 50
    eval_steps: int = 4
    lr: float = 3e-4
    w_r: float = 1.0
    w_f: float = 1.0
    layers: int = 4
    hidden: int = 512
    heads: int = 8
    tensor_parallel: int = 1
    per_token_loss: bool = True
    bf16: bool = False
    seed: int = 1234
    cache: str | None = None


def build_model(options: Options) -> DistributedDataParallel:
    """A GPT of megatron-core's own modules (no Transformer Engine, no apex), under its DistributedDataParallel."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        tensor_model_parallel_size=options.tensor_parallel,
        calculate_per_token_loss=options.per_token_loss,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=options.bf16,
        params_dtype=dtype,
        use_cpu_initialization=DEVICE == "cpu",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=HarmonyTokenizer.vocab_size,
        max_sequence_length=options.sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).to(DEVICE)
    wrapped = Float16Module(config, model) if options.bf16 else model
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    return DistributedDataParallel(config, ddp, wrapped)


def loader(dataset: Any, options: Options) -> Iterator[Batch] | None:
    """This rank's micro-batches, in the order of Megatron's own sampler; None on ranks without a loader."""
    if not has_loader():
        return None
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    size = options.micro_batch
    firsts = range(rank * size, len(dataset) - (ranks - rank) * size + 1, ranks * size)
    return (torch.utils.data.default_collate([dataset[first + i] for i in range(size)]) for first in firsts)


def run_step(
    training: SpanTraining, batches: Iterator[Batch] | None, model: Any, options: Options, *, forward_only: bool
) -> list[dict[str, Tensor]]:
    """One step through Megatron's schedule: the reports of its micro-batches. Gradients are finished in `main_grad`."""
    reports: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=training.forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=training.micro_batches(not forward_only),
        seq_length=options.sequence_length,
        micro_batch_size=options.micro_batch,
        forward_only=forward_only,
    )
    return reports


def evaluate(training: SpanTraining, dataset: Any, model: Any, options: Options) -> dict[str, float]:
    """The values of all evaluation steps: the loss is the mean of theirs, that of a span is over all its tokens."""
    model.eval()
    batches = loader(dataset, options)
    with torch.no_grad():
        steps = [run_step(training, batches, model, options, forward_only=True) for _ in range(options.eval_steps)]
    model.train()
    return read_report([report for step in steps for report in step])


def train(options: Options) -> list[dict[str, float]]:
    """All steps; the values of each."""
    ranks = parallel_state.get_data_parallel_world_size()
    micro_batches = options.global_batch // (options.micro_batch * ranks)
    if micro_batches * options.micro_batch * ranks != options.global_batch:
        raise SystemExit(
            f"a global batch of {options.global_batch} is no multiple of {options.micro_batch} x {ranks} ranks"
        )
    samples = [options.steps * options.global_batch, options.eval_steps * options.global_batch, 0]
    train_set, valid_set, _ = build_datasets(
        options.root, options.sequence_length, samples, seed=options.seed, cache=options.cache
    )
    model = build_model(options)
    clip = 1.0 if DEVICE == "cuda" else 0.0  # megatron-core clips gradients on GPUs only
    settings = OptimizerConfig(optimizer="adam", lr=options.lr, weight_decay=0.01, clip_grad=clip, bf16=options.bf16)
    settings.params_dtype = torch.bfloat16 if options.bf16 else torch.float32
    optimizer = get_megatron_optimizer(settings, [model])
    training = SpanTraining(lambda _: micro_batches, w_r=options.w_r, w_f=options.w_f)
    batches = loader(train_set, options)
    has_valid = bool(synth_kd_blends(options.root)[1])
    found = []
    for step in range(1, options.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found.append(read_report(run_step(training, batches, model, options, forward_only=False)))
        optimizer.step()
        say(f"step {step:5d}", {**found[-1], "w_r": options.w_r, "w_f": options.w_f})
        if has_valid and step % options.eval_every == 0:
            say(f"valid {step:4d}", evaluate(training, valid_set, model, options))
    return found


def say(what: str, values: Mapping[str, float]) -> None:
    """A line of the log, from the first rank."""
    if torch.distributed.get_rank() == 0:
        print(what, " ".join(f"{name}: {value:.6g}" for name, value in values.items()), sep=" | ", flush=True)


@contextlib.contextmanager
def megatron(options: Options) -> Iterator[None]:
    """Process groups and random numbers, as `torchrun` or a single process needs them."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with contextlib.ExitStack() as stack:
        if DEVICE == "cpu":
            from on_cpu import megatron_on_cpu

            stack.enter_context(megatron_on_cpu())
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        if "RANK" in os.environ:
            torch.distributed.init_process_group(backend)
        else:
            store = stack.enter_context(tempfile.TemporaryDirectory())
            torch.distributed.init_process_group(backend, init_method=f"file://{store}/store", rank=0, world_size=1)
        stack.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tensor_parallel)
        stack.callback(parallel_state.destroy_model_parallel)
        torch.manual_seed(options.seed)
        if DEVICE == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
        yield


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line: one option for each field."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="what `chatmill synth-kd` or `chatmill export --to megatron` wrote")
    for name, default in Options._field_defaults.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(option, type=str if default is None else type(default), default=default)
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    chosen = parse()
    with megatron(chosen):
        losses = [values["lm loss"] for values in train(chosen)]
        say("done", {"first": losses[0], "last": losses[-1]})
