"""Answers that people compared: pairs are two documents with one prompt, labelled answers documents with a label."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, RecordError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.prove.verify import verify
from chatmill.read.columns import read_one_by_one
from chatmill.read.files import batch_records
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from chatmill.store.episodes import Episode, EpisodeDataset
from tests.compiler.builds import CHATML, OPEN_GATES, apart, proved, text, write_jsonl
from tests.compiler.scanned import both_ways
from tests.damage import flip
from tests.data.tokenizer_files import unpacked
from tests.read.three_ways import as_lines, bare

QWEN = {"tokenizer": str(unpacked("qwen3")), "template": "qwen3"}


CALL = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


def said(role: str, words: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": words, **more}


def random_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs in all the ways in which people write them."""
    rng, made = random.Random(seed), []
    for number in range(count):
        prompt = [said("user", text(rng, 8))]
        if rng.random() < 0.5:
            prompt = [said("system", "Be short."), *prompt, said("assistant", text(rng, 5)), said("user", text(rng, 5))]
        good, bad = text(rng, 9), text(rng, 9) + " no"
        way = rng.choice(["texts", "messages", "whole"])
        if way == "texts":
            made.append({"prompt": prompt, "chosen": good, "rejected": bad})
        elif way == "messages":
            made.append({"messages": prompt, "chosen": said("assistant", good), "rejected": [said("assistant", bad)]})
        else:
            made.append({key: [*prompt, said("assistant", one)] for key, one in (("chosen", good), ("rejected", bad))})
        made[-1]["id"] = f"p{number}"
    return made


def plain(record: dict[str, Any], side: str) -> dict[str, Any]:
    """One side of a pair as an ordinary record, whose prompt is not trained."""
    prompt = record.get("prompt") or record.get("messages") or record[side][:-1]
    answer = record[side][-1] if isinstance(record[side], list) else record[side]
    answer = said("assistant", answer) if isinstance(answer, str) else answer
    context = [{**one, "train": False} if one["role"] == "assistant" else one for one in prompt]
    return {"id": record["id"], "messages": [*context, answer]}


def build(folder: Path, records: list[Any], name: str = "built", **more: Any) -> Path:
    path = write_jsonl(folder / f"{name}.jsonl", records)
    options = {"preferences": "pairs", **CHATML, "gates": OPEN_GATES, **more}
    proved({"sources": [{"path": str(path), **options.pop("source", {})}], **options}, folder / name)
    return folder / name


def facts(episode: Episode) -> tuple[Any, ...]:
    assert episode.weights is not None
    assert episode.kinds is not None
    return episode.ids.tolist(), episode.weights.tolist(), episode.kinds.tolist(), episode.record_id


@pytest.mark.parametrize("model", [CHATML, QWEN])
def test_a_pair_is_the_two_ordinary_documents_of_its_sides(tmp_path: Path, model: dict[str, Any]) -> None:
    records = random_pairs(24)
    folder = build(tmp_path, records, **model, split={"val_fraction": 0.3})
    sides = [plain(record, side) for record in records for side in ("chosen", "rejected")]
    other = build(tmp_path, sides, "plain", preferences=None, **model, split={"val_fraction": 0.3})
    for split in ("train", "val"):
        found, wanted = EpisodeDataset(folder, split), EpisodeDataset(other, split)
        assert [facts(one) for one in found] == [facts(one) for one in wanted]
        assert [one.side for one in found] == ["chosen", "rejected"] * (len(found) // 2)
    assert json.loads((folder / "manifest.json").read_text())["ledger"]["records"]["built"]["read"][""] == 24


MORE = [{}, {}, {"name": "n"}, {"weight": 0.5}, {"reasoning_content": "r"}, CALL, {"train": True}, {"x": 1}, {"x": 1.0}]
MESSAGES = st.builds(
    lambda role, words, more: {"role": role, "content": words, **more},
    st.sampled_from(["system", "user", "assistant", "assistant", "tool"]),
    st.sampled_from(["a", "b", ""]),
    st.sampled_from(MORE),
)
LISTS = st.lists(MESSAGES, min_size=1, max_size=3)
ANSWER = said("assistant", "a")
ANSWERS = st.sampled_from(["a", "b", "", ANSWER, [ANSWER], [ANSWER, said("user", "b")], said("tool", "b")])
PROMPTS = ("a", "a", "", None, [], 3, [said("user", "a")], [said("system", "s"), said("user", "b"), ANSWER])
FIELDS = [{"prompt": one} for one in PROMPTS]
FIELDS += [{"question": "a"}, {"system": "s"}, {"system": ""}, {"margin": 1}, {"margin": ""}, {"margin": None}]
SCORED = (
    {"chosen_score": 8, "rejected_score": 3.5},
    {"chosen_rating": 5, "rejected_rating": 4},
    {"score_chosen": None},
)
FIELDS += [*SCORED, {"score_chosen": 4.5, "score_rejected": 0}, {"chosen_score": 1}, {"margin": 4.5}, {"margin": 1e31}]
FIELDS += [{"score_chosen": 1e-31, "score_rejected": 0}, {"margin": -0.0}, {"chosen_score": "8", "rejected_score": "1"}]
FIELDS += [{"input": []}, {"input": "a"}, {"label": True}, {"u": "v", "source": "o"}]
BESIDE = st.lists(st.sampled_from(FIELDS), max_size=2).map(
    lambda some: {name: value for one in some for name, value in one.items()}
)
BEGINNINGS = st.sampled_from([[said("user", "a")], [said("system", "s"), said("user", "a"), ANSWER], []])
WHOLE = st.builds(
    lambda begins, chosen, rejected, beside: {"chosen": begins + chosen, "rejected": begins + rejected, **beside},
    *(st.builds(list.__add__, BEGINNINGS, st.just([]) | LISTS), st.just([ANSWER]) | LISTS, LISTS, BESIDE),
)
AFTER_PROMPT = st.builds(
    lambda a, b, beside: {"prompt": "q", **beside, "chosen": a, "rejected": b}, ANSWERS, ANSWERS, BESIDE
)


@given(st.lists(WHOLE | AFTER_PROMPT, min_size=1, max_size=5))
def test_pairs_are_the_same_read_as_columns_and_one_by_one(pairs: list[dict[str, Any]]) -> None:
    both_ways([{"id": f"{n}", **pair} for n, pair in enumerate(pairs)], "pairs")


def test_pairs_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [said("system", "S"), said("user", "u"), {"role": "assistant", "content": "", **CALL}, said("tool", "t")]
    records = [
        {side: [*prompt, said("assistant", side)] for side in ("chosen", "rejected")},
        {"prompt": prompt, **{side: [said("assistant", side)] for side in ("chosen", "rejected")}},
        {"chosen": said("assistant", "chosen"), "rejected": "rejected", "prompt": prompt},
        {"chosen": "chosen", "rejected": "rejected", "question": "u", "system": "S", "prompt": None},
    ]
    monkeypatch.setattr("chatmill.read.columns.conversation_or_error", None)
    batch, wrong = as_lines(records, find_shape("pairs"))
    assert (len(batch), wrong) == (8, [])
    weights = [[message.weight for message in one.messages] for one in batch]
    assert weights == [[None, None, 0, None, None]] * 6 + [[None] * 3] * 2
    assert [one.messages[-1].content for one in batch] == ["chosen", "rejected"] * 4


def test_pairs_with_scores_and_other_fields_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As UltraFeedback publishes them: the prompt as a text, the chosen conversation twice, and scores."""
    asked = {**said("user", "u"), "id": "m1"}
    sides = {side: [asked, {**said("assistant", side), "time": 1}] for side in ("chosen", "rejected")}
    scores = {"score_chosen": 8.5, "score_rejected": 3.0}
    record = {"prompt": "u", "prompt_id": "p", **sides, "messages": sides["chosen"], **scores}
    monkeypatch.setattr("chatmill.read.columns.conversation_or_error", None)
    shape = find_shape("pairs")
    for batch, wrong in (
        as_lines([record], shape),
        read_rows(pa.RecordBatch.from_pylist([record]), first=1, path="f", source="s", shape=shape),
    ):
        assert (len(batch), wrong) == (2, [])
        assert [one.margin for one in batch] == [5.5, 5.5]
        unused = {name: count for (_, name), count in batch.unused.items()}
        assert unused == dict.fromkeys(("messages[].id", "messages[].time", "prompt_id", *scores), 1)


WORDS = st.none() | st.sampled_from(["a", "b", ""])
TURN = {"role": st.sampled_from(["user", "assistant", "assistant", "system"]), "content": WORDS}
MORE_IN_ROWS = {
    "id": st.none() | st.sampled_from(["1", "2"]),
    "turn": st.none() | st.integers(0, 1),
    "about": st.none() | st.fixed_dictionaries({"n": st.none() | st.integers(0, 1)}),
}
NUMBERS = st.sampled_from([None, 8.0, 3.5, 0.0, -1e300, 1e-31])
INTEGERS = st.none() | st.integers(-2, 9)


def turns(names: list[str]) -> st.SearchStrategy[Any]:
    """Lists of messages with these unknown fields."""
    return st.lists(st.fixed_dictionaries(TURN | {name: MORE_IN_ROWS[name] for name in names}), max_size=2)


@st.composite
def pair_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of one table of pairs, so that a column has one type; with a prompt, scores and other fields or without."""
    listed = turns(draw(st.lists(st.sampled_from(sorted(MORE_IN_ROWS)), unique=True)))
    is_listed = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    columns: dict[str, st.SearchStrategy[Any]] = {
        "chosen": listed if is_listed[0] else st.just("a") | WORDS,
        "rejected": listed if is_listed[1] else st.just("b") | WORDS,
    }
    if draw(st.booleans()):
        columns["prompt"] = st.none() | listed if is_listed[2] else st.just("q") | WORDS
    scores = NUMBERS if draw(st.booleans()) else INTEGERS
    beside = {"system": WORDS, "margin": st.sampled_from([None, None, 1.5, 4.5])}
    beside |= {"score_chosen": scores, "score_rejected": scores, "chosen_rating": INTEGERS, "rejected_rating": INTEGERS}
    beside |= {"messages": st.none() | listed, "about": WORDS}
    for name in draw(st.lists(st.sampled_from(sorted(beside)), unique=True)):
        columns[name] = beside[name]
    return draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=4))


ROWS = pair_rows()


@given(ROWS)
def test_rows_of_pairs_are_the_same_read_as_columns_and_one_by_one(rows: list[dict[str, Any]]) -> None:
    batch, shape = pa.RecordBatch.from_pylist(rows), find_shape("pairs")
    for part in (batch, batch.slice(1)):
        fast, wrong = read_rows(part, first=1, path="f", source="s", shape=shape)
        slow, also_wrong = read_one_by_one(batch_records([part], "f", list(range(1, len(part) + 1))), shape, "s")
        assert list(map(str, wrong)) == list(map(str, also_wrong))
        assert list(map(bare, fast)) == list(map(bare, slow))
        assert fast.unused == slow.unused


def test_a_tree_of_a_pair_has_the_prompt_once(tmp_path: Path) -> None:
    records = random_pairs(30, seed=1)
    rows, trees = EpisodeDataset(build(tmp_path, records)), EpisodeDataset(build(tmp_path, records, "t", expand="tree"))
    assert len(rows) == 2 * len(trees)
    for number, tree in enumerate(trees):
        assert tree.side == "pair"
        assert [ids.tolist() for ids, _, _ in apart(tree)] == [rows[2 * number + k].ids.tolist() for k in (0, 1)]
    assert trees.tokens < rows.tokens


PROMPT = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize("overflow", ["drop", "cut"])
def test_overflow_decides_for_both_sides(tmp_path: Path, overflow: str) -> None:
    records = [{"id": "short", **PROMPT}, {"id": "long", **PROMPT, "rejected": "b" * 50}]
    folder = build(tmp_path, records, packing={"max_length": 40, "overflow": overflow})
    found = [(one.record_id, one.side, len(one)) for one in EpisodeDataset(folder)]
    left = [("long", "chosen", 23), ("long", "rejected", 40)] if overflow == "cut" else []
    assert found == [("short", "chosen", 23), ("short", "rejected", 23), *left]


@pytest.mark.parametrize("expand", ["turns", "tree"])
def test_a_pair_whose_answers_overflow_makes_the_same_is_refused(tmp_path: Path, expand: str) -> None:
    same = {"id": "same", "prompt": "q" * 10, "chosen": "y" * 80 + "1", "rejected": "y" * 80 + "2"}
    early = {**same, "id": "early", "rejected": "n" + "y" * 80}
    asked = {**same, "id": "asked", "prompt": "q" * 100}
    records = [{"id": "short", **PROMPT}, same, *([early] if expand == "turns" else []), asked]
    options = {"packing": {"max_length": 64, "overflow": "cut"}, "expand": expand, "on_error": "quarantine"}
    folder = build(tmp_path, records, **options)
    rejected = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [(one["id"], one["reason"]) for one in rejected] == [("same", "answers_same"), ("asked", "no_answer")]
    assert "in the 64 that are kept" in rejected[0]["message"]
    assert {episode.record_id for episode in EpisodeDataset(folder)} == {"short", "early"} & {r["id"] for r in records}


@pytest.mark.parametrize("expand", ["turns", "tree"])
def test_a_pair_whose_sampled_tokens_are_the_same_is_refused(tmp_path: Path, expand: str) -> None:
    stop = 260
    sides = [{"role": "assistant", "content": text, "token_ids": [97, 98, stop]} for text in ("ab", "other")]
    records = [
        {"id": "same", "prompt": "q", "chosen": sides[0], "rejected": sides[1]},
        {"id": "apart", "prompt": "q", "chosen": sides[0], "rejected": {**sides[1], "token_ids": [97, 99, stop]}},
        {"id": "begins", "prompt": "q", "chosen": sides[0], "rejected": {**sides[1], "token_ids": [97]}},
        {"id": "goes on", "prompt": "q", "chosen": {**sides[0], "token_ids": [97]}, "rejected": "a"},
    ]
    folder = build(tmp_path, records, trust="tokens", expand=expand, on_error="quarantine")
    rejected = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    known = {"same"} if expand == "turns" else {"same", "begins", "goes on"}
    assert {one["id"] for one in rejected} == known
    assert {one["reason"] for one in rejected} == {"answers_same"}
    if expand == "tree":
        assert [len(apart(tree)) for tree in EpisodeDataset(folder)] == [2]


SAID = st.text("ab", min_size=1, max_size=9)


@settings(max_examples=10, phases=[Phase.generate])  # every example is a build
@given(
    pairs=st.lists(
        st.tuples(*[st.text("ab", min_size=1, max_size=9)] * 3, st.integers(0, 50)), min_size=6, max_size=12
    ),
    longest=st.integers(21, 60),
    overflow=st.sampled_from(["cut", "drop"]),
    expand=st.sampled_from(["turns", "tree"]),
)
def test_what_is_stored_of_a_pair_can_be_compared(
    pairs: list[tuple[str, str, str, int]], longest: int, overflow: str, expand: str
) -> None:
    """No two documents of a pair are alike, and every tree of one has a branch; the others are refused or dropped."""
    records = [
        {"id": f"{number}", "prompt": asked, "chosen": "c" * alike + one, "rejected": "c" * alike + other}
        for number, (asked, one, other, alike) in enumerate(pairs)
    ]
    options = {"packing": {"max_length": longest, "overflow": overflow}, "expand": expand, "on_error": "quarantine"}
    with tempfile.TemporaryDirectory() as folder:
        good = {"id": "good", "prompt": "q", "chosen": "x", "rejected": "y"}
        try:
            episodes = list(EpisodeDataset(build(Path(folder), [good, *records], **options)))
        except ConfigError as error:
            assert "as one tree is longer than" in str(error)  # noqa: PT017
            return
        if expand == "tree":
            assert all(len(apart(tree)) == 2 for tree in episodes)
        else:
            assert all(a.ids.tolist() != b.ids.tolist() for a, b in zip(episodes[::2], episodes[1::2], strict=True))


def test_weights_and_conditions_hold_for_whole_pairs(tmp_path: Path) -> None:
    records = [{"id": str(n), "prompt": "q", "chosen": f"a{n}", "rejected": "b", "score": n} for n in range(40)]
    folder = build(tmp_path, records, source={"weight": 2.5, "where": "score >= 20"})
    found = [(one.record_id, one.side) for one in EpisodeDataset(folder)]
    assert [side for _, side in found] == ["chosen", "rejected"] * (len(found) // 2)
    assert 80 < len(found) < 120


def test_labels_are_kept_and_judge_the_last_answer(tmp_path: Path) -> None:
    asked = [said("user", "q"), said("assistant", "a"), said("user", "q2"), said("assistant", "b")]
    folder = build(tmp_path, [{"messages": asked, "label": True}, {"messages": asked[:2], "label": False}])
    episodes = list(EpisodeDataset(folder))
    assert [(one.side, one.turns, one.trained) for one in episodes] == [("liked", 2, 2), ("disliked", 1, 2)]


def refused(folder: Path, records: list[Any], **more: Any) -> RecordError:
    with pytest.raises(RecordError) as found:
        build(folder, records, "fails", **more)
    return found.value


CHANGED = [said("assistant", "b", reasoning_content="Hm."), said("user", "again"), said("assistant", "c")]
OTHER_QUESTION = {key: [said("user", key), said("assistant", "a")] for key in ("chosen", "rejected")}


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (OTHER_QUESTION, "prompts_differ"),
        ({**PROMPT, "rejected": "a"}, "answers_same"),
        ({**PROMPT, "rejected": said("assistant", "b", train=False)}, "no_answer"),
        ({"chosen": "a", "rejected": "b"}, "missing_field"),
        ({**PROMPT, "rejected": CHANGED}, "several_rows"),
    ],
)
def test_a_pair_that_is_none_is_one_bad_record(tmp_path: Path, record: dict[str, Any], code: str) -> None:
    error = refused(tmp_path, [PROMPT, record], **QWEN)
    assert (error.code, error.where.endswith("fails.jsonl:2")) == (code, True)
    folder = build(tmp_path, [PROMPT, record, PROMPT], **QWEN, on_error="quarantine")
    assert len(EpisodeDataset(folder)) == 4
    assert [json.loads(line)["reason"] for line in (folder / "rejected.jsonl").read_text().splitlines()] == [code]


THINKS = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is not false %}<think>
{% endif %}{% endif -%}"""


def test_a_prompt_that_is_rendered_differently_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thinks.jinja").write_text(THINKS)
    model = {**QWEN, "add_control_tokens": False, "template": str(tmp_path / "thinks.jinja")}
    thinks = said("assistant", "a", reasoning_content="Hm.")
    records = [{**PROMPT, "chosen": thinks}, {**PROMPT, "chosen": thinks, "rejected": {**thinks, "content": "c"}}]
    error = refused(tmp_path, records[:1], **model)
    assert (error.code, "another prompt for 'rejected'" in str(error)) == ("prompts_differ", True)
    folder = build(tmp_path, records, **model, on_error="quarantine")
    assert [one.side for one in EpisodeDataset(folder)] == ["chosen", "rejected"]


def test_records_without_a_label_are_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, [{"prompt": "q", "completion": "a"}])
    assert (error.code, "'label' that is true or false" in str(error)) == ("label_type", True)


def test_loaders_do_not_train_rejected_answers_and_verify_finds_a_changed_side(tmp_path: Path) -> None:
    folder = build(tmp_path, [PROMPT])
    with pytest.raises(ConfigError, match="rejected ones too"):
        GPTEpisodeDataLoader({"batch_size": 1, "block_size": 64}, None, folder, pad_token_id=0)
    with pytest.raises(ConfigError, match="no packing"):
        to_hf_dataset(folder, packed=True, max_length=64)
    assert to_hf_dataset(folder)["side"] == ["chosen", "rejected"]
    flip(next((folder / "train").rglob("side.u8")), 0, 2)
    assert any("the column side has 'rejected'" in one.message for one in verify(folder, deep=True).findings)
