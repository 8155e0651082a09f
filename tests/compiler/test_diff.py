"""Comparing datasets: which records are pairs and what differs, against slow references; and what a user sees of it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.prove.compare.changes import changed_lines
from chatmill.prove.compare.diff import Change, DatasetDiff, compare_documents, diff_datasets
from chatmill.prove.compare.records import Match, pair_records
from chatmill.store import split as split_module
from chatmill.store.documents import open_dataset
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.split import Documents
from tests.cli.run import here
from tests.compiler.builds import CHATML, talk, write_jsonl
from tests.compiler.verify_sets import edited
from tests.pages import run_python

Record = dict[str, Any]


def conversation(number: int, answer: str | None = None) -> Record:
    said = (f"What is {number} plus {number}?", answer or f"It is {2 * number}.", "And one more?")
    return {"id": f"talk-{number}", "messages": talk(*said, f"{2 * number + 1}, of course.")}


TALKS = [conversation(number) for number in range(12)]


def built(out: Path, talks: Sequence[Record] = TALKS, *, ids: bool = True, **options: Any) -> Path:
    """Build some talks; their file has the same name whatever the folder, so that sources are named alike."""
    (out.parent / "input" / out.name).mkdir(parents=True)
    records = [one if ids else {"messages": one["messages"]} for one in talks]
    return build(out, write_jsonl(out.parent / "input" / out.name / "talks.jsonl", records), **options)


def build(out: Path, file: Path, **options: Any) -> Path:
    run_build({"sources": [{"path": str(file)}], **CHATML, **options}, out, workers=0)
    return out


def counts(found: DatasetDiff) -> dict[str, int]:
    return {str(change): count for change, count in found.counts.items() if count}


def run(*arguments: str | Path) -> Any:
    return here("diff", *arguments, columns=100)


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
    assert (done.returncode, "All records are equal." in done.stdout) == (0, True)
    found = diff_datasets(base, build(tmp_path / "c", write_jsonl(tmp_path / "renamed.jsonl", TALKS[::-1])))
    assert found.equal
    assert any("another order" in note for note in found.notes)


def test_another_policy_changes_weights_alone(base: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "b", policy="last_turn")
    done = run(base, other, "--json", "--show", "1")
    assert done.returncode == 1
    as_json = json.loads(done.stdout)
    assert as_json["counts"]["weights"] == as_json["differing"] == 12
    assert as_json["changed"][0]["lines"][1]["text"] == "It is 0."
    found = diff_datasets(base, other, show=2)
    assert not found.equal
    assert counts(found) == {"weights": 12}
    assert found.totals_a.tokens == found.totals_b.tokens
    assert found.totals_b.trained < found.totals_a.trained
    named = {item.what: (item.a, item.b) for item in found.manifest}
    assert named["recipe.policy"] == (None, "last_turn")
    assert named["policy"][0].startswith("assistant (")
    first, _ = found.shown
    assert (first.record_id, first.place_a, first.place_b) == ("talk-0", ("train", 0), ("train", 0))
    changed = [line for line in first.lines if line.sign != " "]
    assert [(line.sign, line.weight) for line in changed[:2]] == [("-", 1.0), ("+", 0.0)]
    assert bytes(changed[0].ids.tolist()) == b"It is 0."


def test_edited_added_and_removed_records_are_shown_without_colour(base: Path, tmp_path: Path) -> None:
    talks = [one for one in TALKS if one["id"] != "talk-3"]
    talks[5] = conversation(6, "It is \x1b[31mI\nthink.")
    talks.insert(2, conversation(99))
    found = diff_datasets(base, built(tmp_path / "b", talks))
    assert counts(found) == {"only_in_a": 1, "only_in_b": 1, "ids": 1, "equal": 10}
    changes = [(r.record_id, r.change) for r in found.shown]
    assert changes == [("talk-6", Change.IDS), ("talk-3", Change.ONLY_IN_A), ("talk-99", Change.ONLY_IN_B)]
    texts = [(line.sign, bytes(line.ids.tolist()).decode()) for line in found.shown[0].lines if line.sign != " "]
    assert texts == [("-", "It is 12."), ("+", "It is \x1b[31mI\nthink.")]
    assert found.totals_b.tokens - found.totals_a.tokens == sum(r.b.tokens - r.a.tokens for r in found.shown)
    assert any(item.what.startswith("input ") for item in found.manifest)
    done = run(base, tmp_path / "b")
    assert (done.returncode, "\x1b" in done.stdout) == (1, False)
    lines = done.stdout.splitlines()
    assert any(line.startswith("- assistant.content      \u258c It is 12.") for line in lines)
    assert any(line.startswith("+ assistant.content      \u258c It is \u241b[31mI") for line in lines)
    assert any(line.startswith("+ ") and line.endswith("\u258c think.") for line in lines)
    assert any("equal tokens" in line for line in lines)
    assert "3 records differ." in done.stdout
    assert "talk-6 \u00b7 ids changed" in done.stdout


def test_records_without_ids_are_followed_when_lines_move(tmp_path: Path) -> None:
    a = built(tmp_path / "a", ids=False)
    talks = [conversation(50), *TALKS]
    talks[7] = conversation(6, "Something else.")
    found = diff_datasets(a, built(tmp_path / "b", talks, ids=False))
    assert counts(found) == {"equal": 11, "only_in_a": 1, "only_in_b": 2}
    assert found.matched[Match.CONTENT] == 11
    # The very same file: its places are as good as ids, whatever changed in the recipe.
    found = diff_datasets(a, build(tmp_path / "c", tmp_path / "input" / "a" / "talks.jsonl", template="token_native"))
    assert counts(found) == {"ids": 12}
    assert found.matched[Match.RECORD_ID] == 12


def test_windows_are_matched_one_by_one(base: Path, tmp_path: Path) -> None:
    cut = {"packing": {"max_length": 80, "overflow": "windows"}}
    a, b = built(tmp_path / "a", **cut), built(tmp_path / "b", [*TALKS[:4], conversation(4, "No."), *TALKS[5:]], **cut)
    found, windows = diff_datasets(a, b), len(open_dataset(a).splits["train"])
    assert (found.counts[Change.IDS], found.differing) == (1, 1)
    assert diff_datasets(base, a).counts[Change.ONLY_IN_B] == windows - 12 > 0


def test_records_in_another_split(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = diff_datasets(base, built(tmp_path / "b", split={"val_fraction": 0.4}), show=3)
    assert counts(found) == {"equal": 12}
    assert 0 < found.moved == found.differing < 12
    assert not found.equal
    assert found.shown[0].place_b == ("val", 0)
    assert not any("another order" in note for note in found.notes)
    other = built(tmp_path / "c", [*TALKS[3:], conversation(1, "Two!")], split={"val_fraction": 0.3})
    whole = diff_datasets(base, other, show=20).as_json()
    monkeypatch.setattr(split_module, "BATCH_TOKENS", 100)
    assert diff_datasets(base, other, show=20).as_json() == whole, "sizes of batches change nothing"
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


def test_ids_that_no_tokenizer_knows_are_shown_as_numbers(base: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "b", policy="all")
    for manifest in edited(other):
        manifest["tokenizer"]["fingerprint"] = "0" * 64
    found = diff_datasets(base, other, show=1)
    assert found.decoders[0] is not None
    assert found.decoders[1] is None
    assert any(note.startswith("B: ids are shown") and "fingerprint" in note for note in found.notes)
    done = run(base, other, "-n", "1")
    assert any(line.startswith("+ user.header") and line.split()[-1].isdigit() for line in done.stdout.splitlines())
    other = built(tmp_path / "c")
    tokens = np.memmap(other / "train" / "tokens.bin", dtype=np.uint32, mode="r+")
    tokens[20] = 999_999
    tokens.flush()
    (changed,) = diff_datasets(base, other).as_json()["changed"]
    assert any("[id 999999]" in line.get("text", "") for line in changed["lines"])
    assert "[id 999999]" in run(base, other).stdout


@pytest.mark.parametrize(
    ("page", "says"), [("diff", "talk-0 weights ('train', 0) ('train', 0)"), ("export", "is in export.json alone")]
)
def test_code_of_the_pages_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str, says: str
) -> None:
    built(tmp_path / "data" / "monday")
    built(tmp_path / "data" / "tuesday", policy="last_turn")
    monkeypatch.chdir(tmp_path)
    run_python(f"commands/{page}.md", blocks=1)
    assert says in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(base: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        diff_datasets(base, tmp_path / "nothing")
    (tmp_path / "begun" / ".build").mkdir(parents=True)
    with pytest.raises(FormatError, match="unfinished build"):
        diff_datasets(tmp_path / "begun", base)


def test_plain_episodes_without_manifest_or_masks(tmp_path: Path) -> None:
    for name, weights in (("a", [None, None]), ("b", [[1, 1, 1], [1, 0.5]])):
        with EpisodeWriter(tmp_path / name, "train") as writer:
            writer.append([1, 2, 3], weights[0])
            writer.append([4, 5], weights[1])
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert counts(found) == {"equal": 1, "weights": 1}
    assert sum("has no manifest" in note for note in found.notes) == 2
    assert sum("no kinds" in note for note in found.notes) == 2
    assert any("A, train: no weights" in note for note in found.notes)
    lines = [(line.sign, line.kind, line.weight, line.ids.tolist()) for line in found.shown[0].lines]
    assert lines == [(" ", None, 0.0, []), ("-", None, 1.0, [5]), ("+", None, 0.5, [5])]


def slow_partners(a: Sequence[Record], b: Sequence[Record]) -> list[int]:
    """The same rules, one record at a time."""
    partner, taken = [-1] * len(a), set[int]()

    def level(key: Callable[[Record], Any], who: Callable[[Record], bool]) -> None:
        for i, one in enumerate(a):
            if partner[i] >= 0 or not who(one):
                continue
            for j, other in enumerate(b):
                if j not in taken and who(other) and key(one) == key(other):
                    partner[i] = j
                    taken.add(j)
                    break

    level(lambda r: r["id"], lambda r: r["named"])
    level(lambda r: r["content"], lambda r: True)
    return partner


RECORD = st.fixed_dictionaries({"id": st.integers(0, 4), "named": st.booleans(), "content": st.integers(0, 5)})


@settings(max_examples=150)
@given(*[st.lists(RECORD, max_size=12)] * 2, st.sampled_from([None, (True, True), (False, True), (False, False)]))
def test_pairing_is_that_of_the_slow_rules(a: Any, b: Any, all_named: tuple[bool, bool] | None) -> None:
    if all_named is not None:
        a, b = ([{**r, "named": flag} for r in side] for side, flag in zip((a, b), all_named, strict=True))
    ids = [[bytes([3, r["id"]]) if r["named"] else b"" for r in side] for side in (a, b)]
    contents = [lambda numbers, side=side: [bytes([side[n]["content"]]) for n in numbers.tolist()] for side in (a, b)]
    pairs = pair_records(ids[0], ids[1], contents[0], contents[1])
    assert pairs.partner.tolist() == slow_partners(a, b)
    found = [j for j in pairs.partner.tolist() if j >= 0]
    assert len(found) == len(set(found)) == sum(pairs.matched.values())
    assert sorted([*found, *pairs.only_in_b.tolist()]) == list(range(len(b)))


Row = tuple[list[int], list[float], list[int]]
"""Ids, weights and kinds."""
ROW = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([26, 34])), min_size=1, max_size=4
).map(lambda tokens: tuple(map(list, zip(*tokens, strict=True))))


def batch(rows: Sequence[Row], *, weights: bool = True, kinds: bool = True) -> Documents:
    ids, values, codes = ([v for row in rows for v in row[i]] for i in range(3))
    return Documents(
        ids=np.array(ids, dtype=np.uint32),
        offsets=offsets_of(np.array([len(row[0]) for row in rows], dtype=np.int64)),
        weights=np.array(values, dtype=np.float32) if weights else None,
        kinds=np.array(codes, dtype=np.uint8) if kinds else None,
    )


@settings(max_examples=150)
@given(pairs=st.lists(st.tuples(ROW, ROW, st.integers(0, 4)), max_size=8), flags=st.tuples(*[st.booleans()] * 3))
def test_comparison_is_that_of_a_loop(pairs: list[Any], flags: tuple[bool, bool, bool]) -> None:
    weights_a, kinds_a, kinds_b = flags
    made, wanted = [], []
    for one, other, like in pairs:
        # Half of the pairs share a part, so that every answer comes up.
        new = tuple(one[i] if len(one[i]) == len(other[i]) and like > i else other[i] for i in range(3))
        new = one if like == 4 else new
        made.append((one, new))
        old_weights = one[1] if weights_a else [1.0] * len(one[0])
        if one[0] != new[0]:
            wanted.append(3)
        elif old_weights != new[1]:
            wanted.append(2)
        else:
            wanted.append(int(kinds_a and kinds_b and one[2] != new[2]))
    a = batch([one for one, _ in made], weights=weights_a, kinds=kinds_a)
    b = batch([other for _, other in made], kinds=kinds_b)
    assert compare_documents(a, b).tolist() == wanted


def replayed(lines: Sequence[Any], old: list[int], sign: str) -> list[int]:
    """The tokens of one side, put together again from the lines and the other side's equal stretches."""
    out: list[int] = []
    for line in lines:
        if line.sign == " ":
            out += old[len(out) : len(out) + line.tokens]
        elif line.sign == sign:
            out += line.ids.tolist()
    return out


@settings(max_examples=150)
@given(one=ROW, other=ROW, shared=st.lists(st.integers(0, 9), max_size=40))
def test_lines_hold_every_token_of_both_sides(one: Row, other: Row, shared: list[int]) -> None:
    extra = len(shared)
    a, b = (
        (shared + ids + shared, [0.0] * extra + weights + [1.0] * extra, [26] * extra + kinds + [34] * extra)
        for ids, weights, kinds in (one, other)
    )
    lines = changed_lines(batch([a]), batch([b]))
    assert replayed(lines, a[0], "-") == a[0]
    assert replayed(lines, b[0], "+") == b[0]
    assert all(line.tokens for line in lines)
    signs = [line.sign for line in lines]
    assert signs == [" "] if a == b else {"-", "+"} & {*signs}
