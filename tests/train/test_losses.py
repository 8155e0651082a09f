"""Losses as sums and counts: equal to an obvious loop, for packed rows and any split over micro-batches and ranks."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from chatmill.errors import DataError
from chatmill.train.losses import (
    SpanLoss,
    span_counts,
    span_normalized_loss,
    teacher_losses,
    token_losses,
    weight_counts,
    weighted_loss,
)
from tests.train.ranks import run_two_ranks

VOCABULARY = 23


def columns(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses in float32 that want a gradient, span ids 0..2 or fewer, and weights, some of them zero or fractions."""
    made = torch.Generator().manual_seed(seed)
    losses = torch.rand(rows, length, generator=made) * 5
    span_id = torch.randint(0, 3, (rows, length), generator=made)
    span_id[span_id == {3: 2, 4: 1}.get(seed % 5, 3)] = 0
    mask = torch.randint(0, 5, (rows, length), generator=made) / 4 * (span_id > 0)
    return losses.requires_grad_(), span_id, mask


def by_hand(losses: Tensor, span_id: Tensor, mask: Tensor, w_r: float, w_f: float) -> dict[str, float]:
    """The definition of spec 5, one position at a time, in Python floats."""
    sums, counts = {1: 0.0, 2: 0.0}, {1: 0.0, 2: 0.0}
    for loss, span, weight in zip(
        losses.flatten().tolist(), span_id.flatten().tolist(), mask.flatten().tolist(), strict=True
    ):
        if span in sums and weight:
            sums[span] += loss * weight
            counts[span] += weight
    means = {span: sums[span] / counts[span] if counts[span] else 0.0 for span in sums}
    return {
        "loss": w_r * means[1] + w_f * means[2],
        "loss_r": means[1], "loss_f": means[2], "sum_r": sums[1], "sum_f": sums[2],
        "tokens_r": counts[1], "tokens_f": counts[2], "w_r": w_r, "w_f": w_f,
    }  # fmt: skip


def loss_of(kind: str, losses: Tensor, span_id: Tensor, mask: Tensor, group: Any = None, **counts: Tensor) -> Any:
    if kind == "span":
        return span_normalized_loss(losses, span_id, mask, 1.5, 0.5, group, **counts)
    return weighted_loss(losses, mask, group, **counts)


def counts_of(kind: str, span_id: Tensor, mask: Tensor, group: Any = None) -> Tensor:
    return span_counts(span_id, mask, group) if kind == "span" else weight_counts(mask, group)


close = functools.partial(pytest.approx, rel=1e-6, abs=1e-6)
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_both_losses_equal_their_definition(rows: int, length: int, seed: int, w_r: float, w_f: float) -> None:
    losses, span_id, mask = columns(rows, length, seed)
    result = span_normalized_loss(losses, span_id, mask, w_r, w_f)
    expected = by_hand(losses, span_id, mask, w_r, w_f)
    assert result.values() == close(expected)
    assert result.values().keys() == expected.keys() == set(SpanLoss.__dataclass_fields__)
    result.loss.backward()
    wanted = torch.zeros_like(losses)
    for span, weight in ((1, w_r), (2, w_f)):
        chosen = mask * (span_id == span)
        wanted += weight * chosen / (float(chosen.sum()) or 1.0)
    assert_close(losses.grad, wanted)
    losses.grad = None
    weighted = weighted_loss(losses, mask * 0.5)
    summed, count = (losses * mask).sum().item() / 2, float(mask.sum()) / 2
    assert weighted.values() == close({"loss": summed / count if count else 0.0, "sum": summed, "tokens": count})
    weighted.loss.backward()
    assert_close(losses.grad, mask / (float(mask.sum()) or 1.0))
    # Without a mask every position of a span counts.
    plain = span_normalized_loss(losses, span_id).values()
    assert plain == span_normalized_loss(losses, span_id, (span_id > 0).long()).values()
    assert plain["tokens_r"] == int((span_id == 1).sum())


@pytest.mark.parametrize("kind", ["span", "weighted"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_loss_on_untrained_positions_does_no_harm(bad: float, kind: str) -> None:
    losses, span_id, mask = columns(2, 8, 3)
    broken = torch.where(mask == 0, bad, losses.detach()).requires_grad_()
    result = loss_of(kind, broken, span_id, mask)
    result.loss.backward()
    assert result.values() == loss_of(kind, losses, span_id, mask).values()
    assert broken.grad is not None
    assert torch.isfinite(broken.grad).all()


def test_bfloat16_losses_are_summed_wide() -> None:
    losses, ones = torch.full((1, 4096), 1.0, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.uint8)
    for result in (span_normalized_loss(losses, ones), weighted_loss(losses, ones)):
        assert result.loss.dtype == torch.float32
        assert 4096.0 in result.values().values()
        assert result.values()["loss"] == 1.0


ZEROS = torch.zeros(2, 4)
OF_STUDENT = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: span_normalized_loss(torch.zeros(2, 3), ZEROS), r"per_token_loss \(2, 3\), span_id \(2, 4\)"),
        (lambda: span_counts(ZEROS, torch.zeros(4)), r"loss_mask \(4,\)"),
        (lambda: token_losses(torch.zeros(2, 3, 5), ZEROS), r"labels \(2, 4\), logits \(2, 3\)"),
        (lambda: span_normalized_loss(ZEROS, ZEROS, counts=0), "over the micro-batches of the step"),  # type: ignore[arg-type]
        (lambda: span_normalized_loss(ZEROS, ZEROS, counts=torch.zeros(3)), "over the micro-batches of the step"),
        (
            lambda: span_normalized_loss(ZEROS, ZEROS, None, 1.0) + span_normalized_loss(ZEROS, ZEROS, None, 2.0),
            r"w_r 1.0 and 2.0",
        ),
        (
            lambda: teacher_losses(OF_STUDENT, torch.full((2, 3, 1), 4), torch.zeros(2, 3, 1), torch.zeros(2, 3)),
            "the student has 4 logits",
        ),
        (
            lambda: teacher_losses(OF_STUDENT, torch.zeros(2, 2, 1), torch.zeros(2, 3, 1), torch.zeros(2, 3)),
            "shapes differ",
        ),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        call()


# ---- micro-batches and ranks


def test_counting_over_ranks_changes_nothing_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """`all_reduce` writes into what it is given."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(3))
    weights = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    assert weight_counts(weights, "a group").tolist() == [6]
    assert weights.tolist() == [[1, 1, 0]]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from(["span", "weighted"]), st.data())
def test_accumulation_equals_the_big_batch(rows: int, seed: int, kind: str, data: st.DataObject) -> None:
    losses, span_id, mask = columns(rows, 11, seed)
    whole = loss_of(kind, losses, span_id, mask)
    whole.loss.backward()
    wanted, losses.grad = losses.grad, None
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=rows)) | {0, rows})
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    counts = torch.stack([counts_of(kind, span_id[p], mask[p]) for p in pieces]).sum(0)
    parts = []
    for p in pieces:
        part = loss_of(kind, losses[p], span_id[p], mask[p], counts=counts)
        part.loss.backward()
        parts.append(part.detached())
    total = functools.reduce(operator.add, parts)
    assert total.values() == close(whole.values())
    assert_close(losses.grad, wanted)
    assert not total.loss.requires_grad


def net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 1)


def run_rank(rank: str, store: str, out: str) -> None:
    """One rank has rows 0, 1 and the other 2..5, then the other way round with both in two micro-batches."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    x, span_id, mask = torch.load(out + ".in")
    world, results = torch.distributed.group.WORLD, []
    for kind in ("span", "weighted"):
        for pieces in ([[slice(0, 2)], [slice(2, 6)]], [[slice(3, 6), slice(2, 3)], [slice(0, 1), slice(1, 2)]]):
            parallel, mine = torch.nn.parallel.DistributedDataParallel(net()), pieces[int(rank)]
            counts = sum(counts_of(kind, span_id[p], mask[p], world) for p in mine)
            parts = []
            for number, p in enumerate(mine):
                with torch.enable_grad() if number == len(mine) - 1 else parallel.no_sync():
                    given: Any = {} if len(mine) == 1 else {"counts": counts}
                    part = loss_of(kind, parallel(x[p]).squeeze(-1) ** 2, span_id[p], mask[p], world, **given)
                    part.loss.backward()
                    parts.append(part.detached())
            grads = [parameter.grad.flatten().tolist() for parameter in parallel.parameters()]
            results.append((kind, functools.reduce(operator.add, parts).values(), grads))
    Path(f"{out}.{rank}").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_equal_the_big_batch_in_value_and_gradient(tmp_path: Path) -> None:
    _, span_id, mask = columns(6, 10, 7)
    span_id[:2], mask[:2] = 2, 1.0  # one rank has no reasoning token at all
    x = torch.randn(6, 10, 6, generator=torch.Generator().manual_seed(1))
    torch.save((x, span_id, mask), tmp_path / "out.in")
    run_two_ranks(Path(__file__), tmp_path / "store", tmp_path / "out", preload=("tests.train.test_losses",))
    results = [result for rank in range(2) for result in json.loads((tmp_path / f"out.{rank}").read_text())]
    assert len(results) == 8
    for kind, values, grads in results:
        alone = net()
        whole = loss_of(kind, alone(x).squeeze(-1) ** 2, span_id, mask)
        whole.loss.backward()
        assert values == close(whole.values()), kind
        for got, parameter in zip(grads, alone.parameters(), strict=True):
            assert got == close(parameter.grad.flatten().tolist()), kind


# ---- teachers


@given(st.integers(1, VOCABULARY), st.integers(0, 2**20))
@settings(max_examples=40)
def test_the_loss_against_a_teacher_is_that_over_the_vocabulary_with_the_other_tokens_as_one(k: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, VOCABULARY, dtype=torch.float64, generator=made).requires_grad_()
    teacher = (torch.randn(3, 4, VOCABULARY, dtype=torch.float64, generator=made) * 3).log_softmax(-1)
    logprobs, ids = teacher.topk(k)
    rest = (1 - logprobs.exp().sum(-1)).clamp(min=0)
    known = torch.rand(3, 4, generator=made) < 0.7
    padded = torch.where(known[..., None], logprobs, -torch.inf)  # and an entry more than this teacher names
    padded, more = F.pad(padded, (0, 1), value=-torch.inf), F.pad(ids, (0, 1))
    losses = teacher_losses(logits, more, padded, torch.where(known, rest, 0))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)

    q = logits.log_softmax(-1)
    if k == VOCABULARY:
        wanted = F.kl_div(q, teacher, reduction="none", log_target=True).sum(-1)
    else:
        named = (logprobs.exp() * (logprobs - q.gather(-1, ids))).sum(-1)
        wanted = named + rest * (rest.log() - (1 - q.gather(-1, ids).exp().sum(-1)).log())
    wanted = torch.where(known, wanted, 0)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), logits)[0])
    assert not teacher_losses(logits, torch.zeros(3, 4, 0), torch.zeros(3, 4, 0), rest).any()


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
