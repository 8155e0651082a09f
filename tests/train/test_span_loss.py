"""The loss of spec 5: equal to an obvious loop, for any split of a batch over micro-batches and ranks."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.train.span_loss import SpanLoss, span_counts, span_normalized_loss
from tests.train.ranks import run_two_ranks


def batch(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses in float32 that want a gradient, span ids 0..2, and a mask that leaves some of them out."""
    made = torch.Generator().manual_seed(seed)
    losses = torch.rand(rows, length, generator=made) * 5
    span_id = torch.randint(0, 3, (rows, length), generator=made)
    mask = (torch.rand(rows, length, generator=made) < 0.8).float() * (span_id > 0)
    return losses.requires_grad_(), span_id, mask


def by_hand(
    losses: torch.Tensor, span_id: torch.Tensor, mask: torch.Tensor, w_r: float, w_f: float
) -> dict[str, float]:
    """The definition, one position at a time, in Python floats."""
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
def test_equals_the_definition(rows: int, length: int, seed: int, w_r: float, w_f: float) -> None:
    losses, span_id, mask = batch(rows, length, seed)
    result = span_normalized_loss(losses, span_id, mask, w_r, w_f)
    expected = by_hand(losses, span_id, mask, w_r, w_f)
    assert result.values() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert result.values().keys() == expected.keys() == set(SpanLoss.__dataclass_fields__)
    result.loss.backward()
    wanted = torch.zeros_like(losses)
    for span, weight in ((1, w_r), (2, w_f)):
        chosen = mask * (span_id == span)
        wanted += weight * chosen / max(1.0, float(chosen.sum()))
    torch.testing.assert_close(losses.grad, wanted, rtol=1e-6, atol=1e-7)


def test_without_a_mask_every_position_of_a_span_counts() -> None:
    losses, span_id, _ = batch(3, 7, 1)
    plain = span_normalized_loss(losses, span_id)
    assert plain.values() == span_normalized_loss(losses, span_id, (span_id > 0).long()).values()
    assert plain.values()["tokens_r"] == int((span_id == 1).sum()) > 0


@pytest.mark.parametrize("present", [(), (1,), (2,)])
def test_a_span_without_tokens_gives_zero_and_never_nan(present: tuple[int, ...]) -> None:
    losses = torch.rand(2, 4, requires_grad=True)
    span_id = torch.zeros(2, 4, dtype=torch.long)
    for span in present:
        span_id[0, span] = span
    result = span_normalized_loss(losses, span_id, w_r=2.0, w_f=3.0)
    result.loss.backward()
    assert losses.grad is not None
    assert torch.isfinite(losses.grad).all()
    values = result.values()
    for span, name in ((1, "r"), (2, "f")):
        expected = float(losses.detach()[0, span]) if span in present else 0.0
        assert values[f"loss_{name}"] == pytest.approx(expected, rel=1e-6)
        assert values[f"tokens_{name}"] == float(span in present)
    assert (values["w_r"], values["w_f"]) == (2.0, 3.0)
    assert int((losses.grad != 0).sum()) == len(present)


def test_a_broken_loss_on_untrained_positions_does_no_harm() -> None:
    losses, span_id, mask = batch(2, 8, 3)
    expected = span_normalized_loss(losses, span_id, mask).values()
    broken = torch.where(mask == 0, torch.nan, losses.detach()).requires_grad_()
    result = span_normalized_loss(broken, span_id, mask)
    result.loss.backward()
    assert result.values() == expected
    assert broken.grad is not None
    assert torch.isfinite(broken.grad).all()


def test_fractional_masks_weigh_both_sum_and_count() -> None:
    losses = torch.tensor([[4.0, 2.0, 8.0]])
    result = span_normalized_loss(losses, torch.tensor([[1, 1, 2]]), torch.tensor([[0.5, 1.0, 0.25]])).values()
    assert result["loss_r"] == pytest.approx(4.0 / 1.5)
    assert (result["tokens_r"], result["loss_f"], result["tokens_f"]) == (1.5, 8.0, 0.25)


def test_bfloat16_losses_are_summed_wide() -> None:
    losses = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    result = span_normalized_loss(losses, torch.ones(1, 4096, dtype=torch.uint8))
    assert result.loss.dtype == torch.float32
    assert result.values()["sum_r"] == 4096.0
    assert result.values()["loss"] == 1.0


def test_shapes_that_differ_are_refused_with_the_shapes() -> None:
    with pytest.raises(DataError, match=r"per_token_loss \(2, 3\), span_id \(2, 4\)"):
        span_normalized_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(DataError, match=r"loss_mask \(4,\)"):
        span_counts(torch.zeros(2, 4), torch.zeros(4))
    for counts in (0, torch.zeros(3)):
        with pytest.raises(DataError, match="one micro-batch or more"):
            span_normalized_loss(torch.zeros(2, 4), torch.zeros(2, 4), counts=counts)  # type: ignore[arg-type]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 1000), st.data())
def test_accumulation_equals_the_big_batch(rows: int, seed: int, data: st.DataObject) -> None:
    losses, span_id, mask = batch(rows, 11, seed)
    whole = span_normalized_loss(losses, span_id, mask, 1.5, 0.5)
    whole.loss.backward()
    wanted, losses.grad = losses.grad, None
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=rows)) | {0, rows})
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    counts = torch.stack([span_counts(span_id[piece], mask[piece]) for piece in pieces]).sum(0)
    parts = []
    for piece in pieces:
        part = span_normalized_loss(losses[piece], span_id[piece], mask[piece], 1.5, 0.5, counts=counts)
        part.loss.backward()
        parts.append(part.detached())
    total = functools.reduce(operator.add, parts)
    assert total.values() == pytest.approx(whole.values(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(losses.grad, wanted, rtol=1e-6, atol=1e-7)
    assert not total.loss.requires_grad
    assert len(parts) == len(pieces) > 0


def test_shares_with_other_weights_are_not_added() -> None:
    losses, span_id, mask = batch(1, 5, 2)
    one, other = (span_normalized_loss(losses, span_id, mask, w_r) for w_r in (1.0, 2.0))
    with pytest.raises(DataError, match=r"w_r 1.0 and 2.0"):
        one + other


SCRIPT = """
import functools, json, operator, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from chatmill.train.span_loss import span_counts, span_normalized_loss

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
data = torch.load(out + ".in")
WORLD = dist.group.WORLD
results = []

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(6, 1)

def losses(net, x):
    return net(x).squeeze(-1) ** 2

# One rank has rows 0, 1 and the other 2..5, the other way round with both in two micro-batches.
for name, pieces in {
    "ranks": [[slice(0, 2)], [slice(2, 6)]],
    "both": [[slice(3, 6), slice(2, 3)], [slice(0, 1), slice(1, 2)]],
}.items():
    net = DistributedDataParallel(model())
    mine = pieces[rank]
    x, span, mask = data["x"], data["span"], data["mask"]
    counts = sum(span_counts(span[p], mask[p], WORLD) for p in mine)
    parts = []
    for number, p in enumerate(mine):
        last = number == len(mine) - 1
        with torch.enable_grad() if last else net.no_sync():
            given = {} if name == "ranks" else {"counts": counts}
            part = span_normalized_loss(losses(net, x[p]), span[p], mask[p], 1.5, 0.5, WORLD, **given)
            part.loss.backward()
            parts.append(part.detached())
    results.append({"name": name, "values": functools.reduce(operator.add, parts).values(),
                    "grads": [p.grad.flatten().tolist() for p in net.parameters()]})
json.dump(results, open(out + f".{rank}", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_equal_the_big_batch_in_value_and_gradient(tmp_path: Path) -> None:
    _, span_id, mask = batch(6, 10, 7)
    span_id[:2], mask[:2] = 2, 1.0  # one rank of "ranks" has no reasoning token at all
    x = torch.randn(6, 10, 6, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x, "span": span_id, "mask": mask}, tmp_path / "out.in")
    (tmp_path / "run.py").write_text(SCRIPT)
    preload = ("chatmill.train.span_loss",)
    run_two_ranks(tmp_path / "run.py", tmp_path / "store", tmp_path / "out", preload=preload)

    torch.manual_seed(0)
    net = torch.nn.Linear(6, 1)
    whole = span_normalized_loss(net(x).squeeze(-1) ** 2, span_id, mask, 1.5, 0.5)
    whole.loss.backward()
    wanted = [p.grad.flatten().tolist() for p in net.parameters() if p.grad is not None]
    results = [result for rank in range(2) for result in json.loads((tmp_path / f"out.{rank}").read_text())]
    assert len(results) == 4
    assert len(wanted) == 2
    for result in results:
        assert result["values"] == pytest.approx(whole.values(), rel=1e-6, abs=1e-6), result["name"]
        for got, grad in zip(result["grads"], wanted, strict=True):
            assert got == pytest.approx(grad, rel=1e-6, abs=1e-6), result["name"]
