"""Head and cross entropy in one: the loss and its gradient chunk by chunk, without the logits of the whole batch.

`linear_cross_entropy` equals `cross_entropy(hidden @ weight.T, ...)`, but looks only at trained positions, a chunk of
them at a time, and makes the gradient of a chunk while its logits are there: three matrix products in all, nothing is
computed twice, and the memory does not grow with the number of positions. Plain PyTorch anywhere; on a CUDA device
with Triton, two kernels of `linear_cross_entropy_triton` join the work between the matrix products.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError, member
from chatmill.train.losses import LossResult, LossSums, check_shapes, checked_scales, position_weights, span_sums

CUDA_BYTES = 2_135_000_000
"""What a call may hold on a GPU beyond inputs and gradients: a little less than 2 GiB."""
PLAIN_CHUNK_BYTES = 64 * 2**20
"""Logits held at a time by the plain path, which keeps a few copies of them."""
CUDA_ROWS = 4096
"""Positions per chunk on a GPU where memory allows: more make it hardly faster."""
ROUNDED_CHUNKS = 4
"""So many chunks may be summed in 16 bits: with more, rounding would make the error of the sum grow."""
ROW_TILE = 128
"""Where it costs nothing, numbers of rows are multiples of this."""


class LossBackend(StrEnum):
    """Who does the work between the matrix products."""

    AUTO = "auto"
    """Triton on a CUDA device where it is installed, for anything but float64; else plain."""
    PLAIN = "plain"
    """PyTorch operations: any device, any float dtype."""
    TRITON = "triton"
    """The kernels of this package: a CUDA device, at most float32."""


class Sums(StrEnum):
    """How a 16-bit gradient of the weight is summed over chunks; a float32 one is always exact."""

    AUTO = "auto"
    """Rounded for up to four chunks, exact beyond: the error does not grow with the number of positions."""
    ROUNDED = "rounded"
    """In its own dtype: fastest."""
    EXACT = "exact"
    """In float32, rounded once: as accurate as one matrix product; takes as much memory again as the weight."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    spans: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_rows: int | None = None,
    sums: Sums | str = Sums.AUTO,
    backend: LossBackend | str = LossBackend.AUTO,
) -> LossResult:
    """Cross entropy of `hidden @ weight.T` as sums per span, with gradients for `hidden` and `weight`.

    - `hidden` `(..., H)`, `weight` `(V, H)`; `labels`, `weights` (default 1) and `spans` (default: one) have the shape
      `(...)` and are label-aligned. Positions whose label is `ignore_index` or whose weight is 0 cost nothing.
    - `scales` `(G,)`: what the sum of each span counts in `loss` (`Objective.scales`); default: one span, 1. Each is
      part of the gradient as it is made, so `loss.backward()` has nothing left to multiply. Scaling the loss
      afterwards works too and costs one pass over the gradients.
    - `chunk_rows`: positions per chunk at most; by default as many as fit a fixed amount of memory (2 GiB on a GPU).
    - `sums`: how a 16-bit gradient of the weight is summed over chunks.

    The matrix products run in the dtype of `hidden` (under autocast in its dtype), softmax and sums in float32
    (float64 for float64). Gradients have the dtypes of `hidden` and `weight`. They are made in the forward pass, so
    `backward()` can be called once per call.
    """
    _check_inputs(hidden, weight, labels, weights, spans, chunk_rows)
    flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    counted = position_weights(flat_labels, None if weights is None else weights.reshape(-1), ignore_index)
    scales = checked_scales(scales, spans, labels.device)
    rows = torch.nonzero(counted).squeeze(1)
    row_labels, row_weights = flat_labels[rows], counted[rows]
    row_spans = None if spans is None else spans.reshape(-1)[rows]
    factors = row_weights * _scale_of_rows(scales, row_spans)
    dtype = _product_dtype(hidden)
    job = _Job(
        rows=None if len(rows) == len(flat) else rows,
        labels=row_labels,
        factors=factors,
        unit=_checked_unit(row_labels, factors, len(weight)),
        dtype=dtype,
        chunk_rows=chunk_rows,
        sums=member(Sums, "sums", sums),
        backend=_chosen_backend(backend, hidden.device, dtype),
        gradients=torch.is_grad_enabled(),
    )
    loss, losses = _LinearCrossEntropy.apply(flat, weight, job)  # type: ignore[no-untyped-call]
    summed = span_sums(losses * row_weights, row_spans, len(scales))
    return LossResult(loss=loss, sums=LossSums(sums=summed, counts=span_sums(row_weights, row_spans, len(scales))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What to compute: all but the two tensors that get gradients."""

    rows: Tensor | None
    """The trained positions; None: all of them."""
    labels: Tensor
    """Of the trained positions, like `factors`."""
    factors: Tensor
    """What the loss of each trained position counts in the result."""
    unit: float
    """The largest factor. The gradient of the logits is made in units of it, and matrix products multiply by it:
    in bfloat16 1 / 510 would be 0.4% off, alike for every label, and 1 is not."""
    dtype: torch.dtype
    """Of the matrix products."""
    chunk_rows: int | None
    sums: Sums
    backend: LossBackend
    gradients: bool

    @property
    def wide(self) -> torch.dtype:
        """The dtype of softmax and losses."""
        return torch.promote_types(self.dtype, torch.float32)

    def plan(self, weight: Tensor) -> tuple[list[slice], bool]:
        """Chunks of the trained positions, equal but for the first, and whether sums over them are kept exact."""
        count = len(self.labels)
        most = self.chunk_rows or self._most_rows(weight)
        chunks = math.ceil(count / most)
        rows = math.ceil(count / max(1, chunks))
        tiled = math.ceil(rows / ROW_TILE) * ROW_TILE
        rows = tiled if tiled <= most else rows
        borders = [0, *(count - rows * left for left in range(chunks - 1, -1, -1))]
        exact = self.sums is Sums.EXACT or (self.sums is Sums.AUTO and chunks > ROUNDED_CHUNKS)
        return list(itertools.starmap(slice, itertools.pairwise(borders))), exact

    def _most_rows(self, weight: Tensor) -> int:
        """Positions per chunk at most, from the memory a call may take."""
        row = len(weight) * self.dtype.itemsize
        if self.backend is LossBackend.PLAIN:
            return max(1, PLAIN_CHUNK_BYTES // row)
        # Beside the logits there are a chunk of hidden states, one of their gradient, and maybe exact sums.
        row += 2 * weight.shape[1] * self.dtype.itemsize
        few = min(CUDA_BYTES // row, max(CUDA_ROWS, math.ceil(len(self.labels) / ROUNDED_CHUNKS)))
        narrow = weight.dtype.itemsize < self.wide.itemsize
        if (
            self.sums is Sums.ROUNDED
            or not narrow
            or (self.sums is Sums.AUTO and len(self.labels) <= few * ROUNDED_CHUNKS)
        ):
            return max(ROW_TILE, few)
        return min(CUDA_ROWS, max(ROW_TILE, (CUDA_BYTES - weight.numel() * weight.dtype.itemsize) // row))


class _LinearCrossEntropy(torch.autograd.Function):
    """`(loss, losses of the trained positions)`; both gradients are made in `forward`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        wanted = tuple(job.gradients and needed for needed in ctx.needs_input_grad[:2])
        with torch.autocast(hidden.device.type, enabled=False):
            losses, ctx.made = _losses_and_gradients(hidden, weight, job, *wanted)
        ctx.triton = job.backend is LossBackend.TRITON
        ctx.mark_non_differentiable(losses)
        return (losses * job.factors).sum().to(job.wide), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if ctx.made is None:
            raise ConfigError(
                "linear_cross_entropy makes its gradients in the forward pass and gives them away in the first "
                "backward(): add losses up and call backward() once, or call linear_cross_entropy again"
            )
        gradients, late = ctx.made
        ctx.made = None
        factor = grad_loss if late == 1 else grad_loss * late
        return (*(_scaled(gradient, factor, ctx.triton) for gradient in gradients), None)  # type: ignore[return-value]


def _losses_and_gradients(
    hidden: Tensor, weight: Tensor, job: _Job, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, tuple[list[Tensor | None], float]]:
    """The losses; the gradients of `hidden` and `weight`, and what they are still to be multiplied by."""
    # A float16 gradient would vanish in its few exponents if it were divided by the tokens before any loss scaling.
    now, late = (1.0, job.unit) if job.dtype is torch.float16 else (job.unit, 1.0)
    factors = (job.factors / job.unit).to(job.wide)
    chunks, exact = job.plan(weight)
    matrix = weight.detach().to(job.dtype)
    work = _work(job, matrix, chunks)
    losses = torch.empty(len(job.labels), dtype=job.wide, device=hidden.device)
    hidden_gradient = _empty_gradient(hidden, job) if for_hidden else None
    weight_gradient = _WeightGradient(weight, job, exact=exact) if for_weight else None
    for chunk in chunks:
        rows = chunk if job.rows is None else job.rows[chunk]
        inputs = hidden.detach()[rows].to(job.dtype)
        losses[chunk], slopes = work(inputs, job.labels[chunk], factors[chunk], for_hidden or for_weight)
        if hidden_gradient is not None:
            product = torch.empty_like(inputs, memory_format=torch.contiguous_format)
            hidden_gradient[rows] = torch.addmm(product, slopes, matrix, beta=0, alpha=now, out=product).to(
                hidden.dtype
            )
        if weight_gradient is not None:
            weight_gradient.add(slopes, inputs, now)
    return losses, ([hidden_gradient, None if weight_gradient is None else weight_gradient.total()], late)


def _empty_gradient(hidden: Tensor, job: _Job) -> Tensor:
    """Zeros where some positions are not trained, else memory that every chunk writes its part of."""
    make = torch.empty_like if job.rows is None else torch.zeros_like
    return make(hidden, memory_format=torch.contiguous_format)


class _Work(Protocol):
    """Losses of a chunk and, if asked for, the gradient of its logits, each row times its factor."""

    def __call__(self, inputs: Tensor, labels: Tensor, factors: Tensor, gradient: bool) -> tuple[Tensor, Tensor]: ...


def _work(job: _Job, matrix: Tensor, chunks: list[slice]) -> _Work:
    if job.backend is LossBackend.PLAIN:
        return functools.partial(_plain_work, matrix)
    most = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    # Rows begin at multiples of 128 bytes, also for a vocabulary such as 50,257: matrix products want it.
    width = math.ceil(len(matrix) / 64) * 64
    return functools.partial(_triton_work, matrix, torch.empty(most, width, dtype=job.dtype, device=matrix.device))


def _plain_work(
    matrix: Tensor, inputs: Tensor, labels: Tensor, factors: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = (inputs @ matrix.t()).to(factors.dtype)
    log_sums = torch.logsumexp(logits, 1)
    losses = log_sums - logits.gather(1, labels[:, None]).squeeze(1)
    if gradient:
        logits.sub_(log_sums[:, None]).exp_()
        logits.scatter_add_(1, labels[:, None], torch.full_like(logits[:, :1], -1))
        logits.mul_(factors[:, None])
    return losses, logits.to(inputs.dtype)


def _triton_work(
    matrix: Tensor, buffer: Tensor, inputs: Tensor, labels: Tensor, factors: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    from chatmill.train.linear_cross_entropy_triton import softmax_gradient_

    logits = buffer[: len(inputs), : len(matrix)]
    torch.mm(inputs, matrix.t(), out=logits)
    return softmax_gradient_(logits, labels, factors, gradient=gradient), logits


class _WeightGradient:
    """The gradient of the weight, summed over chunks.

    Exact sums are float32 (float64 for float64). A 16-bit gradient is half as large as they are: its own memory
    holds the sums of the first half of the vocabulary until the end, one more buffer of its size the others.
    """

    def __init__(self, weight: Tensor, job: _Job, *, exact: bool) -> None:
        self.gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        wide = torch.promote_types(weight.dtype, job.wide)
        direct = weight.dtype == wide or (weight.dtype == job.dtype and not exact)
        self._half = len(weight) if direct else len(weight) * weight.dtype.itemsize // wide.itemsize
        self._lower = self.gradient if direct else self._as_wide(wide)
        self._upper = torch.empty(len(weight) - self._half, weight.shape[1], dtype=wide, device=weight.device)
        self._empty = True

    def _as_wide(self, wide: torch.dtype) -> Tensor:
        """The memory of the gradient as wide values, `(self._half, H)`."""
        size = self._half * self.gradient.shape[1] * wide.itemsize // self.gradient.dtype.itemsize
        return self.gradient.view(-1)[:size].view(wide).view(self._half, self.gradient.shape[1])

    def add(self, slopes: Tensor, inputs: Tensor, factor: float) -> None:
        """Add the product of a chunk's logit gradient `(rows, V)` and its inputs `(rows, H)`, times `factor`."""
        _add_product(self._lower, slopes[:, : self._half], inputs, factor, first=self._empty)
        if len(self._upper):
            _add_product(self._upper, slopes[:, self._half :], inputs, factor, first=self._empty)
        self._empty = False

    def total(self) -> Tensor:
        """The sum in the dtype of the weight; zeros where nothing was added."""
        if self._empty:
            return self.gradient.zero_()
        if self._lower.dtype != self.gradient.dtype:
            self._narrow()
        return self.gradient

    def _narrow(self) -> None:
        """Round the sums, which share memory with the result: row `r` of the result ends before wide row `r`.

        So rows `a` to `2 * a` may be copied at once; only the first few go through a copy.
        """
        done = min(ROW_TILE, self._half)
        self.gradient[:done] = self._lower[:done].to(self.gradient.dtype)
        while done < self._half:
            upto = min(2 * done, self._half)
            self.gradient[done:upto] = self._lower[done:upto]
            done = upto
        self.gradient[self._half :] = self._upper


def _add_product(total: Tensor, slopes: Tensor, inputs: Tensor, factor: float, *, first: bool) -> None:
    """`total += factor * slopes.T @ inputs`, or `=` the first time; on a GPU rounded only after it is added."""
    how: dict[str, Any] = {"beta": 0 if first else 1, "alpha": factor, "out": total}
    if slopes.dtype == total.dtype:
        torch.addmm(total, slopes.t(), inputs, **how)
    elif total.device.type == "cuda":
        torch.addmm(total, slopes.t(), inputs, out_dtype=total.dtype, **how)
    else:
        product = (slopes.t() @ inputs).to(total.dtype).mul_(factor)
        total.copy_(product) if first else total.add_(product)


def _scaled(gradient: Tensor | None, factor: Tensor, by_triton: bool) -> Tensor | None:
    """The gradient times the gradient of the loss, in place; nothing is done where that is 1."""
    if gradient is None:
        return None
    if by_triton:
        from chatmill.train.linear_cross_entropy_triton import scale_

        return scale_(gradient, factor.to(torch.float32))
    if gradient.device.type == "cpu" and factor.item() == 1:
        return gradient
    return gradient.mul_(factor)


def _scale_of_rows(scales: Tensor, spans: Tensor | None) -> Tensor:
    """The scale of each position's span; 0 for a span number that has none."""
    if spans is None:
        return scales[0]
    known = (spans >= 0) & (spans < len(scales))
    return torch.where(known, scales[torch.where(known, spans, 0).long()], 0)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


def _chosen_backend(backend: LossBackend | str, device: torch.device, dtype: torch.dtype) -> LossBackend:
    backend = member(LossBackend, "backend", backend)
    fits = device.type == "cuda" and dtype is not torch.float64
    if backend == LossBackend.TRITON and not (fits and _has_triton()):
        raise ConfigError(
            f"backend='triton' needs a CUDA device, Triton and at most float32, not {dtype} on {device} with Triton "
            f"{'installed' if _has_triton() else 'missing'}: leave backend='auto'"
        )
    if backend == LossBackend.AUTO:
        return LossBackend.TRITON if fits and _has_triton() else LossBackend.PLAIN
    return backend


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    spans: Tensor | None,
    chunk_rows: int | None,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise DataError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: (..., H) and (V, H) are needed"
        )
    check_shapes(labels=labels, hidden=hidden[..., 0], weights=weights, spans=spans)
    if chunk_rows is not None and chunk_rows < 1:
        raise ConfigError(f"chunk_rows is {chunk_rows}; a chunk holds at least one position")


def _checked_unit(labels: Tensor, factors: Tensor, vocabulary: int) -> float:
    """The largest factor, 1 where all are 0; labels that are no row of the weight are refused.

    A kernel would read memory that is not its own for them. One look at the GPU serves both.
    """
    if not len(labels):
        return 1.0
    facts = torch.stack([value.to(factors.dtype) for value in (*torch.aminmax(labels), factors.abs().max())]).tolist()
    lowest, highest = int(facts[0]), int(facts[1])
    if lowest < 0 or highest >= vocabulary:
        raise DataError(
            f"trained labels go from {lowest} to {highest}, but the weight has rows 0 to {vocabulary - 1}: "
            "mark positions that are not trained with ignore_index, or use the tokenizer the head was made for"
        )
    return facts[2] or 1.0
