"""Every export is read back by inspect, stats, audit and view with what the dataset trains, or named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import chatmill
from chatmill.errors import FormatError
from chatmill.export.registry import TARGETS
from chatmill.look.dataset import is_dataset, open_for_looking
from chatmill.render.registry import find_template
from chatmill.store.documents import open_dataset
from tests.cli.run import invoke
from tests.compiler.builds import write_jsonl
from tests.data.tokenizer_files import unpacked
from tests.export.sets import built

NOT_SHOWN = {"olmo-core", "torchtitan"}
"""In files of NumPy."""
PAD = 151643
PREFERENCES = {"trl-dpo", "trl-kto", "trl-reward"}
OPTIONS: dict[str, dict[str, Any]] = {
    "levanter": {"max_length": 4096, "packing_strategy": "alone"},
    "torchtitan": {"max_length": 4096},
    "megatron-bridge": {"max_length": 4096},
    "olmo-core": {"eod_id": 0},
}
CHATS = [{"prompt": f"question {n} " * (n % 4 + 1), "completion": "answer " * (n % 5 + 1)} for n in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a template without changes."""
    folder = tmp_path_factory.mktemp("model") / "chatml"
    shutil.copytree(unpacked("qwen3"), folder)
    (folder / "chat_template.jinja").write_text(find_template("chatml").text)
    return folder


@pytest.fixture(scope="module")
def chats(model: Path) -> Path:
    return build(model, "chats", CHATS)


@pytest.fixture(scope="module")
def pairs(model: Path) -> Path:
    records = [{"prompt": one["prompt"], "chosen": one["completion"], "rejected": "no"} for one in CHATS]
    return build(model, "pairs", records, preferences="pairs")


@pytest.fixture(scope="module")
def labels(model: Path) -> Path:
    records = [{**one, "label": number % 3 == 0} for number, one in enumerate(CHATS)]
    return build(model, "labels", records, preferences="pairs")


def build(model: Path, name: str, records: list[dict[str, Any]], **options: Any) -> Path:
    home = model.parent / name
    home.mkdir()
    path = write_jsonl(home / "chats.jsonl", records)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": str(model), **options}
    chatmill.build(recipe, home / "built", workers=0)
    return home / "built"


def documents(folder: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ids and places of trained tokens of each document, as the look at a dataset has them."""
    split = open_for_looking(folder).split("train")
    found = []
    for number in range(len(split)):
        item = split.item(number)
        for start, end in item.borders:
            ids = tuple(item.ids[start:end].tolist())
            found.append((ids, tuple(np.flatnonzero(item.is_trained[start:end]).tolist())))
    return found


@pytest.mark.parametrize("to", sorted(set(TARGETS) - NOT_SHOWN - PREFERENCES))
def test_an_export_is_read_back_as_the_dataset_it_was_made_of(
    to: str, chats: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    chatmill.export_dataset(chats, to, out, **OPTIONS.get(to, {}))
    found = documents(out)
    if to == "levanter":
        # Its rows have one length, and nothing in them says what is padding.
        found = [(ids[: ids.index(PAD)], places) for ids, places in found]
    assert sorted(found) == sorted(documents(chats))
    for command in ("inspect", "stats"):
        done = invoke(command, out)
        assert done.exit_code == 0, (command, done.output)
    report = chatmill.audit(out, model, split="train")
    assert report.passed, report
    assert (report.answers, report.trained_answers, report.trained_stops) == (12, 12, 12)


@pytest.mark.parametrize("to", sorted(NOT_SHOWN))
def test_an_export_that_is_not_shown_says_where_to_look(to: str, chats: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    chatmill.export_dataset(chats, to, out, **OPTIONS.get(to, {}))
    words = f"is an export for {to}, in files that are not shown: look at the dataset that it was made of, built"
    for command in (["inspect", out], ["stats", out], ["audit", out, "--model", model], ["view", out, "--save", "x"]):
        assert words in str(invoke(*command).exception), command
    assert invoke("verify", out).exit_code == 0


@pytest.mark.parametrize(
    ("to", "kind"),
    [
        ("trl-dpo", "pairs"),
        ("trl-kto", "pairs"),
        ("trl-kto", "labels"),
        ("trl-reward", "pairs"),
        ("llamafactory", "pairs"),
        ("llamafactory", "labels"),
    ],
)
def test_answers_that_people_compared_are_read_back_side_by_side(
    to: str, kind: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    out = tmp_path / "out"
    chatmill.export_dataset(folder, to, out)
    assert is_dataset(str(out))
    split = open_for_looking(out).split()
    stored = open_dataset(folder).splits["train"]
    assert len(split) == len(stored) == (24 if kind == "pairs" else 12)
    sides = stored.facts("side", np.arange(len(stored)))
    for number, (ids, places) in enumerate(documents(folder)):
        item = split.item(number)
        if (to, kind) != ("llamafactory", "labels"):
            assert item.side == (sides[number] if to != "trl-kto" or kind == "labels" else LIKED[sides[number]])
        # TRL trains all of an answer, so what the template writes after it is left out.
        size = len(ids) if to in ("llamafactory", "trl-reward") else places[-1] + 1
        assert item.ids.tolist() == list(ids[:size])
        if to != "trl-reward":
            assert np.flatnonzero(item.is_trained).tolist() == list(places)
    shown = invoke("inspect", out, "-n", 2)
    assert shown.exit_code == 0
    assert "question 0" in shown.output
    assert invoke("stats", out).exit_code == 0
    report = chatmill.audit(out, model)
    assert report.passed, report
    assert report.answers == len(stored)
    in_memory = chatmill.audit(datasets.load_from_disk(str(out))["train"], model)
    assert (in_memory.answers, in_memory.tokens) == (report.answers, report.tokens)


LIKED = {"chosen": "liked", "rejected": "disliked"}


def test_a_damaged_receipt_is_an_error_of_the_file(chats: Path, tmp_path: Path) -> None:
    chatmill.export_dataset(chats, "olmo-core", tmp_path / "out", eod_id=0)
    (tmp_path / "out" / "export.json").write_text("{}")
    with pytest.raises(FormatError, match=r"export\.json"):
        open_for_looking(tmp_path / "out")


def test_splits_of_megatron_are_audited_each(tmp_path: Path) -> None:
    folder = built(tmp_path / "set")
    chatmill.export_dataset(folder, "megatron", tmp_path / "meg", shard_tokens=5000)
    bound = chatmill.load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    template = "chatml"
    for split in ("train", "val"):
        report = chatmill.audit(tmp_path / "meg", bound, template=template, split=split)
        assert report.documents == len(open_dataset(folder).splits[split])
