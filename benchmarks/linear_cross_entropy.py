"""`linear_cross_entropy` on a GPU: time against the matmul floor and plain PyTorch, memory, and gradient error.

    python -m benchmarks.linear_cross_entropy [--quick] [--json]     needs numpy, torch and a CUDA device

16,384 positions x hidden 2,880 x vocabulary 201,088, bfloat16, forward and backward, with all and with 40% of the
positions trained. Contestants take turns:

- floor: the three matrix products of the trained positions (logits, gradient of hidden, gradient of weight), each in
  one call over all of them, on the real numbers, outputs allocated before;
- squares: as many operations in products of 8,192 x 8,192, the shape a GPU likes best;
- plain: `cross_entropy((hidden[trained] @ weight.T).float(), labels[trained])` and `backward()`;
- `linear_cross_entropy(hidden, weight, labels)` and `backward()`, as it is and with `sums="exact"`.

Memory is the peak of a call less inputs and gradients. Errors are `|gradient - exact| / |exact|`, where exact is
float32 throughout on the same bfloat16 inputs; "random" inputs have labels without pattern, "fitted" ones Zipf labels
that the hidden states predict (loss about 4, a few large gradients and many small ones). Times are of "fitted".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import alternate, dump, options
from chatmill.core.shift import IGNORE_INDEX
from chatmill.train.linear_cross_entropy import Sums, linear_cross_entropy

FLOOR, SQUARES, PLAIN = "floor: three matmuls", "as much in 8192^3 matmuls", "plain PyTorch, trained rows"
OURS, EXACT = "linear_cross_entropy", "linear_cross_entropy, exact"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One problem; hidden and weight are leaves that collect gradients."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    trained: Tensor
    """The numbers of the trained positions."""
    scales: Tensor
    """1 / trained positions: counts are known before a model runs."""

    def clear(self) -> None:
        """Drop the gradients."""
        self.hidden.grad = self.weight.grad = None


def make_inputs(arguments: argparse.Namespace, fraction: float, *, fitted: bool) -> Inputs:
    """Random bfloat16 inputs; `fraction` of the positions are trained."""
    torch.manual_seed(0)
    positions, width, vocabulary = arguments.positions, arguments.hidden, arguments.vocabulary
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).bfloat16()
    hidden = torch.randn(positions, width, device="cuda")
    labels = torch.randint(0, vocabulary, (positions,), device="cuda")
    if fitted:
        frequency = 1 / torch.arange(10, vocabulary + 10, device="cuda", dtype=torch.float32)
        labels = torch.multinomial(frequency, positions, replacement=True)
        hidden = hidden * 2 + weight[labels].float() * 9
    labels[torch.randperm(positions, device="cuda")[round(fraction * positions) :]] = IGNORE_INDEX
    trained = torch.nonzero(labels != IGNORE_INDEX).squeeze(1)
    return Inputs(
        hidden=hidden.bfloat16().requires_grad_(),
        weight=weight.requires_grad_(),
        labels=labels,
        trained=trained,
        scales=torch.full((1,), 1 / len(trained), device="cuda"),
    )


def ours(inputs: Inputs, sums: Sums = Sums.AUTO) -> None:
    """The function under test."""
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, scales=inputs.scales, sums=sums).loss.backward()


def ours_exact(inputs: Inputs) -> None:
    """The same, with float32 sums of the weight's gradient."""
    ours(inputs, Sums.EXACT)


def plain(inputs: Inputs) -> None:
    """What one writes without it."""
    rows = inputs.trained
    F.cross_entropy((inputs.hidden[rows] @ inputs.weight.t()).float(), inputs.labels[rows]).backward()


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Both gradients in float32, a few rows at a time."""
    rows = inputs.trained
    hidden = inputs.hidden.detach().float().requires_grad_()
    weight = inputs.weight.detach().float().requires_grad_()
    for some in rows.split(2048):
        loss = F.cross_entropy(hidden[some] @ weight.t(), inputs.labels[some], reduction="sum") / len(rows)
        loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


@torch.no_grad()
def floor_of(inputs: Inputs) -> tuple[Callable[[], None], float]:
    """The three products on the numbers of the problem, everything allocated, and their teraflop.

    On a card too small for the logits of all trained positions, of as many as fit.
    """
    weight = inputs.weight.detach()
    rows = inputs.trained[: int(0.7 * torch.cuda.mem_get_info()[0]) // (4 * len(weight))]
    hidden = inputs.hidden[rows]
    slopes = torch.empty(len(rows), len(weight), dtype=torch.bfloat16, device="cuda")
    for start in range(0, len(rows), 2048):
        part = torch.softmax((hidden[start : start + 2048] @ weight.t()).float(), 1)
        own = inputs.labels[rows[start : start + 2048], None]
        slopes[start : start + 2048] = part.scatter_add_(1, own, torch.full_like(own, -1, dtype=part.dtype)) / len(rows)
    logits, for_hidden, for_weight = torch.empty_like(slopes), torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(slopes, weight, out=for_hidden)
        torch.mm(slopes.t(), hidden, out=for_weight)

    return run, 6 * len(rows) * weight.numel() / 1e12


def squares_of(teraflop: float) -> tuple[Callable[[], None], float]:
    """Square products of about so many operations, and how many they are."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = left @ right
    one = 2 * 8192**3 / 1e12
    times = max(1, round(teraflop / one))

    def run() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    return run, times * one


def finished(run: Callable[[], Any]) -> Callable[[], None]:
    """The same, ending when the GPU has done it."""

    def call() -> None:
        run()
        torch.cuda.synchronize()

    return call


def memory_of(run: Callable[[Inputs], None], inputs: Inputs) -> float:
    """Peak GiB of a call beyond inputs and gradients."""
    inputs.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(inputs)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / GIB


def fits(run: Callable[[Inputs], None], inputs: Inputs) -> bool:
    """Whether the card has the memory for it."""
    try:
        run(inputs)
    except torch.OutOfMemoryError:
        return False
    finally:
        inputs.clear()
    return True


def errors_of(run: Callable[[Inputs], None], inputs: Inputs, truth: tuple[Tensor, Tensor]) -> list[float]:
    """Relative error of the gradient of hidden and of weight."""
    inputs.clear()
    run(inputs)
    made = (inputs.hidden.grad, inputs.weight.grad)
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in made)
    return [float((a.float() - b).norm() / b.norm()) for a, b in zip(made, truth, strict=True) if a is not None]


def measure(arguments: argparse.Namespace, fraction: float) -> dict[str, Any]:
    """Times, memory and errors with a fraction of the positions trained."""
    contestants = {PLAIN: plain, OURS: ours, EXACT: ours_exact}
    if not fits(plain, make_inputs(arguments, fraction, fitted=False)):
        del contestants[PLAIN]
    result: dict[str, Any] = {"errors": {}, "memory_gib": {}}
    for name, fitted in (("random", False), ("fitted", True)):
        inputs = make_inputs(arguments, fraction, fitted=fitted)
        truth = exact(inputs)
        result["errors"][name] = {who: errors_of(run, inputs, truth) for who, run in contestants.items()}
        del truth
    result["trained"] = len(inputs.trained)
    result["memory_gib"] = {who: memory_of(run, inputs) for who, run in contestants.items()}

    def call(run: Callable[[Inputs], None]) -> Callable[[], None]:
        def with_new_gradients() -> None:
            inputs.clear()
            run(inputs)

        return finished(with_new_gradients)

    work = 6 * result["trained"] * arguments.hidden * arguments.vocabulary / 1e12
    squares, squares_work = squares_of(work)
    floor, floor_work = floor_of(inputs)
    timed = {FLOOR: (finished(floor), floor_work), SQUARES: (finished(squares), squares_work)}
    timed |= {who: (call(run), work) for who, run in contestants.items()}
    alternate(timed, rounds=2)  # warm-up: kernels are compiled and memory is taken
    timings = alternate(timed, rounds=3 if arguments.quick else 15)
    result["timings"] = {who: timing.as_json() for who, timing in timings.items()}
    for name, rate in (("over_floor", timings[FLOOR].rate), ("over_squares", timings[SQUARES].rate)):
        result[name] = {who: rate / timing.rate for who, timing in timings.items()}
    inputs.clear()
    torch.cuda.empty_cache()
    return result


def show(result: dict[str, Any]) -> None:
    """One table."""
    errors = result["errors"]
    print(f"\n{result['trained']:,} positions trained")
    heads = [f"{name} {which}" for name in errors for which in ("hidden", "weight")]
    columns = f"{'ms':>8}{'x floor':>9}{'x squares':>11}{'TFLOP/s':>9}{'GiB':>7}"
    print(f"  {'':<30}{columns}  error:{''.join(f'{head:>18}' for head in heads)}")
    for who, timing in result["timings"].items():
        line = f"  {who:<30}{timing['median'] * 1e3:>8.1f}{result['over_floor'][who]:>9.3f}"
        line += f"{result['over_squares'][who]:>11.3f}{timing['rate']:>9.0f}"
        if who in result["memory_gib"]:
            line += f"{result['memory_gib'][who]:>7.2f}        "
            for name in errors:
                for mine, other in zip(errors[name][who], errors[name].get(PLAIN, [None, None]), strict=True):
                    ratio = f" ({mine / other:.2f}x)" if other else ""
                    line += f"{f'{mine:.2e}{ratio}':>18}"
        print(line)


def main() -> None:
    """Measure and print."""
    parser = options("linear_cross_entropy against the matmul floor and plain PyTorch, on a GPU")
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=2_880)
    parser.add_argument("--vocabulary", type=int, default=201_088)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this benchmark needs a GPU")
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: getattr(arguments, name) for name in ("positions", "hidden", "vocabulary")},
        "dtype": "bfloat16",
    }
    results = [measure(arguments, fraction) for fraction in (1.0, 0.4)]
    if arguments.json:
        dump("linear_cross_entropy", **about, results=results)
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for result in results:
        show(result)


if __name__ == "__main__":
    main()
