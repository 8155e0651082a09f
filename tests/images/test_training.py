"""From files to a training step of small random models, to LLaMA-Factory, and to the viewer."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import chatmill
from chatmill.errors import ConfigError, DataError
from chatmill.train.picture_isolation import check_pictures
from tests.cli.run import invoke
from tests.compiler.builds import write_jsonl
from tests.images.model_folders import FAMILIES, picture, write_model
from tests.view.sets import running

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
    """The chats of a folder, built with a model in it."""
    recipe = {"sources": [{"path": str(folder / "chats.jsonl")}], "tokenizer": str(folder / name), **more}
    chatmill.build(recipe, out, workers=0)
    return out


@cache
def plainly_built(folder: Path, name: str) -> Path:
    """A dataset that nothing changes."""
    vocabulary(folder / name)
    return built(folder, name, folder / f"{name}-built")


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_give_the_logits_of_documents_alone(name: str, folder: Path) -> None:
    data = plainly_built(folder, name)
    assert not chatmill.verify_dataset(data, deep=True).differences
    tokenizer = vocabulary(folder / name)
    ids = tokenizer.get_vocab()
    model = random_model(name, ids)
    row = chatmill.to_hf_dataset(data, max_length=16384, packed=True)[0]
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


@pytest.mark.parametrize("max_length", [None, 4096])
def test_the_lines_that_an_export_prints_train_on_its_pictures(
    max_length: int | None, folder: Path, tmp_path: Path
) -> None:
    data, words = plainly_built(folder, "qwen3_vl"), vocabulary(folder / "qwen3_vl")
    first, second = chatmill.export_dataset(data, "hf", tmp_path / "rows", max_length=max_length).config.splitlines()
    model = random_model("qwen3_vl", words.get_vocab())
    told = {"chatmill": chatmill, "tokenizer": words, "model": model}
    assert first.endswith(f"{str(folder / 'qwen3_vl')!r}, images={str(folder)!r})")
    exec(first, told)
    given = eval(second.replace("transformers: Trainer(..., ", "dict("), {**told, "TrainingArguments": dict})
    rows = datasets.load_from_disk(str(tmp_path / "rows"))["train"]
    settings = {"max_steps": 1, "per_device_train_batch_size": 3, "use_cpu": True, "report_to": [], "logging_steps": 1}
    arguments = transformers.TrainingArguments(str(tmp_path / "run"), **given["args"], **settings)
    weight = model.model.visual.patch_embed.proj.weight
    before = weight.detach().clone()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=given["data_collator"])
    trainer.train()
    assert np.isfinite(trainer.state.log_history[0]["loss"])
    assert not torch.equal(weight, before), "what sees pictures is trained too"


def test_pictures_that_have_changed_are_an_error_unless_the_dataset_stores_them(folder: Path, tmp_path: Path) -> None:
    place = folder / "wide.png"
    before = place.read_bytes()
    data = plainly_built(folder, "qwen3_vl")
    stored = built(folder, "qwen3_vl", tmp_path / "stored", store_images=True)
    inner = chatmill.DataCollatorForCausalLM(vocabulary(folder / "qwen3_vl"))
    outside, inside = (chatmill.to_hf_dataset(one, max_length=2048, packed=True)[0] for one in (data, stored))
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


def test_whole_paths_of_pictures_need_no_folder(folder: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "qwen3_vl").symlink_to(folder / "qwen3_vl")
    inner = chatmill.DataCollatorForCausalLM(vocabulary(folder / "qwen3_vl"))
    collator = chatmill.PictureCollator(inner, folder / "qwen3_vl")
    for name in (str(folder / "wide.png"), f"file://{folder / 'wide.png'}", "wide.png"):
        write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat, "images": [name]}])
        data = built(tmp_path, "qwen3_vl", tmp_path / f"built-{len(name)}", images=str(folder))
        row = chatmill.to_hf_dataset(data)[0]
        if name == "wide.png":
            with pytest.raises(ConfigError, match="give images= the folder of the pictures"):
                collator([row])
        else:
            assert "pixel_values" in collator([row])


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

    row = chatmill.to_hf_dataset(plainly_built(folder, "qwen3_vl"), max_length=4096, packed=True)[0]
    leaks = chatmill.PictureCollator(plain_positions, folder / "qwen3_vl", folder)
    assert len(check_pictures(random_model("qwen3_vl", tokenizer.get_vocab()), [row], leaks).leaking) >= 1


# Exports to LLaMA-Factory, which is given the pictures of rows, and to which document each belongs.


ROOT = Path(__file__).parents[2]


def built_of(folder: Path, pictures: dict[str, bytes], **more: Any) -> Path:
    write_model(folder / "model", "qwen3_vl")
    answer = {"role": "assistant", "content": "Yes."}
    rows = [{"messages": [{"role": "user", "content": "Hello"}, answer]}]
    for name, data in pictures.items():
        (folder / name).write_bytes(data)
        rows.append({"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": [name]})
    write_jsonl(folder / "chats.jsonl", rows)
    return built(folder, "model", folder / "built", **more)


def test_rows_have_their_pictures_and_whose_they_are(tmp_path: Path) -> None:
    shown = {"a.png": picture(64, 200), "b.jpg": picture(120, 70, "JPEG")}
    data = built_of(tmp_path, shown, store_images=True)
    alone = chatmill.export_dataset(data, "llamafactory", tmp_path / "alone")
    assert "image_max_pixels: 178956970" in alone.config
    rows = datasets.load_from_disk(str(tmp_path / "alone"))["train"]
    by_name = {own["path"]: own["bytes"] for row in rows for own in row["images"]}
    assert by_name == shown
    chatmill.export_dataset(data, "llamafactory", tmp_path / "packed", max_length=600)
    (row,) = datasets.load_from_disk(str(tmp_path / "packed"))["train"]
    about = row["packing_params"]
    ends = np.array(about["sequence_boundaries"])
    assert ends[-1] == len(row["input_ids"]) == 608
    assert ends[-1] - ends[-2] == about["right_padding_length"]
    mask = np.array(row["attention_mask"])
    assert [set(mask[a:b].tolist()) for a, b in itertools.pairwise(ends)] == [{1}, {2}, {3}, {0}]
    pads = chatmill.load_tokenizer(str(tmp_path / "model")).control_ids["<|image_pad|>"]
    places = [(np.array(row["input_ids"])[a:b] == pads).any() for a, b in itertools.pairwise(ends)]
    assert about["image_subseq_ids"] == np.flatnonzero(places).tolist()
    order = [by_name[own["path"]] for own in row["images"]]
    assert order == [own["bytes"] for own in row["images"]]


@pytest.mark.parametrize(
    ("name", "data", "stores", "wrong"),
    [
        ("a.png", picture(64, 200), False, "--store-images"),
        ("a.jpg", picture(64, 200, "JPEG", 6), True, "turned by EXIF"),
        ("a.png", picture(20, 200), True, "side under 28"),
    ],
)
def test_what_llamafactory_would_show_otherwise_is_refused(
    name: str, data: bytes, stores: bool, wrong: str, tmp_path: Path
) -> None:
    made = built_of(tmp_path, {name: data}, store_images=stores)
    with pytest.raises(DataError, match=wrong):
        chatmill.export_dataset(made, "llamafactory", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.trainers
def test_its_own_collator_makes_the_same_batch(tmp_path: Path) -> None:
    package = ROOT / ".trainers" / "llamafactory"
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    command = [sys.executable, "-m", "tests.images.llamafactory_collator", str(tmp_path), str(package)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "export" / "own_readers" / "stand_ins")))
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip().endswith("equal"), ran.stderr


# The viewer, which shows small copies from the folder of the build, or from the dataset.


WIDE, TURNED = picture(64, 200), picture(1200, 700, "JPEG", 6)


@pytest.mark.parametrize(("stores", "packs"), [(False, True), (True, False)])
def test_pictures_are_shown_small(stores: bool, packs: bool, tmp_path: Path) -> None:
    packing = {"pack": {"strategy": "best_fit"}, "packing": {"max_length": 2048}} if packs else {}
    data = built_of(tmp_path, {"wide.png": WIDE, "turned.jpg": TURNED}, store_images=stores, **packing)
    with running(data) as found:
        pages = [f"/splits/train/{number}" for number in range(1 if packs else 3)]
        texts = [b"".join(part.encode() for part in found.viewer.answer(page, {}).body).decode() for page in pages]
        assert sum(text.count("<img ") for text in texts) == 2
        assert any("[image 200x64, " in text for text in texts)
        assert not any("&lt;|image_pad|&gt;" in text for text in texts)
        page = pages[-1]
        small = [found.viewer.answer(f"{page}/picture", {"n": str(number)}) for number in range(2 if packs else 1)]
        assert all(one.kind == "image/png" for one in small)
        sizes = {Image.open(io.BytesIO(one.body)).size for one in small}
        assert (320, 187) in sizes  # turned as EXIF says
        assert found.viewer.answer(f"{page}/picture", {"n": "9"}).status == 404
        if not stores:
            (tmp_path / "turned.jpg").write_bytes(WIDE)
            statuses = {found.viewer.answer(f"{page}/picture", {"n": str(number)}).status for number in range(2)}
            assert 400 in statuses
