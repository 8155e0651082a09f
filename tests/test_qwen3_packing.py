"""Packing with the real Qwen3 tokenizers: no BOS, PAD `<|endoftext|>`, and EOS another token or the same one."""

from __future__ import annotations

import gzip
import json
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.load.collate import DataCollatorForCausalLM, get_pos_ids_for_packed_sequence
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.train.isolation import check_isolation
from tests.data.tokenizer_files import loaded
from tests.render.reference import hf_tokenizer

CONVERSATIONS = Path(__file__).parent / "data" / "conversations" / "gsm8k.jsonl.gz"
END_OF_TEXT, IM_START, IM_END = 151643, 151644, 151645


@cache
def chats(count: int = 40) -> tuple[str, ...]:
    """Real conversations, rendered as finished documents without a terminator at the very end."""
    texts = []
    with gzip.open(CONVERSATIONS, "rt") as file:
        for line, _ in zip(file, range(count), strict=False):
            turns = [f"<|im_start|>{m['role']}\n{m['content']}" for m in json.loads(line)["messages"]]
            texts.append("<|im_end|>\n".join(turns))
    assert len(texts) == count
    return tuple(texts)


def pack(name: str = "qwen3", tokenizer: Any = None, texts: tuple[str, ...] | None = None, **options: Any) -> Any:
    return block_tokenize_fn(
        {"text": list(texts or chats())},
        tokenizer or hf_tokenizer(name),
        "text",
        **{"max_length": 256, "packed": True, "packing_strategy": "best_fit"} | options,
    )


def documents(packed: dict[str, list[list[int]]]) -> list[list[int]]:
    return [
        block[start:end]
        for block, starts in zip(packed["input_ids"], packed["document_starts"], strict=True)
        for start, end in zip(starts, [*starts[1:], len(block)], strict=True)
    ]


def features(packed: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    pairs = zip(packed["input_ids"], packed["document_starts"], strict=True)
    return [{"input_ids": block, "document_starts": starts} for block, starts in pairs]


@pytest.mark.parametrize("strategy", ["greedy", "best_fit", "first_fit"])
def test_every_chat_is_a_document_with_its_control_tokens(strategy: str) -> None:
    packed = pack(packing_strategy=strategy, max_length=1024)
    tokenizer = hf_tokenizer("qwen3")
    found = documents(packed)
    if strategy == "greedy":
        joined = [i for document in found for i in document]
        assert joined == [i for text in chats() for i in [*tokenizer(text).input_ids, IM_END]]
        return
    assert sorted(tokenizer.decode(document) for document in found) == sorted(t + "<|im_end|>" for t in chats())
    assert all(document[0] == IM_START and document[-1] == IM_END for document in found), "no BOS, an EOS each"
    assert all(document.count(IM_END) == 2 for document in found), "control tokens in the text are recognised"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_base"])
@pytest.mark.parametrize("strategy", ["greedy", "best_fit"])
def test_a_chatmill_tokenizer_makes_the_same_blocks(name: str, strategy: str) -> None:
    own = loaded(name)
    assert pack(name, own, packing_strategy=strategy, stride=3) == pack(name, packing_strategy=strategy, stride=3)


def test_boundaries_do_not_come_from_the_eos() -> None:
    """The EOS of the chat tokenizer ends every turn: a document found by it would be half a conversation."""
    packed = pack()
    batch = DataCollatorForCausalLM(hf_tokenizer("qwen3"))(features(packed))
    by_token = get_pos_ids_for_packed_sequence(batch["input_ids"], token_id=IM_END)
    restarts = [
        sum(row[: len(block)] == 0) for row, block in zip(batch["position_ids"], packed["input_ids"], strict=True)
    ]
    assert restarts == [len(starts) for starts in packed["document_starts"]]
    assert (by_token == 0).sum() > (batch["position_ids"] == 0).sum()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_base"])
def test_no_real_eos_loses_its_label(name: str) -> None:
    tokenizer = hf_tokenizer(name)
    packed = pack(name, max_length=512)
    batch = DataCollatorForCausalLM(tokenizer, padding="max_length", max_length=512)(features(packed))
    padding = batch["input_ids"].numel() - sum(map(len, packed["input_ids"]))
    assert padding > 0
    assert (batch["input_ids"] == END_OF_TEXT).sum() == padding + (len(chats()) if name == "qwen3_base" else 0)
    in_data = sum(block.count(tokenizer.eos_token_id) for block in packed["input_ids"])
    assert in_data >= len(chats())
    assert (batch["labels"] == tokenizer.eos_token_id).sum() == in_data
    later_starts = sum(len(starts) - 1 for starts in packed["document_starts"])
    assert later_starts > 0
    assert (batch["labels"] == -100).sum() == padding + later_starts


def test_a_datasets_round_trip_into_a_dataloader(tmp_path: Path) -> None:
    import datasets
    from torch.utils.data import DataLoader

    tokenizer = hf_tokenizer("qwen3")
    raw = datasets.Dataset.from_dict({"text": list(chats()), "id": list(range(len(chats())))})
    options = {"tokenizer": tokenizer, "feature": "text", "max_length": 256, "packed": True}
    packed = raw.map(
        partial(block_tokenize_fn, packing_strategy="best_fit", **options),
        batched=True,
        batch_size=None,
        remove_columns=raw.column_names,
    )
    assert packed.column_names == ["input_ids", "document_starts"]
    packed.save_to_disk(str(tmp_path / "packed"))
    again = datasets.load_from_disk(str(tmp_path / "packed"))
    expected = pack()
    assert again["input_ids"][:] == expected["input_ids"]
    assert again["document_starts"][:] == expected["document_starts"]

    collator = DataCollatorForCausalLM(tokenizer, padding="max_length", max_length=256, return_cu_seqlens=True)
    batches = list(DataLoader(again, batch_size=4, collate_fn=collator))
    assert sum(len(batch["input_ids"]) for batch in batches) == len(expected["input_ids"])
    seen = []
    for batch in batches:
        borders = batch["cu_seqlens"].tolist()
        flat = batch["input_ids"].flatten()
        seen += [flat[a:b].tolist() for a, b in pairwise(borders)]
    assert [segment for segment in seen if set(segment) != {END_OF_TEXT}] == documents(expected)


@cache
def small_qwen3() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=151_936,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.5,
        use_cache=False,
    )
    return hf.Qwen3ForCausalLM(config).double().eval()


def short_batch(name: str) -> tuple[dict[str, Any], list[list[int]]]:
    texts = tuple(text[:60] for text in chats(6))
    packed = pack(name, texts=texts, max_length=48)
    assert max(len(starts) for starts in packed["document_starts"]) >= 2
    chosen = [f for f in features(packed) if len(f["document_starts"]) > 1][:1]
    block, starts = chosen[0]["input_ids"], chosen[0]["document_starts"]
    alone = [block[a:b] for a, b in zip(starts, [*starts[1:], len(block)], strict=True)]
    collator = DataCollatorForCausalLM(hf_tokenizer(name), padding="max_length", max_length=52)
    return collator(chosen), alone


@pytest.mark.parametrize("name", ["qwen3", "qwen3_base"])
def test_logits_of_a_packed_row_equal_those_of_each_document_alone(name: str) -> None:
    model = small_qwen3()
    batch, alone = short_batch(name)
    assert len(alone) >= 2
    with torch.no_grad():
        packed_logits = model(**batch).logits[0]
        start = 0
        for ids in alone:
            expected = model(input_ids=torch.tensor([ids])).logits[0]
            torch.testing.assert_close(packed_logits[start : start + len(ids)], expected, rtol=0, atol=1e-10)
            start += len(ids)
        without_positions = model(input_ids=batch["input_ids"]).logits[0]
    second = slice(len(alone[0]), len(alone[0]) + len(alone[1]))
    assert (without_positions[second] - packed_logits[second]).abs().max() > 1e-3, "a leak would be seen"
    assert check_isolation(model, batch).passed
