"""Comparing real builds, and what a user sees of it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import FormatError
from chatmill.prove.compare.diff import Change, DatasetDiff, diff_datasets
from chatmill.prove.compare.records import Match
from chatmill.store import split as split_module
from chatmill.store.documents import open_dataset
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.receipts import receipt_bytes, sealed
from tests.cli.run import here
from tests.compiler.builds import CHATML, write_jsonl
from tests.pages import run_python

Record = dict[str, Any]


# --- real builds --------------------------------------------------------------------------------------------------


def conversation(number: int, answer: str | None = None) -> Record:
    return {
        "id": f"talk-{number}",
        "messages": [
            {"role": "user", "content": f"What is {number} plus {number}?"},
            {"role": "assistant", "content": answer or f"It is {2 * number}."},
            {"role": "user", "content": "And one more?"},
            {"role": "assistant", "content": f"{2 * number + 1}, of course."},
        ],
    }


TALKS = [conversation(number) for number in range(12)]


def built(out: Path, talks: Sequence[Record] = TALKS, *, ids: bool = True, **options: Any) -> Path:
    """Build some talks; their file has the same name whatever the folder, so that sources are named alike."""
    (out.parent / "input" / out.name).mkdir(parents=True)
    records = [talk if ids else {"messages": talk["messages"]} for talk in talks]
    file = write_jsonl(out.parent / "input" / out.name / "talks.jsonl", records)
    return build(out, file, **options)


def build(out: Path, file: Path, **options: Any) -> Path:
    run_build({"sources": [{"path": str(file)}], **CHATML, **options}, out, workers=0)
    return out


def counts(found: DatasetDiff) -> dict[str, int]:
    return {str(change): count for change, count in found.counts.items() if count}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("base") / "a")


def test_equal_builds(base: Path, tmp_path: Path) -> None:
    found = diff_datasets(base, built(tmp_path / "b"))
    assert found.equal
    assert counts(found) == {"equal": 12}
    assert found.totals_a == found.totals_b
    assert found.matched[Match.RECORD_ID] == 12
    assert all(item.what.startswith("input ") or item.what.endswith(".path") for item in found.manifest)
    done = run(base, tmp_path / "b")
    assert done.returncode == 0
    assert "All records are equal." in done.stdout
    file = write_jsonl(tmp_path / "renamed.jsonl", TALKS[::-1])
    found = diff_datasets(base, build(tmp_path / "c", file))
    assert found.equal
    assert any("another order" in note for note in found.notes)


def test_another_policy_changes_weights_alone(base: Path, tmp_path: Path) -> None:
    done = run(base, built(tmp_path / "b", policy="last_turn"), "--json", "--show", "1")
    assert done.returncode == 1
    as_json = json.loads(done.stdout)
    assert as_json["counts"]["weights"] == as_json["differing"] == 12
    assert as_json["changed"][0]["lines"][1]["text"] == "It is 0."
    found = diff_datasets(base, tmp_path / "b", show=2)
    assert not found.equal
    assert counts(found) == {"weights": 12}
    assert found.totals_a.tokens == found.totals_b.tokens
    assert found.totals_b.trained < found.totals_a.trained
    named = {item.what: (item.a, item.b) for item in found.manifest}
    assert named["recipe.policy"] == (None, "last_turn")
    assert named["policy"][0].startswith("assistant (")
    assert len(found.shown) == 2
    first = found.shown[0]
    assert (first.record_id, first.place_a, first.place_b) == ("talk-0", ("train", 0), ("train", 0))
    changed = [line for line in first.lines if line.sign != " "]
    assert [(line.sign, line.weight) for line in changed[:2]] == [("-", 1.0), ("+", 0.0)]
    assert bytes(changed[0].ids.tolist()) == b"It is 0."


def test_edited_added_and_removed_records(base: Path, tmp_path: Path) -> None:
    talks = [talk for talk in TALKS if talk["id"] != "talk-3"]
    talks[5] = conversation(6, "I do not know.")
    talks.insert(2, conversation(99))
    found = diff_datasets(base, built(tmp_path / "b", talks))
    assert counts(found) == {"only_in_a": 1, "only_in_b": 1, "ids": 1, "equal": 10}
    assert [(r.record_id, r.change) for r in found.shown] == [
        ("talk-6", Change.IDS),
        ("talk-3", Change.ONLY_IN_A),
        ("talk-99", Change.ONLY_IN_B),
    ]
    texts = [(line.sign, bytes(line.ids.tolist()).decode()) for line in found.shown[0].lines if line.sign != " "]
    assert texts == [("-", "It is 12."), ("+", "I do not know.")]
    assert found.totals_b.tokens - found.totals_a.tokens == sum(r.b.tokens - r.a.tokens for r in found.shown)
    assert any(item.what.startswith("input ") for item in found.manifest)


def test_records_without_ids_are_followed_when_lines_move(tmp_path: Path) -> None:
    a = built(tmp_path / "a", ids=False)
    talks = [conversation(50), *TALKS]
    talks[7] = conversation(6, "Something else.")
    found = diff_datasets(a, built(tmp_path / "b", talks, ids=False))
    assert counts(found) == {"equal": 11, "only_in_a": 1, "only_in_b": 2}
    assert found.matched[Match.CONTENT] == 11
    # The very same file: its places are as good as ids, whatever changed in the recipe.
    file = tmp_path / "input" / "a" / "talks.jsonl"
    found = diff_datasets(a, build(tmp_path / "c", file, template="token_native"))
    assert counts(found) == {"ids": 12}
    assert found.matched[Match.RECORD_ID] == 12


def test_windows_are_matched_one_by_one(base: Path, tmp_path: Path) -> None:
    cut = {"packing": {"max_length": 80, "overflow": "windows"}}
    a, b = built(tmp_path / "a", **cut), built(tmp_path / "b", [*TALKS[:4], conversation(4, "No."), *TALKS[5:]], **cut)
    assert len(open_dataset(a).splits["train"]) > 12
    found = diff_datasets(a, b)
    assert found.counts[Change.IDS] == 1
    assert found.differing == 1
    assert diff_datasets(base, a).counts[Change.ONLY_IN_B] == len(open_dataset(a).splits["train"]) - 12


def test_records_in_another_split(base: Path, tmp_path: Path) -> None:
    found = diff_datasets(base, built(tmp_path / "b", split={"val_fraction": 0.4}), show=3)
    assert counts(found) == {"equal": 12}
    assert 0 < found.moved < 12
    assert found.differing == found.moved
    assert not found.equal
    assert found.shown[0].place_b == ("val", 0)
    assert not any("another order" in note for note in found.notes)


def test_sizes_of_batches_change_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = built(tmp_path / "b", [*TALKS[3:], conversation(1, "Two!")], split={"val_fraction": 0.3})
    whole = diff_datasets(base, other, show=20).as_json()
    monkeypatch.setattr(split_module, "BATCH_TOKENS", 100)
    assert diff_datasets(base, other, show=20).as_json() == whole
    assert len(whole["changed"]) == whole["differing"] > 4


def test_memory_does_not_hold_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.RandomState(0)
    for name in ("a", "b"):
        with EpisodeWriter(tmp_path / name, "train") as writer:
            for number in range(200):
                writer.append(np.full(20_000, number), np.arange(20_000) % 2, record_id=f"{rng.randint(10**9)}-{name}")
    monkeypatch.setattr(split_module, "BATCH_TOKENS", 1 << 15)
    tracemalloc.start()
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts(found) == {"equal": 200}
    assert found.totals_a.tokens == 4_000_000
    assert peak < 4_000_000, "less than one byte for each of 4 million tokens"


# --- the command --------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Any:
    return here("diff", *arguments, columns=100)


def test_the_command_shows_changes_without_colour(base: Path, tmp_path: Path) -> None:
    talks = [conversation(0, "It is 0, \x1b[31mI\nthink."), *TALKS[1:]]
    done = run(base, built(tmp_path / "b", talks))
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert any(line.startswith("- assistant.content      \u258c It is 0.") for line in lines)
    assert any(line.startswith("+ assistant.content      \u258c It is 0, \u241b[31mI") for line in lines)
    assert any(line.startswith("+ ") and line.endswith("\u258c think.") for line in lines)
    assert any("equal tokens" in line for line in lines)
    assert "1 record differs." in done.stdout
    assert "talk-0 \u00b7 ids changed" in done.stdout


def test_a_tokenizer_that_is_not_the_same_any_more_is_not_used(base: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "b", policy="all")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = "0" * 64
    (other / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))
    found = diff_datasets(base, other, show=1)
    assert found.decoders[0] is not None
    assert found.decoders[1] is None
    assert any(note.startswith("B: ids are shown") and "fingerprint" in note for note in found.notes)
    done = run(base, other, "-n", "1")
    assert any(line.startswith("+ user.header") and line.split()[-1].isdigit() for line in done.stdout.splitlines())


def test_an_id_that_the_tokenizer_does_not_know_is_shown_as_a_number(base: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "b")
    tokens = np.memmap(other / "train" / "tokens.bin", dtype=np.uint32, mode="r+")
    tokens[20] = 999_999
    tokens.flush()
    (changed,) = diff_datasets(base, other).as_json()["changed"]
    assert any("[id 999999]" in line.get("text", "") for line in changed["lines"])
    assert "[id 999999]" in run(base, other).stdout


@pytest.mark.parametrize("page", ["diff", "export"])
def test_code_of_the_pages_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    built(tmp_path / "data" / "monday")
    built(tmp_path / "data" / "tuesday", policy="last_turn")
    monkeypatch.chdir(tmp_path)
    run_python(f"commands/{page}.md", blocks=1)
    out = capsys.readouterr().out
    assert ("talk-0 weights ('train', 0) ('train', 0)" if page == "diff" else "is in export.json alone") in out


def test_what_cannot_be_compared_is_said(base: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        diff_datasets(base, tmp_path / "nothing")
    (tmp_path / "begun" / ".build").mkdir(parents=True)
    with pytest.raises(FormatError, match="unfinished build"):
        diff_datasets(tmp_path / "begun", base)


def test_plain_episodes_without_manifest_or_masks(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "a", "train") as writer:
        writer.append([1, 2, 3])
        writer.append([4, 5])
    with EpisodeWriter(tmp_path / "b", "train") as writer:
        writer.append([1, 2, 3], [1, 1, 1])
        writer.append([4, 5], [1, 0.5])
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert counts(found) == {"equal": 1, "weights": 1}
    assert sum("has no manifest" in note for note in found.notes) == 2
    assert sum("no kinds" in note for note in found.notes) == 2
    assert any("A, train: no weights" in note for note in found.notes)
    lines = [(line.sign, line.kind, line.weight, line.ids.tolist()) for line in found.shown[0].lines]
    assert lines == [(" ", None, 0.0, []), ("-", None, 1.0, [5]), ("+", None, 0.5, [5])]
