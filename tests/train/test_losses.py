"""Losses as sums and counts: equal to an obvious loop, for packed rows and any split over micro-batches and ranks."""

from __future__ import annotations

import functools
import itertools
import json
import operator
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
    assert result.values() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert result.values().keys() == expected.keys() == set(SpanLoss.__dataclass_fields__)
    result.loss.backward()
    wanted = torch.zeros_like(losses)
    for span, weight in ((1, w_r), (2, w_f)):
        chosen = mask * (span_id == span)
        wanted += weight * chosen / (float(chosen.sum()) or 1.0)
    torch.testing.assert_close(losses.grad, wanted, rtol=1e-6, atol=1e-7)
    losses.grad = None
    weighted = weighted_loss(losses, mask * 0.5)
    summed, count = (losses * mask).sum().item() / 2, float(mask.sum()) / 2
    mean = summed / count if count else 0.0
    assert weighted.values() == pytest.approx({"loss": mean, "sum": summed, "tokens": count}, rel=1e-6, abs=1e-6)
    weighted.loss.backward()
    torch.testing.assert_close(losses.grad, mask / (float(mask.sum()) or 1.0), rtol=1e-6, atol=1e-7)


def test_without_a_mask_every_position_of_a_span_counts() -> None:
    losses, span_id, _ = columns(3, 7, 1)
    plain = span_normalized_loss(losses, span_id)
    assert plain.values() == span_normalized_loss(losses, span_id, (span_id > 0).long()).values()
    assert plain.values()["tokens_r"] == int((span_id == 1).sum()) > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_loss_on_untrained_positions_does_no_harm(bad: float) -> None:
    losses, span_id, mask = columns(2, 8, 3)
    broken = torch.where(mask == 0, bad, losses.detach()).requires_grad_()
    for clean, result in (
        (span_normalized_loss(losses, span_id, mask), span_normalized_loss(broken, span_id, mask)),
        (weighted_loss(losses, mask), weighted_loss(broken, mask)),
    ):
        result.loss.backward()
        assert result.values() == clean.values()
        assert broken.grad is not None
        assert torch.isfinite(broken.grad).all()


def test_bfloat16_losses_are_summed_wide() -> None:
    losses, ones = torch.full((1, 4096), 1.0, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.uint8)
    for result in (span_normalized_loss(losses, ones), weighted_loss(losses, ones)):
        assert result.loss.dtype == torch.float32
        assert 4096.0 in result.values().values()
        assert result.values()["loss"] == 1.0


def test_mistakes_are_named() -> None:
    with pytest.raises(DataError, match=r"per_token_loss \(2, 3\), span_id \(2, 4\)"):
        span_normalized_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(DataError, match=r"loss_mask \(4,\)"):
        span_counts(torch.zeros(2, 4), torch.zeros(4))
    with pytest.raises(DataError, match=r"labels \(2, 4\), logits \(2, 3\)"):
        token_losses(torch.zeros(2, 3, 5), torch.zeros(2, 4))
    for counts in (0, torch.zeros(3)):
        with pytest.raises(DataError, match="over the micro-batches of the step"):
            span_normalized_loss(torch.zeros(2, 4), torch.zeros(2, 4), counts=counts)  # type: ignore[arg-type]
    losses, span_id, mask = columns(1, 5, 2)
    one, other = (span_normalized_loss(losses, span_id, mask, w_r) for w_r in (1.0, 2.0))
    with pytest.raises(DataError, match=r"w_r 1.0 and 2.0"):
        one + other


def test_counting_over_ranks_changes_nothing_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """`all_reduce` writes into what it is given."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(3))
    weights = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    assert weight_counts(weights, "a group").tolist() == [6]
    assert weights.tolist() == [[1, 1, 0]]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 1000), st.booleans(), st.data())
def test_accumulation_equals_the_big_batch(rows: int, seed: int, spans: bool, data: st.DataObject) -> None:
    losses, span_id, mask = columns(rows, 11, seed)

    def loss(piece: slice, **counts: Tensor) -> Any:
        if spans:
            return span_normalized_loss(losses[piece], span_id[piece], mask[piece], 1.5, 0.5, **counts)
        return weighted_loss(losses[piece], mask[piece], **counts)

    whole = loss(slice(None))
    whole.loss.backward()
    wanted, losses.grad = losses.grad, None
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=rows)) | {0, rows})
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    counted = [span_counts(span_id[p], mask[p]) if spans else weight_counts(mask[p]) for p in pieces]
    parts = []
    for piece in pieces:
        part = loss(piece, counts=torch.stack(counted).sum(0))
        part.loss.backward()
        parts.append(part.detached())
    total = functools.reduce(operator.add, parts)
    assert total.values() == pytest.approx(whole.values(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(losses.grad, wanted, rtol=1e-6, atol=1e-7)
    assert not total.loss.requires_grad
    assert len(parts) == len(pieces) > 0


SCRIPT = """
import functools, json, operator, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from chatmill.train.losses import span_counts, span_normalized_loss, weight_counts, weighted_loss

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
data = torch.load(out + ".in")
WORLD = dist.group.WORLD
results = []

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(6, 1)

def counted(kind, p):
    return span_counts(span[p], mask[p], WORLD) if kind == "span" else weight_counts(mask[p], WORLD)

def loss(kind, values, p, **given):
    if kind == "span":
        return span_normalized_loss(values, span[p], mask[p], 1.5, 0.5, WORLD, **given)
    return weighted_loss(values, mask[p], WORLD, **given)

x, span, mask = data["x"], data["span"], data["mask"]
# One rank has rows 0, 1 and the other 2..5, the other way round with both in two micro-batches.
for kind in ("span", "weighted"):
    for pieces in ([[slice(0, 2)], [slice(2, 6)]], [[slice(3, 6), slice(2, 3)], [slice(0, 1), slice(1, 2)]]):
        net = DistributedDataParallel(model())
        mine = pieces[rank]
        counts = sum(counted(kind, p) for p in mine)
        parts = []
        for number, p in enumerate(mine):
            with torch.enable_grad() if number == len(mine) - 1 else net.no_sync():
                given = {} if len(mine) == 1 else {"counts": counts}
                part = loss(kind, net(x[p]).squeeze(-1) ** 2, p, **given)
                part.loss.backward()
                parts.append(part.detached())
        results.append({"kind": kind, "values": functools.reduce(operator.add, parts).values(),
                        "grads": [p.grad.flatten().tolist() for p in net.parameters()]})
json.dump(results, open(out + f".{rank}", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_equal_the_big_batch_in_value_and_gradient(tmp_path: Path) -> None:
    _, span_id, mask = columns(6, 10, 7)
    span_id[:2], mask[:2] = 2, 1.0  # one rank has no reasoning token at all
    x = torch.randn(6, 10, 6, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x, "span": span_id, "mask": mask}, tmp_path / "out.in")
    (tmp_path / "run.py").write_text(SCRIPT)
    run_two_ranks(tmp_path / "run.py", tmp_path / "store", tmp_path / "out", preload=("chatmill.train.losses",))
    results = [result for rank in range(2) for result in json.loads((tmp_path / f"out.{rank}").read_text())]
    assert len(results) == 8
    for result in results:
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 1)
        losses = net(x).squeeze(-1) ** 2
        is_span = result["kind"] == "span"
        whole: Any = span_normalized_loss(losses, span_id, mask, 1.5, 0.5) if is_span else weighted_loss(losses, mask)
        whole.loss.backward()
        assert result["values"] == pytest.approx(whole.values(), rel=1e-6, abs=1e-6), result["kind"]
        for got, parameter in zip(result["grads"], net.parameters(), strict=True):
            assert parameter.grad is not None
            assert got == pytest.approx(parameter.grad.flatten().tolist(), rel=1e-6, abs=1e-6), result["kind"]


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


def test_a_teacher_with_another_vocabulary_or_shape_is_refused() -> None:
    logits, logprobs, rest = torch.zeros(2, 3, 4), torch.zeros(2, 3, 1), torch.zeros(2, 3)
    with pytest.raises(DataError, match="the student has 4 logits"):
        teacher_losses(logits, torch.full((2, 3, 1), 4), logprobs, rest)
    with pytest.raises(DataError, match="shapes differ"):
        teacher_losses(logits, torch.zeros(2, 2, 1), logprobs, rest)
    assert not teacher_losses(logits, torch.zeros(2, 3, 0), torch.zeros(2, 3, 0), rest).any()
