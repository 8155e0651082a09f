"""No chunk is compiled with an engine that nobody has checked: the driver asks the reference, each worker compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chatmill.compiler import chunk_job, run
from chatmill.compiler.chunk_job import checked_pipeline, pipeline_of
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build
from chatmill.tokenizer import tiktoken_file
from chatmill.tokenizer.backends import Engine, GigatokenBackend
from tests.compiler.builds import chats, digest, leftovers, plain_recipe, write_jsonl
from tests.data.tokenizer_files import unpacked

STARTUP = """
import os

from chatmill.tokenizer.backends import GigatokenBackend

original = GigatokenBackend.encode_batch, GigatokenBackend.from_json


def wrong(self, texts):
    ids, offsets = original[0](self, texts)
    return ids[::-1].copy(), offsets


def missing(text):
    raise RuntimeError("no such engine")


if os.environ.get("TEST_ENGINE") == "wrong":
    GigatokenBackend.encode_batch = wrong
if os.environ.get("TEST_ENGINE") == "missing":
    GigatokenBackend.from_json = missing
"""
"""What every Python runs when it starts, once its folder is in PYTHONPATH."""


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has loaded nothing yet."""
    monkeypatch.setattr(chunk_job, "LOADED", {})


class Good(NamedTuple):
    """A recipe, and what workers with a good engine make of it."""

    recipe: dict[str, Any]
    files: dict[str, str]
    kept: dict[Any, Any]
    """What the driver has loaded: it has the good engine, and only workers have a bad one."""


@pytest.fixture(scope="module")
def good(fast_module: Path) -> Good:
    """Built by workers; the driver needs no fast engine."""
    path, kept = write_jsonl(fast_module / "chats.jsonl", chats(60)), dict[Any, Any]()
    recipe = plain_recipe(path, tokenizer=str(unpacked("gpt2")), template="token_native", shard_bytes=4000)

    def refuse(text: bytes) -> Any:
        raise AssertionError("the driver loads gigatoken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_job, "LOADED", kept)
        patch.setattr(GigatokenBackend, "from_json", refuse)
        run_build(recipe, fast_module / "good", workers=1)
    return Good(recipe, digest(fast_module / "good"), kept)


@pytest.mark.parametrize(("engine", "prepared"), [("wrong", False), ("missing", True)])
def test_workers_with_a_bad_engine_build_the_same_bytes(
    engine: str, prepared: bool, good: Good, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_job, "LOADED", good.kept)
    if not prepared:
        monkeypatch.setattr(LocalExecutor, "prepare", lambda self, job, spec: None)
    monkeypatch.setenv("TEST_ENGINE", engine)
    (fast / "sitecustomize.py").write_text(STARTUP)
    monkeypatch.setenv("PYTHONPATH", str(fast))
    run_build(good.recipe, fast / "bad", workers=2)
    assert digest(fast / "bad") == good.files
    assert leftovers(fast / "bad") == []


def test_one_process_loads_each_engine_once(
    good: Good, fast: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    loaded = []
    original = GigatokenBackend.from_json

    def count(text: bytes) -> GigatokenBackend:
        loaded.append(len(text))
        return original(text)

    monkeypatch.setattr(GigatokenBackend, "from_json", count)
    for name in ("here", "again"):
        run_build(good.recipe, fast / name, workers=0)
        assert digest(fast / name) == good.files
    assert len(loaded) == 1


def test_an_engine_is_used_after_it_gave_the_answers(good: Good, forgotten: None) -> None:
    text = json.dumps(recipe_of(good.recipe).as_json())
    reference = pipeline_of(text, Engine.REFERENCE)
    answers, files = reference.answers, reference.files
    unchecked = pipeline_of(text, Engine.UNCHECKED)
    assert checked_pipeline(text, answers, files) is unchecked
    assert pipeline_of(text) is unchecked
    chunk_job.LOADED.clear()
    other = type(answers)(ids=answers.ids[::-1], normalized=answers.normalized)
    unchecked = pipeline_of(text, Engine.UNCHECKED)
    own = checked_pipeline(text, other, files)  # the answers are at fault here: the engine agrees with the reference
    assert own is not unchecked
    assert own.template.tokenizer.backend.name == "gigatoken"  # type: ignore[attr-defined]


def test_without_a_reference_the_driver_has_the_fast_engine(
    fast: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    recipe = recipe_of(plain_recipe(write_jsonl(fast / "chats.jsonl", chats(9)), tokenizer="o200k"))
    assert run.driver_pipeline(recipe).template.tokenizer.backend.name == "tiktoken"  # type: ignore[attr-defined]
    chunk_job.LOADED.clear()
    monkeypatch.setattr(tiktoken_file, "_reference", lambda ranks: None)
    assert run.driver_pipeline(recipe).template.tokenizer.backend.name == "gigatoken"  # type: ignore[attr-defined]


def test_a_small_input_is_built_here_by_the_reference(
    good: Good, fast: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GigatokenBackend, "from_json", None)
    monkeypatch.setattr(run, "LocalExecutor", lambda workers: LocalExecutor({0: 0}[workers]))
    run_build(good.recipe, fast / "small")
    assert digest(fast / "small") == good.files
