"""Datasets whose manifest names relative paths are shown, exported and proved from any folder, and after a move."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import chatmill
from chatmill.look.dataset import open_for_looking
from chatmill.store.named_paths import find_named, folder_of_build
from tests.cli.run import invoke
from tests.compiler.builds import talk, write_jsonl
from tests.data.tokenizer_files import unpacked


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, chats and a dataset, which was built in a folder inside of it, and moved since."""
    place = tmp_path / "first"
    (place / "work").mkdir(parents=True)
    shutil.copytree(unpacked("qwen3"), place / "model")
    write_jsonl(place / "work" / "chats.jsonl", [{"messages": talk("A question?", "An answer.")}])
    monkeypatch.chdir(place / "work")
    chatmill.build({"sources": [{"path": "chats.jsonl"}], "tokenizer": "../model"}, "out/built", workers=0)
    moved = tmp_path / "moved" / "here"
    moved.parent.mkdir()
    place.rename(moved)
    monkeypatch.chdir(tmp_path)
    return moved


def test_a_moved_dataset_has_its_text_its_export_and_its_proof(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    built = home / "work" / "out" / "built"
    opened = open_for_looking(built)
    assert opened.decoder is not None
    assert opened.decoder_problem == ""
    assert "An answer." in invoke("inspect", built).output
    assert invoke("view", built, "--save", home / "page.html").exit_code == 0
    assert "An answer." in (home / "page.html").read_text()
    deep = invoke("verify", built, "--deep", "--workers", "0")
    assert deep.exit_code == 0, deep.output
    assert "0 differences" in deep.output
    exported = chatmill.export_dataset(built, "hf", home / "rows")
    assert open_for_looking(exported.directory).decoder is not None
    assert "An answer." in str(chatmill.Dataset(built)[0])


def test_another_tokenizer_of_the_same_name_is_not_taken(home: Path) -> None:
    """What is nearer and has other tokens loses against the one of the build."""
    built = home / "work" / "out" / "built"
    near = home / "work" / "out" / "model"
    shutil.copytree(home / "model", near)
    config = json.loads((near / "tokenizer.json").read_text())
    config["added_tokens"] = config["added_tokens"][:-1]
    (near / "tokenizer.json").write_text(json.dumps(config))
    assert find_named("../model", built)[1:] == [str(built / "../model"), str(home / "work" / "../model")]
    opened = open_for_looking(built)
    assert opened.decoder_problem == ""
    shutil.rmtree(home / "model")
    assert "is not the one of the build" in open_for_looking(built).decoder_problem


def test_the_folder_of_a_build_has_all_its_files(home: Path) -> None:
    built = home / "work" / "out" / "built"
    assert folder_of_build(["chats.jsonl", "../model"], built) == home / "work"
    assert folder_of_build(["nowhere.jsonl"], built) is None
    assert folder_of_build(["/abs.jsonl", "s3://b/c"], built) is None
