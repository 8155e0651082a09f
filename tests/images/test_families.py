"""Every family writes the ids that transformers' own processor writes, of whatever size pictures are."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation
from chatmill.core.kinds import PICTURE
from chatmill.core.message_parser import parse_messages
from chatmill.errors import RecordError
from chatmill.images.files import Pictures
from chatmill.label.presets import PRESETS
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer
from tests.images.model_folders import FAMILIES, SIZES, picture, processor_of, write_model

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


def talk(parts: Any, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


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
            turns += talk(parts, chosen.choice(texts).strip() + ".")
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
    some, plain = (
        render([Conversation(parse_messages(one))], template) for one in (talk(parts, spelled), talk(parts[1:2], "x"))
    )
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
        render([Conversation(parse_messages(talk(parts, "x")))], template_of(folder, pictures))
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
