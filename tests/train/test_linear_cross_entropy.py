"""Linear + cross entropy against the plain one: values, gradients, spans, chunks, dtypes; and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from chatmill.errors import ConfigError, DataError, UnknownNameError
from chatmill.train.linear_cross_entropy import LossBackend, Sums, linear_cross_entropy
from chatmill.train.losses import LossResult, cross_entropy

HIDDEN, VOCABULARY = 12, 37


def problem(
    positions: int = 40,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    untrained: float = 0.4,
) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (positions,), generator=made)
    labels[torch.rand(positions, generator=made) < untrained] = -100
    columns = {
        "hidden": torch.randn(positions, HIDDEN, generator=made, dtype=torch.float64).to(dtype),
        "weight": torch.randn(VOCABULARY, HIDDEN, generator=made, dtype=torch.float64).to(dtype),
        "labels": labels,
        "weights": torch.rand(positions, generator=made, dtype=torch.float64).clamp_min(0.1),
        "spans": torch.randint(0, 3, (positions,), generator=made),
    }
    columns["weights"][::7] = 0
    return {name: column.to(device) for name, column in columns.items()}


def gradients(made: LossResult, *leaves: Tensor, factor: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(made.loss * factor if factor != 1 else made.loss, leaves))


def both(data: dict[str, Tensor], scales: Tensor | None, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(loss, sums, counts, gradients) of the function under test and of the plain way."""
    results = []
    for fused in (True, False):
        hidden, weight = data["hidden"].clone().requires_grad_(), data["weight"].clone().requires_grad_()
        rest = (data["labels"], data.get("weights"), data.get("spans"))
        if fused:
            made = linear_cross_entropy(hidden, weight, *rest, scales=scales, **options)
        else:
            made = cross_entropy(hidden @ weight.t(), *rest, scales=scales)
        results.append([made.loss.detach(), made.sums.sums, made.sums.counts, *gradients(made, hidden, weight)])
    return results[0], results[1]


def assert_equal(ours: list[Tensor], plain: list[Tensor], tolerance: float = 1e-12) -> None:
    assert len(ours) == len(plain) == 5
    for mine, other in zip(ours, plain, strict=True):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= tolerance, (mine - other).abs().max()


@given(
    positions=st.integers(1, 50),
    chunk_rows=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**16),
    with_weights=st.booleans(),
    with_spans=st.booleans(),
    untrained=st.sampled_from([0.0, 0.4, 1.0]),
)
@settings(max_examples=150)
def test_equals_the_plain_way_for_any_chunks_weights_and_spans(
    positions: int, chunk_rows: int | None, seed: int, with_weights: bool, with_spans: bool, untrained: float
) -> None:
    data = problem(positions, seed=seed, untrained=untrained)
    if not with_weights:
        del data["weights"]
    if not with_spans:
        del data["spans"]
    scales = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64) if with_spans else None
    assert_equal(*both(data, scales, chunk_rows=chunk_rows))


def test_equals_torch_itself() -> None:
    data = problem()
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    expected = F.cross_entropy(hidden @ weight.t(), data["labels"], ignore_index=-100)
    trained = int((data["labels"] != -100).sum())
    made = linear_cross_entropy(
        hidden, weight, data["labels"], scales=torch.tensor([1 / trained], dtype=torch.float64), chunk_rows=7
    )
    assert float(made.sums.counts) == trained
    assert (made.loss - expected).abs().item() < 1e-12
    for mine, other in zip(
        gradients(made, hidden, weight), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        assert (mine - other).abs().max() < 1e-14


def test_gradient_equals_finite_differences() -> None:
    data = problem(6, untrained=0.2)
    scales = torch.tensor([0.3, 1.0, 0.7], dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        rest = (data["labels"], data["weights"], data["spans"])
        return linear_cross_entropy(hidden, weight, *rest, scales=scales, chunk_rows=2).loss

    leaves = [data["hidden"].requires_grad_(), data["weight"].requires_grad_()]
    made = torch.autograd.grad(loss(*leaves), leaves)
    step, checked = 1e-5, 0
    for leaf, gradient in zip(leaves, made, strict=True):
        for index in range(0, leaf.numel(), 5):
            moved = torch.zeros_like(leaf).view(-1)
            moved[index] = step
            shifts = [moved.view_as(leaf) if leaf is other else torch.zeros_like(other) for other in leaves]
            with torch.no_grad():
                above = loss(*(a + b for a, b in zip(leaves, shifts, strict=True)))
                below = loss(*(a - b for a, b in zip(leaves, shifts, strict=True)))
            assert abs(float(above - below) / (2 * step) - float(gradient.view(-1)[index])) < 1e-8
            checked += 1
    assert checked > 90


def test_shapes_with_rows_are_kept() -> None:
    data = problem(40)
    flat, _ = both(data, torch.ones(3))
    folded = {name: c.view(4, 10, *c.shape[1:]) if name != "weight" else c for name, c in data.items()}
    rows, _ = both(folded, torch.ones(3))
    assert rows[3].shape == (4, 10, HIDDEN)
    rows[3] = rows[3].view(40, HIDDEN)
    assert_equal(rows, flat)


def test_untrained_positions_may_hold_anything() -> None:
    data = problem(20)
    data["hidden"][data["labels"] == -100] = float("nan")
    made = linear_cross_entropy(data["hidden"].requires_grad_(), data["weight"], data["labels"], data["weights"])
    (gradient,) = gradients(made, data["hidden"])
    assert bool(gradient.isfinite().all())
    assert not gradient[data["labels"] == -100].any()
    assert gradient.any()


def test_nothing_trained_gives_zeros_and_no_nan() -> None:
    data = problem(9, untrained=1.0)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    made = linear_cross_entropy(hidden, weight, data["labels"])
    assert made.loss.item() == 0
    assert made.sums.counts.tolist() == [0]
    made.loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_spans_come_with_their_own_sums() -> None:
    data = problem(60)
    made = linear_cross_entropy(
        data["hidden"], data["weight"], data["labels"], data["weights"], data["spans"], scales=torch.ones(3)
    )
    losses = F.cross_entropy(data["hidden"] @ data["weight"].t(), data["labels"], reduction="none")
    counted = data["weights"] * (data["labels"] != -100)
    for span in range(3):
        own = counted * (data["spans"] == span)
        assert float(own.sum()) > 0
        assert abs(float(made.sums.counts[span] - own.sum())) < 1e-12
        assert abs(float(made.sums.sums[span] - (own * losses).sum())) < 1e-12


def test_a_span_number_without_a_scale_counts_nowhere() -> None:
    data = problem(30)
    data["spans"][:5] = 9
    ours, plain = both(data, torch.ones(3))
    assert_equal(ours, plain)
    data["labels"][:5] = -100
    assert_equal(both(data, torch.ones(3))[0], ours)


@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_what_follows_the_loss_scales_the_gradient(factor: float) -> None:
    data = problem()
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    made = gradients(linear_cross_entropy(hidden, weight, data["labels"]), hidden, weight, factor=factor)
    plain = gradients(cross_entropy(hidden @ weight.t(), data["labels"]), hidden, weight, factor=factor)
    for mine, other in zip(made, plain, strict=True):
        assert (mine - other).abs().max() < 1e-12


def test_only_what_needs_a_gradient_gets_one() -> None:
    data = problem()
    weight = data["weight"].requires_grad_()
    linear_cross_entropy(data["hidden"], weight, data["labels"]).loss.backward()
    assert weight.grad is not None
    assert data["hidden"].grad is None
    with torch.no_grad():
        made = linear_cross_entropy(data["hidden"], weight, data["labels"])
    assert not made.loss.requires_grad


def test_a_second_backward_is_refused_with_the_reason() -> None:
    data = problem()
    loss = linear_cross_entropy(data["hidden"].requires_grad_(), data["weight"], data["labels"]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="call backward\\(\\) once"):
        loss.backward()


# ---- 16 bits


def error(made: Tensor, exact: Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


def half_precision(dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of hidden and weight in a 16-bit dtype, and exactly."""
    data = problem(512, dtype=dtype, untrained=0.1)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    scales = torch.tensor([1 / 512])
    made = gradients(linear_cross_entropy(hidden, weight, data["labels"], scales=scales, **options), hidden, weight)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    loss = cross_entropy(wide[0] @ wide[1].t(), data["labels"], scales=scales).loss
    exact = torch.autograd.grad(loss, wide)
    assert [g.dtype for g in made] == [dtype, dtype]
    return (*made, *exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_rows", [512, 64, 5])
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_exact_sums_are_as_good_as_one_product(dtype: torch.dtype, chunk_rows: int) -> None:
    epsilon = torch.finfo(dtype).eps
    hidden, weight, exact_hidden, exact_weight = half_precision(dtype, chunk_rows=chunk_rows, sums="exact")
    assert error(hidden, exact_hidden) < 1.0 * epsilon
    assert error(weight, exact_weight) < 1.0 * epsilon


@pytest.mark.filterwarnings("ignore:mkldnn")
def test_a_divisor_that_is_no_16_bit_number_does_no_harm() -> None:
    """1 / 510 is 0.4% off in bfloat16, and the plain way takes that error into every trained label."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(510, HIDDEN).bfloat16(), torch.randn(VOCABULARY, HIDDEN).bfloat16()
    labels, scales = torch.randint(0, VOCABULARY, (510,)), torch.tensor([1 / 510])
    assert abs(float(scales.bfloat16()) * 510 - 1) > 0.003
    wide = [leaf.double().requires_grad_() for leaf in (hidden, weight)]
    exact = gradients(cross_entropy(wide[0] @ wide[1].t(), labels, scales=scales), *wide)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight)]
    plain = gradients(cross_entropy(hidden @ weight.t(), labels, scales=scales), *leaves)
    ours = gradients(linear_cross_entropy(hidden, weight, labels, scales=scales), *leaves)
    for mine, other, true in zip(ours, plain, exact, strict=True):
        assert error(mine, true) < error(other, true)


@pytest.mark.filterwarnings("ignore:mkldnn")
def test_rounded_sums_of_many_chunks_are_worse_and_auto_avoids_them() -> None:
    errors = {}
    for sums in Sums:
        _, weight, _, exact = half_precision(torch.bfloat16, chunk_rows=4, sums=sums)
        errors[sums] = error(weight, exact)
    assert errors[Sums.ROUNDED] > 1.5 * errors[Sums.EXACT]
    assert errors[Sums.AUTO] == errors[Sums.EXACT]


@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 127, 128, 129, 255, 257, 511, 1030])
def test_exact_sums_in_the_gradients_own_memory_reach_every_row(vocabulary: int) -> None:
    """Odd sizes: the halves of the vocabulary differ, and rows are rounded in place in doubling steps."""
    torch.manual_seed(0)
    hidden = torch.randn(16, 6).bfloat16()
    labels = torch.randint(0, vocabulary, (16,))
    weights = [torch.randn(vocabulary, 6).bfloat16().requires_grad_()]
    weights.append(weights[0].detach().float().requires_grad_())
    for weight in weights:
        linear_cross_entropy(hidden, weight, labels, chunk_rows=3, sums="exact").loss.backward()
    assert weights[1].grad is not None
    torch.testing.assert_close(weights[0].grad, weights[1].grad.bfloat16(), rtol=0, atol=0)
    assert vocabulary == 1 or bool((weights[1].grad != 0).any(1).all())


@pytest.mark.filterwarnings("ignore:mkldnn")
def test_autocast_is_followed_and_the_weight_keeps_a_float32_gradient() -> None:
    data = problem(64, dtype=torch.float32)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = gradients(linear_cross_entropy(hidden, weight, data["labels"]), hidden, weight)
    narrow = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), data["labels"])
    exact = gradients(cross_entropy(hidden @ weight.t(), data["labels"]), hidden, weight)
    for mine, other, true in zip(made, gradients(narrow, hidden, weight), exact, strict=True):
        assert mine.dtype is torch.float32
        assert (mine - other).abs().max() < 0.02
        assert 1e-4 < error(mine, true.double()) < 0.02


# ---- mistakes


@pytest.mark.parametrize("label", [VOCABULARY, -1, 10**6])
def test_a_label_outside_the_vocabulary_is_named(label: int) -> None:
    data = problem(10)
    data["labels"][3] = label
    with pytest.raises(DataError, match=f"rows 0 to {VOCABULARY - 1}"):
        linear_cross_entropy(data["hidden"], data["weight"], data["labels"])


@pytest.mark.parametrize(
    ("change", "error_type", "words"),
    [
        ({"labels": torch.zeros(3, dtype=torch.long)}, DataError, "shapes differ"),
        ({"weights": torch.ones(3)}, DataError, "weights \\(3,\\)"),
        ({"weight": torch.ones(4, 5)}, DataError, "do not fit"),
        ({"chunk_rows": 0}, ConfigError, "chunk_rows is 0"),
        ({"backend": "cuda"}, UnknownNameError, "plain"),
        ({"sums": "kahan"}, UnknownNameError, "exact"),
        ({"backend": "triton"}, ConfigError, "leave backend='auto'"),
        ({"spans": torch.zeros(10, dtype=torch.long)}, ConfigError, "scales"),
        ({"scales": torch.ones(2, 2)}, DataError, "one number per span"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error_type: type[Exception], words: str) -> None:
    data = problem(10)
    arguments: dict[str, Any] = {name: data[name] for name in ("hidden", "weight", "labels")}
    with pytest.raises(error_type, match=words):
        linear_cross_entropy(**{**arguments, **change})


# ---- on a GPU: run without the rest of the suite, `pytest --noconftest -m gpu` needs numpy, torch and Triton alone

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sums", list(Sums))
@pytest.mark.parametrize("chunk_rows", [None, 100])
def test_kernels_equal_float64(dtype: torch.dtype, sums: Sums, chunk_rows: int | None) -> None:
    """An odd vocabulary wider than a block, untrained positions, weights, spans, and a factor behind the loss."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    vocabulary, positions, width = 20_011, 700, 64
    hidden = torch.randn(positions, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (positions,), device="cuda")
    labels[torch.rand(positions, device="cuda") < 0.3] = -100
    rest = (labels, torch.rand(positions, device="cuda"), torch.randint(0, 3, (positions,), device="cuda"))
    scales = torch.tensor([0.0, 1 / 300, 2 / 300], device="cuda")
    made = linear_cross_entropy(
        hidden, weight, *rest, scales=scales, chunk_rows=chunk_rows, sums=sums, backend="triton"
    )
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = cross_entropy(wide[0] @ wide[1].t(), *rest, scales=scales)
    bound = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    assert abs(made.loss.item() / exact.loss.item() - 1) < bound
    torch.testing.assert_close(made.sums.counts, exact.sums.counts)
    assert error(made.sums.sums, exact.sums.sums) < bound
    factor = 512.0
    for mine, true in zip(
        gradients(made, hidden, weight, factor=factor), gradients(exact, *wide, factor=factor), strict=True
    ):
        assert bool(mine.isfinite().all())
        assert error(mine, true) < bound


@gpu
@needs_cuda
def test_backends_agree_on_a_gpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    data = problem(300, dtype=torch.float32, device="cuda")
    made = [both(data, torch.ones(3), backend=backend, chunk_rows=64)[0] for backend in LossBackend]
    for other in made[1:]:
        assert_equal(other, made[0], tolerance=1e-3)


@gpu
@needs_cuda
def test_autocast_on_a_gpu_sums_into_a_float32_gradient() -> None:
    data = problem(300, dtype=torch.float32, device="cuda")
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        made = gradients(linear_cross_entropy(hidden, weight, data["labels"], chunk_rows=50), hidden, weight)
    exact = gradients(cross_entropy(hidden @ weight.t(), data["labels"]), hidden, weight)
    for mine, true in zip(made, exact, strict=True):
        assert mine.dtype is torch.float32
        assert error(mine, true.double()) < 0.01


@gpu
@needs_cuda
def test_memory_does_not_grow_with_the_positions() -> None:
    vocabulary, width = 100_000, 256
    weight = torch.randn(vocabulary, width, device="cuda").bfloat16().requires_grad_()
    peaks = []
    for positions in (20_000, 40_000):
        hidden = torch.randn(positions, width, device="cuda").bfloat16().requires_grad_()
        labels = torch.randint(0, vocabulary, (positions,), device="cuda")
        weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        linear_cross_entropy(hidden, weight, labels).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    assert max(peaks) < 2 * 2**30
