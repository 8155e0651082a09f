"""Pictures from records to ids: every form of record, one clear error for each wrong one, every family of models."""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatmill
from chatmill.core.conversation import Conversation
from chatmill.core.kinds import PICTURE
from chatmill.core.message_parser import parse_messages
from chatmill.core.pictures import Picture
from chatmill.errors import RecordError
from chatmill.images.files import Pictures
from chatmill.label.presets import PRESETS
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer
from tests.compiler.builds import write_jsonl
from tests.images.model_folders import FAMILIES, SIZES, picture, processor_of, write_model

PNG = picture(40, 30)
BASE64 = base64.b64encode(PNG).decode()
IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "Look"}


def user(*parts: Any, answer: str = "Yes.") -> list[dict[str, Any]]:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def link(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def form(*expected: Any, shape: str = "openai", **record: Any) -> tuple[str, dict[str, Any], list[Any]]:
    return shape, record, list(expected)


SOURCE = {"type": "base64", "data": BASE64}
SHAREGPT = [{"from": "human", "value": "<image>\nLook"}, {"from": "gpt", "value": "Yes."}]
FORMS = {
    "openai": form("Look", "a.png", messages=user(TEXT, link("a.png"))),
    "data": form(PNG, messages=user(link(f"data:image/png;base64,{BASE64}"))),
    "path": form("a.png", "Look", messages=user({"type": "image", "path": "a.png"}, TEXT)),
    "column": form("a", "Look", "b", messages=user(IMAGE, TEXT, IMAGE), images=["a", "b"]),
    "bytes": form(PNG, messages=user(IMAGE), images=[{"bytes": PNG, "path": "a.png"}]),
    "marks": form("a", "Look", "b", messages=user("<image>Look<image>"), images=["a", "b"]),
    "sharegpt": form("a.png", "\nLook", shape="sharegpt", conversations=SHAREGPT, image="a.png"),
    "anthropic": form(PNG, "Look", shape="anthropic", messages=user({"type": "image", "source": SOURCE}, TEXT)),
}


@pytest.mark.parametrize("name", FORMS)
def test_pictures_are_read_in_every_form(name: str) -> None:
    shape, record, expected = FORMS[name]
    found = conversation_of(record, find_shape(shape)).messages[0]
    assert [part if isinstance(part, str) else part.data or part.place for part in found.parts] == expected
    assert found.content == ""
    assert all(isinstance(part, Picture) for part in found.pictures)


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"messages": user(IMAGE, IMAGE), "images": ["a"]}, "images_differ"),
        ({"messages": user(IMAGE)}, "images_differ"),
        ({"messages": user("no place"), "images": ["a"]}, "images_differ"),
        ({"messages": user("<image>"), "images": ["a", "b"]}, "images_differ"),
        ({"messages": user(link("data:image/png,x"))}, "bad_image"),
        ({"messages": user(link("data:image/png;base64,!"))}, "bad_image"),
        ({"messages": user({"type": "image", "image": {"nothing": 1}})}, "bad_image"),
        ({"messages": user({"type": "video", "path": "a.mp4"})}, "non_text_part"),
        ({"messages": user("x"), "videos": ["a.mp4"]}, "non_text_part"),
    ],
)
def test_a_record_that_does_not_agree_with_itself_is_refused(record: dict[str, Any], code: str) -> None:
    with pytest.raises(RecordError) as error:
        conversation_of(record, find_shape("openai"))
    assert error.value.code == code


def test_marks_are_text_where_no_field_holds_pictures() -> None:
    found = conversation_of({"messages": user("<image> is text")}, find_shape("openai")).messages[0]
    assert (found.content, found.parts) == ("<image> is text", ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    (made / "pictures").mkdir()
    jpeg, png = picture(300, 200, "JPEG"), picture(300, 200)
    bomb = bytearray(png)
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    files = {"good.png": png, "png_in.jpg": png, "bomb.png": bytes(bomb), "thin.png": picture(1, 201)}
    files |= {"cut.jpg": jpeg[: len(jpeg) // 2], "cut.png": png[: len(png) // 2]}
    files |= {"cut.webp": picture(300, 200, "WEBP")[:-20], "text.png": b"not a picture", "empty.png": b""}
    for name, data in files.items():
        (made / "pictures" / name).write_bytes(data)
    (made / "secret.png").write_bytes(png)
    (made / "pictures" / "link.png").symlink_to(made / "secret.png")
    os.mkfifo(made / "pictures" / "pipe.png")
    write_model(made / "model", "qwen3_vl")
    return made


ERRORS = {
    "cut.jpg": ("bad_image", "cut off"),
    "cut.png": ("bad_image", "cut off"),
    "cut.webp": ("bad_image", "cut off"),
    "bomb.png": ("bad_image", "pixels"),
    "text.png": ("bad_image", "not a picture"),
    "empty.png": ("bad_image", "not a picture"),
    "thin.png": ("image_size", "200 times"),
    "missing.png": ("image_missing", "No such file"),
    ".": ("image_missing", "directory"),
    "pipe.png": ("image_missing", "pipe"),
    "bad\0name": ("image_missing", "bad"),
    "../secret.png": ("image_outside", "--images"),
    "link.png": ("image_outside", "--images"),
    "https://example.com/a.png": ("image_not_local", "nothing is fetched"),
}


@pytest.mark.parametrize("place", ERRORS)
def test_a_picture_that_cannot_be_used_is_one_clear_error(place: str, folder: Path) -> None:
    code, words = ERRORS[place]
    pictures = Pictures.of(folder / "model", str(folder / "pictures"))
    with pytest.raises(RecordError, match=words) as error:
        pictures.look([(Picture(place), "messages[0].content[0]")])
    assert (error.value.code, error.value.path) == (code, "messages[0].content[0]")


def test_the_content_of_a_file_counts_and_not_its_name(folder: Path) -> None:
    pictures = Pictures.of(folder / "model", str(folder / "pictures"))
    good, named = pictures.look([(Picture("good.png"), ""), (Picture("png_in.jpg"), "")])
    assert good[1:] == named[1:]


def build(folder: Path, records: list[dict[str, Any]], out: Path, source: Any = None, **more: Any) -> list[Any]:
    """Build records whose pictures are in a folder, with its model; those that were put aside."""
    chats = write_jsonl(folder / "pictures" / f"{out.parent.name}.jsonl", records)
    recipe = {"sources": [{"path": str(chats), **(source or {})}], "tokenizer": str(folder / "model")}
    recipe |= {"on_error": "quarantine", "gates": {"records_left_out": None}}
    assert chatmill.build({**recipe, **more}, out, workers=0).outcome == "built"
    assert not chatmill.verify_dataset(out, deep=True).findings
    rejected = out / "rejected.jsonl"
    return [json.loads(line) for line in rejected.read_text().splitlines()] if rejected.exists() else []


def test_records_with_pictures_that_cannot_be_used_are_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    places = [place for place in ERRORS if "\0" not in place]
    records = [{"id": place, "messages": user(IMAGE, TEXT), "images": [place]} for place in ("good.png", *places)]
    rejected = build(folder, records, tmp_path / "built")
    assert [(one["id"], one["reason"]) for one in rejected] == [(place, ERRORS[place][0]) for place in places]
    text_model = write_model(tmp_path / "text", "qwen3_vl")
    (text_model / "preprocessor_config.json").unlink()
    with pytest.raises(RecordError, match="takes no pictures"):
        build(folder, records, tmp_path / "none", tokenizer=str(text_model), on_error="fail")


def test_stored_pictures_are_in_the_statistics(folder: Path, tmp_path: Path) -> None:
    records = [{"messages": user(IMAGE, TEXT), "images": ["good.png"]}]
    build(folder, records, tmp_path / "built", store_images=True)
    stats = chatmill.Dataset(tmp_path / "built").stats()
    assert stats.splits[0].pictures["count"] == 1
    assert "1 picture, " in repr(stats)
    assert " pixels" in repr(stats)


@pytest.mark.parametrize("more", [{"preferences": "pairs"}, {"expand": "tree"}])
def test_a_picture_where_none_is_taken_costs_one_record(folder: Path, tmp_path: Path, more: dict[str, str]) -> None:
    records: list[dict[str, Any]] = []
    for parts, pictures in (([IMAGE, TEXT], ["good.png"]), (["Look"], [])):
        messages = user(*parts)
        pair = {"prompt": messages[:1], "chosen": "Yes.", "rejected": "No."}
        records.append({**(pair if "preferences" in more else {"messages": messages}), "images": pictures})
    (rejected,) = build(folder, records, tmp_path / "built", **more)
    assert (rejected["reason"], rejected["where"].rpartition(":")[2]) == ("images_not_taken", "1")
    assert len(chatmill.EpisodeDataset(tmp_path / "built")) == (2 if "preferences" in more else 1)


# Every family writes the ids that transformers' own processor writes, of whatever size pictures are.


TEXTS = ("the in", "\n", "\n\nthe", " ", "What <image> is [IMG] in <|image_pad|><start_of_image>?", "é🙂")


@cache
def template_of(folder: Path, pictures: Path) -> ModelTemplate:
    options = TemplateOptions(pictures=Pictures.of(folder, str(pictures)))
    return bind(str(folder), load_tokenizer(str(folder)), options)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate(SIZES):
        turned = number % 4 == 3
        data = picture(*size, "JPEG", 5 + number % 4) if turned else picture(*size, ("PNG", "WEBP", "GIF")[number % 3])
        (folder / f"{number}").write_bytes(data)
    return folder


def conversations(name: str, count: int, seed: int) -> list[list[dict[str, Any]]]:
    """Messages with one to four pictures each, all sizes among them; no text spells what the family writes."""
    fits = [n for n, size in enumerate(SIZES) if FAMILIES[name].sizes(*size)]
    chosen = random.Random(seed)
    texts = [one for one in TEXTS if not any(token in one for token in (*FAMILIES[name].tokens, "<image>"))]
    made = []
    for number in range(count):
        turns: list[dict[str, Any]] = []
        left = [fits[number % len(fits)], *chosen.choices(fits, k=chosen.randrange(4))]
        while left:
            shown, left = left[:2], left[2:]
            parts = [{"type": "image", "path": str(one)} for one in shown]
            for _ in range(chosen.randrange(3)):
                parts.insert(chosen.randrange(len(parts) + 1), {"type": "text", "text": chosen.choice(texts)})
            turns += user(*parts, answer=chosen.choice(texts).strip() + ".")
        made.append(turns)
    return made


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_processor(name: str, count: int, pictures: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", name)
    processor, template = processor_of(folder, name), template_of(folder, pictures)
    chats = conversations(name, count, seed=1)
    rendered = render([Conversation(parse_messages(chat)) for chat in chats], template)
    last = np.append(np.diff(rendered.kept) > 0, True)
    for chat, document in zip(chats, np.flatnonzero(last).tolist(), strict=True):
        there = json.loads(json.dumps(chat).replace('"path": "', f'"path": "{pictures}/'))
        made = processor.apply_chat_template([there], tokenize=True, return_dict=True)
        found = rendered.tokens.conversation(document)
        assert found.ids.tolist() == np.asarray(made["input_ids"][0]).tolist(), chat
        placeholders = [template.tokenizer.control_ids[one] for one in template.rules.picture_names]
        own = np.flatnonzero(np.isin(found.ids, placeholders))
        assert (found.kinds[own] == PICTURE).all()
        for policy in PRESETS.values():
            assert not found.per_token(policy.run_weights(found))[own].any(), policy.name


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_spells_a_placeholder_stays_text(name: str, pictures: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", name)
    template = template_of(folder, pictures)
    spelled = " ".join(FAMILIES[name].tokens)
    parts = [{"type": "text", "text": spelled}, {"type": "image", "path": "2"}, {"type": "text", "text": spelled}]
    chats = user(*parts, answer=spelled), user(*parts[1:2])
    some, plain = (render([Conversation(parse_messages(one))], template) for one in chats)
    for token in (template.tokenizer.control_ids[one] for one in FAMILIES[name].tokens):
        assert (some.tokens.ids == token).sum() == (plain.tokens.ids == token).sum()
    assert len(some.pictures.runs) == 1


def test_a_placeholder_that_the_vocabulary_does_not_call_special_is_refused(pictures: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_vl")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    for token in vocabulary["added_tokens"]:
        token["special"] = token["content"] != "<|image_pad|>"
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    parts = [{"type": "image", "path": "2"}, {"type": "text", "text": "a <|image_pad|>"}]
    with pytest.raises(RecordError) as error:
        render([Conversation(parse_messages(user(*parts)))], template_of(folder, pictures))
    assert error.value.code == "images_differ"


def test_a_model_whose_processor_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "pixtral")
    for file in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        text = (folder / file).read_text().replace("PixtralProcessor", "Other7Processor")
        (folder / file).write_text(text)
    assert "Other7Processor" in str(Pictures.of(folder).rule)
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    assert "takes no pictures" in str(Pictures.of(folder).rule)
