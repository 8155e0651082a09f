"""Packing with the real Qwen3 tokenizers: no BOS, PAD `<|endoftext|>`, and EOS another token or the same one."""

from __future__ import annotations

from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.load.collate import DataCollatorForCausalLM, get_pos_ids_for_packed_sequence
from chatmill.read.conversations import ConversationFile
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.train.isolation import check_isolation
from tests.conftest import DATA
from tests.data.tokenizer_files import loaded
from tests.render.reference import hf_tokenizer

END_OF_TEXT, IM_START, IM_END = 151643, 151644, 151645
Packed = dict[str, list[list[int]]]


@cache
def chats() -> list[str]:
    """Real conversations, rendered as finished documents without a terminator at the very end."""
    talks = islice(ConversationFile(DATA / "conversations" / "gsm8k.jsonl.gz"), 40)
    texts = ["<|im_end|>\n".join(f"<|im_start|>{m.role.value}\n{m.content}" for m in talk.messages) for talk in talks]
    assert len(texts) == 40
    return texts


def pack(tokenizer: Any, texts: list[str] | None = None, **options: Any) -> Packed:
    options = {"max_length": 256, "packed": True, "packing_strategy": "best_fit"} | options
    made: Packed = block_tokenize_fn({"text": texts or chats()}, tokenizer, "text", **options)
    return made


def rows(packed: Packed) -> list[dict[str, Any]]:
    return [dict(zip(packed, row, strict=True)) for row in zip(*packed.values(), strict=True)]


def documents(packed: Packed) -> list[list[int]]:
    return [
        row["input_ids"][start:end]
        for row in rows(packed)
        for start, end in pairwise([*row["document_starts"], len(row["input_ids"])])
    ]


@pytest.mark.parametrize("strategy", ["greedy", "best_fit", "first_fit"])
def test_every_chat_is_a_document_with_its_control_tokens(strategy: str) -> None:
    tokenizer = hf_tokenizer("qwen3")
    found = documents(pack(tokenizer, packing_strategy=strategy, max_length=1024))
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
    made, other = (pack(t, packing_strategy=strategy, stride=3) for t in (loaded(name), hf_tokenizer(name)))
    assert made == other


def test_boundaries_do_not_come_from_the_eos() -> None:
    """The EOS of the chat tokenizer ends every turn: a document found by it would be half a conversation."""
    packed = rows(pack(hf_tokenizer("qwen3")))
    batch = DataCollatorForCausalLM(hf_tokenizer("qwen3"))(packed)
    by_token = get_pos_ids_for_packed_sequence(batch["input_ids"], token_id=IM_END)
    restarts = [sum(at[: len(row["input_ids"])] == 0) for at, row in zip(batch["position_ids"], packed, strict=True)]
    assert restarts == [len(row["document_starts"]) for row in packed]
    assert (by_token == 0).sum() > (batch["position_ids"] == 0).sum()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_base"])
def test_no_real_eos_loses_its_label(name: str) -> None:
    tokenizer = hf_tokenizer(name)
    packed = pack(tokenizer, max_length=512)
    batch = DataCollatorForCausalLM(tokenizer, padding="max_length", max_length=512)(rows(packed))
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
    raw = datasets.Dataset.from_dict({"text": chats(), "id": list(range(len(chats())))})
    options = {"feature": "text", "max_length": 256, "packed": True, "packing_strategy": "best_fit"}
    work = partial(block_tokenize_fn, tokenizer=tokenizer, **options)
    packed = raw.map(work, batched=True, batch_size=None, remove_columns=raw.column_names)
    packed.save_to_disk(str(tmp_path / "packed"))
    again = datasets.load_from_disk(str(tmp_path / "packed"))
    expected = pack(tokenizer)
    assert {name: again[name][:] for name in again.column_names} == expected

    collator = DataCollatorForCausalLM(tokenizer, padding="max_length", max_length=256, return_cu_seqlens=True)
    batches = list(DataLoader(again, batch_size=4, collate_fn=collator))
    assert sum(len(batch["input_ids"]) for batch in batches) == len(expected["input_ids"])
    seen: list[list[int]] = []
    for batch in batches:
        seen += [batch["input_ids"].flatten()[a:b].tolist() for a, b in pairwise(batch["cu_seqlens"].tolist())]
    assert [segment for segment in seen if set(segment) != {END_OF_TEXT}] == documents(expected)


@cache
def small_qwen3() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"vocab_size": 151_936, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = hf.Qwen3Config(**sizes, max_position_embeddings=256, initializer_range=0.5, use_cache=False)
    return hf.Qwen3ForCausalLM(config).double().eval()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_base"])
def test_logits_of_a_packed_row_equal_those_of_each_document_alone(name: str) -> None:
    model, tokenizer = small_qwen3(), hf_tokenizer(name)
    packed = pack(tokenizer, [text[:60] for text in chats()[:6]], max_length=48)
    row = next(row for row in rows(packed) if len(row["document_starts"]) > 1)
    batch = DataCollatorForCausalLM(tokenizer, padding="max_length", max_length=52)([row])
    with torch.no_grad():
        packed_logits = model(**batch).logits[0]
        for start, end in pairwise([*row["document_starts"], len(row["input_ids"])]):
            alone = model(input_ids=batch["input_ids"][:, start:end]).logits[0]
            torch.testing.assert_close(packed_logits[start:end], alone, rtol=0, atol=1e-10)
        without_positions = model(input_ids=batch["input_ids"]).logits[0]
    second = slice(row["document_starts"][1], len(row["input_ids"]))
    assert (without_positions[second] - packed_logits[second]).abs().max() > 1e-3, "a leak would be seen"
    assert check_isolation(model, batch).passed
