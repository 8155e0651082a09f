"""Recipes: defaults, checks, and messages that name the key, the value and the way out."""

from __future__ import annotations

import datetime
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from chatmill.compiler.inputs import InputFile
from chatmill.compiler.manifest import build_fingerprint, chunk_fingerprints
from chatmill.compiler.recipe import (
    Gates,
    Pack,
    Packing,
    Recipe,
    Source,
    SplitOptions,
    StoreOptions,
    recipe_of,
    stored_recipe,
)
from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, TokenizerError, UnknownNameError
from chatmill.pack.plan import Strategy
from chatmill.render.registry import find_template
from tests.compiler.builds import chats, write_jsonl
from tests.data.tokenizer_files import unpacked

DOCS = Path(__file__).parents[2] / "docs" / "commands" / "build.md"
SMALLEST: dict[str, Any] = {"sources": [{"path": "a.jsonl"}], "tokenizer": "bytes", "template": "chatml"}
TREE = {"expand": "tree", "tree": {"group": "b"}}


def source(**more: Any) -> dict[str, Any]:
    return {"sources": [{"path": "a.jsonl", **more}]}


def changed(**changes: Any) -> dict[str, Any]:
    return {**SMALLEST, **changes}


def test_a_row_and_the_longest_episode_have_one_length_unless_both_are_given() -> None:
    for changes in ({"pack": {"length": 64}}, {"pack": {}, "packing": {"max_length": 64}}):
        recipe = recipe_of(changed(**changes))
        assert recipe.pack is not None
        assert (recipe.pack.length, recipe.packing.max_length) == (64, 64)
        assert recipe.pack.strategy is Strategy.BEST_FIT
    both = recipe_of(changed(pack={"length": 64}, packing={"max_length": 32}))
    assert both.pack is not None
    assert (both.pack.length, both.packing.max_length) == (64, 32)


def test_the_same_values_make_the_same_recipe_however_they_are_given(tmp_path: Path) -> None:
    full = changed(
        sources=[{"path": ["a.jsonl", "b/*.parquet"], "name": "x", "weight": 0.5, "max_records": 9, "shape": "openai"}],
        packing={"max_length": "128", "overflow": "windows"},
        pack={"length": 512, "strategy": "first_fit"},
        split={"val_fraction": 0.1},
        gates={"trained_tokens_lost": 0.001, "records_without_trained_tokens": None, "untrained_terminators": 3.0},
        date="2026-01-31",
    )
    recipe = recipe_of(full)
    assert (recipe.packing.max_length, recipe.gates.untrained_terminators) == (128, 3)
    assert recipe.date == datetime.date(2026, 1, 31)
    assert recipe_of({**full, "date": recipe.date}) == recipe_of(recipe.as_json()) == recipe
    assert stored_recipe(json.dumps(recipe.as_json())) == pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe_of(recipe) is recipe
    assert recipe.sources[0].patterns == ["a.jsonl", "b/*.parquet"]
    assert Source(path="a.jsonl").patterns == ["a.jsonl"]
    assert recipe_of({**source(), "model": "bytes", "template": "chatml"}) == recipe_of(SMALLEST)
    mapped = {"path": "a", "map": {"user": "q", "assistant": "a"}}
    assert Recipe(**changed(sources=[mapped, Source(path="b")])) == recipe_of(changed(sources=[mapped, {"path": "b"}]))
    path = tmp_path / "recipe.yaml"
    path.write_bytes("# straße\nsources:\n  - path: a.jsonl\ntokenizer: bytes\ntemplate: chatml\n".encode())
    assert recipe_of(path) == recipe_of(str(path)) == recipe_of(SMALLEST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokeniser": "x"}, "unknown key 'tokeniser', did you mean 'tokenizer'?"),
        ({"sources": [{"path": "a"}, {"path": "b", "wieght": 2}]}, "unknown key 'sources[1].wieght', did you mean"),
        ({"zzz": 1}, "unknown key 'zzz', known: version, sources, tokenizer"),
        ({"sources": []}, "sources: should be a list that is not empty (found [])"),
        ({"sources": [{}]}, "'sources[0].path' is missing"),
        ({"sources": [{"path": "a", "weight": -1}]}, "sources[0].weight: "),
        ({"pack": {}}, "pack needs a length, the tokens of a row (or packing.max_length)"),
        ({"pack": {"length": 2**31}}, "pack.length: "),
        ({"pack": {"length": 64, "strategy": "tight"}}, "pack.strategy: should be 'best_fit', 'first_fit'"),
        ({"pack": {"length": 64}, "packing": {"max_length": 65}}, "do not fit into rows of 64"),
        ({"packing": {"overflow": "windows"}}, "'windows' has no effect without packing.max_length"),
        ({"packing": {"max_length": 1}}, "packing.max_length: should be a whole number of at least 2 (found 1)"),
        ({"date": "yesterday"}, "date: should be a date, such as 2026-01-31 (found 'yesterday')"),
        ({"on_error": "skip"}, "on_error: should be 'fail' or 'quarantine' (found 'skip')"),
        ({"version": 2}, "version: this package reads recipes of version 1 (found 2)"),
        ({"tokenizer": None}, "tokenizer: should be a text (found None)"),
        ({"sources": ["a.jsonl"]}, "sources[0]: should be a mapping (found 'a.jsonl')"),
        ({"sources": [{"path": "a", "weight": float("inf")}]}, "sources[0].weight: should be a finite number (found"),
        ({"sources": [{"path": "a", "map": {"user": "q"}, "shape": "openai"}]}, "sources[0]: 'map' says what the"),
        ({"tokenizer": object()}, "tokenizer: expected text, numbers, lists and objects, or a path"),
        (source(pick={"group": "a", "best": "reward +"}), "sources[0].pick: 'reward +' cannot be read"),
        (source(pick={"group": "a"}) | TREE, "by different fields"),
        (TREE | {"preferences": "pairs"}, "a pair shares a tree with expand: tree alone"),
        ({"packing": {"max_length": 9, "overflow": "windows"}, "preferences": "pairs"}, "two answers of a pair"),
        (TREE | {"expand": "turns"}, "no effect without expand: tree"),
        (TREE | source(weight=2), "cannot have a weight"),
        ({"expand": "tree", "tree": {}}, "'tree.group' is missing"),
        ({"model": "bytes"}, "'model' names the tokenizer and its template, and so does 'tokenizer'"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(changed(**changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith("the recipe: ")
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'tokenizer'\?; 'tokenizer' is missing"):
        recipe_of({"sources": [{"path": "a"}], "tokeniser": "x"})
    words = r"on_error: should be .*; 'template' is missing, and bytes holds none; name a model folder, .*chatml"
    with pytest.raises(ConfigError, match=words):
        recipe_of({"sources": [{"path": "a"}], "tokenizer": "bytes", "on_error": "rows"})


def test_the_template_of_the_tokenizer_folder_is_the_default() -> None:
    folder = str(unpacked("qwen3"))
    without = {"sources": [{"path": "a.jsonl"}], "tokenizer": folder}
    assert recipe_of(without).template == recipe_of({**without, "template": ""}).template == folder
    assert recipe_of({**without, "template": "chatml"}).template == "chatml"
    assert recipe_of({"sources": [{"path": Path("a.jsonl")}], "tokenizer": Path(folder)}) == recipe_of(without)


def test_files_and_classes_that_hold_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for text, message in (
        (b"sources: \xff\xfe", "is not YAML"),
        (b"!!python/object/apply:os.system ['true']", "is not YAML: "),
        (b"", "must hold a mapping with sources, tokenizer and template"),
        (b"sources:\n  - path: a.jsonl\ntemplate: chatml\n", "'tokenizer' is missing"),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=rf"recipe\.yaml.*{message}"):
            recipe_of(path)
    with pytest.raises(ConfigError, match="no recipe file"):
        recipe_of(tmp_path / "other.yaml")
    for wrong in ({"sources": [Source(path="a", weight=-1)]}, {"packing": Packing(max_length=1)}, {"vocab_size": 0}):
        with pytest.raises(ConfigError, match=r"(weight|max_length|vocab_size): should be a .*number of at least \d"):
            Recipe(**changed(**wrong))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"template": "chatlm"}, UnknownNameError, "Did you mean 'chatml'"),
        ({"policy": "asistant"}, UnknownNameError, "Did you mean 'assistant'"),
        ({"tokenizer": "no/such"}, ValueError, "no tokenizer 'no/such'"),
        ({"add_control_tokens": False}, TokenizerError, r"<\|im_start\|>.*--add-control-tokens"),
        ({"template": "phi4", "add_control_tokens": False}, TokenizerError, r"<\|im_sep\|>.*--add-control-tokens"),
        ({"template": "dated.jinja"}, ConfigError, "asks for today's date; set `date` in the recipe"),
        ({"template_options": {"enable_thinkin": True}}, ConfigError, "never reads the option 'enable_thinkin'"),
        ({"sources": [{"path": "chats.jsonl", "shape": "alpacca"}]}, UnknownNameError, "Did you mean 'alpaca'"),
        ({"sources": [{"path": "chat.jsonl"}]}, ConfigError, "Did you mean 'chats.jsonl'"),
        ({"sources": [{"path": "*.parquet"}]}, ConfigError, "no file matches"),
    ],
)
def test_names_are_looked_up_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_jsonl(tmp_path / "chats.jsonl", chats(3))
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + find_template("chatml").text)  # type: ignore[union-attr]
    monkeypatch.chdir(tmp_path)
    recipe = changed(**{"sources": [{"path": "chats.jsonl"}], "add_control_tokens": True, **changes})
    with pytest.raises(error, match=message):
        run_build(recipe, tmp_path / "out", workers=0)
    assert not list(tmp_path.glob("out/**/*")), "something was written"


def test_the_docs_have_a_recipe_and_every_key_with_its_default() -> None:
    text = DOCS.read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    recipe = recipe_of(yaml.safe_load(example))
    assert recipe.sources[1].patterns == ["rows-0.parquet", "rows-1.parquet"]
    assert recipe.gates.records_left_out == 0.01
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", text, re.MULTILINE))
    for model in (Recipe, Source, Packing, Pack, SplitOptions, Gates, StoreOptions):
        for field in msgspec.structs.fields(model):
            assert f"`{field.name}`" in text
            if isinstance(field.default, str | int | float) and field.default != "":
                assert yaml.safe_load(rows[field.name].strip(" `")) == field.default, field.name


def test_every_option_that_changes_bytes_changes_the_fingerprint() -> None:
    """A chunk is used again with another `pack` or `shard_bytes`, which say nothing about what is in it."""
    plain = recipe_of(SMALLEST).as_json()
    file = InputFile(path="a", source="a", shape="openai", bytes=1, digest="0", lines=1, records=None, mtime_ns=1)

    def prints(changes: dict[str, Any], template: str = "t", **of_file: Any) -> tuple[str, str]:
        recipe: Any = SimpleNamespace(as_json=lambda: plain | changes)
        (chunk,) = chunk_fingerprints(recipe, [[]], {"template": template})
        return build_fingerprint(recipe, [replace(file, **of_file)], {"template": template}), chunk

    build, chunk = prints({})
    without_effect = {
        "gates",
        "on_error",
        "vocab_size",
        "store",
        "tokenizer",
    }  # the ids of a tokenizer have a hash of their own
    for key in set(plain) - {"sources"}:
        other = prints({key: "another"})
        assert (other[0] == build) == (key in without_effect), key
        assert (other[1] == chunk) == (key in without_effect | {"pack", "shard_bytes"}), key
    (source,) = plain["sources"]
    for key in source:
        assert (prints({"sources": [{**source, key: "another"}]})[0] == build) == (key == "path"), key
    for changed_file in ({"path": "b"}, {"source": "b"}, {"shape": "alpaca"}, {"digest": "1"}):
        assert prints({}, **changed_file)[0] != build
    assert prints({}, mtime_ns=2) == (build, chunk)
    for one, other_one in zip(prints({}, "another"), (build, chunk), strict=True):
        assert one != other_one
