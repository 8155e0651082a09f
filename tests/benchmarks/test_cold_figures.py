"""Rendering is measured and published on a first pass, with the words known next to it; chunks are those of a build."""

from __future__ import annotations

import json
import re
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import builds, render
from chatmill.compiler.recipe import Recipe
from chatmill.label.presets import find_policy

ROOT = Path(__file__).parents[2]
COLD, WARM = "render / apply_chat_template", "render again, words known / apply_chat_template"


def test_a_first_pass_has_a_new_tokenizer_every_round_and_is_the_figure_of_the_chart(
    qwen3: Any, real_conversations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, list[Any]] = {"ours": [], "theirs": []}
    used: list[Any] = []
    rows: Any = None
    bind, run = render.bind, render.render

    def fresh(*given: Any) -> Any:
        made["ours"].append(bind(*given))
        return made["ours"][-1]

    def theirs(name: str) -> Any:
        """A peer that gives what we gave, one conversation after the other."""
        made["theirs"].append(name)
        return SimpleNamespace(apply_chat_template=lambda messages, **options: next(rows))

    def rendered(conversations: Any, template: Any) -> Any:
        nonlocal rows
        found = run(conversations, template)
        weights = found.tokens.per_token(find_policy("trl").run_weights(found.tokens))
        borders = found.tokens.offsets[1:-1]
        columns = (np.split(column, borders) for column in (found.tokens.ids, weights))
        rows = cycle([{"input_ids": ids, "assistant_masks": mask} for ids, mask in zip(*columns, strict=True)])
        used.append(template)
        return found

    monkeypatch.setattr(render, "conversations_without_control_text", lambda limit: real_conversations(1)[:2])
    monkeypatch.setattr(render, "load_tokenizer", lambda path: qwen3)
    monkeypatch.setattr(render, "hf_tokenizer", SimpleNamespace(__wrapped__=theirs))
    monkeypatch.setattr(render, "trl_training_template", str)
    monkeypatch.setattr(render, "bind", fresh)
    monkeypatch.setattr(render, "render", rendered)
    report = render.measure(quick=True)
    assert [(row.what, row.in_chart) for row in report.rows] == [(COLD, True), (WARM, False)]
    known, *new = made["ours"]
    assert len(new) == len(made["theirs"]) - 1 == 2
    assert used[0] is known  # to compare the work
    assert set(map(id, used[1:3])) == set(map(id, new))
    assert all(template is known for template in used[3:])


def test_the_readme_has_the_figure_of_a_first_pass_and_the_other_one_behind_it() -> None:
    rows = re.findall(r"^\| (.*) \| (\d+(?:\.\d+)?)x \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (at,) = (number for number, (what, _) in enumerate(rows) if what.startswith("rendering"))
    assert "a first pass" in rows[at][0]
    assert "know the words" in rows[at + 1][0]
    measured = []
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        found = json.loads(path.read_text())
        every = [one.get("rows") for one in (found, *found.get("benchmarks", {}).values())]
        values = {row["what"]: row["value"] for table in every if isinstance(table, list) for row in table}
        if WARM in values:  # measured side by side: in an older run the other name is of words known, too
            measured.append(values[COLD])
    digits = len(rows[at][1].partition(".")[2])
    assert rows[at][1] in [f"{value:.{digits}f}" for value in measured]


@pytest.mark.parametrize("given", [None, 5000])
def test_chunks_have_the_size_of_a_build_where_no_other_is_asked_for(
    given: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def planned(recipe: Recipe, spool: Path) -> Any:
        sizes.append(recipe.shard_bytes)
        return SimpleNamespace(chunks=[])

    monkeypatch.setattr(builds, "plan_sources", planned)
    monkeypatch.setattr(builds, "pipeline_of", lambda text: None)
    builds.Bench.of(builds.recipe_for([tmp_path / "chats.jsonl"]), tmp_path / "work", shard_bytes=given)
    assert sizes == [given]
