"""Losses as sums and counts: equal for packed and unpacked rows, any micro-batches and any ranks, in float64."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chatmill.core.shift import shift_left
from chatmill.errors import ConfigError, DataError, UnknownNameError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.pack.assemble import assemble_rows
from chatmill.pack.plan import plan
from chatmill.train.linear_cross_entropy import linear_cross_entropy
from chatmill.train.losses import LossKind, LossSums, Objective, cross_entropy, step_counts
from chatmill.train.span_loss import span_normalized_loss
from tests.train.ranks import run_two_ranks

VOCABULARY, WIDTH = 23, 6
EMBEDDING = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
KINDS = list(LossKind)
Columns = dict[str, Tensor]


class Special:
    eos_token_id = pad_token_id = 0


def documents(seed: int, count: int) -> list[Columns]:
    """Documents of 2 to 9 tokens with token-aligned weights (some 0) and spans; the first trains nothing."""
    made = torch.Generator().manual_seed(seed)
    listed = []
    for number in range(count):
        length = int(torch.randint(2, 10, (1,), generator=made))
        weights = torch.rand(length, generator=made, dtype=torch.float64)
        weights[weights < 0.3] = 0
        listed.append(
            {
                "ids": torch.randint(1, VOCABULARY, (length,), generator=made),
                "weights": weights * (number > 0),
                "spans": torch.randint(0, 3, (length,), generator=made),
            }
        )
    return listed


def rows_of(groups: list[list[Columns]], width: int) -> Columns:
    """One row per group, its documents one after the other, padded to `width`; label-aligned columns."""
    shape = (len(groups), width)
    labels, ids = torch.full(shape, -100), torch.zeros(shape, dtype=torch.long)
    weights, spans, numbers = (
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape).long(),
        torch.zeros(shape).long(),
    )
    for row, group in enumerate(groups):
        at = 0
        for number, document in enumerate(group):
            own = (row, slice(at, at + len(document["ids"])))
            ids[own] = document["ids"]
            labels[own] = shift_left(document["ids"], -100)
            weights[own] = shift_left(document["weights"])
            spans[own] = shift_left(document["spans"])
            numbers[own] = number
            at += len(document["ids"])
        numbers[row, at:] = len(group)
    return {"ids": ids, "labels": labels, "weights": weights, "spans": spans, "documents": numbers}


def unpacked(listed: list[Columns]) -> Columns:
    return rows_of([[document] for document in listed], 10)


def step(kind: LossKind, micro_batches: list[Columns], *, fused: bool) -> tuple[float, Tensor, Tensor, LossSums]:
    """(loss, gradient of the embedding, gradient of the head, sums) of one step over micro-batches."""
    objective = Objective(kind=kind, w_r=0.7, w_f=1.9)
    embedding, head = EMBEDDING.clone().requires_grad_(), HEAD.clone().requires_grad_()
    names = ("weights", "spans", "documents")
    targets = [objective.targets(b["labels"], **{name: b[name] for name in names}) for b in micro_batches]
    scales = objective.scales(step_counts(targets))
    total = None
    for batch, target in zip(micro_batches, targets, strict=True):
        hidden = embedding[batch["ids"]].tanh()
        columns = (target.labels, target.weights, target.spans)
        if fused:
            made = linear_cross_entropy(hidden, head, *columns, scales=scales, chunk_rows=3)
        else:
            made = cross_entropy(hidden @ head.t(), *columns, scales=scales)
        made.loss.backward()
        total = made.sums if total is None else total + made.sums
    assert total is not None
    assert embedding.grad is not None
    assert head.grad is not None
    return float(objective.loss(total)), embedding.grad, head.grad, total


def by_hand(kind: LossKind, listed: list[Columns]) -> tuple[float, Tensor, Tensor]:
    """Loss and gradients, one document and one token at a time."""
    embedding, head = EMBEDDING.clone().requires_grad_(), HEAD.clone().requires_grad_()
    tokens: list[tuple[Tensor, float, int, int]] = []
    for number, document in enumerate(listed):
        for at in range(1, len(document["ids"])):
            logits = embedding[document["ids"][at - 1]].tanh() @ head.t()
            loss = -torch.log_softmax(logits, 0)[document["ids"][at]]
            tokens.append((loss, float(document["weights"][at]), int(document["spans"][at]), number))

    def mean(chosen: list[tuple[Tensor, float, int, int]]) -> Tensor:
        weight = sum(weight for _, weight, _, _ in chosen)
        return sum((loss * own for loss, own, _, _ in chosen), torch.zeros(())) / weight if weight else torch.zeros(())

    if kind is LossKind.TOKEN:
        value = mean([(loss, float(weight != 0), span, number) for loss, weight, span, number in tokens])
    elif kind is LossKind.WEIGHTED:
        value = mean(tokens)
    elif kind is LossKind.SPAN:
        value = 0.7 * mean([t for t in tokens if t[2] == 1]) + 1.9 * mean([t for t in tokens if t[2] == 2])
    else:
        per = [[t for t in tokens if t[3] == number] for number in range(len(listed))]
        trained = [own for own in per if sum(weight for _, weight, _, _ in own)]
        value = sum((mean(own) for own in trained), torch.zeros(())) / len(trained)
    value.backward()
    assert embedding.grad is not None
    assert head.grad is not None
    return value.item(), embedding.grad, head.grad


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert abs(one[0] - other[0]) < 1e-9
    assert one[0] > 0.1
    for mine, theirs in zip(one[1:3], other[1:3], strict=True):
        assert (mine - theirs).abs().max() < 1e-9
        assert mine.abs().max() > 1e-3


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_equals_its_definition(kind: LossKind, fused: bool) -> None:
    listed = documents(0, 9)
    assert_same(step(kind, [unpacked(listed)], fused=fused)[:3], by_hand(kind, listed))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 11)), fused=st.booleans())
@settings(max_examples=25)
def test_any_split_into_micro_batches_gives_the_same(kind: LossKind, seed: int, cuts: set[int], fused: bool) -> None:
    listed = documents(seed, 12)
    borders = [0, *sorted(cuts), 12]
    parts = [unpacked(listed[a:b]) for a, b in itertools.pairwise(borders)]
    assert_same(step(kind, parts, fused=fused)[:3], step(kind, [unpacked(listed)], fused=False)[:3])


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), capacity=st.integers(10, 40), rows=st.integers(1, 4))
@settings(max_examples=25)
def test_packed_rows_give_the_same_as_unpacked(kind: LossKind, seed: int, capacity: int, rows: int) -> None:
    listed = documents(seed, 12)
    made = plan(np.array([len(d["ids"]) for d in listed]), capacity)
    bins = [made.order[a:b] for a, b in itertools.pairwise(made.bin_offsets)]
    groups = [[listed[i] for i in own] for own in bins]
    assert sum(map(len, groups)) == 12
    micro = [rows_of(groups[at : at + rows], capacity) for at in range(0, len(groups), rows)]
    assert_same(step(kind, micro, fused=True)[:3], step(kind, [unpacked(listed)], fused=False)[:3])


def test_the_collators_columns_are_what_the_losses_take() -> None:
    """Packed by the real packer, collated by the real collator, shifted once: as documents alone."""
    listed = documents(3, 12)
    offsets = np.cumsum([0, *(len(d["ids"]) for d in listed)])
    ids = torch.cat([d["ids"] for d in listed]).numpy().astype(np.int32)
    rows = assemble_rows(plan(np.diff(offsets), 24), ids, offsets, 0)
    features = [{"input_ids": rows.ids[r], "document_starts": rows.starts(r)} for r in range(len(rows.ids))]
    batch = DataCollatorForCausalLM(Special(), return_seq_idx=True, return_flattened=False)(features)
    labels = shift_left(batch["labels"], -100)
    # Rows are padded with real-looking ids by the packer: what lies behind its documents is not trained.
    for row, length in enumerate(rows.row_lengths):
        labels[row, int(length) - 1 :] = -100
    objective = Objective(kind="document")
    target = objective.targets(labels, documents=shift_left(batch["seq_idx"], -1))
    assert float(target.counts) == 12
    logits = EMBEDDING[batch["input_ids"]].tanh() @ HEAD.t()
    made = cross_entropy(logits, target.labels, target.weights, scales=objective.scales(target.counts))
    alone = [{**d, "weights": torch.ones(len(d["ids"]))} for d in listed]
    assert abs(made.loss.item() - by_hand(LossKind.DOCUMENT, alone)[0]) < 1e-9


def test_a_mean_of_micro_batch_means_would_be_something_else() -> None:
    listed = documents(0, 12)
    parts = [unpacked(listed[:2]), unpacked(listed[2:])]
    whole = step(LossKind.TOKEN, [unpacked(listed)], fused=False)[0]
    means = [step(LossKind.TOKEN, [part], fused=False)[0] for part in parts]
    assert abs(sum(means) / 2 - whole) > 1e-3


def test_the_span_loss_is_the_one_of_spec_5() -> None:
    batch = unpacked(documents(5, 12))
    objective = Objective(kind="span", w_r=0.7, w_f=1.9)
    losses = torch.nn.functional.cross_entropy(
        (EMBEDDING[batch["ids"]].tanh() @ HEAD.t()).flatten(0, 1), batch["labels"].flatten(), reduction="none"
    ).view(batch["labels"].shape)
    mask = batch["weights"] * (batch["labels"] != -100)
    expected = span_normalized_loss(losses, batch["spans"], mask, 0.7, 1.9)
    total = step(LossKind.SPAN, [batch], fused=True)[3]
    ours, theirs = objective.span_loss(total).values(), expected.values()
    assert ours.keys() == theirs.keys() == objective.values(total).keys()
    assert all(abs(ours[name] - theirs[name]) < 1e-9 for name in ours)
    assert ours["tokens_r"] > 1
    assert ours["tokens_f"] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_trained_is_zero_and_never_nan(kind: LossKind) -> None:
    batch = unpacked(documents(0, 1))
    objective = Objective(kind=kind)
    target = objective.targets(
        batch["labels"], weights=batch["weights"], spans=batch["spans"], documents=batch["documents"]
    )
    assert not target.counts.any()
    scales = objective.scales(target.counts)
    assert not scales.any()
    head = HEAD.clone().requires_grad_()
    made = cross_entropy(EMBEDDING[batch["ids"]] @ head.t(), target.labels, target.weights, target.spans, scales=scales)
    made.loss.backward()
    assert made.loss.item() == 0
    assert head.grad is not None
    assert not head.grad.any()
    assert objective.values(made.sums)["loss"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_not_trained_may_be_nan(fused: bool, bad: float) -> None:
    """Losses of positions without weight count for nothing, whatever they are; so do those of an ignored label."""
    labels = torch.tensor([[1, 2, 3, -100]])
    weights = torch.tensor([[0.5, 0.0, 2.0, 1.0]], dtype=torch.float64)
    spans = torch.tensor([[1, 1, 2, 2]])
    scales = torch.tensor([0.0, 0.7, 1.9])

    def sums(hidden: Tensor) -> tuple[float, list[float], list[float]]:
        if fused:
            made = linear_cross_entropy(hidden, HEAD, labels, weights, spans, scales=scales)
        else:
            made = cross_entropy(hidden @ HEAD.t(), labels, weights, spans, scales=scales)
        return made.loss.item(), made.sums.sums.tolist(), made.sums.counts.tolist()

    hidden = EMBEDDING[None, :4].clone()
    clean = sums(hidden)
    hidden[0, [1, 3]] = bad
    assert sums(hidden) == clean
    assert clean[0] > 0
    assert clean[2] == [0, 0.5, 2]


def test_weights_of_the_token_mean_are_a_mask_and_ignored_labels_stay_ignored() -> None:
    labels = torch.tensor([[1, 2, -100, 4]])
    weights = torch.tensor([[0.25, 0.0, 1.0, 2.0]])
    token = Objective(kind="token").targets(labels, weights=weights)
    assert token.labels.tolist() == [[1, -100, -100, 4]]
    assert token.weights.tolist() == [[1, 0, 0, 1]]
    weighted = Objective(kind="weighted").targets(labels, weights=weights)
    assert weighted.weights.tolist() == [[0.25, 0, 0, 2]]
    assert weighted.counts.tolist() == [2.25]


def test_documents_are_told_apart_per_row() -> None:
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, -100, 7]])
    numbers = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]])
    target = Objective(kind="document").targets(labels, documents=numbers)
    assert target.counts.tolist() == [4]
    expected = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 1], [0.5, 0.5, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(target.weights, expected)
    rows = Objective(kind="document").targets(labels)
    assert rows.counts.tolist() == [2]


def test_values_name_loss_sum_and_count() -> None:
    total = LossSums(sums=torch.tensor([6.0]), counts=torch.tensor([4.0]))
    assert Objective().values(total) == {"loss": 1.5, "sum": 6.0, "count": 4.0}
    assert (total + total).means.tolist() == [1.5]
    assert total.reduced(None).counts.tolist() == [4]


def test_counting_over_ranks_changes_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """`all_reduce` writes into what it is given: with one micro-batch that would be the target's own counts."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(3))
    target = Objective().targets(torch.tensor([[1, 2, -100]]))
    assert step_counts([target], "a group").tolist() == [6]
    assert target.counts.tolist() == [2]
    total = LossSums(sums=torch.tensor([5.0]), counts=target.counts)
    assert total.reduced("a group").sums.tolist() == [15]
    assert total.sums.tolist() == [5]


def test_scales_are_constants() -> None:
    scales = torch.tensor([2.0], requires_grad=True)
    head = HEAD.clone().requires_grad_()
    cross_entropy(EMBEDDING[None, :3] @ head.t(), torch.tensor([[1, 2, 3]]), scales=scales).loss.backward()
    assert head.grad is not None
    assert scales.grad is None


def test_mistakes_are_named() -> None:
    labels = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(UnknownNameError, match="document"):
        Objective(kind="dokument")
    with pytest.raises(ConfigError, match="spans="):
        Objective(kind="span").targets(labels)
    with pytest.raises(DataError, match="weights \\(3,\\)"):
        Objective().targets(labels, weights=torch.ones(3))
    with pytest.raises(DataError, match="has 3"):
        Objective(kind="span").scales(torch.ones(1))
    with pytest.raises(ConfigError, match="no spans"):
        Objective().span_loss(LossSums(sums=torch.ones(1), counts=torch.ones(1)))
    with pytest.raises(DataError, match="no micro-batch"):
        step_counts([])
    with pytest.raises(DataError, match="logits"):
        cross_entropy(torch.zeros(2, 4, 5), labels)


RANK_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.train.test_losses import EMBEDDING, HEAD, KINDS, VOCABULARY, WIDTH, documents, unpacked
from chatmill.train.linear_cross_entropy import linear_cross_entropy
from chatmill.train.losses import Objective, step_counts

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
group = dist.group.WORLD


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Parameter(EMBEDDING.clone()), torch.nn.Parameter(HEAD.clone())

    def forward(self, batch, target, scales):
        hidden = self.embedding[batch["ids"]].tanh()
        made = linear_cross_entropy(hidden, self.head, target.labels, target.weights, target.spans, scales=scales)
        return made.loss, made.sums


listed = documents(4, 12)
# Rank 0 has the document that trains nothing and little else; the ranks hold very different numbers of tokens.
own = [unpacked(listed[:1]), unpacked(listed[1:3])] if rank == 0 else [unpacked(listed[3:8]), unpacked(listed[8:])]
results = {}
for kind in KINDS:
    objective = Objective(kind=kind, w_r=0.7, w_f=1.9)
    names = ("weights", "spans", "documents")
    targets = [objective.targets(b["labels"], **{name: b[name] for name in names}) for b in own]
    scales = objective.scales(step_counts(targets, group), ranks=2)
    model = DistributedDataParallel(Model())
    total = None
    for number, (batch, target) in enumerate(zip(own, targets)):
        model.require_backward_grad_sync = number + 1 == len(own)
        loss, sums = model(batch, target, scales)
        loss.backward()
        total = sums if total is None else total + sums
    value = float(objective.loss(total.reduced(group)))
    results[kind.value] = (value, model.module.embedding.grad, model.module.head.grad)
torch.save(results, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_two_ranks_under_ddp_give_the_same_as_one(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK_PROGRAM)
    run_two_ranks(program, tmp_path, preload=("tests.train.test_losses",))
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    listed = documents(4, 12)
    assert len(saved[0]) == len(KINDS) == 4
    for kind in KINDS:
        expected = step(kind, [unpacked(listed)], fused=False)[:3]
        for made in saved:
            assert_same(made[kind.value], expected)
