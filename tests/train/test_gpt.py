"""The GPT: packed rows give what documents alone give, decoding gives what a whole pass gives, sizes are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.blocks import boundaries_from_starts
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.train.attention import (
    Attention,
    attend,
    choose_attention,
    documents_of_positions,
    documents_of_segments,
    prepare,
    whole_row_documents,
)
from chatmill.train.generate import FinishReason, Generated, Sampling, generate
from chatmill.train.gpt import GPT, GPTConfig, rotate
from chatmill.train.isolation import check_isolation
from tests.train.tiny import tiny_gpt

CPU = torch.device("cpu")


def test_a_packed_row_gives_the_logits_of_its_documents_alone() -> None:
    model = tiny_gpt(init_std=0.5).double()
    torch.manual_seed(1)
    ids = torch.randint(0, 97, (2, 24))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([7, 1, 7, 9], [9, 11, 4])])
    report = check_isolation(model, {"input_ids": ids, "position_ids": positions})
    assert report.passed, str(report)
    assert report.moved == 0.0
    assert len(report.documents) == 7
    leaking = check_isolation(lambda batch: model(batch["input_ids"]), {"input_ids": ids, "position_ids": positions})
    assert not leaking.passed


@settings(max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 5))
def test_attention_equals_a_loop_over_documents(lengths: list[int], padding: int) -> None:
    width = sum(lengths) + padding
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    segments = boundaries_from_starts([starts], np.array([sum(lengths)])).segments(width)
    documents = documents_of_segments(segments, CPU, most=8)
    assert documents.cu_seqlens is not None
    assert len(documents.cu_seqlens) == 10
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, width, 4, dtype=torch.float64) for heads in (4, 2, 2))
    got = attend(query, key, value, prepare(documents, Attention.SDPA))
    for start, length in zip(starts.tolist(), lengths, strict=True):
        own = slice(start, start + length)
        for head in range(4):
            scores = query[0, head, own] @ key[0, head // 2, own].T / 2
            scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
            wanted = scores.softmax(-1) @ value[0, head // 2, own]
            torch.testing.assert_close(got[0, head, own], wanted)


def test_documents_read_from_positions_equal_those_of_segments() -> None:
    starts = [[0, 3, 4], [0, 5]]
    segments = boundaries_from_starts(starts, np.array([7, 8])).segments(8)
    made = documents_of_segments(segments, CPU)
    read = documents_of_positions(made.position_ids)
    assert read.cu_seqlens is not None
    assert made.cu_seqlens is not None
    assert read.cu_seqlens.tolist() == made.cu_seqlens.tolist() == [0, 3, 4, 7, 8, 13, 16]
    assert torch.equal(prepare(read, Attention.SDPA), prepare(made, Attention.SDPA))


def test_rows_of_one_document_are_plain_causal_attention() -> None:
    documents = whole_row_documents((2, 5), CPU)
    assert prepare(documents, Attention.SDPA) is None
    query = torch.randn(2, 2, 5, 4)
    plain = attend(query, query, query, None)
    masked = attend(query, query, query, prepare(documents_of_positions(documents.position_ids), Attention.SDPA))
    torch.testing.assert_close(plain, masked)


def test_the_kernel_is_chosen_by_device_and_precision() -> None:
    cuda = torch.device("cuda")
    assert choose_attention("auto", CPU, torch.float32) is Attention.SDPA
    assert choose_attention("auto", CPU, torch.bfloat16) is Attention.SDPA
    assert choose_attention("auto", cuda, torch.float64) is Attention.SDPA
    assert choose_attention("auto", cuda, torch.float32) is Attention.FLEX
    assert choose_attention("auto", cuda, torch.bfloat16) in (Attention.VARLEN, Attention.FLEX)
    with pytest.raises(ConfigError, match="CUDA"):
        choose_attention("varlen", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="backward"):
        choose_attention("flex", CPU, torch.float32)


def test_rotary_positions_depend_on_the_distance_alone() -> None:
    model = tiny_gpt().double()
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(at: int, other: int) -> float:
        turned = []
        for vector, place in ((query, at), (key, other)):
            cos, sin = model._angles(torch.tensor([[place]]), torch.float64)
            turned.append(rotate(vector, cos, sin))
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-9)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    assert score(0, 0) == pytest.approx(float((query * key).sum()))


def test_norms_have_the_definition_and_the_eps_of_the_config() -> None:
    model = tiny_gpt(norm_eps=0.25)
    x = torch.randn(3, model.config.hidden)
    for norm in (model.norm, model.blocks[0].attention_norm, model.blocks[0].ffn_norm):
        torch.testing.assert_close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 0.25).sqrt())


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_or_not(tied: bool) -> None:
    model = tiny_gpt(tied=tied)
    assert (model.head_weight is model.embedding.weight) == tied
    assert len(list(model.parameters())) == 2 + 2 * 6 + (not tied)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 97)


def test_decoding_with_the_cache_equals_whole_passes() -> None:
    model = tiny_gpt(init_std=0.5).double()
    ids = torch.randint(0, 97, (1, 12))
    whole = model(ids)
    cache: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    got = [model.step(ids[:, :5], 0, cache)] + [model.step(ids[:, t : t + 1], t, cache) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(got), whole[0, 4:])


def greedy_by_whole_passes(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_generate_is_greedy_stops_and_repeats_by_seed() -> None:
    model = tiny_gpt(init_std=0.5)
    wanted = greedy_by_whole_passes(model, [3, 4, 5], 8)
    got = generate(model, [3, 4, 5], sampling=Sampling(max_new_tokens=8))
    assert got == Generated(ids=tuple(wanted), finish=FinishReason.LENGTH, stop_id=None)
    stop = wanted[5]
    stopped = generate(model, [3, 4, 5], stop_ids={stop}, sampling=Sampling(max_new_tokens=8))
    first = wanted.index(stop)
    assert stopped == Generated(ids=tuple(wanted[:first]), finish=FinishReason.STOP, stop_id=stop)

    def drawn(seed: int, **options: Any) -> tuple[int, ...]:
        sampling = Sampling(max_new_tokens=20, seed=seed, **{"temperature": 1.5, **options})
        return generate(model, [3, 4, 5], sampling=sampling).ids

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, top_p=1e-6)[:8] == tuple(wanted)
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Sampling(**bad)
    with pytest.raises(ConfigError, match="no tokens"):
        generate(model, [])


def test_sizes_are_checked() -> None:
    assert GPTConfig(vocab_size=10).ffn == 2048
    assert GPTConfig.from_json(GPTConfig(vocab_size=10).to_json()) == GPTConfig(vocab_size=10)
    for bad, word in (
        ({"heads": 5}, "heads"),
        ({"kv_heads": 5}, "kv_heads"),
        ({"layers": 0}, "layers"),
        ({"hidden": 36, "heads": 12}, "even"),
    ):
        with pytest.raises(ConfigError, match=word):
            GPTConfig(vocab_size=10, **bad)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="layers"):
        GPTConfig.from_json({"vocab_size": 10, "layer": 2})
