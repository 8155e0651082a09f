"""The ways in which records hold pictures, and one clear error for each way in which they are wrong."""

from __future__ import annotations

import base64
import json
import os
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import chatmill
from chatmill.core.conversation import Picture
from chatmill.errors import ConfigError, DataError, RecordError
from chatmill.images.files import Pictures
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from tests.images.model_folders import picture, write_model

PNG = picture(40, 30)
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
IMAGE = {"type": "image"}


def user(*parts: Any) -> list[dict[str, Any]]:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]


TEXT = {"type": "text", "text": "Look"}
FORMS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "openai": (
        "openai",
        {"messages": user(TEXT, {"type": "image_url", "image_url": {"url": "a.png"}})},
        ("Look", "a.png"),
    ),
    "data": ("openai", {"messages": user({"type": "image_url", "image_url": {"url": DATA}})}, (PNG,)),
    "path": ("openai", {"messages": user({"type": "image", "path": "a.png"}, TEXT)}, ("a.png", "Look")),
    "column": ("openai", {"messages": user(IMAGE, TEXT, IMAGE), "images": ["a", "b"]}, ("a", "Look", "b")),
    "bytes": ("openai", {"messages": user(IMAGE), "images": [{"bytes": PNG, "path": "a.png"}]}, (PNG,)),
    "marks": ("openai", {"messages": user("<image>Look<image>"), "images": ["a", "b"]}, ("a", "Look", "b")),
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [{"from": "human", "value": "<image>\nLook"}, {"from": "gpt", "value": "Yes."}],
            "image": "a.png",
        },
        ("a.png", "\nLook"),
    ),
    "anthropic": (
        "anthropic",
        {
            "messages": user(
                {"type": "image", "source": {"type": "base64", "data": base64.b64encode(PNG).decode()}}, TEXT
            )
        },
        (PNG, "Look"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_pictures_are_read_in_every_form(name: str) -> None:
    shape, record, expected = FORMS[name]
    found = conversation_of(record, find_shape(shape)).messages[0]
    assert [part if isinstance(part, str) else part.data or part.place for part in found.parts] == list(expected)
    assert found.content == ""
    assert all(isinstance(part, Picture) for part in found.pictures)


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"messages": user(IMAGE, IMAGE), "images": ["a"]}, "images_differ"),
        ({"messages": user(IMAGE)}, "images_differ"),
        ({"messages": user("no place"), "images": ["a"]}, "images_differ"),
        ({"messages": user("<image>"), "images": ["a", "b"]}, "images_differ"),
        ({"messages": user({"type": "image_url", "image_url": {"url": "data:image/png,x"}})}, "bad_image"),
        ({"messages": user({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}})}, "bad_image"),
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
    for name, data in {
        "good.png": png,
        "png_in.jpg": png,
        "cut.jpg": jpeg[: len(jpeg) // 2],
        "cut.png": png[: len(png) // 2],
        "cut.webp": picture(300, 200, "WEBP")[:-20],
        "bomb.png": bytes(bomb),
        "text.png": b"not a picture",
        "empty.png": b"",
        "thin.png": picture(1, 900),
    }.items():
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
    assert error.value.code == code
    assert error.value.path == "messages[0].content[0]"


def test_the_content_of_a_file_counts_and_not_its_name(folder: Path) -> None:
    pictures = Pictures.of(folder / "model", str(folder / "pictures"))
    good, named = pictures.look([(Picture("good.png"), ""), (Picture("png_in.jpg"), "")])
    assert good[1:] == named[1:]


def test_records_with_pictures_that_cannot_be_used_are_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    places = ["good.png", *(place for place in ERRORS if "\0" not in place)]
    lines = [{"id": place, "messages": user(IMAGE, TEXT), "images": [place]} for place in places]
    chats = folder / "pictures" / "chats.jsonl"
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"sources": [{"path": str(chats)}], "tokenizer": str(folder / "model"), "on_error": "quarantine"}
    result = chatmill.build({**recipe, "gates": {"records_left_out": None}}, tmp_path / "built", workers=0)
    assert result.outcome == "built"
    rejected = [json.loads(line) for line in (tmp_path / "built" / "rejected.jsonl").read_text().splitlines()]
    assert [(one["id"], one["reason"]) for one in rejected] == [(place, ERRORS[place][0]) for place in places[1:]]
    text_model = tmp_path / "text"
    write_model(text_model, "qwen3_vl")
    (text_model / "preprocessor_config.json").unlink()
    with pytest.raises(RecordError, match="takes no pictures"):
        chatmill.build({**recipe, "tokenizer": str(text_model), "on_error": "fail"}, tmp_path / "none", workers=0)


def test_pictures_are_fetched_only_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "wide.png").write_bytes(picture(64, 200))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    write_model(tmp_path / "model", "qwen3_vl")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        user = [{"type": "image_url", "image_url": {"url": f"{url}/wide.png"}}, {"type": "text", "text": "What?"}]
        gone = [{"type": "image_url", "image_url": {"url": f"{url}/gone.png"}}]
        chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": "Yes."}] for one in (user, gone)]
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
        recipe = {"sources": [{"path": str(tmp_path / "chats.jsonl")}], "tokenizer": str(tmp_path / "model")}
        recipe |= {"on_error": "quarantine", "gates": {"records_left_out": None}}
        with pytest.raises(DataError, match="--fetch-images"):
            chatmill.build(recipe, tmp_path / "none", workers=0)
        with pytest.raises(ConfigError, match="--store-images"):
            chatmill.build({**recipe, "fetch_images": True}, tmp_path / "lost", workers=0)
        chatmill.build({**recipe, "fetch_images": True, "store_images": True}, tmp_path / "built", workers=0)
        report = chatmill.verify_dataset(tmp_path / "built", deep=True)
        server.shutdown()
    assert not report.differences
    rejected = (tmp_path / "built" / "rejected.jsonl").read_text()
    assert "cannot be fetched" in rejected
    stats = chatmill.Dataset(tmp_path / "built").stats()
    assert stats.splits[0].pictures["count"] == 1
    assert "1 picture, " in repr(stats)
    assert "width 200 to 200, height 64 to 64 pixels" in repr(stats)


@pytest.mark.parametrize("more", [{"preferences": "pairs"}, {"expand": "tree"}])
def test_a_picture_where_none_is_taken_costs_one_record(folder: Path, tmp_path: Path, more: dict[str, str]) -> None:
    asked: list[Any] = [[IMAGE, TEXT], "Look"]
    lines: list[dict[str, Any]] = []
    for content in asked:
        prompt, pictures = [{"role": "user", "content": content}], ["good.png"] if content is asked[0] else []
        if "preferences" in more:
            lines.append({"prompt": prompt, "chosen": "Yes.", "rejected": "No.", "images": pictures})
        else:
            lines.append({"messages": [*prompt, {"role": "assistant", "content": "Yes."}], "images": pictures})
    chats = folder / "pictures" / "mixed.jsonl"
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"sources": [{"path": str(chats)}], "tokenizer": str(folder / "model"), "on_error": "quarantine", **more}
    chatmill.build({**recipe, "gates": {"records_left_out": None}}, tmp_path / "built", workers=0)
    (rejected,) = map(json.loads, (tmp_path / "built" / "rejected.jsonl").read_text().splitlines())
    assert (rejected["reason"], rejected["where"].rpartition(":")[2]) == ("images_not_taken", "1")
    assert len(chatmill.EpisodeDataset(tmp_path / "built")) == (2 if "preferences" in more else 1)
    assert not chatmill.verify_dataset(tmp_path / "built", deep=True).findings


def test_a_picture_of_an_observation_that_is_elided_is_not_shown(folder: Path, tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Yes."}
    messages = [said if k % 2 else {"role": "user", "content": [IMAGE, TEXT]} for k in range(8)]
    chats = folder / "pictures" / "agent.jsonl"
    chats.write_text(json.dumps({"messages": messages, "images": ["good.png"] * 4}) + "\n")
    source = {"path": str(chats), "history": {"observations": 1, "roles": ["user"], "elided": "(gone)"}}
    recipe = {"sources": [source], "tokenizer": str(folder / "model")}
    chatmill.build(recipe, tmp_path / "built", workers=0)
    shown = [len(json.loads(str(one.images))) for one in chatmill.EpisodeDataset(tmp_path / "built")]
    assert shown == [2, 2, 2]
    assert not chatmill.verify_dataset(tmp_path / "built", deep=True).findings
