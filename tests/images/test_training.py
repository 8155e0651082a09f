"""From files to a training step of small random models: packed rows give the logits of documents alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import chatmill
from chatmill.errors import DataError
from chatmill.train.picture_isolation import check_pictures
from tests.cli.run import invoke
from tests.images.model_folders import FAMILIES, picture, write_model

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "head_dim": 16}
SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


def qwen(ids: dict[str, int], vocab: int) -> Any:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    sight = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 2, "out_hidden_size": 32}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": vocab, "rope_scaling": rope},
        vision_config={**sight, "patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def gemma(ids: dict[str, int], vocab: int) -> Any:
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config={**TEXT, "vocab_size": vocab, "sliding_window": 128, "layer_types": layers},
        vision_config={**SIGHT, "num_hidden_layers": 1, "image_size": 896, "patch_size": 56},
        mm_tokens_per_image=256,
        image_token_id=ids["<image_soft_token>"],
        image_token_index=ids["<image_soft_token>"],
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def pixtral(ids: dict[str, int], vocab: int) -> Any:
    config = transformers.LlavaConfig(
        text_config=transformers.MistralConfig(**TEXT, vocab_size=vocab),
        vision_config=transformers.PixtralVisionConfig(**SIGHT, num_hidden_layers=1, head_dim=16, patch_size=16),
        image_token_index=ids["[IMG]"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def idefics(ids: dict[str, int], vocab: int) -> Any:
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=vocab),
        vision_config={**SIGHT, "num_hidden_layers": 1, "image_size": 364, "patch_size": 14},
        image_token_id=ids["<image>"],
        scale_factor=2,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def llava(ids: dict[str, int], vocab: int) -> Any:
    config = transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**TEXT, vocab_size=vocab),
        vision_config=transformers.SiglipVisionConfig(**SIGHT, num_hidden_layers=1, image_size=384, patch_size=14),
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        vision_feature_layer=-1,
        image_grid_pinpoints=FAMILIES["llava_onevision"].image["image_grid_pinpoints"],
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


MODELS: dict[str, Callable[[dict[str, int], int], Any]] = {
    "qwen3_vl": qwen,
    "gemma3": gemma,
    "pixtral": pixtral,
    "idefics3": idefics,
    "llava_onevision": llava,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("training")
    (made / "wide.png").write_bytes(picture(64, 200))
    (made / "turned.jpg").write_bytes(picture(120, 70, "JPEG", 6))
    answer = {"role": "assistant", "content": "Yes."}
    shown = [{"type": "image"}, {"type": "text", "text": "the"}, {"type": "image"}]
    rows = [
        {"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": ["wide.png"]},
        {"messages": [{"role": "user", "content": "Hello"}, answer]},
        {
            "messages": [{"role": "user", "content": shown}, answer, {"role": "user", "content": "More"}, answer],
            "images": ["turned.jpg", "wide.png"],
        },
    ]
    (made / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@cache
def vocabulary(model: Path) -> Any:
    """The tokenizer of a model's folder, which is written if it is not there."""
    return transformers.AutoTokenizer.from_pretrained(write_model(model, model.name))


def built(folder: Path, name: str, out: Path, **more: Any) -> Path:
    vocabulary(folder / name)
    recipe = {"sources": [{"path": str(folder / "chats.jsonl")}], "tokenizer": str(folder / name), **more}
    chatmill.build(recipe, out, workers=0)
    return out


@cache
def plainly_built(folder: Path, name: str) -> Path:
    """A dataset that nothing changes."""
    return built(folder, name, folder / f"{name}-built")


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_give_the_logits_of_documents_alone(name: str, folder: Path) -> None:
    data = plainly_built(folder, name)
    assert not chatmill.verify_dataset(data, deep=True).differences
    tokenizer = vocabulary(folder / name)
    ids = tokenizer.get_vocab()
    torch.manual_seed(0)
    model = MODELS[name](ids, max(ids.values()) + 1).eval()
    row = chatmill.to_hf_dataset(data, max_length=16384, pack=True)[0]
    alone = {tuple(one["input_ids"]): one for one in chatmill.to_hf_dataset(data)}
    packs = chatmill.PictureCollator(chatmill.DataCollatorForCausalLM(tokenizer, model=model), folder / name, folder)
    plain = chatmill.PictureCollator(chatmill.DataCollatorForCausalLM(tokenizer), folder / name, folder)
    batch = packs([row])
    with torch.no_grad():
        packed, at = model(**batch).logits[0], 0
        for size in row["seq_lengths"]:
            one = plain([alone[tuple(row["input_ids"][at : at + size])]])
            if name == "qwen3_vl" and "image_grid_thw" in one:
                types = (one["input_ids"] == ids["<|image_pad|>"]).int()
                own, _ = model.model.get_rope_index(one["input_ids"], types, one["image_grid_thw"])
                assert (own == one["position_ids"][1:]).all()
            logits = model(**one, use_cache=False).logits[0]
            assert torch.allclose(packed[at : at + size], logits, atol=1e-5)
            at += size
    model.train()
    loss = model(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_pictures_that_have_changed_are_an_error_unless_the_dataset_stores_them(folder: Path, tmp_path: Path) -> None:
    place = folder / "wide.png"
    before = place.read_bytes()
    data = plainly_built(folder, "qwen3_vl")
    stored = built(folder, "qwen3_vl", tmp_path / "stored", store_images=True)
    tokenizer = vocabulary(folder / "qwen3_vl")
    inner = chatmill.DataCollatorForCausalLM(tokenizer)
    outside, inside = (chatmill.to_hf_dataset(one, max_length=2048, pack=True)[0] for one in (data, stored))
    collator = chatmill.PictureCollator(inner, folder / "qwen3_vl", folder)
    first = collator([outside])
    try:
        place.write_bytes(picture(64, 201))
        with pytest.raises(DataError, match="has changed"):
            collator([outside])
        kept = chatmill.PictureCollator(inner, folder / "qwen3_vl")([inside])
    finally:
        place.write_bytes(before)
    assert torch.equal(first["pixel_values"], kept["pixel_values"])
    assert (data / "train" / "tokens.bin").read_bytes() == (stored / "train" / "tokens.bin").read_bytes()


def test_another_processor_than_that_of_the_build_is_an_error(folder: Path, tmp_path: Path) -> None:
    data = plainly_built(folder, "qwen3_vl")
    other = write_model(tmp_path / "other", "qwen3_vl")
    config = json.loads((other / "preprocessor_config.json").read_text())
    config["size"] = {"shortest_edge": 4096, "longest_edge": 8192}
    (other / "preprocessor_config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    collator = chatmill.PictureCollator(chatmill.DataCollatorForCausalLM(tokenizer), other, folder)
    with pytest.raises(DataError, match="was built with"):
        collator([chatmill.to_hf_dataset(data)[0]])


@pytest.mark.parametrize("overflow", ["cut", "windows", "drop_oldest_turns"])
def test_overflow_never_cuts_a_picture(overflow: str, folder: Path, tmp_path: Path) -> None:
    pad = vocabulary(folder / "qwen3_vl").get_vocab()["<|image_pad|>"]
    for length in (60, 160, 230):
        packing = {"max_length": length, "overflow": overflow}
        gates = {"records_without_trained_tokens": None, "records_left_out": None}
        data = built(folder, "qwen3_vl", tmp_path / f"{length}", packing=packing, gates=gates)
        assert not chatmill.verify_dataset(data, deep=True).differences
        for episode in chatmill.EpisodeDataset(data):
            shown = json.loads(episode.images or "[]")
            assert (episode.ids == pad).sum() == sum(one["stop"] - one["start"] for one in shown)
            for one in shown:
                assert (episode.ids[one["start"] : one["stop"]] == pad).all()
                assert one["stop"] - one["start"] == one["grid"][1] * one["grid"][2] // 4


@pytest.mark.parametrize("name", ["qwen3_vl", "pixtral"])
def test_isolate_changes_pictures_too(name: str, folder: Path, tmp_path: Path) -> None:
    data = plainly_built(folder, name)
    chatmill.export_dataset(data, "hf", tmp_path / "rows", max_length=4096)
    ids = vocabulary(folder / name).get_vocab()
    torch.manual_seed(0)
    MODELS[name](ids, max(ids.values()) + 1).save_pretrained(tmp_path / "model")
    for file in (folder / name).iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    asked = ["isolate", str(tmp_path / "model"), str(tmp_path / "rows"), "--split", "train"]
    more = ["--max-length", "4096", "--images", str(folder)]
    done = invoke(*asked, *more)
    assert done.exit_code == 0, done.output
    assert "isolated: 3 documents, 0 leak" in done.output
    short = invoke(*asked)  # rows of 256 tokens: no picture fits, and text alone proves nothing
    assert isinstance(short.exception, DataError)
    assert "raise --max-length" in str(short.exception)


def test_isolate_sees_a_leak_of_a_picture(folder: Path) -> None:
    data = plainly_built(folder, "qwen3_vl")
    tokenizer = vocabulary(folder / "qwen3_vl")
    ids = tokenizer.get_vocab()
    torch.manual_seed(0)
    model = qwen(ids, max(ids.values()) + 1).eval()
    row = chatmill.to_hf_dataset(data, max_length=4096, pack=True)[0]
    leaks = chatmill.PictureCollator(PlainPositions(tokenizer), folder / "qwen3_vl", folder)
    assert len(check_pictures(model, [row], leaks).leaking) >= 1


class PlainPositions:
    """A collator that loses where documents begin."""

    def __init__(self, tokenizer: Any) -> None:
        self._inner = chatmill.DataCollatorForCausalLM(tokenizer)

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        kept = [{key: one[key] for key in ("input_ids", "labels")} for one in features]
        return dict(self._inner(kept))
