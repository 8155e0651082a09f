"""From files to a training step of small random models: packed rows give the logits of documents alone."""

from __future__ import annotations

import json
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
from tests.compiler.builds import write_jsonl
from tests.images.model_folders import FAMILIES, picture, write_model

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "head_dim": 16}
SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN = {"num_heads": 2, "depth": 2, "out_hidden_size": 32, "patch_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {"rope_scaling": ROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "gemma3": {
        "text_config": {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {"image_size": 896, "patch_size": 56},
        "mm_tokens_per_image": 256,
        "image_token_id": "<image_soft_token>",
    },
    "pixtral": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, "patch_size": 16},
        "image_token_index": "[IMG]",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "idefics3": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"image_size": 364, "patch_size": 14},
        "image_token_id": "<image>",
        "scale_factor": 2,
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
        "image_token_id": "<image>",
        "video_token_id": "<video>",
        "vision_feature_layer": -1,
        "image_grid_pinpoints": FAMILIES["llava_onevision"].image["image_grid_pinpoints"],
    },
}
"""Configs of small models, with the names of tokens for their ids."""


@cache
def vocabulary(folder: Path) -> Any:
    """The tokenizer of a model's folder, which is written if it is not there."""
    return transformers.AutoTokenizer.from_pretrained(write_model(folder, folder.name))


def random_model(name: str, ids: dict[str, int]) -> Any:
    """A small model of a family for a vocabulary."""
    told = {key: ids.get(value, value) if isinstance(value, str) else value for key, value in MODELS[name].items()}
    kind = told.pop("model_type", name)
    told["text_config"] = {**TEXT, "vocab_size": max(ids.values()) + 1, **told["text_config"]}
    told["vision_config"] = {**SIGHT, **told["vision_config"]}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **told)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("training")
    (made / "wide.png").write_bytes(picture(64, 200))
    (made / "turned.jpg").write_bytes(picture(120, 70, "JPEG", 6))
    answer, text = {"role": "assistant", "content": "Yes."}, [{"type": "text", "text": "the"}]
    asked: list[tuple[list[Any], list[str]]] = [
        (["<image>What?"], ["wide.png"]),
        (["Hello"], []),
        ([[{"type": "image"}, *text, {"type": "image"}], "More"], ["turned.jpg", "wide.png"]),
    ]
    rows = [
        {"messages": [one for words in turns for one in ({"role": "user", "content": words}, answer)], "images": shown}
        for turns, shown in asked
    ]
    write_jsonl(made / "chats.jsonl", rows)
    return made


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
    model = random_model(name, ids)
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
    inner = chatmill.DataCollatorForCausalLM(vocabulary(folder / "qwen3_vl"))
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
    other = write_model(tmp_path, "qwen3_vl")
    config = json.loads((other / "preprocessor_config.json").read_text())
    config["size"] = {"shortest_edge": 4096, "longest_edge": 8192}
    (other / "preprocessor_config.json").write_text(json.dumps(config))
    inner = chatmill.DataCollatorForCausalLM(transformers.AutoTokenizer.from_pretrained(other))
    with pytest.raises(DataError, match="was built with"):
        chatmill.PictureCollator(inner, other, folder)([chatmill.to_hf_dataset(plainly_built(folder, "qwen3_vl"))[0]])


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
    random_model(name, vocabulary(folder / name).get_vocab()).save_pretrained(tmp_path / "model")
    for file in (folder / name).iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    asked = ["isolate", str(tmp_path / "model"), str(tmp_path / "rows"), "--split", "train"]
    done = invoke(*asked, "--max-length", "4096", "--images", str(folder))
    assert done.exit_code == 0, done.output
    assert "isolated: 3 documents, 0 leak" in done.output
    short = invoke(*asked)  # rows of 256 tokens: no picture fits, and text alone proves nothing
    assert isinstance(short.exception, DataError)
    assert "raise --max-length" in str(short.exception)


def test_isolate_sees_a_leak_of_a_picture(folder: Path) -> None:
    tokenizer = vocabulary(folder / "qwen3_vl")
    inner = chatmill.DataCollatorForCausalLM(tokenizer)

    def plain_positions(features: list[dict[str, Any]]) -> dict[str, Any]:
        """Loses where documents begin."""
        return dict(inner([{key: one[key] for key in ("input_ids", "labels")} for one in features]))

    row = chatmill.to_hf_dataset(plainly_built(folder, "qwen3_vl"), max_length=4096, pack=True)[0]
    leaks = chatmill.PictureCollator(plain_positions, folder / "qwen3_vl", folder)
    assert len(check_pictures(random_model("qwen3_vl", tokenizer.get_vocab()), [row], leaks).leaking) >= 1
